//! An HTTP server that answers from a script and remembers what it was asked.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Asked {
    pub line: String,
    pub headers: String,
    pub body: serde_json::Value,
}

pub struct Server {
    pub url: String,
    pub asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    /// Answers the n-th request with the n-th of `answers`, whole HTTP responses, then closes.
    pub fn start(answers: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                log.lock().unwrap().push(read(&stream));
                // In small pieces, so that events are cut in the middle.
                for piece in answer.as_bytes().chunks(7) {
                    (&stream).write_all(piece).unwrap();
                    (&stream).flush().unwrap();
                }
            }
        });
        Self { url, asked }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

/// One request.
pub fn read(stream: impl Read) -> Asked {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let mut headers = String::new();
    while !headers.ends_with("\r\n\r\n") && reader.read_line(&mut headers).unwrap() > 2 {}
    let length = headers
        .to_ascii_lowercase()
        .lines()
        .find_map(|h| h.strip_prefix("content-length:").map(|n| n.trim().parse::<usize>().unwrap()))
        .unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    Asked { line: line.trim().into(), headers, body: serde_json::from_slice(&body).unwrap_or_default() }
}

pub fn json(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

pub fn models() -> String {
    json("200 OK", r#"{"object":"list","data":[{"id":"smollm2"},{"id":"other"}]}"#)
}

pub fn sse(events: &[&str]) -> String {
    let body: String = events.iter().map(|e| format!("data: {e}\n\n")).collect();
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: ping\n\n{body}")
}

pub fn delta(text: &str) -> String {
    serde_json::json!({"choices": [{"index": 0, "delta": {"content": text}}]}).to_string()
}
