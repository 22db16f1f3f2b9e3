//! Stages whose layers lie on a device. The device is a ggml-RPC server in a process of its own; the chain must say what
//! the CPU says, bit for bit. A device that was asked for and is missing ends the stage with an error.
#![cfg(test)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

const STAGE: &str = env!("CARGO_BIN_EXE_splitmodel-stage");
const CUT: u32 = 3;
/// Far beyond what anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Loopback addresses nobody listens on.
fn free<const N: usize>() -> [SocketAddr; N] {
    let listeners: [TcpListener; N] = std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|l| l.local_addr().unwrap())
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ended when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rpc_server() -> (Process, SocketAddr) {
    let [address] = free();
    let child =
        Command::new(STAGE).args(["rpc-server", "--bind", &address.to_string()]).stdout(Stdio::null()).spawn().unwrap();
    let process = Process(child);
    wait_for("the RPC server", || TcpStream::connect(address).is_ok());
    (process, address)
}

/// Status and body of one request.
fn http(to: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    Ok((status, body))
}

fn tiny(dir: &Path) -> PathBuf {
    let model = dir.join("tiny.gguf");
    // Not twice: a stage may be reading it.
    if !model.exists() {
        Tiny::new(Arch::Llama).write(&model).unwrap();
    }
    model
}

/// Configuration of one of two stages; `engine` is merged into the options all runs share.
fn configuration(dir: &Path, stage: u32, links: [SocketAddr; 2], engine: &Value) -> Value {
    let model = tiny(dir);
    let n_layers = Model::open(&model).unwrap().facts().unwrap().n_layers;
    let mut options = json!({ "context_length": 512, "lanes": 2, "n_ubatch": 64, "n_batch": 64, "threads": 1 });
    options.as_object_mut().unwrap().extend(engine.as_object().unwrap().clone());
    let [control, health, api]: [SocketAddr; 3] = free();
    let mut config = json!({
        "chain": "offload-0", "stage": stage, "stages": 2, "n_layers": n_layers,
        "layers": if stage == 0 { [0, CUT] } else { [CUT, n_layers] },
        "model": { "source": model }, "cache": { "dir": dir.join("slices") },
        "link": { "bind": links[stage as usize] },
        "control": { "bind": control }, "health": { "bind": health },
        "engine": options, "scheduling": { "prefill_chunk": 64 }, "log": { "level": "debug" },
    });
    if stage == 0 {
        config["link"]["downstream"] = json!(links[1]);
        config["api"] = json!({ "bind": api, "model": "tiny" });
    } else {
        config["link"]["return"] = json!(links[0]);
        config["schedule_log"] = json!(dir.join("last.schedule"));
    }
    config
}

fn write(dir: &Path, name: &str, config: &Value) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

/// What a run of the chain said and left.
struct Ran {
    texts: Vec<String>,
    log: PathBuf,
    /// Standard error of the last stage.
    said: String,
}

/// Two stages, the last one with `engine`; three greedy answers, one after the other.
fn ran(dir: &Path, engine: &Value) -> Ran {
    std::fs::create_dir(dir).unwrap();
    let links = free();
    let stderr = dir.join("stage-1.log");
    let mut api = None;
    let mut stages: Vec<Process> = Vec::new();
    let cpu = json!({ "n_gpu_layers": 0 });
    for stage in [1, 0] {
        let config = configuration(dir, stage, links, if stage == 1 { engine } else { &cpu });
        api = config["api"]["bind"].as_str().map(|a| a.parse::<SocketAddr>().unwrap());
        let file = write(dir, &format!("stage-{stage}.json"), &config);
        let log = if stage == 1 { std::fs::File::create(&stderr).unwrap().into() } else { Stdio::null() };
        stages.push(Process(Command::new(STAGE).args(["serve", "--config"]).arg(file).stderr(log).spawn().unwrap()));
    }
    let api = api.unwrap();
    wait_for("a token to cross the chain", || {
        for stage in &mut stages {
            assert_eq!(stage.0.try_wait().unwrap(), None, "{}", std::fs::read_to_string(&stderr).unwrap());
        }
        http(api, "GET", "/ready", "").is_ok_and(|(status, _)| status == 200)
    });
    let long = "the river and the mill ".repeat(12);
    let texts = ["once upon a time", long.as_str(), "in the morning"].map(|prompt| {
        let body = json!({ "model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0 });
        let (status, answer) = http(api, "POST", "/v1/completions", &body.to_string()).unwrap();
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 24, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    });
    drop(stages);
    Ran { texts: texts.into(), log: dir.join("last.schedule"), said: std::fs::read_to_string(stderr).unwrap() }
}

fn replay(log: &Path, model: &Path) -> Output {
    Command::new(STAGE).arg("replay").arg(log).arg("--model").arg(model).output().unwrap()
}

fn assert_identical(log: &Path, model: &Path, what: &str) {
    let output = replay(log, model);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("bit-identical"), "{what}: {output:?}");
    // Every generated token's logits, and every token sampled again.
    assert!(text.contains("72 tokens sampled again") || text.contains("73 tokens sampled again"), "{what}: {text}");
}

#[test]
fn an_offloaded_stage_says_what_the_cpu_says() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny(dir.path());
    let cpu = ran(&dir.path().join("cpu"), &json!({ "n_gpu_layers": 0 }));
    assert!(!cpu.said.contains("RPC0"), "{}", cpu.said);
    assert_identical(&cpu.log, &model, "CPU");
    let (_server, address) = rpc_server();
    for (name, engine) in [
        ("all", json!({ "rpc": [address] })),
        ("some", json!({ "rpc": [address], "n_gpu_layers": 2, "devices": ["RPC0"] })),
    ] {
        let offloaded = ran(&dir.path().join(name), &engine);
        assert!(
            offloaded.said.lines().any(|l| l.contains("RPC0") && l.contains("KV buffer size")),
            "no KV cache lies on the device: {}",
            offloaded.said
        );
        assert_eq!(offloaded.texts, cpu.texts, "{name}");
        // The unsplit model on the same device, then the unsplit model on the CPU.
        assert_identical(&offloaded.log, &model, name);
        let log = std::fs::read_to_string(&offloaded.log).unwrap();
        let (head, ops) = log.split_once('\n').unwrap();
        let mut head: Value = serde_json::from_str(head).unwrap();
        assert_eq!(head["engine"]["rpc"], json!([address]));
        for (option, value) in [("rpc", json!([])), ("devices", json!([])), ("n_gpu_layers", json!(0))] {
            head["engine"][option] = value;
        }
        std::fs::write(&offloaded.log, format!("{head}\n{ops}")).unwrap();
        assert_identical(&offloaded.log, &model, &format!("{name}, against the CPU"));
    }
}

/// What a stage says that cannot start.
fn refused(engine: &Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path(), 1, free(), engine);
    let file = write(dir.path(), "stage.json", &config);
    let output = Command::new(STAGE).args(["serve", "--config"]).arg(file).output().unwrap();
    assert!(!output.status.success() && output.status.code().is_some(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    said.lines().find(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("no error in {said}")).to_owned()
}

fn devices() -> String {
    let output = Command::new(STAGE).arg("devices").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn missing_devices_end_the_stage() {
    let error = refused(&json!({ "devices": ["CUDA7"] }));
    assert!(error.contains("`devices`") && error.contains("`CUDA7`") && error.contains("can be put on"), "{error}");
    let (_server, address) = rpc_server();
    let error = refused(&json!({ "devices": ["CUDA7"], "rpc": [address] }));
    assert!(error.contains("`devices`") && error.contains("`CUDA7`") && error.contains("RPC0"), "{error}");
    let [nobody] = free();
    let error = refused(&json!({ "rpc": [nobody] }));
    assert!(error.contains("`rpc`") && error.contains(&nobody.to_string()), "{error}");
    let none = devices().contains("None of these takes layers");
    if none {
        let error = refused(&json!({ "n_gpu_layers": 99 }));
        assert!(error.contains("`n_gpu_layers` is 99") && error.contains("CPU ("), "{error}");
    }
    let error = refused(&json!({ "rpc": [address], "n_gpu_layers": 0 }));
    assert!(error.contains("`n_gpu_layers`"), "{error}");
}

#[test]
fn devices_are_listed_as_a_table() {
    let text = devices();
    let head: Vec<_> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["NAME", "KIND", "MEMORY", "FREE", "DESCRIPTION"]);
    let cpu = text.lines().find(|l| l.starts_with("CPU ")).unwrap();
    assert!(cpu.contains(" GiB"), "{cpu}");
}
