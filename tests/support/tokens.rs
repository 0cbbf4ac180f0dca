//! Tokens for SASL/OAUTHBEARER: the keys with which the shared broker checks them, and a program that prints them.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;

use super::certificates::write_private;
use super::reaper;
use super::secrets::SECRET;

static KEY: LazyLock<PKey<Private>> =
    LazyLock::new(|| PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap());

/// The file with the public key, as RFC 7517 has it.
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

/// Whom tokens are for.
pub(crate) const AUDIENCE: &str = "kafka";

/// `$1` is the folder, `$2` how many seconds a token is good for, `$3` by what it is signed. The secret in it is searched for where it may not be.
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
    /// Of RFC 7518.
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

    /// Of tokens without a signature.
    pub(crate) fn unsecured(lifetime_seconds: u32) -> Self {
        Self {
            algorithm: "none",
            ..Self::new(lifetime_seconds)
        }
    }

    /// As a value of walpost.toml.
    pub(crate) fn command(&self) -> String {
        let (folder, lifetime) = (self.folder.display(), self.lifetime_seconds);
        let algorithm = self.algorithm;
        format!(
            "[\"/bin/sh\", \"{folder}/token.sh\", \"{folder}\", \"{lifetime}\", \"{algorithm}\"]"
        )
    }

    /// How often it was run.
    pub(crate) fn calls(&self) -> usize {
        fs::read(self.folder.join("calls")).map_or(0, |calls| calls.len())
    }

    /// Has it fail from now on.
    pub(crate) fn leave(&self) {
        fs::write(self.folder.join("away"), "").unwrap();
    }

    /// Has it print tokens again.
    pub(crate) fn come_back(&self) {
        fs::remove_file(self.folder.join("away")).unwrap();
    }
}
