//! A man-in-the-middle proxy between Walpost and PostgreSQL. It claims that the server does not
//! support TLS, and then either forwards the traffic or impersonates the server.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// How the proxy treats a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InterceptAction {
    /// Forwards the connection to the real server.
    Pass,
    /// Requests the password in clear text, records the response, and then returns an error.
    RequestPassword,
    /// Requests an MD5 hash of the password, records the response, and then returns an error.
    RequestHash,
    /// Accepts the connection without authentication, and answers the first query after `SHOW
    /// search_path` with a row of this many bytes.
    RespondWith(u32),
}

/// A proxy that listens on a non-loopback address of this machine.
pub(crate) struct InterceptingProxy {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<u8>>>,
    is_stopped: Arc<AtomicBool>,
}

/// Returns an address of this machine that other hosts on the network can reach, or `None` if there
/// is no such address.
pub(crate) fn non_loopback_address() -> Option<IpAddr> {
    // Connecting a UDP socket sends nothing, but makes the kernel choose the source address.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().unwrap().ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

impl InterceptingProxy {
    /// Intercepts connections to the server on the given loopback port. `choose_action` is called
    /// for each connection, with true for a replication connection.
    pub(crate) fn start(
        address: IpAddr,
        server: u16,
        choose_action: impl Fn(bool) -> InterceptAction + Copy + Send + 'static,
    ) -> Self {
        Self::listen(address, move |client, received| {
            serve(client, server, choose_action, received)
        })
    }

    fn listen(
        address: IpAddr,
        serve: impl Fn(TcpStream, &Mutex<Vec<u8>>) -> io::Result<()> + Copy + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            received: Arc::default(),
            is_stopped: Arc::default(),
        };
        let (received, stop_flag) = (Arc::clone(&proxy.received), Arc::clone(&proxy.is_stopped));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if stop_flag.load(Ordering::Relaxed) {
                    return;
                }
                let received = Arc::clone(&received);
                // The thread ends when the connection is closed. Ignore its errors.
                thread::spawn(move || serve(client, &received));
            }
        });
        proxy
    }

    /// Forwards all connections unchanged, including TLS, to the server on the given loopback port.
    pub(crate) fn tunnel(address: IpAddr, server: u16) -> Self {
        Self::listen(address, move |client, _| {
            forward(client, TcpStream::connect(("127.0.0.1", server))?)
        })
    }

    /// Like [`InterceptingProxy::tunnel`], but responds to the first message of a connection with the
    /// bytes that `choose_reply` returns, if any, and then closes the connection.
    pub(crate) fn tunnel_unless(
        address: IpAddr,
        server: u16,
        choose_reply: impl Fn() -> Option<&'static [u8]> + Copy + Send + 'static,
    ) -> Self {
        Self::listen(address, move |mut client, _| match choose_reply() {
            Some(reply) => {
                read_untagged(&mut client)?;
                client.write_all(reply)?;
                client.shutdown(Shutdown::Both)
            }
            None => forward(client, TcpStream::connect(("127.0.0.1", server))?),
        })
    }

    /// Returns connection string parameters that make a client connect to this proxy.
    pub(crate) fn parameters(&self) -> String {
        let (address, port) = (self.address.ip(), self.address.port());
        format!("hostaddr={address} port={port}")
    }

    /// Returns everything that clients sent after the startup message while the proxy impersonated
    /// the server.
    pub(crate) fn received(&self) -> String {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&received).into_owned()
    }
}

impl Drop for InterceptingProxy {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        // Connect to the listener, so that its thread wakes up and checks the flag.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(
    mut client: TcpStream,
    server: u16,
    choose_action: impl Fn(bool) -> InterceptAction,
    received: &Mutex<Vec<u8>>,
) -> io::Result<()> {
    let startup = loop {
        let message = read_untagged(&mut client)?;
        match message.get(4..8) {
            // SSLRequest and GSSENCRequest.
            Some([0x04, 0xd2, 0x16, 0x2f | 0x30]) => client.write_all(b"N")?,
            _ => break message,
        }
    };
    let is_replication = startup.windows(12).any(|some| some == b"replication\0");
    let request = match choose_action(is_replication) {
        InterceptAction::Pass => {
            let mut server = TcpStream::connect(("127.0.0.1", server))?;
            server.write_all(&startup)?;
            return forward(client, server);
        }
        InterceptAction::RequestPassword => b"R\0\0\0\x08\0\0\0\x03".to_vec(),
        InterceptAction::RequestHash => b"R\0\0\0\x0c\0\0\0\x05salt".to_vec(),
        InterceptAction::RespondWith(bytes) => return respond_with(client, bytes),
    };
    client.write_all(&request)?;
    let mut bytes = [0; 1024];
    loop {
        let count = client.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
        received.extend_from_slice(&bytes[..count]);
        drop(received);
        // Return an error, because Walpost would otherwise keep waiting for a response.
        client.write_all(b"E\0\0\0\x1bSFATAL\0C28P01\0Mgot it\0\0")?;
        client.shutdown(Shutdown::Write)?;
    }
}

/// Accepts the connection, answers the query for `search_path`, and answers the next query with a
/// message of the given length.
fn respond_with(mut client: TcpStream, bytes: u32) -> io::Result<()> {
    client.write_all(b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\0\x07\0\0\0\x08Z\0\0\0\x05I")?;
    let _ = client.read(&mut [0; 4096])?;
    client.write_all(b"D\0\0\0\x1d\0\x01\0\0\0\x13pg_catalog, pg_tempZ\0\0\0\x05I")?;
    let _ = client.read(&mut [0; 4096])?;
    client.write_all(b"1\0\0\0\x04D")?;
    client.write_all(&bytes.to_be_bytes())?;
    let body = vec![b'x'; 1 << 20];
    let mut left = usize::try_from(bytes).unwrap_or(usize::MAX) - 4;
    while left > 0 {
        let count = left.min(body.len());
        client.write_all(&body[..count])?;
        left -= count;
    }
    // Keep the connection open until Walpost closes it.
    let _ = client.read_to_end(&mut Vec::new())?;
    Ok(())
}

fn read_untagged(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let count = usize::try_from(u32::from_be_bytes(length)).unwrap().max(4);
    let mut message = length.to_vec();
    message.resize(count, 0);
    stream.read_exact(&mut message[4..])?;
    Ok(message)
}

fn forward(client: TcpStream, server: TcpStream) -> io::Result<()> {
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut from_client, &mut to_server);
        to_server.shutdown(Shutdown::Write)
    });
    let (mut from_server, mut to_client) = (server, client);
    let _ = io::copy(&mut from_server, &mut to_client);
    to_client.shutdown(Shutdown::Both)
}
