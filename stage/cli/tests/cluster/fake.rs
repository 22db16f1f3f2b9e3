//! An API server that answers from a table, and pods behind its port-forward that answer from scripts.
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use tungstenite::handshake::derive_accept_key;
use tungstenite::protocol::Role;
use tungstenite::{Message, WebSocket};

use crate::common::{self, Asked};

/// Where SplitModels of the namespace are.
pub const MODELS: &str = "/apis/splitmodel.dev/v1alpha1/namespaces/team/splitmodels";
/// Where its pods are.
pub const PODS: &str = "/api/v1/namespaces/team/pods";

#[derive(Default)]
struct State {
    /// Answers by path: code and body.
    answers: BTreeMap<String, (u16, String)>,
    /// Pods of stage 0, the one that is ready first, with what each answers; the next gets ready when it has said it all.
    pods: VecDeque<(String, VecDeque<String>)>,
    asked: Vec<String>,
    /// Requests that came to pods, with the pod and the port.
    forwarded: Vec<(String, Asked)>,
}

/// The cluster, and a kubeconfig for it.
pub struct Cluster {
    pub dir: TempDir,
    state: Arc<Mutex<State>>,
}

impl Cluster {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::<Mutex<State>>::default();
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, state) = (stream.unwrap(), shared.clone());
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "team"}}],
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {"token": "t0ken"}}],
        });
        std::fs::write(dir.path().join("kubeconfig"), config.to_string()).unwrap();
        Self { dir, state }
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig")
    }

    pub fn answer(&self, path: &str, body: Value) {
        self.state.lock().unwrap().answers.insert(path.to_owned(), (200, body.to_string()));
    }

    /// A refusal as the API server words it.
    pub fn refuse(&self, path: &str, code: u16, reason: &str, message: &str) {
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message});
        self.state.lock().unwrap().answers.insert(path.to_owned(), (code, body.to_string()));
    }

    /// A SplitModel of the namespace.
    pub fn model(&self, text: &str) {
        let model: Value = serde_saphyr::from_str(text).unwrap();
        let name = model["metadata"]["name"].as_str().unwrap().to_owned();
        self.answer(&format!("{MODELS}/{name}"), model.clone());
        self.answer(MODELS, list("SplitModel", vec![model]));
    }

    pub fn pod(&self, name: &str, answers: Vec<String>) {
        self.state.lock().unwrap().pods.push_back((name.to_owned(), answers.into()));
    }

    pub fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.clone()
    }

    pub fn forwarded(&self) -> Vec<(String, Asked)> {
        self.state.lock().unwrap().forwarded.clone()
    }
}

pub fn list(kind: &str, items: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": format!("{kind}List"), "metadata": {}, "items": items})
}

fn serve(stream: TcpStream, state: &Mutex<State>) {
    let asked = common::read(&stream);
    let target = asked.line.split(' ').nth(1).unwrap_or_default().to_owned();
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    assert!(asked.headers.contains("authorization: Bearer t0ken"), "{asked:?}");
    state.lock().unwrap().asked.push(asked.line.clone());
    let refused = state.lock().unwrap().answers.get(path).cloned();
    let port = query.split_once("ports=").and_then(|(_, port)| port.parse::<u16>().ok());
    let pod = path.strip_prefix(PODS).and_then(|rest| rest.strip_prefix('/')?.strip_suffix("/portforward"));
    if let (Some(port), Some(pod), None) = (port, pod, &refused) {
        return forward(stream, state, &asked, pod, port);
    }
    let (code, body) = refused.unwrap_or_else(|| match path == PODS {
        true => (200, ready(state).to_string()),
        false => (404, "404 page not found\n".to_owned()),
    });
    (&stream).write_all(common::json(&format!("{code} Answer"), &body).as_bytes()).unwrap();
}

fn ready(state: &Mutex<State>) -> Value {
    let state = state.lock().unwrap();
    let pods = state.pods.iter().enumerate().map(|(index, (name, _))| {
        let ready = if index == 0 { "True" } else { "False" };
        json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}})
    });
    list("Pod", pods.collect())
}

fn forward(stream: TcpStream, state: &Mutex<State>, asked: &Asked, pod: &str, port: u16) {
    let header = |name: &str| {
        asked
            .headers
            .lines()
            .find_map(|l| l.to_ascii_lowercase().starts_with(name).then(|| l[name.len()..].trim().to_owned()))
    };
    let accept = derive_accept_key(header("sec-websocket-key:").unwrap().as_bytes());
    let head = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\
         Sec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
    );
    (&stream).write_all(head.as_bytes()).unwrap();
    let mut socket = WebSocket::from_raw_socket(stream, Role::Server, None);
    let frame = |channel: u8, bytes: &[u8]| Message::binary([&[channel], bytes].concat());
    for channel in [0, 1] {
        socket.send(frame(channel, &port.to_le_bytes())).unwrap();
    }
    let mut pending = Vec::new();
    while let Ok(message) = socket.read() {
        let Message::Binary(bytes) = message else { continue };
        pending.extend_from_slice(&bytes[1..]);
        if !is_whole(&pending) {
            continue;
        }
        let request = common::read(&*std::mem::take(&mut pending));
        let answer = {
            let mut state = state.lock().unwrap();
            state.forwarded.push((format!("{pod}:{port}"), request));
            let script = state.pods.iter_mut().find(|(name, _)| name == pod);
            let answer = script.and_then(|(_, answers)| answers.pop_front());
            state.pods.retain(|(_, answers)| !answers.is_empty());
            answer
        };
        match answer {
            Some(answer) => {
                for piece in answer.as_bytes().chunks(11) {
                    socket.send(frame(0, piece)).unwrap();
                }
            }
            None => socket.send(frame(1, b"connection refused")).unwrap(),
        }
        // As when the container closes its end.
        let _ = socket.close(None);
    }
}

fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let head = head.to_ascii_lowercase();
    let length = head.lines().find_map(|l| l.strip_prefix("content-length:").map(|n| n.trim().parse().unwrap()));
    body.len() >= length.unwrap_or(0)
}
