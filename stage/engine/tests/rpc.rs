//! Slices offloaded to a device that is not the host: a ggml-RPC server in a process of its own. KV and weights lie there,
//! activations are captured from device memory, and the bits are those of the CPU.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Chain, Row, assert_same, config, prompt, run, whole};
use splitmodel_chain::runtime::Runtime;
use splitmodel_engine::{EngineConfig, EngineError, Slice, serve_rpc};

const ENDPOINT: &str = "SPLITMODEL_TEST_RPC_ENDPOINT";

#[test]
#[ignore = "the server process of the tests below"]
fn server() {
    let endpoint = std::env::var(ENDPOINT).unwrap();
    panic!("{}", serve_rpc(&endpoint, 1).unwrap_err());
}

struct Server {
    child: Child,
    endpoint: String,
}

impl Server {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint = format!("127.0.0.1:{port}");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "server"])
            .env(ENDPOINT, &endpoint)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(&endpoint).is_err() {
            assert!(Instant::now() < until, "the RPC server does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { child, endpoint }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn schedule(chain: &mut Chain) -> Vec<Vec<f32>> {
    let tokens = prompt();
    let n = tokens.len() as i32;
    let mut out = chain.decode(&run(0, 0, &tokens)).unwrap();
    chain.each(|s| s.seq_cp(0, 1, 0, n / 2));
    let rows: [Row; 3] = [(0, n, tokens[1], true), (1, n / 2, tokens[2], true), (2, 0, tokens[3], true)];
    out.extend(chain.decode(&rows).unwrap());
    chain.each(|s| assert!(s.seq_rm(0, n / 3, -1)));
    out.extend(chain.decode(&run(0, n / 3, &tokens[..10])).unwrap());
    out
}

#[test]
fn offloaded_slices_give_the_bits_of_the_cpu() {
    let server = Server::start();
    // The server does not repack weights.
    let cpu = EngineConfig { repack: false, ..config() };
    let reference = schedule(&mut Chain(vec![whole(&cpu)]));
    let offloaded = EngineConfig { n_gpu_layers: Some(999), rpc: vec![server.endpoint.clone()], ..cpu.clone() };
    let mut chain = Chain::load(&[0, 12, 30], &offloaded);
    for slice in &chain.0 {
        let memory = slice.memory();
        let (there, here): (Vec<_>, Vec<_>) = memory.buffers.iter().partition(|b| b.place.starts_with("RPC"));
        assert_eq!(there.iter().map(|b| b.kv).sum::<u64>(), memory.kv, "{memory:?}");
        // llama.cpp keeps a tied head's table on the host too.
        let weights = |b: &[&splitmodel_engine::BufferUse]| b.iter().map(|b| b.weights).sum::<u64>();
        assert!(weights(&there) > 2 * weights(&here), "{memory:?}");
    }
    assert_same(&schedule(&mut chain), &reference, "offloaded");
    drop(chain);

    // Some layers only; a mixed chain; the device by its name.
    let partly = EngineConfig { n_gpu_layers: Some(5), ..offloaded.clone() };
    let stages = vec![common::slice(0, 12, &partly), common::slice(12, 30, &cpu)];
    assert_same(&schedule(&mut Chain(stages)), &reference, "partly offloaded");
    let name = "RPC0".to_owned();
    let named = EngineConfig { devices: vec![name.clone()], n_gpu_layers: None, ..offloaded.clone() };
    assert!(common::slice(12, 30, &named).memory().buffers.iter().any(|b| b.place.starts_with("RPC") && b.kv > 0));

    let twice = EngineConfig { devices: vec![name.clone(), name], ..named };
    let error = Slice::load(&common::files(12, 30), &twice, &mut |_| true).err().unwrap();
    assert!(matches!(error, EngineError::Config { field: "devices", .. }), "{error}");
    let other = EngineConfig { devices: vec!["RPC9".into()], ..offloaded };
    let error = Slice::load(&common::files(12, 30), &other, &mut |_| true).err().unwrap();
    assert!(matches!(&error, EngineError::NoDevice { available, .. } if available.contains("RPC0")), "{error}");
}
