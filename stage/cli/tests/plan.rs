//! `splitmodel plan`, `slice` and the words of the command line.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory;
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};
use tempfile::TempDir;

fn scene(spec: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    Tiny::new(Arch::Llama).write(dir.path().join("t.gguf")).unwrap();
    let source = dir.path().join("t.gguf").display().to_string();
    let text = format!(
        "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata:\n  name: tiny\nspec:\n  model:\n    \
         source: file://{source}\n{spec}"
    );
    fs::write(dir.path().join("m.yaml"), text).unwrap();
    dir
}

fn splitmodel(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_splitmodel")).current_dir(dir).args(args).output().unwrap()
}

fn stdout(out: &Output) -> &str {
    assert!(out.status.success(), "{out:?}");
    std::str::from_utf8(&out.stdout).unwrap()
}

fn failure(out: &Output) -> &str {
    assert!(!out.status.success() && out.stdout.is_empty(), "{out:?}");
    std::str::from_utf8(&out.stderr).unwrap()
}

#[test]
fn a_plan_is_a_table_of_stages() {
    let dir = scene("  stages: 3\n  contextLength: 512\n  parallel: 2\n");
    let out = splitmodel(dir.path(), &["plan", "m.yaml"]);
    let lines: Vec<&str> = stdout(&out).lines().collect();
    assert_eq!(lines[0], "tiny llama 1: llama, 8 layers; 2 sessions of 512 tokens");
    assert!(lines[1].starts_with("STAGE  DEVICE        LAYERS  WEIGHTS"), "{lines:#?}");
    assert!(lines[2].starts_with("    0  this machine     0-"), "{lines:#?}");
    assert!(lines[4].starts_with("    2  this machine") && lines[4].contains("-7 "), "{lines:#?}");

    let two = splitmodel(dir.path(), &["plan", "m.yaml", "--stages", "2"]);
    assert_eq!(stdout(&two).matches("this machine").count(), 2);
}

#[test]
fn output_that_cannot_be_written_is_told() {
    let dir = scene("  stages: 2\n");
    let plan = |out: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_splitmodel"));
        command.current_dir(dir.path()).args(["plan", "m.yaml"]).stdout(out).output().unwrap()
    };
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let out = plan(full.into());
    assert_eq!(out.status.code(), Some(1));
    assert!(std::str::from_utf8(&out.stderr).unwrap().contains("cannot write the output: No space left"), "{out:?}");
    // Who stops reading wanted no more.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = plan(writer.into());
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
}

#[test]
fn a_plan_for_devices_names_them() {
    let dir = scene("  stages: 2\n");
    let out = splitmodel(dir.path(), &["plan", "m.yaml", "--device", "left=1Gi", "--device", "right=2Gi", "--json"]);
    let plan: serde_json::Value = serde_json::from_str(stdout(&out)).unwrap();
    assert_eq!(plan["name"], "tiny");
    assert_eq!(plan["model"]["n_layers"], 8);
    let stages = plan["plan"]["stages"].as_array().unwrap();
    assert_eq!((stages[0]["device_name"].as_str(), stages[1]["device_name"].as_str()), (Some("left"), Some("right")));
    assert_eq!(stages[0]["memory"], 1_u64 << 30);
    assert_eq!((&stages[0]["first"], &stages[1]["end"]), (&0.into(), &8.into()));

    let out = splitmodel(dir.path(), &["plan", "m.yaml", "--device", "a=1Mi", "--device", "b=1Mi"]);
    assert!(failure(&out).contains("does not fit") && failure(&out).contains("missing"), "{out:?}");
    let out = splitmodel(dir.path(), &["plan", "m.yaml", "--device", "a=lots"]);
    assert!(failure(&out).starts_with("error: --device: `a=lots`"), "{out:?}");
}

#[test]
fn slices_are_models_of_their_own() {
    let dir = scene("  stages: 2\n");
    let out = splitmodel(dir.path(), &["slice", "t.gguf", "--layers", "2..5", "--out", "s.gguf"]);
    assert!(stdout(&out).starts_with("s.gguf: layers [2, 5), "), "{out:?}");
    let slice = Model::open(dir.path().join("s.gguf")).unwrap();
    assert_eq!(slice.header().u32("llama.block_count").unwrap(), Some(3));
    assert!(slice.tensor("blk.2.attn_q.weight").is_some() && slice.tensor("blk.3.attn_q.weight").is_none());

    let out = splitmodel(dir.path(), &["slice", "t.gguf", "--stages", "2", "--out-dir", "slices"]);
    let lines: Vec<&str> = stdout(&out).lines().collect();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    let mut layers = 0;
    for entry in fs::read_dir(dir.path().join("slices")).unwrap() {
        layers += Model::open(entry.unwrap().path()).unwrap().header().u32("llama.block_count").unwrap().unwrap();
    }
    assert_eq!(layers, 8);
}

#[test]
fn bad_slices_are_refused_by_name() {
    let dir = scene("");
    let cases: [(&[&str], &str); 6] = [
        (&["--layers", "5..2", "--out", "s.gguf"], "--layers: `5..2`"),
        (&["--layers", "5..9", "--out", "s.gguf"], "t.gguf"),
        (&["--layers", "0..2"], "--out"),
        (&["--layers", "0..2", "--out", "./t.gguf"], "--out: ./t.gguf is the model itself"),
        (&["--stages", "9", "--out-dir", "d"], "9 stages"),
        (&[], "--layers"),
    ];
    for (flags, words) in cases {
        let out = splitmodel(dir.path(), &[&["slice", "t.gguf"], flags].concat());
        assert!(failure(&out).contains(words), "{words}: {out:?}");
        assert!(!dir.path().join("s.gguf").exists());
    }
}

#[test]
fn an_endless_manifest_is_not_read_to_its_end() {
    let dir = scene("");
    let out = splitmodel(dir.path(), &["plan", "/dev/zero"]);
    assert!(failure(&out).contains("too many for a manifest"), "{out:?}");
}

#[test]
fn status_of_a_silent_stage_is_an_error() {
    let dir = scene("");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let out = splitmodel(dir.path(), &["status", "--control", &free]);
    assert_eq!(out.status.code(), Some(1));
    assert!(std::str::from_utf8(&out.stdout).unwrap().contains("not answering"), "{out:?}");
    assert!(std::str::from_utf8(&out.stderr).unwrap().contains(&free), "{out:?}");
    let out = splitmodel(dir.path(), &["status", "--json", "--control", &free]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(json[0]["stages"][0]["unreachable"].as_str().unwrap().contains(&free), "{json}");
}

#[test]
fn every_command_and_flag_is_documented() {
    let mut cli = splitmodel_cli::args::Cli::command();
    cli.build();
    cli.clone().debug_assert();
    for command in cli.get_subcommands() {
        assert!(command.get_about().is_some(), "{}", command.get_name());
        for arg in command.get_arguments() {
            assert!(
                arg.get_help().is_some_and(|h| !h.to_string().is_empty()),
                "{} {}",
                command.get_name(),
                arg.get_id()
            );
        }
    }
}
