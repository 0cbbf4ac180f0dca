//! How the program ends.

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done, or stopped as asked: 0.
    Done,
    /// Anything that is none of the others, and findings of `verify`: 1.
    Failed,
    /// Bad usage or configuration: 2.
    Usage,
    /// Halted, and a person is needed: 3.
    Halted,
}

impl Exit {
    /// The process's exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Halted => 3,
        }
    }

    /// As one pipeline after another has ended: a person who is needed is worth more than a server that is
    /// not there now.
    #[must_use]
    pub(crate) fn and(self, next: Self) -> Self {
        match (self, next) {
            (Self::Halted, _) | (_, Self::Done) => self,
            (_, next) => next,
        }
    }
}
