//! The report on how each property was handled, for the user who migrates.

/// The heading of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Carried,
    Different,
    Unsupported,
    Unknown,
}

impl Group {
    /// All groups, in the order of the output.
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

/// How a property or a default was handled. Never contains a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) group: Group,
    /// The name of the property as written in the file, or another subject.
    pub(crate) property: String,
    pub(crate) says: String,
    /// Whether the user has to decide or do something before using the configuration.
    pub(crate) needs_person: bool,
}

#[derive(Debug, Default)]
pub(super) struct Report {
    findings: Vec<Finding>,
    without_effect: Vec<String>,
}

impl Report {
    fn add(&mut self, group: Group, property: &str, says: impl Into<String>, needs_person: bool) {
        let finding = Finding {
            group,
            property: property.to_owned(),
            says: says.into(),
            needs_person,
        };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    pub(super) fn carried(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Carried, property, says, false);
    }

    pub(super) fn different(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Different, property, says, false);
    }

    /// Like [`different`](Self::different), but the user has to act.
    pub(super) fn task(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Different, property, says, true);
    }

    pub(super) fn unsupported(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Unsupported, property, says, true);
    }

    pub(super) fn unknown(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Unknown, property, says, true);
    }

    /// Reports a property whose absence neither a consumer nor an operator would notice.
    pub(super) fn without_effect(&mut self, property: &str) {
        self.without_effect.push(property.to_owned());
    }

    /// Returns all findings, with one for all properties without effect.
    pub(super) fn finish(mut self) -> Vec<Finding> {
        if !self.without_effect.is_empty() {
            self.without_effect.sort();
            let names = self.without_effect.join(", ");
            self.add(
                Group::Carried,
                "without effect in Walpost",
                format!("nothing has to be written for {names}"),
                false,
            );
        }
        self.findings
    }
}
