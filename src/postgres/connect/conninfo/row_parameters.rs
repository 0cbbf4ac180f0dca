//! Determines which connection parameters a row in a registry may set: the server, the database,
//! the user, and how strictly the server's identity is verified. Only the operator may set sockets,
//! local files and authentication methods, because these determine where the operator's own
//! passwords are sent.

use std::net::IpAddr;

use super::syntax;

/// Maximum length of a host name (RFC 1035, section 2.3.4).
const HOST_BYTES_MAX: usize = 253;

/// Parameters for which a registry row may supply a value that is inserted into a URL.
const IN_PLACE: [&str; 7] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "password",
    "port",
    "user",
];

/// Parameters that a complete connection string from a registry row may contain, in addition to
/// those in [`IN_PLACE`].
const IN_WHOLE: [&str; 16] = [
    "channel_binding",
    "client_encoding",
    "connect_timeout",
    "fallback_application_name",
    "gssencmode",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "load_balance_hosts",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslmode",
    "sslsni",
    "target_session_attrs",
    "tcp_user_timeout",
];

/// A description of valid hosts, for errors about an invalid host.
const HOST_EXPECTED: &str = "a host name or an IP address. The directory of a Unix-domain socket must be part of the template: \
                             postgresql://walpost@/{dbname}?host=/var/run/postgresql";

/// Returns the parameter whose value contains `marker`. Returns `None` if no value contains it, or
/// if a registry row is not allowed to supply that parameter.
pub(super) fn parameter_with(text: &str, marker: &str) -> Option<&'static str> {
    let pairs = syntax::pairs(text).ok()?;
    let (name, _) = pairs.iter().find(|(_, value)| value.contains(marker))?;
    IN_PLACE.into_iter().find(|known| known == name)
}

/// Checks a value from a registry row before the value is inserted into the connection parameter
/// `parameter`.
pub(super) fn check_part(parameter: &str, value: &str) -> Result<(), String> {
    let expected = match parameter {
        "host" if !is_host(value) => HOST_EXPECTED,
        "hostaddr" if value.parse::<IpAddr>().is_err() => "an IP address",
        "port" if !is_port(value) => "a number from 1 to 65535",
        // An empty password counts as not set. In that case, a password from a different source
        // would be sent to the server that the row specifies.
        "password" if value.is_empty() => {
            return Err("found an empty password, expected at least one character".to_owned());
        }
        _ if value.is_empty() => "non-empty text",
        _ if value.contains('\0') => "text without NUL characters",
        _ => return Ok(()),
    };
    let shown: String = value.chars().take(HOST_BYTES_MAX).collect();
    Err(format!("found {shown:?}, expected {expected}"))
}

/// Checks a complete connection string that a registry row supplies. Errors don't contain values
/// that could be passwords.
pub(super) fn check_whole(text: &str) -> Result<(), String> {
    // Ignore a syntax error here: the string is parsed again later, which reports a more useful
    // error.
    let Ok(pairs) = syntax::pairs(text) else {
        return Ok(());
    };
    let is_known = |name: &str| super::keywords::KEYWORDS.iter().any(|of| of.name == name);
    let mut names_host = false;
    for (name, value) in &pairs {
        let name = name.as_str();
        if !IN_PLACE.contains(&name) && !IN_WHOLE.contains(&name) {
            match is_known(name) {
                true => {
                    return Err(format!(
                        "the connection string in the row sets {name}, which rows are not allowed to set. Remove the parameter, \
                         or set its environment variable"
                    ));
                }
                false => continue,
            }
        }
        if !matches!(name, "host" | "hostaddr") {
            continue;
        }
        names_host |= !value.is_empty();
        if let Some(wrong) = value.split(',').find(|host| !is_host(host)) {
            return Err(format!(
                "found the host {wrong:?}, expected {HOST_EXPECTED}"
            ));
        }
    }
    match names_host {
        true => Ok(()),
        false => Err(format!(
            "the connection string does not name a host; it must contain {HOST_EXPECTED}"
        )),
    }
}

/// Returns whether `text` is the name or address of a single host, rather than a path, an abstract
/// socket, a port, a list or another parameter.
pub(crate) fn is_host(text: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    text.parse::<IpAddr>().is_ok()
        || text.len() <= HOST_BYTES_MAX
            && text.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
            && text.bytes().all(is_name)
}

/// Returns whether `text` is a valid port number, written in decimal digits.
pub(crate) fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

#[cfg(test)]
mod tests {
    use super::super::keywords::{KEYWORDS, Rule};
    use super::*;

    /// Parameters that have an effect but that a registry row must not set.
    const OPERATORS_ONLY: [&str; 10] = [
        "options",
        "passfile",
        "require_auth",
        "requirepeer",
        "sslcert",
        "sslcertmode",
        "sslcrl",
        "sslkey",
        "sslpassword",
        "sslrootcert",
    ];

    #[test]
    fn each_connection_parameter_is_allowed_in_registry_rows_or_only_for_operators() {
        for keyword in KEYWORDS {
            let lists = [&IN_PLACE[..], &IN_WHOLE, &OPERATORS_ONLY];
            let listed = lists.iter().filter(|list| list.contains(&keyword.name));
            let expected = match keyword.rule {
                Rule::Used => 1..=1,
                Rule::Ignored | Rule::Only(_) | Rule::Refused(_) => 0..=1,
            };
            let name = keyword.name;
            assert!(
                expected.contains(&listed.count()),
                "parameter {name} must be in exactly one of IN_PLACE, IN_WHOLE and OPERATORS_ONLY"
            );
        }
    }

    #[test]
    fn accepts_only_host_names_and_addresses_as_a_host() {
        for host in [
            "db",
            "db-1.example.com",
            "my_db",
            "10.0.0.1",
            "::1",
            "2001:db8::1",
        ] {
            assert!(is_host(host), "{host}");
        }
        for host in [
            "",
            "/tmp/x",
            "@abstract",
            ".",
            "..",
            "-x",
            "a,b",
            "a:5433",
            "a/b",
            "a?sslmode=disable",
            "a&b",
            "a#b",
            "%2Ftmp",
            "a b",
            "a\0b",
            "a\nb",
            "[::1]",
            "fe80::1%eth0",
            "u@h",
            "\u{ff0f}tmp",
        ] {
            assert!(!is_host(host), "{host:?}");
        }
        assert!(!is_host(&"a".repeat(HOST_BYTES_MAX + 1)));
    }

    #[test]
    fn accepts_only_ports_in_decimal_digits() {
        assert!(is_port("5432") && is_port("65535"));
        for port in ["", "0", "65536", "+5432", " 5432", "5432,5433", "0x10"] {
            assert!(!is_port(port), "{port:?}");
        }
    }

    #[test]
    fn rejects_connection_strings_with_sockets_or_files_or_authentication_methods() {
        for text in [
            "postgresql://u:secret@db.example.com:5432/shop?sslmode=verify-full",
            "host=db,10.0.0.1 user=u password=secret",
            "postgresql://[::1]/shop",
            "hostaddr=10.0.0.1 user=u",
        ] {
            assert_eq!(check_whole(text), Ok(()), "{text}");
        }
        for (text, part) in [
            ("postgresql://u:secret@%2Ftmp%2Fx/shop", "\"/tmp/x\""),
            ("postgresql://u:secret@/shop?host=/tmp/x", "\"/tmp/x\""),
            ("postgresql://u:secret@db,%2Ftmp/shop", "\"/tmp\""),
            ("postgresql://u:secret@db%2C%2Ftmp/shop", "\"/tmp\""),
            ("host='@x' password=secret", "\"@x\""),
            ("host=db host=/tmp password=secret", "\"/tmp\""),
            ("postgresql://u:secret@/shop", "not name a host"),
            ("host=db passfile=/etc/shadow password=secret", "passfile"),
            (
                "host=db require_auth=password password=secret",
                "require_auth",
            ),
            ("host=db options='-c a=b' password=secret", "options"),
            ("host=db sslrootcert=/tmp/ca password=secret", "sslrootcert"),
            ("host=db service=x password=secret", "service"),
        ] {
            let error = check_whole(text).expect_err(text);
            assert!(error.contains(part) && !error.contains("secret"), "{error}");
        }
    }
}
