//! Why a SplitModel does not serve: one word for programs, one sentence for people.

/// A reason of a condition. docs/troubleshooting.md says of each what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The spec asks for what cannot be.
    InvalidSpec,
    /// The model's header is being read.
    Inspecting,
    /// The model's header cannot be read.
    InspectFailed,
    /// No node has what a stage asks for.
    NoNode,
    /// The model does not fit the nodes.
    DoesNotFit,
    /// There is a plan.
    Planned,
    /// An object of another owner has the name of a child.
    NameTaken,
    /// Objects of a SplitModel of the same name are still being deleted.
    OldChildren,
    /// The API server refuses a child: a quota, a policy, an admission webhook.
    Refused,
    /// A pod is not made, mostly for a quota.
    PodRefused,
    /// A pod finds no node.
    Unschedulable,
    /// A container does not start: its image, a Secret, a volume.
    ContainerWaiting,
    /// Stages fetch their slices.
    Fetching,
    /// Stages load their slices.
    Loading,
    /// Stages are loaded; no token has crossed the chain.
    Linking,
    /// A stage ends again and again.
    CrashLoop,
    /// A stage was given up.
    StageFailed,
    /// A pod does not go away.
    Terminating,
    /// Chains change to a new revision, one after the other.
    RollingOut,
    /// `replicas` is 0.
    ScaledToZero,
    /// A token crosses every chain.
    Serving,
    /// Nothing is under way.
    Settled,
    /// Nothing is wrong.
    AsPlanned,
}

impl Reason {
    /// As in conditions, events and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidSpec => "InvalidSpec",
            Self::Inspecting => "Inspecting",
            Self::InspectFailed => "InspectFailed",
            Self::NoNode => "NoNode",
            Self::DoesNotFit => "DoesNotFit",
            Self::Planned => "Planned",
            Self::NameTaken => "NameTaken",
            Self::OldChildren => "OldChildren",
            Self::Refused => "Refused",
            Self::PodRefused => "PodRefused",
            Self::Unschedulable => "Unschedulable",
            Self::ContainerWaiting => "ContainerWaiting",
            Self::Fetching => "Fetching",
            Self::Loading => "Loading",
            Self::Linking => "Linking",
            Self::CrashLoop => "CrashLoop",
            Self::StageFailed => "StageFailed",
            Self::Terminating => "Terminating",
            Self::RollingOut => "RollingOut",
            Self::ScaledToZero => "ScaledToZero",
            Self::Serving => "Serving",
            Self::Settled => "Settled",
            Self::AsPlanned => "AsPlanned",
        }
    }

    /// Whether somebody has to do something.
    #[must_use]
    pub const fn is_wrong(self) -> bool {
        matches!(
            self,
            Self::InvalidSpec
                | Self::InspectFailed
                | Self::NoNode
                | Self::DoesNotFit
                | Self::NameTaken
                | Self::Refused
                | Self::PodRefused
                | Self::CrashLoop
                | Self::StageFailed
        )
    }
}

/// A reason with its sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotReady {
    /// The word.
    pub reason: Reason,
    /// The sentence: what is, and what to do.
    pub message: String,
}

impl NotReady {
    /// A reason with its sentence.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_documentation_has_every_reason() {
        let root = std::path::PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../..");
        let text = std::fs::read_to_string(root.join("docs/troubleshooting.md")).unwrap();
        let mut seen = 0;
        for line in include_str!("reason.rs").lines().filter_map(|l| l.trim().strip_prefix("Self::")) {
            let Some((_, name)) = line.split_once(" => \"") else { continue };
            let name = name.trim_end_matches("\",");
            assert!(
                text.contains(&format!("`{name}`")),
                "docs/troubleshooting.md does not say what to do about {name}"
            );
            seen += 1;
        }
        assert!(seen > 15, "{seen}");
    }
}
