//! Strangers at every port: nothing aborts, and the chain goes on.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::plan::Plan;

/// What strangers say.
fn speeches() -> Vec<Vec<u8>> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut noise = |n: usize| -> Vec<u8> {
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..n).map(|_| byte()).collect()
    };
    let preface = |rest: &[u8]| [b"SPLTMDL\x01".as_slice(), rest].concat();
    vec![
        Vec::new(),
        vec![0],
        vec![0xFF; 4096],
        noise(1),
        noise(7),
        noise(100),
        noise(200_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\nHost: x".to_vec(),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{".to_vec(),
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0xFF; 300]].concat(),
        // A TLS greeting of the greatest length.
        [&[0x16, 0x03, 0x01, 0x40, 0x00, 0x01][..], &[0; 64]].concat(),
        preface(&[]),
        preface(&[1, 0, 0, 0]),
        preface(&[1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]),
        preface(&[0xFF; 64]),
        preface(&[[1, 0, 0, 0, 40, 0, 0, 0].as_slice(), b"{\"role\":\"data\",\"chain\":\"e2e\"}"].concat()),
    ]
}

/// Says `speech` and waits a little for what comes. Half of them then hold the connection open.
async fn say(to: SocketAddr, speech: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(to).await.unwrap_or_else(|e| panic!("{to} does not listen: {e}"));
    let _ = stream.write_all(speech).await; // it may have hung up
    let mut answer = [0; 4096];
    let read = tokio::time::timeout(Duration::from_millis(20), stream.read(&mut answer)).await;
    read.is_err().then_some(stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_at_every_port_disturb_nothing() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 2, 5, 8])).await;
    let body = request(1, &[30, 31, 32, 33], 400);
    let want = chain.client.ask(&body).await;
    let formation = chain.status(0).await.formation;
    let mut ports = Vec::new();
    for config in &chain.configs {
        ports.extend([config.link.bind, config.control.bind, config.health.bind]);
        ports.extend(config.api.as_ref().map(|a| a.bind));
    }
    let mut held = Vec::new();
    let mut count = 0;
    for speech in speeches() {
        let asked = tokio::spawn({
            let (client, body) = (chain.client.clone(), body.clone());
            async move { client.ask(&body).await }
        });
        for port in &ports {
            count += 1;
            held.extend(say(*port, &speech).await);
        }
        assert_eq!(asked.await.unwrap().text, want.text, "after {:?}", &speech[..speech.len().min(40)]);
    }
    println!("{count} strangers, {} still on the line", held.len());
    assert!(chain.stages.iter_mut().all(|s| s.runs()));
    assert_eq!(chain.status(0).await.formation, formation, "no link was lost");
    assert_eq!(chain.client.ask(&body).await.text, want.text);
    chain.until_lanes(0).await;
    for stage in &chain.stages {
        let log = stage.log();
        assert!(!log.contains("panicked"), "{log}");
    }
    // Those on the line do not keep the chain from ending in order.
    chain.end().await;
    drop(held);
}
