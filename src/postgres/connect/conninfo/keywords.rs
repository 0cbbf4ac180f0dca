//! Lists libpq 18's connection parameters and defines how Walpost handles each of them.
//!
//! Spec: PostgreSQL 18, 32.1.2 "Parameter Key Words" and 32.15 "Environment Variables".

use super::ConninfoError;

/// How Walpost handles a parameter if it is set.
#[derive(Clone, Copy)]
pub(crate) enum Rule {
    Used,
    /// The parameter has no effect in Walpost and is not relevant to security.
    Ignored,
    /// The parameter is accepted only with values that request Walpost's normal behavior.
    Only(&'static [&'static str]),
    Refused(&'static str),
}
use Rule::{Ignored, Only, Refused, Used};

/// A parameter, the environment variable that can set it, and how Walpost handles the parameter.
pub(crate) struct Keyword {
    pub(crate) name: &'static str,
    pub(crate) variable: Option<&'static str>,
    pub(crate) rule: Rule,
}

const fn keyword(name: &'static str, variable: &'static str, rule: Rule) -> Keyword {
    Keyword {
        name,
        variable: Some(variable),
        rule,
    }
}

const fn string_only(name: &'static str, rule: Rule) -> Keyword {
    Keyword {
        name,
        variable: None,
        rule,
    }
}

const OAUTH: Rule = Refused("Walpost does not support OAuth authentication");

pub(crate) const KEYWORDS: &[Keyword] = &[
    keyword("host", "PGHOST", Used),
    keyword("hostaddr", "PGHOSTADDR", Used),
    keyword("port", "PGPORT", Used),
    keyword("dbname", "PGDATABASE", Used),
    keyword("user", "PGUSER", Used),
    keyword("password", "PGPASSWORD", Used),
    keyword("passfile", "PGPASSFILE", Used),
    keyword("application_name", "PGAPPNAME", Used),
    string_only("fallback_application_name", Used),
    keyword("options", "PGOPTIONS", Used),
    keyword("connect_timeout", "PGCONNECT_TIMEOUT", Used),
    keyword("target_session_attrs", "PGTARGETSESSIONATTRS", Used),
    keyword("load_balance_hosts", "PGLOADBALANCEHOSTS", Used),
    string_only("keepalives", Used),
    string_only("keepalives_idle", Used),
    string_only("keepalives_interval", Used),
    string_only("keepalives_count", Used),
    string_only("tcp_user_timeout", Used),
    keyword("channel_binding", "PGCHANNELBINDING", Used),
    keyword("require_auth", "PGREQUIREAUTH", Used),
    keyword("requirepeer", "PGREQUIREPEER", Used),
    keyword("sslmode", "PGSSLMODE", Used),
    keyword("sslrootcert", "PGSSLROOTCERT", Used),
    keyword("sslcrl", "PGSSLCRL", Used),
    keyword("sslcert", "PGSSLCERT", Used),
    keyword("sslkey", "PGSSLKEY", Used),
    string_only("sslpassword", Used),
    keyword("sslcertmode", "PGSSLCERTMODE", Used),
    keyword("sslsni", "PGSSLSNI", Used),
    keyword("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION", Used),
    keyword("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION", Used),
    string_only(
        "client_encoding",
        Only(&["UTF8", "utf8", "UTF-8", "utf-8", "auto"]),
    ),
    keyword("gssencmode", "PGGSSENCMODE", Only(&["disable", "prefer"])),
    keyword("sslnegotiation", "PGSSLNEGOTIATION", Only(&["postgres"])),
    keyword(
        "min_protocol_version",
        "PGMINPROTOCOLVERSION",
        Only(&["3.0"]),
    ),
    string_only("max_protocol_version", Ignored),
    string_only("sslcompression", Ignored),
    string_only("gssdelegation", Ignored),
    string_only("gsslib", Ignored),
    string_only("krbsrvname", Ignored),
    keyword(
        "service",
        "PGSERVICE",
        Refused("use the parameters from the service file instead"),
    ),
    string_only(
        "servicefile",
        Refused("use the parameters from the service file instead"),
    ),
    string_only(
        "replication",
        Refused("remove the parameter, which Walpost sets itself"),
    ),
    keyword(
        "requiressl",
        "PGREQUIRESSL",
        Refused("use sslmode=require instead"),
    ),
    keyword(
        "sslcrldir",
        "PGSSLCRLDIR",
        Refused("put the revocation lists into one file and set sslcrl to its path"),
    ),
    string_only(
        "sslkeylogfile",
        Refused("Walpost does not write TLS session keys to a file"),
    ),
    string_only("scram_client_key", Refused("use the password instead")),
    string_only("scram_server_key", Refused("use the password instead")),
    string_only("oauth_issuer", OAUTH),
    string_only("oauth_client_id", OAUTH),
    string_only("oauth_client_secret", OAUTH),
    string_only("oauth_scope", OAUTH),
];

/// A parameter's value, and the keyword or environment variable that set it.
pub(crate) struct Setting {
    pub(crate) value: String,
    pub(crate) name: &'static str,
}

/// Checks the value of a parameter against the parameter's rule.
///
/// # Errors
/// Returns [`ConninfoError::Unsupported`] or [`ConninfoError::Value`] if the rule rejects the
/// value.
pub(crate) fn check(keyword: &Keyword, setting: &Setting) -> Result<(), ConninfoError> {
    match keyword.rule {
        Used | Ignored => Ok(()),
        // libpq treats an empty value as if the parameter were not set.
        Only(_) | Refused(_) if setting.value.is_empty() => Ok(()),
        Only(values) if values.contains(&setting.value.as_str()) => Ok(()),
        Only(values) => Err(ConninfoError::Value {
            name: setting.name,
            found: setting.value.clone(),
            expected: values.join(" or "),
        }),
        Refused(remedy) => Err(ConninfoError::Unsupported {
            name: setting.name,
            remedy,
        }),
    }
}

/// Returns the error for an unknown parameter. `before` is the preceding parameter.
pub(crate) fn unknown(name: &str, before: &str) -> ConninfoError {
    let nearest = KEYWORDS
        .iter()
        .map(|keyword| (strsim::jaro_winkler(name, keyword.name), keyword.name))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(likeness, _)| *likeness > 0.7)
        .map(|(_, name)| name);
    if before == "password" {
        return ConninfoError::BehindPassword { nearest };
    }
    ConninfoError::UnknownKey {
        name: name.to_owned(),
        nearest,
    }
}
