//! Roles that others have set or can act as.

use super::Shop;
use crate::support::event::Outbox;
use crate::support::postgres::{MAJOR, MAJORS};

#[test]
fn role_that_the_owner_of_the_database_has_set_for_it_is_not_taken_on() {
    for major in MAJORS {
        let shop = Shop::bare(Outbox::Table, major);
        let (db, mallory, name) = (&shop.scene.db, &shop.mallory, &shop.scene.name);
        db.run(&format!("ALTER DATABASE {name} OWNER TO {mallory}"));
        shop.theirs
            .run(&format!("ALTER DATABASE {name} SET role = '{mallory}'"));
        shop.init().finish().expect_code(0);
        let owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class
            WHERE oid IN ('public.outbox'::regclass, 'walpost.journal'::regclass)
            UNION SELECT pg_get_userbyid(pubowner) FROM pg_publication
            UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'walpost'";
        assert_eq!(
            db.rows(owners),
            [vec![Some("postgres".to_owned())]],
            "PostgreSQL {major}"
        );
        shop.command(&["check"]).finish().expect_code(0);
    }
}

#[test]
fn role_that_others_can_act_as_is_warned_of() {
    let shop = Shop::new(Outbox::Table, MAJOR);
    let (walpost, mallory) = (&shop.walpost, &shop.mallory);
    shop.scene.db.run(&format!("GRANT {walpost} TO {mallory}"));
    let init = shop.init().finish().expect_code(0);
    init.expect_says(&["WARNING", &format!("REVOKE {walpost} FROM {mallory}")]);
}

/// On servers where the DBA is no superuser, as rented ones.
#[test]
fn what_the_role_that_may_make_roles_owns_is_used() {
    for major in MAJORS {
        let shop = Shop::bare(Outbox::Table, major);
        let (name, dba) = (&shop.scene.name, format!("{}_dba", shop.scene.name));
        shop.scene.db.run(&format!(
            "CREATE ROLE {dba} LOGIN CREATEROLE REPLICATION; ALTER DATABASE {name} OWNER TO {dba};
             CREATE ROLE {0}_app; GRANT {0}_app TO {dba};
             GRANT CREATE ON SCHEMA public TO {dba}",
            shop.mallory
        ));
        let init = || {
            shop.command_as(&dba, &["init", "--role", &shop.walpost])
                .finish()
        };
        // Up to 15 a superuser alone can give REPLICATION.
        if major < 16 {
            let make = format!("CREATE ROLE {} LOGIN REPLICATION", shop.walpost);
            let by = format!("{make}, run by a superuser");
            init()
                .expect_code(3)
                .expect_says(&[&by, "Nothing was changed"]);
            shop.scene.db.run(&make);
        }
        init().expect_code(0);
        shop.scene.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {}_app",
            shop.mallory
        ));
        shop.command(&["check"]).finish().expect_code(0);
        let aggregate = shop.scene.aggregate(1);
        let walpost = shop.command(&["run"]).start_streaming();
        shop.scene.insert(&aggregate, "k");
        shop.scene.wait_for_records(1);
        walpost.terminate().expect_code(0);
        shop.scene.db.run(&format!(
            "DROP OWNED BY {dba}, {0}_app CASCADE; DROP ROLE {0}_app",
            shop.mallory
        ));
        shop.scene.db.run(&format!(
            "ALTER DATABASE {name} OWNER TO postgres; DROP OWNED BY {dba} CASCADE; DROP ROLE {dba}"
        ));
    }
}
