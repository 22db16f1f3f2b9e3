//! `splitmodel link`: delay and bandwidth injected into the links of a running chain.
use std::time::Duration;

use splitmodel_control::{Conditioning, ControlClient, StageStatus};

use crate::args::LinkArgs;
use crate::error::CliError;
use crate::rundir::{self, RunState};
use crate::ui;

/// Time a stage has to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sets what the chosen stages inject into what they send, and prints a line for each.
///
/// # Errors
/// [`CliError::Flag`] when the flags name no stage that runs; [`CliError::Control`] of a stage that does not answer, before
/// anything is changed, or of one that refuses.
pub async fn run(args: LinkArgs) -> Result<(), CliError> {
    let conditioning =
        Conditioning { delay: args.delay.unwrap_or_default(), bytes_per_second: args.bandwidth.unwrap_or_default() };
    let addresses = match args.control.is_empty() {
        true => {
            let dir = rundir::state_dir(args.state_dir.as_deref())?;
            let none = format!("no chain is running here (looked in {})", dir.display());
            let run = choose(rundir::running(&dir)?, args.chain.as_deref(), &none)?;
            chosen(&run, &args.stage)?
        }
        false => args.control,
    };
    let mut stages = Vec::with_capacity(addresses.len());
    for address in &addresses {
        let mut client = ControlClient::connect(address, TIMEOUT).await?;
        let status = client.status().await?;
        stages.push((client, status));
    }
    for (mut client, status) in stages {
        client.set_conditioning(conditioning).await?;
        ui::line(&format!("{}: {}", link_of(&status), words(&conditioning)))?;
    }
    Ok(())
}

/// The one chain that is meant.
fn choose(mut runs: Vec<RunState>, name: Option<&str>, none: &str) -> Result<RunState, CliError> {
    if let Some(name) = name {
        runs.retain(|run| run.name == name);
    }
    let wrong = |flag, message| Err(CliError::Flag { flag, message });
    let names = || runs.iter().map(|r| format!("{} at {}", r.name, r.url)).collect::<Vec<_>>().join(", ");
    match (runs.len(), name) {
        (0, Some(name)) => wrong("chain", format!("no chain `{name}` is running; see `splitmodel status`")),
        (0, None) => wrong("state-dir", format!("{none}; start one with `splitmodel up`, or name a directory")),
        (1, _) => Ok(runs.remove(0)),
        (_, None) => wrong("chain", format!("several chains are running ({}); name one of them", names())),
        (_, Some(_)) => {
            wrong("control", format!("several such chains are running ({}); name control services", names()))
        }
    }
}

/// Control services of the stages that are meant: `wanted`, or all.
fn chosen(run: &RunState, wanted: &[u32]) -> Result<Vec<String>, CliError> {
    let count = run.control.len();
    if count < 2 {
        return Err(CliError::Flag { flag: "all", message: format!("{} has one stage and so no links", run.name) });
    }
    if wanted.is_empty() {
        return Ok(run.control.clone());
    }
    let address = |stage: &u32| {
        let last = count - 1;
        let message = format!("{} has no stage {stage}; its stages are 0 to {last}", run.name);
        run.control.get(*stage as usize).cloned().ok_or(CliError::Flag { flag: "stage", message })
    };
    wanted.iter().map(address).collect()
}

fn link_of(status: &StageStatus) -> String {
    let next = if status.stage + 1 < status.stages { status.stage + 1 } else { 0 };
    format!("stage {} to stage {next}", status.stage)
}

fn words(conditioning: &Conditioning) -> String {
    if *conditioning == Conditioning::default() {
        return "nothing injected".into();
    }
    let delay = match conditioning.delay {
        Duration::ZERO => "no delay".into(),
        delay => format!("delay {delay:?}"),
    };
    let speed = match conditioning.bytes_per_second {
        0 => "no limit".into(),
        bytes => format!("{} kbit/s", u128::from(bytes) * 8 / 1000),
    };
    format!("{delay}, {speed}")
}

/// A number, then a unit out of `units`; its value in the smallest of them.
fn quantity(text: &str, units: &[(&str, f64)], example: &str) -> Result<f64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let names = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let number: f64 = number.parse().map_err(|_| format!("not a number from 0 up with a unit; write {example}"))?;
    match units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit.trim())) {
        Some((_, size)) => Ok(number * size),
        None => Err(format!("the unit must be one of {}; write {example}", names())),
    }
}

/// `25ms` and the like.
///
/// # Errors
/// What is wrong with it.
pub fn parse_delay(text: &str) -> Result<Duration, String> {
    let us = quantity(text, &[("us", 1.0), ("ms", 1e3), ("s", 1e6)], "25ms")?;
    Duration::try_from_secs_f64(us / 1e6).map_err(|_| "that is too long".to_owned())
}

/// `1Gbit` and the like, in bytes per second.
///
/// # Errors
/// What is wrong with it.
pub fn parse_bandwidth(text: &str) -> Result<u64, String> {
    let bit = 0.125;
    let units = [
        ("bit", bit),
        ("kbit", bit * 1e3),
        ("Mbit", bit * 1e6),
        ("Gbit", bit * 1e9),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
    ];
    let bytes = quantity(text, &units, "1Gbit")?.round();
    if (1.0..=1e15).contains(&bytes) {
        return Ok(bytes as u64);
    }
    Err("must be from 8bit to 1000000GB a second; leave it out for no limit".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_and_speeds_are_read_with_their_units() {
        for (text, us) in [("25ms", 25_000), ("0s", 0), ("1.5 S", 1_500_000), ("7us", 7), ("0.5ms", 500)] {
            assert_eq!(parse_delay(text), Ok(Duration::from_micros(us)), "{text}");
        }
        for text in ["25", "-1ms", "ms", "", "1e3ms", "NaNms", "25min", "1.2.3s", &format!("{}s", "9".repeat(400))] {
            assert!(parse_delay(text).is_err(), "{text}");
        }
        for (text, bytes) in [("1Gbit", 125_000_000), ("100mbit", 12_500_000), ("8bit", 1), ("10MB", 10_000_000)] {
            assert_eq!(parse_bandwidth(text), Ok(bytes), "{text}");
        }
        for text in ["0Gbit", "1", "1bit", "-1kB", "9999999GB", "1Tbit"] {
            assert!(parse_bandwidth(text).is_err(), "{text}");
        }
        assert!(parse_delay("25").unwrap_err().contains("us, ms, s; write 25ms"));
    }

    fn run(name: &str, stages: usize) -> RunState {
        let control = (0..stages).map(|s| format!("127.0.0.1:{s}")).collect();
        RunState { name: name.into(), pid: 1, url: format!("http://{name}"), control }
    }

    #[test]
    fn the_chain_and_the_stages_that_are_meant() {
        assert_eq!(choose(vec![run("a", 2)], None, "").unwrap().name, "a");
        assert_eq!(choose(vec![run("a", 2), run("b", 2)], Some("b"), "").unwrap().name, "b");
        let said = |runs, name| choose(runs, name, "no chain is running here").unwrap_err().to_string();
        assert!(said(vec![], None).contains("no chain is running here"));
        assert!(said(vec![run("a", 2)], Some("b")).starts_with("--chain: no chain `b`"));
        assert!(said(vec![run("a", 2), run("b", 2)], None).contains("a at http://a, b at http://b"));
        assert!(said(vec![run("a", 2), run("a", 2)], Some("a")).starts_with("--control:"));
        assert_eq!(chosen(&run("a", 3), &[2, 0]).unwrap(), ["127.0.0.1:2", "127.0.0.1:0"]);
        assert_eq!(chosen(&run("a", 3), &[]).unwrap().len(), 3);
        assert!(chosen(&run("a", 3), &[3]).unwrap_err().to_string().contains("0 to 2"));
        assert!(chosen(&run("a", 1), &[]).is_err());
    }

    #[test]
    fn what_is_injected_in_words() {
        let words = |ms, bytes_per_second| words(&Conditioning { delay: Duration::from_millis(ms), bytes_per_second });
        assert_eq!(words(0, 0), "nothing injected");
        assert_eq!(words(25, 0), "delay 25ms, no limit");
        assert_eq!(words(0, 125_000_000), "no delay, 1000000 kbit/s");
        let status = |stage| link_of(&StageStatus { stage, stages: 3, ..StageStatus::default() });
        assert_eq!((status(0), status(2)), ("stage 0 to stage 1".into(), "stage 2 to stage 0".into()));
    }
}
