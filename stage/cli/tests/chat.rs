//! `splitmodel chat` against a server that answers from a script.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use common::{Server, delta, json, models, sse};

fn chat(url: &str, flags: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_splitmodel"))
        .args(["chat", "--url", url])
        .args(flags)
        .env_remove("SPLITMODEL_API_KEY")
        .env("http_proxy", "http://127.0.0.1:9")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn each_line_is_a_turn_of_one_conversation() {
    let role = r#"{"choices":[{"index":0,"delta":{"role":"assistant"}}]}"#;
    let usage = r#"{"choices":[],"usage":{"total_tokens":3}}"#;
    let server = Server::start(vec![
        models(),
        sse(&[role, &delta("Grüß"), &delta(" dich"), usage, "[DONE]"]),
        sse(&[&delta("Bye."), "[DONE]"]),
    ]);
    let flags = ["--system", "Be brief.", "--api-key", "k3y", "--max-tokens", "9", "--temperature", "0"];
    let out = chat(&server.url, &flags, "hello\n\n/reset\n");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(text(&out.stdout), "Grüß dich\nBye.\n");

    let asked = server.asked();
    assert_eq!(asked[0].line, "GET /v1/models HTTP/1.1");
    assert_eq!(asked[1].line, "POST /v1/chat/completions HTTP/1.1");
    assert!(asked.iter().all(|a| a.headers.to_ascii_lowercase().contains("authorization: bearer k3y")), "{asked:?}");
    assert_eq!(
        asked[2].body,
        serde_json::json!({
            "model": "smollm2", "stream": true, "max_tokens": 9, "temperature": 0.0,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "Grüß dich"},
                {"role": "user", "content": "/reset"},
            ],
        }),
        "commands are for people at a terminal; in a script they are messages"
    );
}

/// A server that is replaced behind a forwarded port: the old connection is still open when the next message comes.
#[test]
fn no_turn_goes_over_the_connection_of_an_earlier_one() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        for word in ["one", "two"] {
            let (stream, _) = listener.accept().unwrap();
            common::read(&stream);
            let body = format!("data: {}\n\ndata: [DONE]\n\n", delta(word));
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
            write!(&stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            // What comes next over it is lost with it.
            std::thread::spawn(move || (&stream).read(&mut [0]));
        }
    });
    let out = chat(&url, &["--model", "m"], "a\nb\n");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(text(&out.stdout), "one\ntwo\n");
    serving.join().unwrap();
}

#[test]
fn a_named_model_is_not_looked_up() {
    let server = Server::start(vec![sse(&[&delta("x"), "[DONE]"])]);
    let out = chat(&format!("{}/v1/", server.url), &["--model", "m"], "a\n");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(server.asked()[0].body["model"], "m");
}

#[test]
fn errors_end_a_script_with_the_servers_words() {
    let refusal = json("401 Unauthorized", r#"{"error":{"message":"no such key","type":"auth"}}"#);
    let broken = r#"{"error":{"message":"stage 1 is gone"}}"#;
    let cases: [(Vec<String>, &str); 5] = [
        (vec![refusal], "no such key; give the API's key with --api-key"),
        (vec![json("200 OK", r#"{"data":[]}"#)], "--model"),
        (vec![models(), sse(&[&delta("half"), broken])], "stage 1 is gone"),
        (vec![models(), sse(&[&delta("half")])], "connection ended before the answer did"),
        (vec![models(), sse(&["{"])], "not JSON"),
    ];
    for (script, words) in cases {
        let server = Server::start(script);
        let out = chat(&server.url, &[], "hello\nagain\n");
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        assert!(text(&out.stderr).starts_with("error: ") && text(&out.stderr).contains(words), "{out:?}");
        assert!(text(&out.stderr).contains(&server.url), "{out:?}");
    }
}

#[test]
fn nobody_there_is_said_with_the_remedy() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let out = chat(&format!("http://{free}"), &[], "hello\n");
    assert_eq!(out.status.code(), Some(1));
    let words = text(&out.stderr);
    assert!(words.contains("is the server running?") && words.contains("--url"), "{words}");
    let out = chat("localhost:8000", &[], "hello\n");
    assert!(text(&out.stderr).contains("--url: `localhost:8000`"), "{out:?}");
}
