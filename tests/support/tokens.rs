//! Supplies tokens for SASL/OAUTHBEARER. Contains the keys that the shared broker uses to verify
//! tokens, a program that prints tokens, and an endpoint that issues them.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::sign::Signer;
use openssl::ssl::{SslAcceptor, SslFiletype, SslMethod, SslStream};

use super::certificates::write_private;
use super::postgres::AUTHORITY;
use super::reaper;
use super::secrets::SECRET;

static KEY: LazyLock<PKey<Private>> =
    LazyLock::new(|| PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap());

/// The path of the public key, in a JSON Web Key Set (RFC 7517).
pub(crate) static KEYS: LazyLock<PathBuf> = LazyLock::new(|| {
    let file = reaper::folder("keys").join("keys.json");
    let key = KEY.rsa().unwrap();
    let [n, e] = [key.n(), key.e()].map(|number| URL_SAFE_NO_PAD.encode(number.to_vec()));
    let text = format!(
        "{{\"keys\": [{{\"kty\": \"RSA\", \"kid\": \"walpost\", \"use\": \"sig\", \"alg\": \"RS256\", \"n\": \"{n}\", \"e\": \"{e}\"}}]}}"
    );
    fs::write(&file, text).unwrap();
    file
});

/// The audience claim of the tokens.
pub(crate) const AUDIENCE: &str = "kafka";

/// A script that prints a token. `$1` is the issuer's directory, `$2` the lifetime of the token in
/// seconds, and `$3` the signature algorithm. The token contains the secret, so that a leaked token
/// is found when output is searched for secrets.
const SCRIPT: &str = r#"
cd "$1" || exit
echo >> calls
[ -e away ] && { echo 'the issuer is away' >&2; exit 3; }
encoded() { openssl base64 -A | tr '+/' '-_' | tr -d =; }
now=$(date +%s)
head=$(printf '{"alg":"%s","kid":"walpost"}' "$3" | encoded)
claims=$(printf '{"iss":"tests","sub":"walpost","aud":"AUDIENCE","note":"SECRET","iat":%d,"exp":%d}' "$now" $((now + $2)) | encoded)
sign=
[ "$3" = none ] || sign=$(printf %s "$head.$claims" | openssl dgst -sha256 -sign key.pem -binary | encoded)
echo "$head.$claims.$sign"
"#;

/// A program that prints tokens.
pub(crate) struct Issuer {
    folder: PathBuf,
    lifetime_seconds: u32,
    /// The signature algorithm, as named in RFC 7518.
    algorithm: &'static str,
}

impl Issuer {
    pub(crate) fn new(lifetime_seconds: u32) -> Self {
        let folder = reaper::folder("issuer");
        let key = KEY.private_key_to_pem_pkcs8().unwrap();
        write_private(&folder.join("key.pem"), &key);
        let script = SCRIPT
            .replace("AUDIENCE", AUDIENCE)
            .replace("SECRET", SECRET);
        write_private(&folder.join("token.sh"), script.as_bytes());
        Self {
            folder,
            lifetime_seconds,
            algorithm: "RS256",
        }
    }

    /// Creates an issuer of unsigned tokens.
    pub(crate) fn unsecured(lifetime_seconds: u32) -> Self {
        Self {
            algorithm: "none",
            ..Self::new(lifetime_seconds)
        }
    }

    /// Returns the command as an array for walpost.toml.
    pub(crate) fn command(&self) -> String {
        let (folder, lifetime) = (self.folder.display(), self.lifetime_seconds);
        let algorithm = self.algorithm;
        format!(
            "[\"/bin/sh\", \"{folder}/token.sh\", \"{folder}\", \"{lifetime}\", \"{algorithm}\"]"
        )
    }

    /// Returns how often the program has been run.
    pub(crate) fn calls(&self) -> usize {
        fs::read(self.folder.join("calls")).map_or(0, |calls| calls.len())
    }

    /// Makes the program fail until [`Issuer::stop_failing`] is called.
    pub(crate) fn start_failing(&self) {
        fs::write(self.folder.join("away"), "").unwrap();
    }

    /// Makes the program print tokens again.
    pub(crate) fn stop_failing(&self) {
        fs::remove_file(self.folder.join("away")).unwrap();
    }
}

/// An OAuth 2.0 token endpoint that serves HTTPS on the loopback interface. To clients that
/// authenticate with its secret, it issues tokens that the shared broker accepts.
pub(crate) struct Endpoint {
    address: SocketAddr,
    state: Arc<EndpointState>,
}

struct EndpointState {
    lifetime_seconds: u64,
    secret: Mutex<String>,
    calls: AtomicUsize,
    rejected: AtomicUsize,
    is_stopped: AtomicBool,
}

/// The client ID that the endpoint expects.
pub(crate) const CLIENT_ID: &str = "walpost-of-tests";

impl Endpoint {
    pub(crate) fn start(lifetime_seconds: u64, secret: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(EndpointState {
            lifetime_seconds,
            secret: Mutex::new(secret.to_owned()),
            calls: AtomicUsize::new(0),
            rejected: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
        });
        let identity = AUTHORITY.sign("localhost", &["localhost"]);
        let mut tls = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls()).unwrap();
        tls.set_certificate_chain_file(&identity.certificate)
            .unwrap();
        tls.set_private_key_file(&identity.key, SslFiletype::PEM)
            .unwrap();
        let (tls, thread_state) = (tls.build(), Arc::clone(&state));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if thread_state.is_stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (tls, state) = (tls.clone(), Arc::clone(&thread_state));
                // Ignore errors, because a client may legitimately reject the certificate or
                // disconnect.
                thread::spawn(move || {
                    tls.accept(client)
                        .is_ok_and(|stream| state.respond(stream).is_ok())
                });
            }
        });
        Self { address, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("https://localhost:{}/token", self.address.port())
    }

    /// Replaces the secret that clients must use.
    pub(crate) fn rotate(&self, secret: &str) {
        secret.clone_into(&mut self.state.secret.lock().unwrap());
    }

    /// Returns how many tokens have been issued.
    pub(crate) fn calls(&self) -> usize {
        self.state.calls.load(Ordering::Relaxed)
    }

    /// Returns how many clients have been rejected.
    pub(crate) fn rejected_clients(&self) -> usize {
        self.state.rejected.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.state.is_stopped.store(true, Ordering::Relaxed);
        // Connect, to wake up the thread that waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

impl EndpointState {
    fn respond(&self, stream: SslStream<TcpStream>) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        let (mut login, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            stream.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                if line.trim_end().is_empty() {
                    break;
                }
                continue;
            };
            match name.to_ascii_lowercase().as_str() {
                "authorization" => value.clone_into(&mut login),
                "content-length" => length = value.parse().unwrap(),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        assert!(body.starts_with(b"grant_type=client_credentials"));
        // HTTP Basic authentication with the client ID and secret, as specified in RFC 6749,
        // section 2.3.1.
        let expected = STANDARD.encode(format!("{CLIENT_ID}:{}", self.secret.lock().unwrap()));
        let (code, text) = match login == format!("Basic {expected}") {
            true => {
                self.calls.fetch_add(1, Ordering::Relaxed);
                let token = token(self.lifetime_seconds);
                ("200 OK", format!("{{\"access_token\": \"{token}\"}}"))
            }
            false => {
                self.rejected.fetch_add(1, Ordering::Relaxed);
                // Echo the credentials, as some debugging endpoints do. Walpost must not log them,
                // and everything it prints is searched for the secret.
                let text = format!(
                    "{{\"error\": \"invalid_client\", \"error_description\": \"Authorization: {login}\"}}"
                );
                ("401 Unauthorized", text)
            }
        };
        let head = "Content-Type: application/json\r\nConnection: close\r\nContent-Length";
        let stream = stream.get_mut();
        write!(
            stream,
            "HTTP/1.1 {code}\r\n{head}: {}\r\n\r\n{text}",
            text.len()
        )?;
        stream.shutdown().map_err(io::Error::other)?;
        Ok(())
    }
}

/// Returns a JWT with the same signature algorithm as the tokens printed by [`SCRIPT`].
fn token(lifetime_seconds: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let expiry = now.as_secs() + lifetime_seconds;
    let head = URL_SAFE_NO_PAD.encode(r#"{"alg":"RS256","kid":"walpost"}"#);
    let claims = format!(
        r#"{{"iss":"tests","sub":"walpost","aud":"{AUDIENCE}","iat":{},"exp":{expiry}}}"#,
        now.as_secs()
    );
    let text = format!("{head}.{}", URL_SAFE_NO_PAD.encode(claims));
    let mut signer = Signer::new(MessageDigest::sha256(), &KEY).unwrap();
    let sign = signer.sign_oneshot_to_vec(text.as_bytes()).unwrap();
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(sign))
}
