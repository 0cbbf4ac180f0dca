//! Whether the server takes Walpost for a synchronous standby, and which commits of ours wait for the others.
//!
//! A walsender for logical replication is a candidate like any other if `synchronous_standby_names` has its
//! `application_name`, or `*`. Commits then wait for what Walpost confirms, and that waits for Kafka. So a session of ours
//! commits with `synchronous_commit = local`, and the few statements that a promoted standby must have wait explicitly.
//!
//! PostgreSQL 18, 19.6.2 "Primary Server", `synchronous_standby_names`.

/// True if `synchronous_standby_names` has this session's `application_name`. Names are compared as the server compares them:
/// without regard to case, and `*` is every name, quoted or not.
pub(super) const IS_SYNCHRONOUS: &str = "EXISTS (SELECT FROM regexp_matches(current_setting('synchronous_standby_names'), \
     '\"((?:[^\"]|\"\")+)\"|([^[:space:](),\"]+)', 'g') AS name \
     WHERE lower(coalesce(replace(name[1], '\"\"', '\"'), name[2])) IN ('*', lower(current_setting('application_name'))))";

/// A statement after which this session's commits are durable on the synchronous standbys too, unless Walpost is one of them: it
/// would wait for itself.
pub(super) fn wait_for_standbys() -> String {
    format!("SELECT set_config('synchronous_commit', 'on', false) WHERE NOT {IS_SYNCHRONOUS}")
}

/// What to say if `names`, the server's `synchronous_standby_names`, has Walpost's `application_name`.
pub(super) fn warning(names: &str, application_name: &str) -> String {
    format!(
        "synchronous_standby_names is {names:?}, and application_name {application_name:?} matches it: Walpost is a synchronous \
         standby, so commits in every database of the server can wait until Kafka has acknowledged the events before them. \
         Name the standbys that are meant: ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby_1, standby_2)'; \
         SELECT pg_reload_conf()"
    )
}
