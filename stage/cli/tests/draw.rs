//! SplitModels as `kubectl splitmodel status` draws them: each `drawn/NAME.yaml` gives `drawn/NAME.txt`.
//! `SPLITMODEL_DRAW=1 cargo test -p splitmodel-cli --test draw` writes the pictures again; look at the difference.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
use std::fs;
use std::path::PathBuf;

use splitmodel_api::SplitModel;
use splitmodel_cli::cluster::{Rates, draw};

fn check(name: &str, rates: &Rates) -> String {
    let file =
        |ending: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/drawn").join(format!("{name}.{ending}"));
    let model: SplitModel = serde_saphyr::from_str(&fs::read_to_string(file("yaml")).unwrap()).unwrap();
    let drawn = draw(&model, rates);
    if std::env::var_os("SPLITMODEL_DRAW").is_some() {
        fs::write(file("txt"), &drawn).unwrap();
    }
    assert_eq!(drawn, fs::read_to_string(file("txt")).unwrap(), "{name}:\n{drawn}");
    assert!(!drawn.chars().any(|c| c.is_control() && c != '\n'), "{drawn:?}");
    assert!(drawn.lines().all(|line| line.trim_end() == line), "{drawn:?}");
    drawn
}

#[test]
fn a_chain_that_serves_shows_no_trouble() {
    let rates = Rates { chains: [(0, 21.44)].into(), note: None };
    let drawn = check("serving", &rates);
    for word in ["Serving", "21.4 tokens/s", "qwen-0-1-0", "node-b", "16-23", "137.3 MiB", "http://qwen.team.svc"] {
        assert!(drawn.contains(word), "{word}");
    }
    assert!(!drawn.contains("=") && !drawn.contains("node-c"), "nothing to say");
}

#[test]
fn a_chain_that_forms_shows_what_it_waits_for() {
    let drawn = check("forming", &Rates::default());
    assert!(drawn.contains("5.0 GiB of 19.0 GiB (26%)"), "{drawn}");
    assert!(drawn.contains("Progressing=True, Ready=False  Unschedulable: stage 1"), "one sentence once");
    assert!(drawn.contains("warning: stage 2"), "warnings of the plan");
}

#[test]
fn a_stage_that_was_given_up_shows_its_first_fatal_line() {
    let note = "chain 1: the cluster does not allow it: pods/portforward is forbidden".to_owned();
    let drawn = check("crashing", &Rates { chains: [].into(), note: Some(note) });
    assert!(drawn.contains("ended 3 times, lastly with exit code 3: error: blk.17"), "{drawn}");
    assert!(drawn.contains("splitmodel.dev/retry"), "what to do");
    assert!(drawn.contains("chain 1  Serving  still as before the last change"), "{drawn}");
    assert!(drawn.contains("tokens/s are not known: chain 1: the cluster does not allow it"), "{drawn}");
}

#[test]
fn without_chains_the_plan_or_the_reason_is_shown() {
    let drawn = check("unplanned", &Rates::default());
    assert!(drawn.contains("Planned=False, Ready=Unknown  DoesNotFit: the model does not fit"), "{drawn}");
    assert!(drawn.contains("has not looked at the last change"), "{drawn}");
    let drawn = check("asleep", &Rates::default());
    assert!(drawn.contains("it is being deleted") && drawn.contains("Ready=False  ScaledToZero"), "{drawn}");
    let drawn = check("untouched", &Rates::default());
    assert!(drawn.contains("the operator has not looked at it yet"), "{drawn}");
}
