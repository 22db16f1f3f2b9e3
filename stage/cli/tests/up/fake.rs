//! A stage that computes nothing: it speaks the control and health services, answers `/ready`, and fails when told to by files.
use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use splitmodel_control::health::{self, HealthHub};
use splitmodel_control::{
    Conditioning, ControlHandler, ControlService, HandlerError, Phase, StageConfig, StageStatus, StatusHub, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Directory of the files that steer the fake stages, and that they write.
pub const DIR: &str = "FAKE_STAGE_DIR";

/// Writes down what it is told, into this file.
struct Told(PathBuf);

impl ControlHandler for Told {
    async fn drain(&self, _: Option<Duration>) -> Result<(), HandlerError> {
        Ok(())
    }
    async fn probe(&self) -> Result<Duration, HandlerError> {
        Ok(Duration::ZERO)
    }
    async fn form_again(&self, _: u64, _: String) -> Result<bool, HandlerError> {
        Ok(false)
    }
    async fn set_conditioning(&self, told: Conditioning) -> Result<(), HandlerError> {
        append(&self.0, &format!("{:?} {}", told.delay, told.bytes_per_second));
        Ok(())
    }
}

fn append(path: &Path, line: &str) {
    writeln!(OpenOptions::new().create(true).append(true).open(path).unwrap(), "{line}").unwrap();
}

/// `serve --config FILE --exit-with-parent`.
pub fn serve_stage(args: &[String]) {
    assert!(matches!(args, [a, _, b] if a == "--config" && b == "--exit-with-parent"), "{args:?}");
    let config = StageConfig::load(Path::new(&args[1])).unwrap();
    let dir = PathBuf::from(std::env::var_os(DIR).unwrap());
    let file = |what: &str| dir.join(format!("stage-{}.{what}", config.stage));
    append(&file("pids"), &std::process::id().to_string());
    println!("loading {}", config.model.source);
    if file("fail").exists() {
        eprintln!("error: tensor blk.0.attn_q.weight is damaged");
        std::process::exit(3);
    }
    if std::fs::remove_file(file("steal")).is_ok() {
        let port = if config.stage == 0 { config.api.as_ref().unwrap().bind } else { config.control.bind };
        hold_elsewhere(port);
        eprintln!("error: address in use");
        std::process::exit(1);
    }
    tokio::runtime::Runtime::new().unwrap().block_on(run(config, dir));
}

/// Leaves a process behind that holds `port`, as any other program might.
#[allow(clippy::zombie_processes, reason = "it outlives this process on purpose")]
fn hold_elsewhere(port: SocketAddr) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["hold", &port.to_string()])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut word = [0; 1];
    std::io::Read::read_exact(&mut child.stdout.unwrap(), &mut word).unwrap();
}

/// `hold ADDRESS`: listens until the file `release` appears.
pub fn hold(address: &str) {
    let dir = PathBuf::from(std::env::var_os(DIR).unwrap());
    let _held = std::net::TcpListener::bind(address).unwrap();
    println!("!");
    for _ in 0..1200 {
        if dir.join("release").exists() || !dir.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

async fn run(config: StageConfig, dir: PathBuf) {
    let stage = config.stage;
    let file = |what: &str| dir.join(format!("stage-{stage}.{what}"));
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let hub = StatusHub::new(StageStatus {
        phase: Phase::Fetching.into(),
        chain: config.chain.clone(),
        stage,
        stages: config.stages,
        first_layer: config.layers[0],
        end_layer: config.layers[1],
        total_bytes: 1000,
        lanes: config.engine.lanes,
        ..StageStatus::default()
    });
    let listener = TcpListener::bind(config.control.bind).await.unwrap();
    let service = ControlService::new(hub.clone(), Arc::new(Told(file("conditioning"))));
    tokio::spawn(async move { serve(listener, service, None, std::future::pending()).await.unwrap() });
    let (_health, service) = HealthHub::new().await;
    let listener = TcpListener::bind(config.health.bind).await.unwrap();
    tokio::spawn(async move { health::serve(listener, service, std::future::pending()).await.unwrap() });
    for fetched in [250, 500, 1000] {
        hub.update(|s| s.fetched_bytes = fetched);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    hub.set_phase(Phase::Loaded);
    if let Some(api) = config.api {
        let listener = TcpListener::bind(api.bind).await.unwrap();
        tokio::spawn(answer_ready(listener));
    }
    hub.set_phase(Phase::Serving);
    let parent_gone = async {
        let mut input = tokio::io::stdin();
        while input.read(&mut [0; 16]).await.unwrap() > 0 {}
    };
    tokio::pin!(parent_gone);
    loop {
        tokio::select! {
            _ = terminate.recv() => {
                append(&file("drained"), "");
                if !dir.join("stubborn").exists() {
                    std::process::exit(0);
                }
            }
            () = &mut parent_gone => {
                append(&file("orphaned"), "");
                std::process::exit(0);
            }
        }
    }
}

/// 503 once, as a chain that no token has crossed yet, then 200.
async fn answer_ready(listener: TcpListener) {
    let mut answers = 0;
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 1024];
        let n = stream.read(&mut request).await.unwrap();
        assert!(request[..n].starts_with(b"GET /ready HTTP/1.1\r\n"));
        let status = if answers == 0 { "503 Service Unavailable" } else { "200 OK" };
        answers += 1;
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
}
