//! Exit codes.

/// The outcome of the process, which determines its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command finished, or the process stopped on request: 0.
    Done,
    /// Any other failure, and discrepancies found by `verify`: 1.
    Failed,
    /// Invalid usage or configuration: 2.
    Usage,
    /// A pipeline halted and an operator has to act: 3.
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

    /// Combines the outcomes of two pipelines. A halt, which needs an operator, takes precedence over a failure such as an
    /// unreachable server.
    #[must_use]
    pub(crate) fn and(self, next: Self) -> Self {
        match (self, next) {
            (Self::Halted, _) | (_, Self::Done) => self,
            (_, next) => next,
        }
    }
}
