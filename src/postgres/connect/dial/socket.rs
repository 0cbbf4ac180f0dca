//! The transport that a session uses: a Unix-domain socket, TCP, or TLS over TCP.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use openssl::ssl::SslVerifyMode;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_openssl::SslStream;

use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::conninfo::exposure::Exposure;

/// A connected socket, ready for PostgreSQL's protocol.
#[derive(Debug)]
pub enum Socket {
    /// A Unix-domain socket, for which PostgreSQL does not support TLS.
    Unix(UnixStream),
    /// Unencrypted TCP.
    Tcp(TcpStream),
    /// TLS over TCP.
    Tls(SslStream<TcpStream>),
    /// A pipe to a simulated server.
    #[cfg(any(test, fuzzing))]
    Memory(tokio::io::DuplexStream),
}

impl Socket {
    /// Returns how well the connection is protected from attackers on the network, or `None` for a
    /// Unix-domain socket, whose peer is examined when connecting.
    pub(super) fn network_exposure(&self) -> Option<Exposure> {
        let address = |stream: &TcpStream| stream.peer_addr().ok().map(|a| a.ip());
        Some(match self {
            Socket::Unix(_) => return None,
            Socket::Tcp(stream) => Exposure::over_tcp(address(stream), None),
            Socket::Tls(stream) => {
                let verifies = stream.ssl().verify_mode() != SslVerifyMode::NONE;
                Exposure::over_tcp(address(stream.get_ref()), Some(verifies))
            }
            #[cfg(any(test, fuzzing))]
            Socket::Memory(_) => Exposure::Local,
        })
    }

    /// Returns whether this is a TCP connection, with or without TLS.
    pub(super) fn is_tcp(&self) -> bool {
        matches!(self, Socket::Tcp(_) | Socket::Tls(_))
    }

    /// Returns the buffer size of a Unix-domain socket in bytes, or `None` for other sockets. The
    /// kernel uses the same size for both ends.
    pub(in crate::postgres) fn unix_buffer(&self) -> Option<usize> {
        match self {
            Socket::Unix(stream) => SockRef::from(stream).send_buffer_size().ok(),
            _ => None,
        }
    }

    /// Sets the receive buffer size if this is an unencrypted TCP connection within the host, and
    /// returns whether it was set. The buffers of other connections are left unchanged, because a
    /// small TCP window between hosts would limit the throughput.
    pub(in crate::postgres) fn shrink_receive_buffer(&self, bytes: usize) -> bool {
        let Socket::Tcp(stream) = self else {
            return false;
        };
        let addresses = (stream.local_addr(), stream.peer_addr());
        let (Ok(local), Ok(peer)) = addresses else {
            return false;
        };
        is_within_host(local.ip(), peer.ip())
            && SockRef::from(stream).set_recv_buffer_size(bytes).is_ok()
    }

    /// Duplicates the handle of a Unix-domain socket. The new handle is also non-blocking. Returns
    /// `None` for other types of sockets.
    ///
    /// # Errors
    /// Returns an error if the process or system is out of file descriptors.
    pub(in crate::postgres) fn unix_handle(&self) -> io::Result<Option<socket2::Socket>> {
        match self {
            Socket::Unix(stream) => SockRef::from(stream).try_clone().map(Some),
            _ => Ok(None),
        }
    }

    /// Creates a Unix-domain socket from a handle.
    ///
    /// # Errors
    /// Returns an error if the socket can't be registered with the runtime.
    pub(in crate::postgres) fn from_unix_handle(handle: socket2::Socket) -> io::Result<Self> {
        Ok(Socket::Unix(UnixStream::from_std(handle.into())?))
    }
}

/// Returns whether a connection between the addresses `local` and `peer` stays within the host:
/// either the peer has a loopback address, or both ends have the same address.
fn is_within_host(local: IpAddr, peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback() || local == peer
}

#[derive(Clone, Debug)]
pub(crate) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Address {
    /// Returns the address of PostgreSQL's socket in the directory `folder`, or of an abstract
    /// socket if `folder` starts with `@`.
    ///
    /// Spec: PostgreSQL 18, 19.3.1 `unix_socket_directories`.
    pub(crate) fn unix(folder: &str, port: u16) -> Address {
        let folder = match folder.strip_prefix('@') {
            Some(name) => format!("\0{name}"),
            None => folder.to_owned(),
        };
        Address::Unix(PathBuf::from(format!("{folder}/.s.PGSQL.{port}")))
    }
}

/// Opens a TCP connection. Sets the keepalive and timeout options in `conninfo`, which detect an
/// unreachable peer.
pub(crate) async fn connect_tcp(address: SocketAddr, conninfo: &Conninfo) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = conninfo.keepalive {
        let mut wanted = TcpKeepalive::new();
        if !keepalive.idle.is_zero() {
            wanted = wanted.with_time(keepalive.idle);
        }
        if !keepalive.interval.is_zero() {
            wanted = wanted.with_interval(keepalive.interval);
        }
        if keepalive.retries != 0 {
            wanted = wanted.with_retries(keepalive.retries);
        }
        socket.set_tcp_keepalive(&wanted)?;
    }
    #[cfg(target_os = "linux")]
    if conninfo.tcp_user_timeout.is_some() {
        socket.set_tcp_user_timeout(conninfo.tcp_user_timeout)?;
    }
    Ok(stream)
}

macro_rules! each {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket.get_mut() {
            Socket::Unix($stream) => $call,
            Socket::Tcp($stream) => $call,
            Socket::Tls($stream) => $call,
            #[cfg(any(test, fuzzing))]
            Socket::Memory($stream) => $call,
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_connections_to_the_same_host() {
        let is_within = |local: &str, peer: &str| {
            is_within_host(
                local.parse().expect("an address"),
                peer.parse().expect("an address"),
            )
        };
        assert!(is_within("127.0.0.1", "127.0.0.1"));
        assert!(is_within("127.0.0.1", "127.0.0.2"));
        assert!(is_within("::1", "::1"));
        assert!(is_within("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
        assert!(is_within("10.1.0.7", "10.1.0.7"));
        assert!(!is_within("10.1.0.7", "10.1.0.8"));
        assert!(!is_within("2001:db8::1", "2001:db8::2"));
        assert!(
            !is_within("172.17.0.2", "172.17.0.1"),
            "a container must not be treated as its host"
        );
    }

    #[tokio::test]
    async fn shrinks_the_receive_buffer_only_for_tcp_connections_to_the_same_host() {
        const BYTES: usize = 96 << 10;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("an address")).await;
        let stream = Socket::Tcp(stream.expect("connects"));
        assert!(stream.shrink_receive_buffer(BYTES));
        let Socket::Tcp(stream) = stream else {
            unreachable!("created as TCP")
        };
        let has = SockRef::from(&stream).recv_buffer_size().expect("a size");
        // Linux doubles the requested size to make room for its own bookkeeping.
        assert!((BYTES..=2 * BYTES).contains(&has), "{has}");
        let (unix, _other) = UnixStream::pair().expect("a pair");
        assert!(!Socket::Unix(unix).shrink_receive_buffer(BYTES));
    }
}
