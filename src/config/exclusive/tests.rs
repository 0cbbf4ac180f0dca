use super::*;

/// Returns a row that defines a pipeline with this name and slot.
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

/// Builds one row for each element of `names`, which has the form `name/slot`, or `name` if the
/// pipeline and the slot have the same name.
fn rows(names: &[&str]) -> Vec<ValidRow> {
    let parts = names
        .iter()
        .map(|row| row.split_once('/').unwrap_or((row, row)));
    parts.map(|(name, slot)| row(name, slot)).collect()
}

/// Creates a source from the names of its current and previous rows.
fn source(current: &[&str], previous: Option<&[&str]>) -> SourceRows {
    SourceRows {
        rows: rows(current),
        previous: previous.map(rows),
        ..SourceRows::default()
    }
}

/// Rejects rows that conflict with the pipeline `in_file`, and returns the names of the remaining
/// pipelines.
fn resolve(
    source: &mut SourceRows,
    in_file: &str,
    running: &[&str],
) -> Result<Vec<String>, String> {
    let in_files = row(in_file, in_file).resources.into_iter().collect();
    let running = running.iter().map(|name| (*name).to_owned()).collect();
    source.reject_conflicts(&in_files, &running)?;
    let names = source.rows.iter().map(|row| row.pipeline.name().to_owned());
    Ok(names.collect())
}

#[test]
fn a_pipeline_registry_row_cannot_replace_a_pipeline_defined_in_a_file() {
    for added in ["file", "other/file"] {
        for previous in [None, Some(&["a"][..])] {
            let mut source = source(&["a", added], previous);
            let names = resolve(&mut source, "file", &["a"]);
            assert_eq!(names, Ok(vec!["a".to_owned()]));
            let failure = source.failure().expect("a rejected row");
            assert!(failure.contains("another pipeline"), "{failure}");
        }
    }
    // A pipeline in a file must not displace a running pipeline that is defined by a row.
    let mut in_use = source(&["a", "file"], Some(&["a", "file"]));
    resolve(&mut in_use, "file", &["a", "file"]).expect_err("a conflict");
    let mut changed_query = source(&["a", "file"], None);
    resolve(&mut changed_query, "file", &["a", "file"]).expect_err("a conflict");
}

/// If only the changed row were rejected, its pipeline would no longer be defined, and the running
/// pipeline would be removed.
#[test]
fn keeps_all_pipelines_of_a_registry_if_a_changed_row_uses_a_slot_already_in_use() {
    let mut rows = source(&["a/file", "c"], Some(&["a"]));
    assert_eq!(resolve(&mut rows, "file", &["a"]), Ok(vec!["a".to_owned()]));
    assert!(rows.failure().is_some());
    let mut rows = source(&["a/file"], Some(&["a"]));
    rows.previous_failure = Some("invalid".to_owned());
    assert_eq!(
        resolve(&mut rows, "file", &["a"]),
        Err("invalid".to_owned())
    );
    let mut changed_query = source(&["a/file", "c"], None);
    resolve(&mut changed_query, "file", &["a"]).expect_err("a conflict");
}

#[test]
fn rejects_every_registry_row_whose_pipeline_name_is_not_unique() {
    let mut rows = source(&["a", "duplicate", "duplicate/b"], None);
    rows.remove_duplicates();
    assert_eq!(rows.rows.len(), 1);
    let failure = rows.failure().expect("rejected rows");
    assert!(
        failure.starts_with("2 rows") && failure.contains("row duplicate: "),
        "{failure}"
    );
}
