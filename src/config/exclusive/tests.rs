use super::*;

/// Returns a row whose pipeline has this name and slot.
fn row(name: &str, slot: &str) -> ValidRow {
    let resources = vec![
        ExclusiveResource::Name(name.to_owned()),
        ExclusiveResource::Slot {
            slot: slot.to_owned(),
            database: "d".to_owned(),
        },
    ];
    ValidRow {
        name: format!("row {name}"),
        row: TextRow::new(),
        pipeline: FilePipeline {
            name: Some(name.to_owned()),
            ..FilePipeline::default()
        },
        resources,
    }
}

/// Creates a source from its current and previous rows. Each row is given as `name/slot`, or only
/// as `name` if the pipeline and its slot have the same name.
fn source(rows: &[&str], previous: &[&str]) -> SourceRows {
    let rows_of = |names: &[&str]| {
        let parts = names
            .iter()
            .map(|row| row.split_once('/').unwrap_or((row, row)));
        parts.map(|(name, slot)| row(name, slot)).collect()
    };
    SourceRows {
        rows: rows_of(rows),
        previous: rows_of(previous),
        ..SourceRows::default()
    }
}

fn resolve(sources: &mut [SourceRows], in_files: &[&str]) -> Result<Vec<Vec<String>>, Conflict> {
    let in_files = in_files.iter().map(|name| row(name, name));
    let in_files = in_files.flat_map(|row| row.resources).collect();
    resolve_conflicts(sources, &in_files)?;
    let names = |source: &SourceRows| {
        let rows = source.rows.iter();
        rows.map(|row| row.pipeline.name().to_owned()).collect()
    };
    Ok(sources.iter().map(names).collect())
}

#[test]
fn new_row_does_not_displace_an_existing_pipeline_of_a_later_source() {
    for added in ["victim", "other/victim"] {
        let mut sources = [
            source(&["a", added, "new"], &["a"]),
            source(&["victim", "next"], &["victim"]),
        ];
        let used = resolve(&mut sources, &[]).expect("a result");
        assert_eq!(used, [["a", "new"], ["victim", "next"]]);
        let failure = sources[0].failure().expect("a rejected row");
        assert!(failure.contains("another pipeline"), "{failure}");
        assert_eq!(sources[1].failure(), None);
    }
}

#[test]
fn a_row_does_not_displace_a_pipeline_defined_in_a_file() {
    let mut sources = [source(&["a", "file"], &[])];
    assert_eq!(
        resolve(&mut sources, &["file"]),
        Ok(vec![vec!["a".to_owned()]])
    );
    assert!(sources[0].failure().is_some());
    let mut sources = [source(&["a", "file"], &["file"])];
    let conflict = resolve(&mut sources, &["file"]).expect_err("a conflict");
    assert_eq!(conflict.source, 0);
}

#[test]
fn rejects_new_rows_from_different_sources_that_define_the_same_pipeline_name() {
    let mut sources = [source(&["a", "both"], &[]), source(&["both", "b"], &["b"])];
    let used = resolve(&mut sources, &[]).expect("a result");
    assert_eq!(used, [["a"], ["b"]]);
    for source in &sources {
        let failure = source.failure().expect("a rejected row");
        assert!(
            failure.starts_with("row both: another pipeline"),
            "{failure}"
        );
    }
}

#[test]
fn a_pipeline_can_move_to_another_source() {
    let mut sources = [
        source(&["a", "moves"], &["a"]),
        source(&["b"], &["b", "moves"]),
    ];
    let used = resolve(&mut sources, &[]).expect("a result");
    assert_eq!(used, [vec!["a", "moves"], vec!["b"]]);
}

/// If only the changed row were rejected, its pipeline would be removed because of another row.
#[test]
fn keeps_the_previous_rows_of_a_source_if_a_changed_pipeline_needs_a_slot_already_in_use() {
    let mut sources = [source(&["a/b", "c"], &["a"]), source(&["b"], &["b"])];
    let used = resolve(&mut sources, &[]).expect("a result");
    assert_eq!(used, [["a"], ["b"]]);
    let mut sources = [source(&["a/b"], &["a"]), source(&["b"], &["b"])];
    sources[0].previous_failure = Some("invalid".to_owned());
    let conflict = resolve(&mut sources, &[]).expect_err("a conflict");
    assert_eq!(conflict.reason, "invalid");
}

#[test]
fn rejects_all_rows_of_a_source_that_have_the_same_name() {
    let mut rows = source(&["a", "twice", "twice/b"], &[]);
    rows.remove_duplicates();
    assert_eq!(rows.rows.len(), 1);
    let failure = rows.failure().expect("rejected rows");
    assert!(
        failure.starts_with("2 rows can't be used. row twice: "),
        "{failure}"
    );
}
