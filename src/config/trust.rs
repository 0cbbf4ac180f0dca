//! Checks the programs that walpost.toml names, so that a command fails early, before it has any
//! effect, if another user could have modified one of them. [`crate::program`] checks each program
//! again before executing it.

use std::path::Path;

use super::error::ConfigError;
use super::file::File;
use super::values::{PASSWORD_COMMAND, TOKEN_COMMAND};
use crate::trusted_path;

/// Checks every program that the configuration file names.
///
/// # Errors
/// Returns an error if a program does not exist, or if other users can write to it.
pub(super) fn check(file: &File) -> Result<(), ConfigError> {
    for pipeline in &file.pipeline {
        let owner = format!("pipeline {:?}", pipeline.name());
        let commands = [
            (PASSWORD_COMMAND, &pipeline.password_command),
            (TOKEN_COMMAND, &pipeline.kafka_token_command),
        ];
        for (key, argv) in commands {
            check_program(&owner, key, argv.iter().flatten().next())?;
        }
    }
    for source in file.queries() {
        let own = source.password_command.iter().flatten().next();
        check_program("fleet.source", PASSWORD_COMMAND, own)?;
        for key in [PASSWORD_COMMAND, TOKEN_COMMAND] {
            let program = source.template_program(key);
            check_program("template of a fleet.source", key, program.as_ref())?;
        }
    }
    Ok(())
}

fn check_program(
    owner: &str,
    key: &'static str,
    program: Option<&String>,
) -> Result<(), ConfigError> {
    // Ignore relative paths here; `Program::new` rejects them.
    let Some(program) = program
        .map(Path::new)
        .filter(|program| program.is_absolute())
    else {
        return Ok(());
    };
    trusted_path::check_program(program).map_err(|error| ConfigError::Program {
        owner: owner.to_owned(),
        key,
        program: program.to_owned(),
        error: error.into(),
    })
}
