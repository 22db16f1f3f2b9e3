//! `splitmodel up` with stages that compute nothing. This program is the tests and, as `… serve`, the stage.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr, reason = "a test program")]
mod fake;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process};
use splitmodel_gguf::tiny::{Arch, Tiny};
use tempfile::TempDir;

/// Nothing here takes long; a machine may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("serve") => fake::serve_stage(&args[1..]),
        Some("hold") => fake::hold(&args[1]),
        _ => {
            let tests: [(&str, fn()); 15] = [
                ("serves_and_ctrl_c_leaves_nothing", serves_and_ctrl_c_leaves_nothing),
                ("serves_also_when_nobody_reads", serves_also_when_nobody_reads),
                ("a_killed_stage_is_started_again", a_killed_stage_is_started_again),
                ("a_stage_that_served_is_not_given_up", a_stage_that_served_is_not_given_up),
                ("a_hanging_stage_is_killed_and_started_again", a_hanging_stage_is_killed_and_started_again),
                ("a_hanging_stage_is_left_alone_if_so_told", a_hanging_stage_is_left_alone_if_so_told),
                ("links_are_conditioned_while_they_run", links_are_conditioned_while_they_run),
                ("a_stage_that_cannot_start_is_given_up", a_stage_that_cannot_start_is_given_up),
                ("stages_go_when_up_is_killed", stages_go_when_up_is_killed),
                ("a_stubborn_stage_is_killed_after_the_grace", a_stubborn_stage_is_killed_after_the_grace),
                ("a_second_ctrl_c_ends_at_once", a_second_ctrl_c_ends_at_once),
                ("a_port_in_use_is_named", a_port_in_use_is_named),
                ("a_stolen_port_of_a_stage_is_replaced", a_stolen_port_of_a_stage_is_replaced),
                ("a_stolen_api_port_is_named", a_stolen_api_port_is_named),
                ("bad_input_is_named", bad_input_is_named),
            ];
            let trials = tests.map(|(name, test)| {
                Trial::test(name, move || {
                    test();
                    Ok(())
                })
            });
            return libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code();
        }
    }
    ExitCode::SUCCESS
}

/// A manifest, its model, a state directory, and a free port.
struct Scene {
    dir: TempDir,
    port: u16,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Tiny::new(Arch::Llama).write(dir.path().join("tiny.gguf")).unwrap();
        let port = free_port();
        let scene = Self { dir, port };
        fs::create_dir(scene.path("fake")).unwrap();
        scene.manifest("");
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn manifest(&self, extra: &str) {
        let text = format!(
            "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata:\n  name: tiny\nspec:\n  model:\n    \
             source: file://{}\n  stages: 3\n  contextLength: 256\n{extra}",
            self.path("tiny.gguf").display()
        );
        fs::write(self.path("m.yaml"), text).unwrap();
    }

    fn tell(&self, name: &str) {
        fs::write(self.path("fake").join(name), "").unwrap();
    }

    fn told(&self, name: &str) -> bool {
        self.path("fake").join(name).exists()
    }

    /// Process ids of all runs of a stage so far.
    fn pids(&self, stage: u32) -> Vec<i32> {
        let text = fs::read_to_string(self.path("fake").join(format!("stage-{stage}.pids"))).unwrap_or_default();
        text.lines().map(|l| l.parse().unwrap()).collect()
    }

    fn all_pids(&self) -> Vec<i32> {
        (0..3).flat_map(|s| self.pids(s)).collect()
    }

    fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_splitmodel"));
        command
            .arg("up")
            .arg(self.path("m.yaml"))
            .args(["--port", &self.port.to_string()])
            .arg("--state-dir")
            .arg(self.path("state"))
            .args(flags)
            .env(fake::DIR, self.path("fake"));
        if !flags.contains(&"--stage-binary") {
            command.arg("--stage-binary").arg(std::env::current_exe().unwrap());
        }
        command
    }

    fn run(&self, flags: &[&str]) -> Output {
        self.command(flags).stdin(Stdio::null()).output().unwrap()
    }

    fn start(&self, flags: &[&str]) -> Up {
        let mut child =
            self.command(flags).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        for pipe in [
            Box::new(child.stdout.take().unwrap()) as Box<dyn std::io::Read + Send>,
            Box::new(child.stderr.take().unwrap()),
        ] {
            let said = Arc::clone(&said);
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    said.lock().unwrap().push_str(&(line + "\n"));
                }
            });
        }
        Up { child, said }
    }

    fn status(&self) -> String {
        let out = Command::new(env!("CARGO_BIN_EXE_splitmodel"))
            .args(["status", "--state-dir"])
            .arg(self.path("state"))
            .output()
            .unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    }
}

/// A port below those that the system gives out, so that stages of tests beside this one cannot be given it.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let candidates = std::iter::repeat_with(|| {
        let next = NEXT.fetch_add(1, Ordering::Relaxed) + std::process::id().wrapping_mul(64);
        10_000 + u16::try_from(next % 20_000).unwrap()
    });
    candidates.take(20_000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

/// A running `up`, and what it said on both streams.
struct Up {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Up {
    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    fn wait_for(&self, words: &str) {
        until(|| self.said().contains(words), &|| format!("`{words}` in:\n{}", self.said()));
    }

    fn signal(&self, signal: Signal) {
        kill(i32::try_from(self.child.id()).unwrap(), signal);
    }

    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        until(
            || {
                status = self.child.try_wait().unwrap();
                status.is_some()
            },
            &|| "the end of `up`".into(),
        );
        status.unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(mut done: impl FnMut() -> bool, what: &dyn Fn() -> String) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {}", what());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kill(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Gone, or a zombie that whoever inherited it has not reaped.
fn is_gone(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_or(true, |stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z')))
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            found.extend(files_below(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}

fn stderr(out: &Output) -> &str {
    std::str::from_utf8(&out.stderr).unwrap()
}

fn serves_and_ctrl_c_leaves_nothing() {
    let scene = Scene::new();
    assert!(scene.status().starts_with("no chain is running here"), "{}", scene.status());
    let mut up = scene.start(&["--schedule-log", scene.path("logs").to_str().unwrap()]);
    up.wait_for("ready: ");
    up.wait_for("curl -N ");
    let said = up.said();
    let url = format!("http://127.0.0.1:{}", scene.port);
    assert!(said.contains("STAGE  DEVICE"), "the plan: {said}");
    assert!(said.contains(&format!("ready: {url} serves tiny over 3 stages")), "{said}");
    assert!(said.contains(&format!("curl -N {url}/v1/chat/completions ")), "{said}");
    for stage in 0..3 {
        assert!(said.contains(&format!("stage {stage}: serving, layers [")), "{said}");
    }

    let status = scene.status();
    assert!(status.starts_with(&format!("tiny at {url} (process {})\n", up.child.id())), "{status}");
    assert_eq!(status.matches("serving").count(), 3, "{status}");

    up.signal(Signal::INT);
    assert!(up.end().success(), "{}", up.said());
    assert!((0..3).all(|s| scene.told(&format!("stage-{s}.drained"))), "each stage was asked first");
    assert_eq!(scene.all_pids().len(), 3);
    assert!(scene.all_pids().into_iter().all(is_gone));
    assert_eq!(files_below(&scene.path("state")), Vec::<PathBuf>::new());
    assert!(scene.status().starts_with("no chain is running here"));
}

fn serves_also_when_nobody_reads() {
    let scene = Scene::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = scene.command(&[]).stdin(Stdio::null()).stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    until(|| scene.status().matches("serving").count() == 3, &|| scene.status());
    kill(i32::try_from(child.id()).unwrap(), Signal::INT);
    assert!(child.wait().unwrap().success());
}

fn a_killed_stage_is_started_again() {
    let scene = Scene::new();
    let mut up = scene.start(&[]);
    up.wait_for("ready: ");
    kill(scene.pids(0)[0], Signal::KILL);
    up.wait_for("stage 0: ended with signal 9; starting again");
    up.wait_for("the chain is broken");
    up.wait_for("ready again");
    kill(scene.pids(1)[0], Signal::KILL);
    up.wait_for("stage 1: ended with signal 9; starting again");
    until(|| scene.pids(1).len() == 2, &|| "the second start of stage 1".into());
    assert_eq!((scene.pids(0).len(), scene.pids(2).len()), (2, 1), "the other stages run on");
    up.signal(Signal::TERM);
    assert!(up.end().success());
    assert!(scene.all_pids().into_iter().all(is_gone));
}

fn a_stage_that_served_is_not_given_up() {
    let scene = Scene::new();
    let mut up = scene.start(&["--restart-limit", "2"]);
    up.wait_for("ready: ");
    for kills in 1..=3 {
        kill(scene.pids(1)[kills - 1], Signal::KILL);
        until(|| up.said().matches("stage 1: ended with signal 9; starting again").count() == kills, &|| up.said());
        until(|| up.said().matches("stage 1: serving").count() > kills, &|| up.said());
    }
    up.signal(Signal::TERM);
    assert!(up.end().success(), "{}", up.said());
}

fn a_hanging_stage_is_killed_and_started_again() {
    let scene = Scene::new();
    let mut up = scene.start(&["--hang-deadline", "3"]);
    up.wait_for("ready: ");
    kill(scene.pids(1)[0], Signal::STOP);
    up.wait_for("stage 1: no sign of life for 3 s, so it is killed");
    up.wait_for("stage 1: ended with signal 9; starting again");
    until(|| scene.pids(1).len() == 2, &|| "the second start of stage 1".into());
    assert!(is_gone(scene.pids(1)[0]));
    assert_eq!((scene.pids(0).len(), scene.pids(2).len()), (1, 1), "the other stages run on");
    up.signal(Signal::TERM);
    assert!(up.end().success());
    assert!(scene.all_pids().into_iter().all(is_gone));
}

fn a_hanging_stage_is_left_alone_if_so_told() {
    let scene = Scene::new();
    let mut up = scene.start(&["--hang-deadline", "0", "--grace", "0"]);
    up.wait_for("ready: ");
    kill(scene.pids(1)[0], Signal::STOP);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(scene.pids(1).len(), 1);
    up.signal(Signal::TERM);
    assert!(up.end().success());
    assert!(!up.said().contains("no sign of life"), "{}", up.said());
    assert!(scene.all_pids().into_iter().all(is_gone), "also the one that stood still");
}

fn links_are_conditioned_while_they_run() {
    let scene = Scene::new();
    let link = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_splitmodel"));
        command.arg("link").args(flags).arg("--state-dir").arg(scene.path("state")).output().unwrap()
    };
    let out = link(&["--all", "--delay", "1ms"]);
    assert!(!out.status.success() && stderr(&out).contains("no chain is running here"), "{out:?}");
    let mut up = scene.start(&[]);
    up.wait_for("ready: ");
    let done = |flags: &[&str]| {
        let out = link(flags);
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    let said = done(&["--all", "--delay", "25ms", "--bandwidth", "1Gbit"]);
    assert!(said.starts_with("stage 0 to stage 1: delay 25ms, 1000000 kbit/s\n"), "{said}");
    assert!(said.ends_with("stage 2 to stage 0: delay 25ms, 1000000 kbit/s\n"), "{said}");
    assert_eq!(done(&["--stage", "1", "--delay", "500us"]), "stage 1 to stage 2: delay 500µs, no limit\n");
    assert_eq!(done(&["--clear", "--stage", "2", "--stage", "1"]).lines().count(), 2);
    let told = |stage| {
        fs::read_to_string(scene.path("fake").join(format!("stage-{stage}.conditioning"))).unwrap().replace('\n', "; ")
    };
    assert_eq!(told(0), "25ms 125000000; ");
    assert_eq!(told(1), "25ms 125000000; 500µs 0; 0ns 0; ");
    assert_eq!(told(2), "25ms 125000000; 0ns 0; ");
    for (flags, words) in [
        (&["--delay", "1ms"][..], "--stage"),
        (&["--all"], "--delay"),
        (&["--all", "--delay", "25"], "write 25ms"),
        (&["--all", "--clear", "--delay", "1ms"], "--clear"),
        (&["--stage", "3", "--clear"], "--stage: tiny has no stage 3; its stages are 0 to 2"),
        (&["--chain", "other", "--all", "--clear"], "no chain `other`"),
        (&["--control", "127.0.0.1:1", "--clear"], "127.0.0.1:1"),
    ] {
        let out = link(flags);
        assert!(!out.status.success() && stderr(&out).contains(words), "{words} in {out:?}");
    }
    up.signal(Signal::INT);
    assert!(up.end().success());
}

fn a_stage_that_cannot_start_is_given_up() {
    let scene = Scene::new();
    scene.tell("stage-1.fail");
    let out = scene.run(&["--restart-limit", "3"]);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(said.contains("error: stage 1 failed 3 times in a row, lastly with exit code 3:\n"), "{said}");
    assert!(said.contains("\n  error: tensor blk.0.attn_q.weight is damaged\n"), "{said}");
    assert_eq!(scene.pids(1).len(), 3);
    assert!(scene.all_pids().into_iter().all(is_gone));

    let log = said.lines().find_map(|l| l.strip_prefix("its whole log: ")).unwrap();
    assert!(fs::read_to_string(log).unwrap().contains("loading"), "the log is kept");
    assert!(scene.status().starts_with("no chain is running here"));
    fs::remove_file(scene.path("fake").join("stage-1.fail")).unwrap();
    let mut up = scene.start(&[]);
    up.wait_for("ready: ");
    assert!(!Path::new(log).exists(), "the next run tidies");
    up.signal(Signal::INT);
    assert!(up.end().success());
}

fn stages_go_when_up_is_killed() {
    let scene = Scene::new();
    let mut up = scene.start(&[]);
    up.wait_for("ready: ");
    up.signal(Signal::KILL);
    assert!(!up.end().success());
    until(|| scene.all_pids().into_iter().all(is_gone), &|| "the stages' end".into());
    assert!((0..3).all(|s| scene.told(&format!("stage-{s}.orphaned"))));
    assert!(scene.status().starts_with("no chain is running here"));
}

fn a_stubborn_stage_is_killed_after_the_grace() {
    let scene = Scene::new();
    scene.tell("stubborn");
    let mut up = scene.start(&["--grace", "1"]);
    up.wait_for("ready: ");
    up.signal(Signal::INT);
    assert!(up.end().success());
    assert!(scene.told("stage-2.drained"));
    assert!(scene.all_pids().into_iter().all(is_gone));
    assert_eq!(files_below(&scene.path("state")), Vec::<PathBuf>::new());
}

fn a_second_ctrl_c_ends_at_once() {
    let scene = Scene::new();
    scene.tell("stubborn");
    let mut up = scene.start(&["--grace", "3600"]);
    up.wait_for("ready: ");
    up.signal(Signal::INT);
    up.wait_for("draining; Ctrl-C again ends at once");
    until(|| scene.told("stage-2.drained"), &|| "the order to drain".into());
    up.signal(Signal::INT);
    assert!(up.end().success());
    assert!(scene.all_pids().into_iter().all(is_gone));
}

fn a_port_in_use_is_named() {
    let scene = Scene::new();
    let other = TcpListener::bind(("127.0.0.1", scene.port)).unwrap();
    let out = scene.run(&[]);
    assert_eq!(out.status.code(), Some(1));
    let words = format!(
        "error: {} is in use by another program; stop that, or choose another port with --port\n",
        other.local_addr().unwrap()
    );
    assert_eq!(stderr(&out), words);
    assert_eq!(scene.all_pids(), [0; 0]);
}

fn a_stolen_port_of_a_stage_is_replaced() {
    let scene = Scene::new();
    scene.tell("stage-1.steal");
    let mut up = scene.start(&[]);
    up.wait_for("another program took a port of a stage");
    up.wait_for("ready: ");
    up.signal(Signal::INT);
    assert!(up.end().success());
    scene.tell("release");
    assert!(scene.all_pids().into_iter().all(is_gone));
}

fn a_stolen_api_port_is_named() {
    let scene = Scene::new();
    scene.tell("stage-0.steal");
    let out = scene.run(&["--restart-limit", "1"]);
    scene.tell("release");
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("is in use by another program") && stderr(&out).contains("--port"), "{out:?}");
}

fn bad_input_is_named() {
    let scene = Scene::new();
    let fails = |flags: &[&str], words: &[&str]| {
        let out = scene.run(flags);
        assert!(!out.status.success() && words.iter().all(|w| stderr(&out).contains(w)), "{words:?} in {out:?}");
    };
    scene.manifest("  paralel: 2\n");
    fails(&[], &["m.yaml", "spec.paralel"]);
    scene.manifest("  api: { keySecret: keys }\n");
    fails(&["--host", "0.0.0.0"], &["--api-key-file", "spec.api.keySecret"]);
    fails(&["--api-key-file", "/nonexistent/keys"], &["/nonexistent/keys: cannot read"]);
    fails(&["--api-key-file", "/dev/null"], &["--api-key-file: /dev/null has no key"]);
    scene.manifest("");
    fails(&["--stages", "9"], &["9 stages"]);
    fails(&["--threads", "0"], &["--threads"]);
    fails(&["--stage-binary", "/nonexistent/stage"], &["/nonexistent/stage", "--stage-binary"]);
    fails(&["--stage-binary", scene.path("m.yaml").to_str().unwrap()], &["m.yaml: cannot be started"]);
    fs::write(scene.path("tiny.gguf"), "GGUF").unwrap();
    fails(&[], &["spec.model.source", "tiny.gguf"]);
    fs::remove_file(scene.path("tiny.gguf")).unwrap();
    fails(&[], &["spec.model.source", "tiny.gguf"]);
    fs::remove_file(scene.path("m.yaml")).unwrap();
    fails(&[], &["m.yaml: cannot read"]);
    assert_eq!(scene.all_pids(), [0; 0]);
    assert_eq!(files_below(&scene.path("state")), Vec::<PathBuf>::new());
}
