//! Exit codes.

/// The outcome of the process, which determines its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Exit code 0: the command succeeded, or the process stopped on request.
    Done,
    /// Exit code 1: a failure that no other exit code describes, or discrepancies found by
    /// `verify`.
    Failed,
    /// Exit code 2: invalid usage or configuration.
    Usage,
    /// Exit code 3: a pipeline halted and requires operator intervention.
    Halted,
}

impl Exit {
    /// Returns the process's exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Halted => 3,
        }
    }

    /// Combines the outcomes of two pipelines. A halt, which requires operator intervention, takes
    /// precedence over a failure such as an unreachable server.
    #[must_use]
    pub(crate) fn and(self, next: Self) -> Self {
        match (self, next) {
            (Self::Halted, _) | (_, Self::Done) => self,
            (_, next) => next,
        }
    }
}
