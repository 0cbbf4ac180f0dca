#![allow(clippy::unwrap_used)]

use super::*;

type Environment<'a> = &'a [(&'a str, &'a str)];

const ALICE: Environment<'_> = &[("USER", "alice"), ("HOME", "/nonexistent")];

fn parse(text: &str, environment: Environment<'_>) -> Result<Conninfo, ConninfoError> {
    let all: Vec<_> = environment.iter().chain(ALICE).collect();
    Conninfo::parse(text, &|name| {
        all.iter()
            .find(|(n, _)| *n == name)
            .map(|(_, v)| (*v).to_owned())
    })
}

fn described(text: &str, environment: Environment<'_>) -> String {
    parse(text, environment).unwrap().describe()
}

fn parse_error(text: &str, environment: Environment<'_>) -> String {
    parse(text, environment).unwrap_err().to_string()
}

fn default_host() -> String {
    Host {
        place: default_place(&SOCKET_FOLDERS),
        port: 5432,
    }
    .to_string()
}

#[test]
fn parses_server_addresses_and_user_and_database_names_like_libpq() {
    let home = default_host();
    let home = home.as_str();
    for (text, [dbname, hosts, user]) in [
        ("dbname=shop", ["shop", home, "alice"]),
        ("host='' dbname=shop", ["shop", home, "alice"]),
        ("postgresql:///shop", ["shop", home, "alice"]),
        ("host=db", ["alice", "db:5432", "alice"]),
        ("host=db user=bob", ["bob", "db:5432", "bob"]),
        ("host=db port='' dbname=''", ["alice", "db:5432", "alice"]),
        ("host=a,b port=1,2", ["alice", "a:1,b:2", "alice"]),
        ("host=a,b port=7", ["alice", "a:7,b:7", "alice"]),
        ("host=a,b port=,7", ["alice", "a:5432,b:7", "alice"]),
        ("postgresql://a,b:7/shop", ["shop", "a:5432,b:7", "alice"]),
        ("postgresql://[::1]:7/shop", ["shop", "[::1]:7", "alice"]),
        (
            "hostaddr=::1,10.0.0.1",
            ["alice", "[::1]:5432,10.0.0.1:5432", "alice"],
        ),
        ("host=db hostaddr=10.0.0.1", ["alice", "db:5432", "alice"]),
        (
            "postgresql://walpost@/shop?host=/var/run/postgresql",
            ["shop", "/var/run/postgresql:5432", "walpost"],
        ),
        (
            "postgresql://%2Ftmp%2Fpg:7",
            ["alice", "/tmp/pg:7", "alice"],
        ),
        ("host=/a,b", ["alice", "/a:5432,b:5432", "alice"]),
        ("host=@abstract", ["alice", "@abstract:5432", "alice"]),
        ("user=a user=b host=h", ["b", "h:5432", "b"]),
    ] {
        let expected = format!("{dbname} on {hosts} as {user}");
        assert_eq!(described(text, &[]), expected, "{text:?}");
    }
}

#[test]
fn defaults_to_the_first_existing_socket_directory_or_else_localhost() {
    let folder = tempfile::tempdir().unwrap();
    let existing = folder.path().to_str().unwrap();
    let socket = Place::Socket(existing.to_owned());
    assert_eq!(default_place(&["/nonexistent", existing]), socket);
    let localhost = Place::Tcp {
        name: "localhost".to_owned(),
        address: None,
    };
    assert_eq!(default_place(&["/nonexistent"]), localhost);
}

#[test]
fn copies_only_the_database_name_from_the_second_connection_string() {
    let administrator = parse("host=h user=postgres dbname=postgres", &[]).unwrap();
    let shop = parse("host=other user=walpost dbname=shop", &[]).unwrap();
    let conninfo = administrator.with_database_of(&shop);
    assert_eq!(conninfo.user(), "postgres");
    assert_eq!(conninfo.servers(), "h:5432");
    assert_eq!(conninfo.dbname(), "shop");
}

#[test]
fn detects_every_way_to_set_a_role_in_the_options_parameter() {
    for (options, asks) in [
        ("-c role=shop", true),
        ("-crole=shop", true),
        ("--role=shop", true),
        ("-c geqo=off -c role=shop", true),
        ("-c geqo=off", false),
        ("-c parole=x", false),
    ] {
        let conninfo = parse(&format!("host=h options='{options}'"), &[]).unwrap();
        assert_eq!(conninfo.sets_role(), asks, "{options}");
    }
    assert!(!parse("host=h", &[]).unwrap().sets_role());
}

#[test]
fn formats_each_sslmode_as_its_libpq_name() {
    for mode in ["disable", "prefer", "require", "verify-ca", "verify-full"] {
        let conninfo = parse(&format!("sslmode={mode}"), &[]).unwrap();
        assert_eq!(conninfo.tls.mode.to_string(), mode);
    }
}

#[test]
fn keeps_the_host_name_for_certificate_checks_if_an_address_is_set() {
    let conninfo = parse("host=db hostaddr=10.0.0.1", &[]).unwrap();
    let place = Place::Tcp {
        name: "db".to_owned(),
        address: Some([10, 0, 0, 1].into()),
    };
    assert_eq!(conninfo.hosts, [Host { place, port: 5432 }]);
}

#[test]
fn prefers_the_connection_string_to_the_environment_and_the_environment_to_defaults() {
    let environment: Environment<'_> = &[
        ("PGHOST", "envhost"),
        ("PGPORT", "99"),
        ("PGUSER", "envuser"),
        ("PGDATABASE", "envdb"),
        ("PGAPPNAME", "envapp"),
        ("PGSSLMODE", "require"),
        ("PGCONNECT_TIMEOUT", "3"),
        ("PGTARGETSESSIONATTRS", "primary"),
        ("PGCHANNELBINDING", "require"),
        ("PGOPTIONS", "-c geqo=off"),
        ("PGCLIENTENCODING", "LATIN1"),
    ];
    assert_eq!(described("", environment), "envdb on envhost:99 as envuser");
    assert_eq!(
        described("host=h port=1 user=u dbname=d", environment),
        "d on h:1 as u"
    );

    let by_environment = parse("", environment).unwrap();
    assert_eq!(by_environment.application_name, "envapp");
    assert_eq!(by_environment.tls.mode, SslMode::Require);
    assert_eq!(by_environment.connect_timeout, Some(Duration::from_secs(3)));
    assert_eq!(by_environment.target, Target::Primary);
    assert_eq!(by_environment.channel_binding, ChannelBinding::Require);
    assert_eq!(by_environment.options.as_deref(), Some("-c geqo=off"));

    let by_string = parse(
        "sslmode=disable connect_timeout=0 application_name=a",
        environment,
    );
    let by_string = by_string.unwrap();
    assert_eq!(by_string.tls.mode, SslMode::Disable);
    assert_eq!(by_string.connect_timeout, None);
    assert_eq!(by_string.application_name, "a");

    let by_default = parse("", &[]).unwrap();
    assert_eq!(by_default.application_name, "walpost");
    assert_eq!(by_default.tls.mode, SslMode::Prefer);
    assert_eq!(by_default.target, Target::Any);
    assert_eq!(by_default.channel_binding, ChannelBinding::Prefer);
    assert_eq!(by_default.connect_timeout, Some(Duration::from_secs(10)));
    assert_eq!(by_default.tcp_user_timeout, Some(Duration::from_secs(30)));
    let keepalive = by_default.keepalive.unwrap();
    assert_eq!(
        (keepalive.idle.as_secs(), keepalive.interval.as_secs()),
        (10, 5)
    );
    assert_eq!(keepalive.retries, 3);
}

#[test]
fn accepts_harmless_connection_parameters() {
    for text in [
        "keepalives=0",
        "keepalives_idle=-1",
        "connect_timeout=' 5 '",
        "fallback_application_name=x",
        "load_balance_hosts=random",
        "gssencmode=prefer",
        "gssencmode=disable",
        "krbsrvname=postgres",
        "sslcompression=0",
        "sslnegotiation=postgres",
        "client_encoding=UTF8",
        "max_protocol_version=latest",
        "require_auth=",
        "ssl_min_protocol_version=TLSv1.1",
        "ssl_min_protocol_version=TLSv1.2 ssl_max_protocol_version=TLSv1.2",
        "sslcertmode=disable",
        "sslrootcert=system sslmode=verify-full",
    ] {
        assert!(parse(text, &[]).is_ok(), "{text:?}: {:?}", parse(text, &[]));
    }
}

#[test]
fn reports_found_and_expected_values_of_invalid_parameters() {
    for (text, expected) in [
        (
            "hots=a",
            "unknown connection parameter \"hots\"; did you mean \"host\"?",
        ),
        (
            "ssl_mode=a",
            "unknown connection parameter \"ssl_mode\"; did you mean \"sslmode\"?",
        ),
        ("qqq=a", "unknown connection parameter \"qqq\""),
        ("postgresql://h/?hots=a", "did you mean \"host\"?"),
        ("port=0", "port is \"0\", expected a number from 1 to 65535"),
        ("port=65536", "port is \"65536\""),
        ("host=a port=x", "port is \"x\""),
        (
            "host=a,b port=1,2,3",
            "port lists 3 values, expected 2: one for each host",
        ),
        (
            "host=a hostaddr=::1,::2",
            "hostaddr lists 2 values, expected 1",
        ),
        (
            "hostaddr=example",
            "hostaddr is \"example\", expected IPv4 or IPv6 addresses",
        ),
        (
            "sslmode=allow",
            "sslmode is \"allow\", expected one of disable, prefer, require, verify-ca, verify-full",
        ),
        ("sslmode=", "sslmode is \"\""),
        (
            "target_session_attrs=standby",
            "target_session_attrs is \"standby\", expected one of any, read-write, primary",
        ),
        (
            "channel_binding=maybe",
            "channel_binding is \"maybe\", expected one of disable, prefer",
        ),
        (
            "connect_timeout=soon",
            "connect_timeout is \"soon\", expected a whole number",
        ),
        ("keepalives=2", "keepalives is \"2\", expected one of 0, 1"),
        (
            "gssencmode=require",
            "gssencmode is \"require\", expected disable or prefer",
        ),
        ("sslnegotiation=direct", "sslnegotiation is \"direct\""),
        ("client_encoding=LATIN1", "client_encoding is \"LATIN1\""),
        (
            "sslcertmode=require",
            "sslcertmode is \"require\", expected one of disable, allow",
        ),
        (
            "ssl_max_protocol_version=TLSv1.1",
            "one of TLSv1.2, TLSv1.3",
        ),
        (
            "ssl_min_protocol_version=TLSv1.3 ssl_max_protocol_version=TLSv1.2",
            "ssl_max_protocol_version is \"TLSv1.2\", expected the value of ssl_min_protocol_version or a later version",
        ),
        (
            "sslrootcert=system sslmode=require",
            "expected verify-full, which sslrootcert=system requires",
        ),
        (
            "service=shop",
            "service is not supported: use the parameters from the service file",
        ),
        (
            "require_auth=scram",
            "require_auth is \"scram\", expected one or more of password, md5, scram-sha-256, gss, sspi, oauth, none",
        ),
        ("require_auth='md5, password'", "commas without spaces"),
        ("require_auth=md5,", "expected one or more"),
        ("require_auth=!", "expected one or more"),
        (
            "require_auth=md5,!password",
            "either every method or no method begins with !",
        ),
        (
            "require_auth=!md5,password",
            "either every method or no method begins with !",
        ),
        (
            "require_auth=md5,none,md5",
            "expected a list that contains each method at most once",
        ),
        (
            "require_auth=!none,!none",
            "expected a list that contains each method at most once",
        ),
        ("sslcrldir=/x", "sslcrldir is not supported"),
        ("replication=database", "replication is not supported"),
    ] {
        let error = parse_error(text, &[]);
        assert!(error.contains(expected), "{text:?}: {error}");
    }
}

#[test]
fn names_the_environment_variable_in_errors() {
    for (variable, value, expected) in [
        ("PGPORT", "x", "PGPORT is \"x\""),
        ("PGSSLMODE", "allow", "PGSSLMODE is \"allow\""),
        ("PGSERVICE", "shop", "PGSERVICE is not supported"),
        ("PGREQUIREAUTH", "x", "PGREQUIREAUTH is \"x\""),
        ("PGHOSTADDR", "a", "PGHOSTADDR is \"a\""),
    ] {
        let error = parse_error("", &[(variable, value)]);
        assert!(error.contains(expected), "{variable}: {error}");
    }
    assert!(parse("service='' port=1", &[("PGSERVICE", "s"), ("PGPORT", "x")]).is_ok());
}

#[test]
fn error_about_a_missing_user_name_lists_the_ways_to_set_it() {
    let error = Conninfo::parse("host=h", &|_| None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("user=NAME") && error.contains("PGUSER"),
        "{error}"
    );
    let conninfo = Conninfo::parse("", &|name| (name == "LOGNAME").then(|| "bob".to_owned()));
    assert_eq!(conninfo.unwrap().user(), "bob");
}

#[test]
fn never_prints_the_password() {
    for text in [
        "host=h password=hunter2 sslpassword=hunter2",
        "postgresql://u:hunter2@h/db",
        "postgresql://u:pa/hunter2@h/db",
        "postgresql://u:hunter2/x@h/db",
        "postgresql://u:8/hunter2@h/db",
        "postgresql://u:p@h/hunter2@h/db",
        "postgresql://u:p@h/x?hunter2=y@h/db",
        "host=h password=my hunter2=x",
        "postgresql://u:p@hunter2@h/db",
        "postgresql://u:p@hunter2@h:x/db",
    ] {
        let shown = match parse(text, &[("PGPASSWORD", "hunter2")]) {
            Ok(conninfo) => format!("{conninfo:?} {}", conninfo.describe()),
            Err(error) => format!("{error} {error:?}"),
        };
        assert!(!shown.contains("hunter2"), "{text:?}: {shown}");
    }
}

#[test]
fn reads_the_password_from_the_string_then_the_environment_then_the_password_file() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join(".pgpass");
    let lines = "localhost:5432:*:alice:by socket\ndb:*:shop:alice:by host\n[::1]:*:*:*:no\n";
    std::fs::write(&file, lines).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let home = home.path().to_str().unwrap();
    let file = file.to_str().unwrap();

    let by_home: Environment<'_> = &[("HOME", home)];
    for (text, environment, expected) in [
        ("host=db dbname=shop", by_home, Some("by host")),
        ("host=db dbname=other", by_home, None),
        ("host=/tmp", by_home, Some("by socket")),
        ("host=/var/run/postgresql", by_home, Some("by socket")),
        ("host=/run/elsewhere", by_home, None),
        ("host=db dbname=shop password=mine", by_home, Some("mine")),
        ("host=db dbname=shop password=", by_home, Some("by host")),
        (
            "host=db dbname=shop",
            &[("HOME", home), ("PGPASSWORD", "env")],
            Some("env"),
        ),
        (
            "host=db dbname=shop",
            &[("PGPASSFILE", file)],
            Some("by host"),
        ),
        ("host=db dbname=shop", &[], None),
    ] {
        let conninfo = parse(text, environment).unwrap();
        let password = conninfo.password(&conninfo.hosts[0]);
        let password = password.map(|Secret(bytes)| String::from_utf8(bytes).unwrap());
        assert_eq!(password.as_deref(), expected, "{text:?} {environment:?}");
    }
}

/// Parses the connection string `text` as if it had been read from a file. `now` is the result of
/// reading the file again.
fn from_changed_file(text: &str, now: Result<&str, &str>) -> Conninfo {
    let now = now.map(str::to_owned).map_err(str::to_owned);
    let read = move || parse(now.as_ref().map_err(String::clone)?, &[]).map_err(|e| e.to_string());
    parse(text, &[]).unwrap().with_source("walpost.toml", read)
}

#[test]
fn rereads_the_password_from_a_file_unless_the_server_or_login_or_security_settings_changed() {
    let text = "host=h user=u dbname=d password=old";
    for (now, expected) in [
        (Ok("host=h user=u dbname=d password=new"), "new"),
        (Ok("host=other user=u dbname=d password=new"), "old"),
        (Ok("host=h user=other dbname=d password=new"), "old"),
        (Ok("host=h user=u dbname=other password=new"), "old"),
        (
            Ok("host=h user=u dbname=d password=new application_name=a"),
            "new",
        ),
        (
            Ok("host=h user=u dbname=d password=new sslmode=verify-full"),
            "old",
        ),
        (
            Ok("host=h user=u dbname=d password=new sslrootcert=/ca"),
            "old",
        ),
        (
            Ok("host=h user=u dbname=d password=new require_auth=scram-sha-256"),
            "old",
        ),
        (
            Ok("host=h user=u dbname=d password=new channel_binding=require"),
            "old",
        ),
        (
            Ok("host=h user=u dbname=d password=new requirepeer=postgres"),
            "old",
        ),
        (Err("no such file"), "old"),
    ] {
        let conninfo = from_changed_file(text, now);
        let Secret(password) = conninfo.password(&conninfo.hosts[0]).unwrap();
        assert_eq!(password, expected.as_bytes(), "{now:?}");
    }
}

#[test]
fn password_error_names_the_source_of_the_password() {
    let origin = |text, environment: Environment<'_>| {
        let conninfo = parse(text, environment).unwrap();
        conninfo.password_origin()
    };
    let check = |found: String, expected: &str| assert!(found.starts_with(expected), "{found}");
    check(
        origin("host=h password=x", &[]),
        "Walpost gets the password from the connection string on the command line or in the environment",
    );
    check(
        origin("host=h", &[("PGPASSWORD", "x")]),
        "Walpost gets the password from the environment variable PGPASSWORD",
    );
    check(
        origin("host=h", &[("PGPASSFILE", "/f")]),
        "Walpost gets the password from the password file /f",
    );
    let homeless = Conninfo::parse("host=h user=u", &|_| None).unwrap();
    check(
        homeless.password_origin(),
        "Walpost can't find a password file, because PGPASSFILE is not set",
    );
    let in_file = "host=h password=x";
    check(
        from_changed_file(in_file, Ok(in_file)).password_origin(),
        "Walpost gets the password from walpost.toml",
    );
    // The password was moved to the password file after startup.
    check(
        from_changed_file(in_file, Ok("host=h passfile=/f")).password_origin(),
        "Walpost gets the password from the password file /f",
    );
}

#[test]
fn reads_the_default_certificate_file_only_if_it_exists() {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".postgresql")).unwrap();
    let root = home.path().join(".postgresql/root.crt");
    let environment: Environment<'_> = &[("HOME", home.path().to_str().unwrap())];
    let file = |text| match parse(text, environment).unwrap().tls.root {
        RootCert::File(file) => file,
        RootCert::System => panic!("{text}"),
    };
    assert_eq!(file("").to_read(), None);
    assert_eq!(
        file("sslrootcert=/none").to_read(),
        Some(Path::new("/none"))
    );
    std::fs::write(&root, "").unwrap();
    assert_eq!(file("").to_read(), Some(root.as_path()));

    let conninfo = parse("sslrootcert=system", environment).unwrap();
    assert_eq!(
        (conninfo.tls.root, conninfo.tls.mode),
        (RootCert::System, SslMode::VerifyFull)
    );
}

#[test]
fn require_auth_allows_the_same_methods_as_libpq() {
    use AuthMethod::{Gss, Md5, None as Nothing, OAuth, Password, ScramSha256, Sspi};
    let all = [Password, Md5, ScramSha256, Gss, Sspi, OAuth, Nothing];
    for (text, allowed, named) in [
        ("", &all[..], &[][..]),
        ("scram-sha-256", &[ScramSha256], &[ScramSha256]),
        ("none", &[Nothing], &[Nothing]),
        (
            "md5,password,none",
            &[Password, Md5, Nothing],
            &[Password, Md5, Nothing],
        ),
        (
            "!password",
            &[Md5, ScramSha256, Gss, Sspi, OAuth, Nothing],
            &[],
        ),
        ("!none", &all[..6], &[]),
        (
            "!md5,!password,!none,!gss,!sspi,!oauth",
            &[ScramSha256],
            &[],
        ),
    ] {
        let by_string = parse(&format!("require_auth='{text}'"), &[]).unwrap();
        let by_variable = parse("", &[("PGREQUIREAUTH", text)]).unwrap();
        for conninfo in [by_string, by_variable] {
            let found = &conninfo.require_auth;
            let matching = |test: &dyn Fn(AuthMethod) -> bool| {
                all.into_iter().filter(|m| test(*m)).collect::<Vec<_>>()
            };
            assert_eq!(matching(&|method| found.allows(method)), allowed, "{text}");
            assert_eq!(matching(&|method| found.requires(method)), named, "{text}");
            assert_eq!(found.to_string(), text);
        }
    }
}

#[test]
fn uses_the_first_line_of_the_program_output_as_the_password() {
    let with = |text: &str, script: &str| {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        let program = Program::new(&argv).expect("a program");
        let password = |name: &str| (name == "PGPASSWORD").then(|| "unrelated".to_owned());
        let conninfo = Conninfo::parse(text, &password).expect("conninfo");
        conninfo.with_password_command(program, "password_command of pipeline \"x\"")
    };
    let run = |script: &str| {
        let conninfo = with("host=db user=u", script).expect("one password");
        let ran = conninfo.password_command().expect("a program").run();
        ran.map(|Secret(password)| String::from_utf8_lossy(&password).into_owned())
            .map_err(|error| error.to_string())
    };
    assert_eq!(run("printf 'one\\ntwo\\n'"), Ok("one".to_owned()));
    assert_eq!(run("printf 'o ne \\r\\n'"), Ok("o ne ".to_owned()));
    assert_eq!(run("printf one"), Ok("one".to_owned()));
    for (script, expected) in [
        ("echo; echo one", "line is empty"),
        ("printf 'o\\0ne\\n'", "contains a NUL character"),
        ("true", "printed nothing"),
    ] {
        let error = run(script).expect_err(script);
        assert!(error.contains(expected), "{error}");
    }

    let conninfo = with("host=db user=u", "true").expect("one password");
    let origin = conninfo.password_origin();
    assert!(
        origin.contains("the program /bin/sh (password_command of pipeline \"x\")"),
        "{origin}"
    );
    let limit = conninfo.attempt_limit().expect("a limit");
    assert!(
        limit > conninfo.connect_timeout.expect("a limit"),
        "the limit includes the time that the program takes to run"
    );
    with("host=db user=u password=p", "true").expect_err("two passwords");
}
