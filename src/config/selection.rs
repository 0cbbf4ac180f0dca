//! Selects pipelines from a file by name.

use std::collections::BTreeMap;
use std::path::Path;

use super::error::ConfigError;
use super::file::{self, File, FilePipeline, Origin};

/// Returns the selected pipelines of the file. Without a file, returns pipelines with no settings
/// except their names: one for each requested name, or a single unnamed pipeline.
pub(super) fn choose(
    file: File,
    requested: &[String],
    from_file: bool,
) -> Result<Vec<FilePipeline>, ConfigError> {
    let has_sources = !file.fleet.source.is_empty();
    let pipelines = file.pipeline;
    if pipelines.is_empty() && !from_file {
        let unnamed = || vec![FilePipeline::default()];
        let named = |name: &String| FilePipeline {
            name: Some(name.clone()),
            ..FilePipeline::default()
        };
        return Ok(match requested {
            [] => unnamed(),
            names => names.iter().map(named).collect(),
        });
    }
    for name in requested {
        if !pipelines.iter().any(|pipeline| pipeline.name() == name) {
            let (name, found) = (name.clone(), names(&pipelines));
            return Err(ConfigError::NoPipeline { name, found });
        }
    }
    if requested.is_empty() {
        return Ok(if pipelines.is_empty() && !has_sources {
            vec![FilePipeline::default()]
        } else {
            pipelines
        });
    }
    Ok(pipelines
        .into_iter()
        .filter(|pipeline| requested.iter().any(|name| name == pipeline.name()))
        .collect())
}

pub(super) fn names(pipelines: &[FilePipeline]) -> String {
    let names: Vec<_> = pipelines.iter().map(FilePipeline::name).collect();
    names.join(", ")
}

/// Reads the configuration file again. Returns the Kafka properties that apply to all pipelines,
/// and the pipeline's current definition at `origin`. The definition is empty if the pipeline no
/// longer exists.
pub(super) fn read_again(
    path: &Path,
    origin: &Origin,
    pipeline: &str,
) -> Result<(BTreeMap<String, file::Scalar>, FilePipeline), ConfigError> {
    let mut file = file::read(path)?;
    let kafka = std::mem::take(&mut file.kafka);
    match origin {
        Origin::Nowhere | Origin::File(_) => {}
        Origin::Part(part) => file.pipeline = file::read_part(part)?,
        Origin::Row { row, .. } => {
            let (id, row) = row.get();
            let source = file.queries().find(|source| source.id() == id);
            let filled = source.and_then(|source| source.fill_template(&row).ok());
            let filled = filled.map(FilePipeline::from_template);
            file.pipeline = filled.into_iter().flatten().collect();
        }
    }
    let is_unnamed =
        file.pipeline.is_empty() && matches!(origin, Origin::Nowhere | Origin::File(_));
    let requested: &[String] = match is_unnamed {
        true => &[],
        false => &[pipeline.to_owned()],
    };
    let chosen = choose(file, requested, true)?;
    let found = chosen.into_iter().next();
    Ok((kafka, found.unwrap_or_default()))
}
