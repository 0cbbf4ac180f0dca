//! The report for the user, which lists how each property was handled.

/// The heading under which a finding is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Carried,
    Different,
    Unsupported,
    Unknown,
}

impl Group {
    /// All groups, in the order in which they are printed.
    pub(crate) const ALL: [Self; 4] = [
        Self::Carried,
        Self::Different,
        Self::Unsupported,
        Self::Unknown,
    ];

    #[must_use]
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Carried => "Carried over",
            Self::Different => "Different",
            Self::Unsupported => "Not supported",
            Self::Unknown => "Unknown",
        }
    }
}

/// A statement about how a property or a default was handled. Never contains a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) group: Group,
    /// The subject of the message: usually the name of the property, as written in the file.
    pub(crate) property: String,
    /// A sentence about `property`, such as `this value is not a port number`.
    pub(crate) message: String,
    /// Whether the user must act before using the configuration.
    pub(crate) needs_action: bool,
}

#[derive(Debug, Default)]
pub(super) struct Report {
    findings: Vec<Finding>,
    without_effect: Vec<String>,
}

impl Report {
    fn add(
        &mut self,
        group: Group,
        property: &str,
        message: impl Into<String>,
        needs_action: bool,
    ) {
        let finding = Finding {
            group,
            property: property.to_owned(),
            message: message.into(),
            needs_action,
        };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    pub(super) fn carried(&mut self, property: &str, message: impl Into<String>) {
        self.add(Group::Carried, property, message, false);
    }

    pub(super) fn different(&mut self, property: &str, message: impl Into<String>) {
        self.add(Group::Different, property, message, false);
    }

    /// Like [`different`](Self::different), but reports that the user must act.
    pub(super) fn task(&mut self, property: &str, message: impl Into<String>) {
        self.add(Group::Different, property, message, true);
    }

    pub(super) fn unsupported(&mut self, property: &str, message: impl Into<String>) {
        self.add(Group::Unsupported, property, message, true);
    }

    pub(super) fn unknown(&mut self, property: &str, message: impl Into<String>) {
        self.add(Group::Unknown, property, message, true);
    }

    /// Reports a property that walpost.toml does not need. Omitting the property makes no
    /// difference to consumers or operators.
    pub(super) fn without_effect(&mut self, property: &str) {
        self.without_effect.push(property.to_owned());
    }

    /// Returns all findings. All properties that have no effect are listed in a single finding.
    pub(super) fn finish(mut self) -> Vec<Finding> {
        if !self.without_effect.is_empty() {
            self.without_effect.sort();
            let names = self.without_effect.join(", ");
            self.add(
                Group::Carried,
                "without effect in Walpost",
                format!("walpost.toml does not need {names}"),
                false,
            );
        }
        self.findings
    }
}
