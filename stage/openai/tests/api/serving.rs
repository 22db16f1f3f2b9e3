//! Connections, from before the model is loaded to the end of the process.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use serde_json::json;
use splitmodel_openai::{ApiConfig, Door, ServeLimits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::support::{Act, Answer, Fetching, Server, Setup, bytes, content, listen, word};

const JSON: (&str, &str) = ("content-type", "application/json");

fn ask(stream: bool) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    json!({"model": "fake-model", "messages": messages, "stream": stream}).to_string().into_bytes()
}

/// Reads until `part` is there; what came.
async fn until(client: &mut TcpStream, part: &str) -> String {
    let mut seen = String::new();
    while !seen.contains(part) {
        let mut bytes = [0; 1024];
        let n = client.read(&mut bytes).await.unwrap();
        assert!(n > 0, "the connection ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..n]));
    }
    seen
}

/// Whether the server ended the connection, with whatever it sent before.
async fn ended(client: &mut TcpStream) {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = client.read_to_end(&mut bytes).await;
}

#[tokio::test]
async fn before_the_model_is_loaded_every_path_answers() {
    let door = Door::new(Arc::new(Fetching), &["*".to_owned()]).unwrap();
    let (addr, _stop, _task) = listen(door.clone(), ServeLimits::default()).await;
    let get = async |path: &str| {
        let mut client = TcpStream::connect(addr).await.unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: x\r\norigin: http://app.test\r\nx-request-id: mine\r\nconnection: close\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).await.unwrap();
        Answer::parse(&bytes)
    };
    assert_eq!(get("/health").await.ok(), json!({"status": "ok"}));
    let ready = get("/ready").await;
    assert_eq!((ready.status, ready.header("retry-after")), (503, Some("1")));
    let reason = "the model is being fetched, 1.5 of 3 GB";
    assert_eq!(ready.json(), json!({"status": "not ready", "reason": reason, "phase": "fetching", "progress": 0.5}));
    let models = get("/v1/models").await;
    let error = models.error(503);
    assert_eq!(
        (error["type"].as_str(), error["code"].as_str()),
        (Some("service_unavailable_error"), Some("model_loading"))
    );
    assert!(error["message"].as_str().unwrap().contains(reason));
    assert_eq!((models.header("retry-after"), models.header("x-request-id")), (Some("5"), Some("mine")));
    assert_eq!(models.header("access-control-allow-origin"), Some("*"));
    let metrics = String::from_utf8(get("/metrics").await.body).unwrap();
    assert!(metrics.contains("fake_bytes_total 5\n") && metrics.ends_with("# EOF\n"));
}

#[tokio::test]
async fn a_connection_from_before_the_load_lives_on() {
    let loaded = Server::start(|_| bytes("ok")).await;
    let door = Door::new(Arc::new(Fetching), &["*".to_owned()]).unwrap();
    let (addr, _stop, _task) = listen(door.clone(), ServeLimits::default()).await;
    let mut client = TcpStream::connect(addr).await.unwrap();
    let head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n";
    client.write_all(head).await.unwrap();
    assert!(until(&mut client, "model_loading").await.starts_with("HTTP/1.1 503 "));
    door.open(splitmodel_openai::router(loaded.fake.clone(), ApiConfig::default()).unwrap());
    client.write_all(head).await.unwrap();
    assert!(until(&mut client, "fake-model").await.contains("HTTP/1.1 200 "));
}

#[tokio::test]
async fn who_sends_no_head_loses_its_connection_and_a_stream_does_not() {
    let limits = ServeLimits { header_timeout: Duration::from_millis(100), ..ServeLimits::default() };
    let config = ApiConfig { keep_alive: Duration::from_millis(20), ..ApiConfig::default() };
    let server = Server::with(Setup { limits, config, ..Setup::default() }, |_| vec![Act::Hang]).await;
    let mut stream = server.open("POST", "/v1/chat/completions", &[JSON], &ask(true)).await;
    // Nothing; a part of a head; a part of the preface of HTTP/2; an idle connection after its answer.
    for start in
        ["", "GET / HTTP/1.1\r\nhost: x\r\nx-slow: ", "PRI * HTTP/2.0\r\n", "GET / HTTP/1.1\r\nhost: x\r\n\r\n"]
    {
        let mut client = TcpStream::connect(server.addr).await.unwrap();
        client.write_all(start.as_bytes()).await.unwrap();
        ended(&mut client).await;
    }
    // More than the timeout's worth of comments.
    for _ in 0..10 {
        until(&mut stream, ": keep-alive\n\n").await;
    }
}

#[tokio::test]
async fn a_head_that_drips_in_is_late_all_the_same() {
    let limits = ServeLimits { header_timeout: Duration::from_millis(200), ..ServeLimits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() }, |_| bytes("ok")).await;
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    // Ends when the server resets the connection.
    while client.write_all(b"x-a: b\r\n").await.is_ok() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_their_turn() {
    let limits = ServeLimits { max_connections: 2, ..ServeLimits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() }, |_| bytes("ok")).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = TcpStream::connect(server.addr).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        until(&mut client, "ok").await;
        held.push(client);
    }
    let mut third = server.open("POST", "/v1/chat/completions", &[JSON], &ask(false)).await;
    let mut byte = [0; 1];
    timeout(Duration::from_millis(200), third.read(&mut byte)).await.unwrap_err();
    assert!(server.seen().is_empty());
    held.pop();
    until(&mut third, "chat.completion").await;
    assert_eq!(server.seen().len(), 1);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_client_that_only_sends_no_more_gets_its_answer() {
    for stream in [false, true] {
        let told = Arc::new(Notify::new());
        let waits = told.clone();
        let server = Server::start(move |_| vec![word("Hello"), Act::Wait(waits.clone()), word(" world")]).await;
        let mut client = server.open("POST", "/v1/chat/completions", &[JSON], &ask(stream)).await;
        if stream {
            until(&mut client, "Hello").await;
        }
        client.shutdown().await.unwrap();
        // It is asked whether it is there, and is.
        until(&mut client, if stream { ": keep-alive\n\n" } else { "100 Continue\r\n\r\n" }).await;
        told.notify_one();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        if stream {
            let rest = String::from_utf8(rest).unwrap();
            assert!(rest.contains(" world") && rest.contains("[DONE]"), "{rest}");
        } else {
            assert_eq!(Answer::parse(&rest).ok()["choices"][0]["message"]["content"], "Hello world");
        }
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_request_and_its_end_in_one_packet_are_answered() {
    let server = Server::start(|_| bytes("ok")).await;
    let mut client = server.open("GET", "/v1/models", &[], b"").await;
    client.shutdown().await.unwrap();
    assert!(until(&mut client, "fake-model").await.contains("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_client_that_has_gone_is_seen_whatever_it_sent() {
    let pipelined = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    for (more, reset) in [(&b""[..], false), (&b""[..], true), (&pipelined[..], false), (&pipelined[..], true)] {
        let mut server = Server::start(|_| vec![Act::Hang]).await;
        let mut client = server.open("POST", "/v1/chat/completions", &[JSON], &ask(false)).await;
        client.write_all(more).await.unwrap();
        while server.seen().is_empty() {
            tokio::task::yield_now().await;
        }
        if reset {
            client.set_zero_linger().unwrap();
        }
        drop(client);
        assert_eq!(server.dropped.recv().await, Some(0));
    }
}

#[tokio::test]
async fn a_client_of_an_early_version_that_sends_no_more_has_gone() {
    let mut server = Server::start(|_| vec![Act::Hang]).await;
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    let body = ask(false);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
    while server.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    client.shutdown().await.unwrap();
    assert_eq!(server.dropped.recv().await, Some(0));
}

#[tokio::test]
async fn http_2_is_spoken_on_the_same_port() {
    let mut server = Server::start(|r| if r.index == 0 { vec![word("Hello"), Act::Hang] } else { bytes("x") }).await;
    let stream = TcpStream::connect(server.addr).await.unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(hyper_util::rt::TokioExecutor::new(), io).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = |method: &str, path: &str, body: Vec<u8>| {
        let uri = format!("http://{}{path}", server.addr);
        let body = axum::body::Body::from(body);
        hyper::Request::builder().method(method).uri(uri).header(JSON.0, JSON.1).body(body).unwrap()
    };
    let models = client.send_request(request("GET", "/v1/models", Vec::new())).await.unwrap();
    assert_eq!((models.status().as_u16(), models.version()), (200, hyper::Version::HTTP_2));
    let chat = client.send_request(request("POST", "/v1/chat/completions", ask(true))).await.unwrap();
    assert_eq!(chat.status(), 200);
    assert!(server.dropped.try_recv().is_err());
    // Its stream is reset; the connection stays.
    drop(chat);
    assert_eq!(server.dropped.recv().await, Some(0));
    let models = client.send_request(request("GET", "/v1/models", Vec::new())).await.unwrap();
    assert_eq!(models.status(), 200);
    assert!(!connection.is_finished());
}

#[tokio::test]
async fn the_end_waits_for_what_was_asked_before() {
    let told = Arc::new(Notify::new());
    let waits = told.clone();
    let mut server = Server::start(move |_| vec![word("Hello"), Act::Wait(waits.clone()), word(" world")]).await;
    let mut client = server.open("POST", "/v1/chat/completions", &[JSON], &ask(true)).await;
    let mut text = until(&mut client, "Hello").await;
    let mut idle = TcpStream::connect(server.addr).await.unwrap();
    idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    until(&mut idle, "ok").await;
    server.stop.take().unwrap().send(()).unwrap();
    // Idle connections end at once, and nobody new comes in.
    ended(&mut idle).await;
    while TcpStream::connect(server.addr).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!server.task.is_finished());
    told.notify_one();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    text.push_str(std::str::from_utf8(&rest).unwrap());
    assert_eq!(content(&Answer::parse(text.as_bytes()).chunks(), 0), "Hello world");
    server.task.await.unwrap();
}

#[tokio::test]
async fn a_prompt_far_too_long_is_refused_before_it_is_tokenized() {
    let server = Server::start(|_| bytes("ok")).await;
    let long = "y".repeat(15 << 20);
    let chat = server.chat(json!({"messages": [{"role": "user", "content": long}]})).await.error(400);
    let plain = server.completion(json!({"prompt": long})).await.error(400);
    for (error, param) in [(chat, "messages"), (plain, "prompt")] {
        assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some("context_length_exceeded"), Some(param)));
        let message = error["message"].as_str().unwrap();
        // The longest token has 13 bytes.
        assert!(message.contains("512 tokens") && message.contains("at least 12"));
    }
    assert_eq!(server.gate().bytes.load(SeqCst), 0);
    // The same text is counted for who wants its tokens.
    assert_eq!(server.post("/tokenize", &json!({"content": &long[..100_000]})).await.ok()["count"], 100_000);
}

#[tokio::test]
async fn a_prompt_too_long_costs_no_more_than_the_context() {
    let server = Server::with(Setup { n_ctx: 100_000, ..Setup::default() }, |_| bytes("ok")).await;
    // Long enough to be counted in pieces, and cut within characters of three bytes.
    let error = server.completion(json!({"prompt": "€".repeat(400_000)})).await.error(400);
    assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some("context_length_exceeded"), Some("prompt")));
    let tokenized = server.gate().bytes.load(SeqCst);
    assert!((125_000..200_000).contains(&tokenized), "{tokenized}");
    // What fits is never taken for too long.
    server.completion(json!({"prompt": "y".repeat(99_999), "max_tokens": 1})).await.ok();
    server.completion(json!({"prompt": "y".repeat(100_000)})).await.error(400);
}

#[tokio::test]
async fn so_many_requests_are_prepared_at_once_and_those_who_left_are_not() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let server = Server::start(|_| bytes("ok")).await;
    server.gate().set(true);
    let body = json!({"model": "fake-model", "prompt": "Hi"}).to_string();
    let mut clients = Vec::new();
    for _ in 0..cores + 3 {
        clients.push(server.open("POST", "/v1/completions", &[JSON], body.as_bytes()).await);
    }
    while server.gate().inside() < cores {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // One that waits goes away; the others are served in the end.
    drop(clients.pop());
    // What generates nothing has places of its own.
    assert_eq!(server.get("/health").await.status, 200);
    server.post("/detokenize", &json!({"tokens": [72]})).await.ok();
    server.gate().set(false);
    for client in &mut clients {
        until(client, "text_completion").await;
    }
    assert_eq!(server.gate().most.load(SeqCst), cores);
    assert_eq!((server.seen().len(), server.gate().texts.load(SeqCst)), (cores + 2, cores + 2));
}
