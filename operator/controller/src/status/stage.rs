//! One stage: how far it is, and how it failed.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use kube::ResourceExt as _;
use splitmodel_api::{Failure, Phase, StageStatus};
use splitmodel_control::{Phase as At, StageStatus as Reported};

use crate::names;
use crate::observed::is_ready;
use crate::reason::{NotReady, Reason};

/// Exit code of a stage that a restart does not help.
const INCURABLE: i32 = 3;
/// Tries of a stage that says so.
const INCURABLE_TRIES: i32 = 3;
/// Tries of others; the kubelet's pauses before them add up to more than five minutes.
const TRIES: i32 = 6;
/// Lines of a failure that are kept.
const LINES: usize = 12;
/// Longest line.
const LINE: usize = 300;

/// What is known of a stage.
pub(super) struct Known<'a> {
    /// `stage 1 of chain 0`.
    pub(super) name: String,
    /// First and last layer.
    pub(super) layers: String,
    /// As its status was.
    pub(super) before: Option<&'a StageStatus>,
    /// Its pod; the one that stays if there are two.
    pub(super) pod: Option<&'a Pod>,
    /// Whether that pod follows another revision than the chain.
    pub(super) former_revision: bool,
    /// What it says of itself.
    pub(super) reported: Option<&'a Reported>,
    /// What `splitmodel.dev/retry` says.
    pub(super) retry: &'a str,
    /// A warning about its pod or its StatefulSet.
    pub(super) warning: Option<&'a str>,
}

/// The stage's status, and what keeps it from serving.
pub(super) fn stage(known: &Known<'_>) -> (StageStatus, Option<NotReady>) {
    let mut status = StageStatus {
        layers: known.layers.clone(),
        pod: known.pod.map(|p| p.name_any()),
        node: known.pod.and_then(|p| p.spec.as_ref()?.node_name.clone()),
        ..StageStatus::default()
    };
    if let Some(reported) = known.reported {
        let bytes = |b: u64| i64::try_from(b).unwrap_or(i64::MAX);
        (status.fetched_bytes, status.total_bytes) =
            (Some(bytes(reported.fetched_bytes)), Some(bytes(reported.total_bytes)));
        status.activations = Some(reported.activations.clone()).filter(|a| !a.is_empty());
    } else if let Some(before) = known.before.filter(|b| b.pod.is_some() && b.pod == status.pod) {
        (status.fetched_bytes, status.total_bytes) = (before.fetched_bytes, before.total_bytes);
        status.activations.clone_from(&before.activations);
    }
    let container = known.pod.and_then(container);
    status.restarts = container.map_or(0, |c| c.restart_count);
    status.failure = failure(known, container);
    let why = phase(&mut status, known, container);
    status.message = why.as_ref().filter(|w| waits(w.reason)).map(|w| w.message.clone());
    (status, why)
}

/// Whether a reason is not about the stages themselves.
const fn waits(reason: Reason) -> bool {
    matches!(reason, Reason::Unschedulable | Reason::ContainerWaiting | Reason::Terminating | Reason::PodRefused)
}

fn container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

/// Sets the phase; says why it is not [`Phase::Serving`].
fn phase(status: &mut StageStatus, known: &Known<'_>, container: Option<&ContainerStatus>) -> Option<NotReady> {
    let name = &known.name;
    let say = |reason, message: String| Some(NotReady::new(reason, message));
    if let Some(failure) = &status.failure {
        let first = failure.lines.first().map_or("it said nothing", String::as_str);
        let how =
            format!("{name} failed {} times, lastly with exit code {}: {first}", failure.count, failure.exit_code);
        if failure.given_up.is_some() {
            status.phase = Phase::Failed;
            let message = format!(
                "{how}; it was given up: mend the cause, then change the spec, or set the annotation {} to a new value",
                names::RETRY
            );
            return say(Reason::StageFailed, message);
        }
        status.phase = Phase::Degraded;
        return say(Reason::CrashLoop, how);
    }
    let Some(pod) = known.pod else {
        status.phase = Phase::Planned;
        return match known.warning {
            Some(warning) => say(Reason::PodRefused, format!("{name} gets no pod: {warning}")),
            None => say(Reason::Linking, format!("{name} has no pod yet")),
        };
    };
    if pod.metadata.deletion_timestamp.is_some() {
        status.phase = Phase::Degraded;
        let node = status.node.as_deref().unwrap_or("no node");
        return say(Reason::Terminating, format!("{name}: pod {} on {node} is ending", pod.name_any()));
    }
    if known.former_revision {
        status.phase = Phase::Degraded;
        return say(Reason::RollingOut, format!("{name}: pod {} follows the former revision", pod.name_any()));
    }
    if is_ready(pod) {
        status.phase = Phase::Serving;
        return None;
    }
    let scheduled = pod.status.as_ref().and_then(|s| s.conditions.as_ref()).into_iter().flatten();
    if let Some(not) = scheduled.clone().find(|c| c.type_ == "PodScheduled" && c.status == "False") {
        status.phase = Phase::Planned;
        let mut message = not.message.clone().unwrap_or_else(|| "no node takes it".to_owned());
        if let Some(warning) = known.warning {
            message = format!("{message}; {warning}");
        }
        return say(Reason::Unschedulable, format!("{name} waits for a node: {message}"));
    }
    status.phase = Phase::Scheduled;
    let state = container.and_then(|c| c.state.as_ref());
    if let Some(waiting) = state.and_then(|s| s.waiting.as_ref()) {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        if !matches!(reason, "" | "ContainerCreating" | "PodInitializing" | "CrashLoopBackOff") {
            let message = waiting.message.as_deref().unwrap_or_default();
            return say(Reason::ContainerWaiting, format!("{name} does not start: {reason}: {message}"));
        }
        if let Some(warning) = known.warning {
            return say(Reason::ContainerWaiting, format!("{name} does not start: {warning}"));
        }
        return say(Reason::Loading, format!("{name} is starting"));
    }
    let Some(reported) = known.reported else { return say(Reason::Loading, format!("{name} is starting")) };
    let (phase, reason, word) = match reported.phase() {
        At::Unspecified | At::Planned => (Phase::Scheduled, Reason::Loading, "is starting"),
        At::Fetching => (Phase::Fetching, Reason::Fetching, "fetches its slice"),
        At::Loading => (Phase::Loading, Reason::Loading, "loads its slice"),
        At::Loaded => (Phase::Loading, Reason::Linking, "is loaded and waits for its neighbours"),
        At::Linked | At::Serving => {
            (Phase::Linked, Reason::Linking, "is linked, and no token has crossed the chain yet")
        }
        At::Draining => (Phase::Degraded, Reason::Terminating, "is ending"),
        At::Failed => (Phase::Degraded, Reason::CrashLoop, "failed"),
    };
    status.phase = phase;
    say(reason, format!("{name} {word}"))
}

/// How the stage failed since it last was ready.
fn failure(known: &Known<'_>, container: Option<&ContainerStatus>) -> Option<Failure> {
    let before = known.before.and_then(|b| b.failure.as_ref());
    if let Some(given_up) = before.filter(|f| f.given_up.as_deref() == Some(known.retry)) {
        return Some(given_up.clone());
    }
    // A new try after it was given up begins to count anew.
    let before = before.filter(|f| f.given_up.is_none());
    if known.pod.is_some_and(is_ready) {
        return None;
    }
    let Some(container) = container else { return before.cloned() };
    let ended = |state: Option<&k8s_openapi::api::core::v1::ContainerState>| state.and_then(|s| s.terminated.clone());
    let now = ended(container.state.as_ref());
    let running = container.state.as_ref().is_some_and(|s| s.running.is_some());
    let last = now.or_else(|| ended(container.last_state.as_ref()));
    let Some(last) = last.filter(|t| t.exit_code != 0) else { return before.cloned() };
    let restarts_before = known.before.map_or(0, |b| b.restarts);
    let replaced = container.restart_count < restarts_before;
    let base = match (before, replaced) {
        (Some(before), true) => -before.count,
        (Some(before), false) => before.base,
        (None, true) => 0,
        (None, false) => restarts_before,
    };
    let count = container.restart_count + i32::from(!running) - base;
    if count <= 0 {
        return before.cloned();
    }
    let limit = if last.exit_code == INCURABLE { INCURABLE_TRIES } else { TRIES };
    let mut lines = before.map(|b| b.lines.clone()).unwrap_or_default();
    if lines.is_empty() {
        lines = fatal_lines(&last);
    }
    let given_up = (count >= limit && !running).then(|| known.retry.to_owned());
    Some(Failure { exit_code: last.exit_code, count, base, given_up, lines })
}

/// The first lines that say why.
fn fatal_lines(ended: &ContainerStateTerminated) -> Vec<String> {
    let message = ended.message.as_deref().unwrap_or_default();
    let mut lines: Vec<String> = message
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .take(LINES)
        .map(|line| line.chars().take(LINE).collect())
        .collect();
    // What ends a process from outside leaves no line of its own; the kubelet then gives the last ones of the log.
    if ended.reason.as_deref() == Some("OOMKilled") {
        lines.insert(
            0,
            "OOMKilled: it used more memory than its limit; raise memory, or lower contextLength or parallel".into(),
        );
    } else if let Some(signal) = ended.signal.or_else(|| Some(ended.exit_code - 128).filter(|s| (1..=64).contains(s))) {
        let name = match signal {
            4 => " (SIGILL: the processor lacks an instruction that the program uses)",
            6 => " (SIGABRT)",
            7 => " (SIGBUS: a file it reads became shorter, or shared memory is full)",
            9 => " (SIGKILL: from the node or from somebody on it)",
            11 => " (SIGSEGV)",
            15 => " (SIGTERM)",
            _ => "",
        };
        let more = if lines.is_empty() { "" } else { "; its last lines follow" };
        lines.insert(0, format!("it was ended by signal {signal}{name}{more}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_a_process_from_outside_comes_first() {
        let ended = |exit_code, reason: &str, message: &str| {
            let (reason, message) = (Some(reason.to_owned()), Some(message.to_owned()));
            fatal_lines(&ContainerStateTerminated { exit_code, reason, message, ..ContainerStateTerminated::default() })
        };
        assert_eq!(ended(1, "Error", "no model\n\nat all\n"), ["no model", "at all"]);
        let killed = ended(137, "Error", "INFO the links are up");
        assert!(killed[0].contains("signal 9 (SIGKILL") && killed[0].ends_with("its last lines follow"), "{killed:?}");
        assert_eq!(killed[1..], ["INFO the links are up"]);
        assert_eq!(ended(139, "Error", ""), ["it was ended by signal 11 (SIGSEGV)"]);
        let out_of_memory = ended(137, "OOMKilled", "");
        assert!(out_of_memory[0].contains("raise memory") && out_of_memory.len() == 1, "{out_of_memory:?}");
        assert_eq!(ended(255, "Error", ""), Vec::<String>::new());
    }
}
