//! A certificate authority for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Rsa;
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509Name, X509NameBuilder};

use super::reaper;

/// A certificate authority.
pub(crate) struct Authority {
    /// The path of the authority's own certificate, a PEM file.
    pub(crate) root: PathBuf,
    folder: PathBuf,
    certificate: X509,
    key: PKey<Private>,
}

/// The validity period of a certificate, relative to the current time.
#[derive(Clone, Copy)]
pub(crate) enum Validity {
    Now,
    Past,
    Future,
}

/// A signed certificate and its private key (PKCS #8), as PEM files.
pub(crate) struct Identity {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Authority {
    /// Creates an authority that no system trusts by default.
    pub(crate) fn new(name: &str) -> Self {
        let folder = reaper::folder("certificates");
        let key = rsa_key();
        let mut builder = builder(name, &key);
        builder.set_issuer_name(&common_name(name)).unwrap();
        builder
            .append_extension(BasicConstraints::new().critical().ca().build().unwrap())
            .unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        let certificate = builder.build();
        let root = folder.join("root.pem");
        fs::write(&root, certificate.to_pem().unwrap()).unwrap();
        Self {
            root,
            folder,
            certificate,
            key,
        }
    }

    /// Issues a certificate. For a client, `name` is the user name. For a server, `hosts` contains
    /// its host names.
    pub(crate) fn sign(&self, name: &str, hosts: &[&str]) -> Identity {
        self.sign_for(name, hosts, Validity::Now)
    }

    /// Like [`Authority::sign`], but with the given validity period.
    pub(crate) fn sign_for(&self, name: &str, hosts: &[&str], validity: Validity) -> Identity {
        let key = rsa_key();
        let mut builder = builder(name, &key);
        set_validity(&mut builder, validity);
        builder
            .set_issuer_name(self.certificate.subject_name())
            .unwrap();
        if !hosts.is_empty() {
            let mut names = SubjectAlternativeName::new();
            for host in hosts {
                names.dns(host);
            }
            let context = builder.x509v3_context(Some(&self.certificate), None);
            let extension = names.build(&context).unwrap();
            builder.append_extension(extension).unwrap();
        }
        builder.sign(&self.key, MessageDigest::sha256()).unwrap();
        // Number the files, because servers start concurrently, and all their certificates are for
        // the same name.
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let identity = Identity {
            certificate: self.folder.join(format!("{name}.{number}.pem")),
            key: self.folder.join(format!("{name}.{number}.key")),
        };
        fs::write(&identity.certificate, builder.build().to_pem().unwrap()).unwrap();
        write_private(&identity.key, &key.private_key_to_pem_pkcs8().unwrap());
        identity
    }
}

/// Writes a file that only its owner can read, as libpq and PostgreSQL require for private keys.
pub(crate) fn write_private(path: &Path, content: &[u8]) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

fn rsa_key() -> PKey<Private> {
    PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap()
}

fn builder(subject: &str, key: &PKey<Private>) -> X509Builder {
    let mut builder = X509Builder::new().unwrap();
    builder.set_version(2).unwrap();
    let mut serial = BigNum::new().unwrap();
    serial
        .rand(127, openssl::bn::MsbOption::MAYBE_ZERO, false)
        .unwrap();
    builder
        .set_serial_number(&serial.to_asn1_integer().unwrap())
        .unwrap();
    builder.set_subject_name(&common_name(subject)).unwrap();
    builder.set_pubkey(key).unwrap();
    set_validity(&mut builder, Validity::Now);
    builder
}

fn set_validity(builder: &mut X509Builder, validity: Validity) {
    const DAY: i64 = 24 * 60 * 60;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let (from, to) = match validity {
        Validity::Now => (now, now + 2 * DAY),
        Validity::Past => (now - 2 * DAY, now - DAY),
        Validity::Future => (now + DAY, now + 2 * DAY),
    };
    let time = |seconds| Asn1Time::from_unix(seconds).unwrap();
    builder.set_not_before(&time(from)).unwrap();
    builder.set_not_after(&time(to)).unwrap();
}

fn common_name(name: &str) -> X509Name {
    let mut builder = X509NameBuilder::new().unwrap();
    builder.append_entry_by_text("CN", name).unwrap();
    builder.build()
}
