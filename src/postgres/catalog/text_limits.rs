//! Limits the size of text that queries return about other roles' objects. A default, a row filter
//! or a comment can be hundreds of megabytes long. One such object must not cause a query that
//! covers all of a pipeline's tables to fail.

/// Maximum size of a catalog expression that a query converts to SQL, measured in its internal text
/// form (`pg_node_tree`). For larger expressions, `pg_get_expr` is not called.
pub(super) const EXPRESSION_BYTES_MAX: usize = 64 << 10;

/// Maximum number of tables whose columns are queried at once. Even if each table has 1,600 columns
/// and expressions of the maximum size, the result does not exceed
/// [`SqlLimits::CATALOG_QUERIES`](crate::postgres::connect::dial::SqlLimits::CATALOG_QUERIES).
pub(super) const TABLES_PER_QUERY: usize = 50;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// SQL expressions that can return text of any length, each with the limited forms that are
    /// permitted. A line of code that contains one of these expressions must also contain one of
    /// its permitted forms.
    const UNBOUNDED: [(&str, &[&str]); 16] = [
        (
            "pg_get_expr(",
            &[
                "EXPRESSION_BYTES_MAX}",
                // `substring` extracts only the timestamp from a partition bound.
                "substring(pg_get_expr(k.relpartbound, 0) FROM",
                "substring(pg_get_expr(c.relpartbound, 0) FROM",
            ],
        ),
        (
            "obj_description(",
            &["right(obj_description(", "string_to_table(obj_description("],
        ),
        ("col_description(", &[]),
        (".description", &["right(d.description, length($2)) = $2"]),
        ("pg_get_viewdef(", &[]),
        ("pg_get_ruledef(", &[]),
        ("pg_get_indexdef(", &[]),
        ("pg_get_triggerdef(", &[]),
        ("pg_get_functiondef(", &[]),
        ("pg_get_function_sqlbody(", &[]),
        ("pg_get_function_arguments(", &[]),
        (
            "pg_get_constraintdef(",
            // `substring` extracts a number with at most 18 digits from the constraint.
            &["substring(pg_get_constraintdef(k.oid) FROM"],
        ),
        ("pg_get_partkeydef(", &[]),
        ("pg_get_partition_constraintdef(", &[]),
        ("prosrc", &["prosrc = $1::text"]),
        ("reloptions", &[]),
    ];

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn queries_limit_the_length_of_text_that_other_roles_control() {
        let mut files = Vec::new();
        for folder in [
            "postgres",
            "retention",
            "replay",
            "verify",
            "pipeline",
            "cli",
        ] {
            let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
            sources(&src.join(folder), &mut files);
        }
        let mut found = Vec::new();
        for file in files
            .iter()
            .filter(|file| !file.ends_with("text_limits.rs"))
        {
            let text = fs::read_to_string(file).expect("a file");
            let (code, _) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
            for line in code.lines().filter(|line| !line.trim().starts_with("//")) {
                let is_unbounded = |(word, bounds): &(&str, &[&str])| {
                    line.contains(word) && !bounds.iter().any(|bound| line.contains(bound))
                };
                if UNBOUNDED.iter().any(is_unbounded) {
                    found.push(format!("{}: {}", file.display(), line.trim()));
                }
            }
        }
        assert!(
            found.is_empty(),
            "these lines read text without limiting its length: {found:#?}"
        );
    }
}
