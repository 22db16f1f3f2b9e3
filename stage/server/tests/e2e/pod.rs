//! What a stage does in a pod: listens on every address, says why it ends, inspects models for the operator.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Output};

use splitmodel_gguf::{Model, ModelFacts};

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::files::{Served, Server};
use crate::harness::models::{cache, tiny};
use crate::harness::plan::Plan;
use crate::harness::process::last_words;

const PROMPT: [i32; 4] = [30, 31, 32, 33];

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_listens_on_every_address_of_its_pods() {
    let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let chain = Chain::spawn_with(&Plan::tiny(&[0, 4, 8]), |configs| {
        let listeners: Vec<_> = (0..10).map(|_| TcpListener::bind((everywhere, 0)).unwrap()).collect();
        let mut ports = listeners.iter().map(|l| l.local_addr().unwrap());
        for config in configs.iter_mut() {
            let mut next = || ports.next().unwrap();
            config.link.bind = next();
            config.link.insecure = true;
            (config.control.bind, config.health.bind) = (next(), next());
            config.metrics.as_mut().unwrap().bind = next();
            if let Some(api) = &mut config.api {
                api.bind = next();
            }
        }
        let here = |address: std::net::SocketAddr| format!("127.0.0.1:{}", address.port());
        configs[0].link.downstream = Some(here(configs[1].link.bind));
        configs[1].link.return_to = Some(here(configs[0].link.bind));
    });
    chain.ready().await;
    chain.client.ask(&request(1, &PROMPT, 5)).await.complete();
    chain.until_linked().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_says_whether_another_start_may_help() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut chain = Chain::spawn_with(&Plan::tiny(&[0, 2, 5, 8]), |configs| {
        configs[0].model.digest = Some("0".repeat(64));
        configs[1].control.bind = taken.local_addr().unwrap();
        configs[2].link.credits = Some(0);
    });
    for (stage, (code, words)) in
        [(3, "model.digest: the plan was made for 0000"), (1, "control.bind: "), (3, "link.credits: ")]
            .iter()
            .enumerate()
    {
        assert_eq!(chain.stages[stage].exit().await.code(), Some(*code), "stage {stage}");
        let text = std::fs::read_to_string(last_words(chain.dir(), stage as u32)).unwrap();
        assert!(text.starts_with(words), "stage {stage}: {text}");
        assert!(chain.stages[stage].log().contains(words));
    }
}

fn inspect(source: &str, output: &Path, more: &[&str], server: &Server) -> Output {
    Command::new(env!("CARGO_BIN_EXE_splitmodel-stage"))
        .args(["inspect", "--source", source, "--output"])
        .arg(output)
        .args(more)
        .env("HF_ENDPOINT", server.url(""))
        .output()
        .unwrap()
}

#[test]
fn a_model_is_inspected_whatever_its_source() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let output = dir.path().join("termination-log");
    let server = Server::start();
    server.shared.put("/o/r/resolve/v2/m.gguf", Served::new(std::fs::read(tiny(1)).unwrap()));
    let model = Model::open(tiny(1)).unwrap();
    std::fs::write(dir.path().join("token"), "hf_hidden").unwrap();
    let credentials = ["--credentials", dir.path().to_str().unwrap()];
    for source in [tiny(1).display().to_string(), format!("file://{}", tiny(1).display()), "hf://o/r@v2/m.gguf".into()]
    {
        std::fs::write(&output, "from before, and longer than what comes now".repeat(99)).unwrap();
        let done = inspect(&source, &output, &credentials, &server);
        assert!(done.status.success(), "{source}: {done:?}");
        let text = std::fs::read_to_string(&output).unwrap();
        assert!(text.len() <= 4096);
        assert_eq!(ModelFacts::from_compact(&text).unwrap(), model.facts().unwrap());
    }
    assert!(server.shared.sent() < 400_000);
    assert!(server.shared.seen().iter().all(|s| s.authorization.as_deref() == Some("Bearer hf_hidden")));

    let broken = dir.path().join("broken.gguf");
    std::fs::write(&broken, &std::fs::read(tiny(1)).unwrap()[..5000]).unwrap();
    for (source, words) in [
        (broken.to_str().unwrap(), "truncated or corrupt"),
        ("/no/such/file.gguf", "cannot open the file"),
        ("hf://o/r/m.gguf", "HTTP 404"),
        ("ftp://h/m.gguf", "ftp:// is unknown"),
    ] {
        let done = inspect(source, &output, &[], &server);
        assert_eq!(done.status.code(), Some(3), "{source}: {done:?}");
        let text = std::fs::read_to_string(&output).unwrap();
        assert!(text.contains(words), "{source}: {text}");
        assert!(String::from_utf8_lossy(&done.stderr).contains(words));
    }
    let done = inspect(tiny(1).to_str().unwrap(), Path::new("/no/such/folder/file"), &[], &server);
    assert_eq!(done.status.code(), Some(1));
}
