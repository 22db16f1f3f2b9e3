//! One stage process.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use splitmodel_control::StageConfig;

use super::until;

/// Where a stage in `dir` writes what ended it.
pub fn last_words(dir: &Path, stage: u32) -> PathBuf {
    dir.join(format!("stage-{stage}.end"))
}

/// A running stage. It ends with this value, or with the test process (it reads the end of its standard input).
pub struct Stage {
    child: Child,
    log: PathBuf,
}

impl Stage {
    /// Starts the stage of `config`; its configuration, its log, which restarts append to, and its last words are in `dir`.
    pub fn start(config: &StageConfig, dir: &Path, env: &[(&'static str, String)]) -> Self {
        let file = dir.join(format!("stage-{}.yaml", config.stage));
        std::fs::write(&file, config.to_yaml().unwrap()).unwrap();
        let log = dir.join(format!("stage-{}.log", config.stage));
        let err = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_splitmodel-stage"))
            .args(["serve", "--exit-with-parent", "--config"])
            .arg(&file)
            .arg("--termination-log")
            .arg(last_words(dir, config.stage))
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(err)
            .spawn()
            .unwrap();
        Self { child, log }
    }

    /// Kills it on the spot, as a crash or the kernel would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Any signal by its name.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let done = Command::new("sh").args(["-c", "kill -\"$0\" \"$1\"", name, &pid]).status().unwrap();
        assert!(done.success(), "no {name} to {pid}");
    }

    /// What the death of its parent looks like to it.
    pub fn close_stdin(&mut self) {
        self.child.stdin.take();
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end.
    pub async fn exit(&mut self) -> ExitStatus {
        // Not `wait`, which closes the standard input and so ends the process itself.
        until("the end of a stage", async || self.child.try_wait().unwrap()).await
    }

    /// CPU time since its start, in clock ticks (1/100 s).
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name in parentheses may hold anything; utime and stime are fields 14 and 15.
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// What it has written to its log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            println!("--- {} (end)\n{}", self.log.display(), lines[lines.len().saturating_sub(25)..].join("\n"));
        }
    }
}
