//! Detects whether the server treats Walpost as a synchronous standby, and makes some of Walpost's
//! own commits wait for standbys.
//!
//! If `synchronous_standby_names` contains Walpost's `application_name`, or `*`, commits wait until
//! Walpost has confirmed them, which it does only after Kafka has acknowledged the preceding
//! events. To keep Walpost from waiting for itself, its sessions use `synchronous_commit = local`.
//! Some journal entries must survive the promotion of a standby. These are written after
//! [`wait_for_standbys`].
//!
//! Spec: PostgreSQL 18, 19.6.2 "Primary Server", `synchronous_standby_names`.

/// An SQL condition that is true if `synchronous_standby_names` matches this session's
/// `application_name`. As in the server, the comparison ignores case, and `*` matches every name,
/// whether it is quoted or not.
pub(super) const IS_SYNCHRONOUS: &str = "EXISTS (SELECT FROM regexp_matches(current_setting('synchronous_standby_names'), \
     '\"((?:[^\"]|\"\")+)\"|([^[:space:](),\"]+)', 'g') AS name \
     WHERE lower(coalesce(replace(name[1], '\"\"', '\"'), name[2])) IN ('*', lower(current_setting('application_name'))))";

/// Returns a statement that makes later commits of this session wait for the synchronous standbys,
/// unless Walpost is one of them.
pub(super) fn wait_for_standbys() -> String {
    format!("SELECT set_config('synchronous_commit', 'on', false) WHERE NOT {IS_SYNCHRONOUS}")
}

/// Returns the warning that `names`, the server's `synchronous_standby_names`, matches Walpost's
/// `application_name`.
pub(super) fn warning(names: &str, application_name: &str) -> String {
    format!(
        "synchronous_standby_names is {names:?}, and application_name {application_name:?} matches it: Walpost is a synchronous \
         standby, so commits in every database of the server can wait until Kafka has acknowledged the preceding events. \
         List only the intended standbys: ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby_1, standby_2)'; \
         SELECT pg_catalog.pg_reload_conf()"
    )
}
