//! Partitions that a superuser makes of a table that another role owns.

use std::path::Path;

use super::Shop;
use crate::init::psql;
use crate::support::event::Outbox;

on_each_version! {
    new_partitions_belong_to_the_owner_of_the_table
}

/// PostgreSQL builds the index of a partition as the owner of the partition.
fn new_partitions_belong_to_the_owner_of_the_table(major: u32) {
    let daily = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/outbox_partitioned.sql");
    for again in ["outbox_partitioned.sql", "init --partitioned"] {
        let shop = Shop::bare(Outbox::Table, major);
        let (db, mallory) = (&shop.scene.db, &shop.mallory);
        let init = || shop.init().arg("--partitioned");
        init().args(["--owner", mallory]).finish().expect_code(0);
        // As if it were two days later.
        db.run(
            "DO $$ DECLARE day text; BEGIN
                 FOR day IN SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'public.outbox'::regclass
                     AND inhrelid::regclass::text LIKE '%outbox_p2%' ORDER BY 1 DESC LIMIT 2 LOOP
                     EXECUTE 'DROP TABLE ' || day; END LOOP; END $$",
        );
        match again {
            "init --partitioned" => drop(init().finish().expect_code(0)),
            _ => psql(&shop.scene, &daily),
        }
        let partitions =
            "SELECT count(*) FROM pg_inherits WHERE inhparent = 'public.outbox'::regclass";
        assert_eq!(db.number(partitions), 9, "PostgreSQL {major}, {again}");
        let of_others = format!(
            "SELECT count(*) FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'public.outbox'::regclass
                 AND relowner <> '{mallory}'::regrole"
        );
        let foreign = db.number(&of_others);
        shop.theirs.run(
            "INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at)
                 SELECT 'a', 'b', 'c', now() + n * interval '1 day' FROM generate_series(0, 7) AS n",
        );
        let _ = shop
            .theirs
            .try_run("CREATE INDEX ON public.outbox (id) WHERE plot.note('index')");
        shop.expect_nothing_ran(again);
        assert_eq!(foreign, 0, "PostgreSQL {major}, {again}");
    }
}
