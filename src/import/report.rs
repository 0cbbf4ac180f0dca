//! What became of each property, for the person who moves over.

/// The heading that a finding stands under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Group {
    Carried,
    Different,
    Unsupported,
    Unknown,
}

impl Group {
    /// In the order in which they are shown.
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

/// What became of one property, or of one of the defaults. Never has a secret in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) group: Group,
    /// As it is written in the file, or what else this is about.
    pub(crate) property: String,
    pub(crate) says: String,
    /// Somebody has to decide or to do something before the configuration is used.
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

    /// As [`different`](Self::different), and a person has to do what is said.
    pub(super) fn task(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Different, property, says, true);
    }

    pub(super) fn unsupported(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Unsupported, property, says, true);
    }

    pub(super) fn unknown(&mut self, property: &str, says: impl Into<String>) {
        self.add(Group::Unknown, property, says, true);
    }

    /// Nothing that a consumer or an operator would miss.
    pub(super) fn without_effect(&mut self, property: &str) {
        self.without_effect.push(property.to_owned());
    }

    /// All findings, the properties without effect as one of them.
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
