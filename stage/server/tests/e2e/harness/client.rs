//! A client of the API: completions of token lists, as they arrive.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::PATIENCE;

/// Asks one server.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// As the API shows it.
    pub text: String,
    /// Log-probability of the likeliest minus that of the second; `None` where they look the same.
    pub gap: Option<f64>,
    pub at: Instant,
}

/// What came of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub pieces: Vec<Piece>,
    pub finish: Option<String>,
    /// Whether `[DONE]` came.
    pub done: bool,
    pub error: Option<Value>,
    /// Comments that came while there was nothing to say.
    pub comments: usize,
}

impl Answer {
    /// Checks that the stream came to its proper end.
    pub fn complete(self) -> Self {
        assert_eq!(self.error, None, "after {} tokens", self.pieces.len());
        assert!(self.done && self.finish.is_some(), "a cut stream: {self:?}");
        self
    }
}

/// A request: greedy and streamed unless it says otherwise. The seed names it in schedule logs.
pub fn request(seed: u64, prompt: &[i32], max_tokens: usize) -> Value {
    json!({
        "prompt": prompt, "max_tokens": max_tokens, "seed": seed, "temperature": 0, "stream": true, "logprobs": 2,
        "ignore_eos": true,
    })
}

/// `request` with fields of `more` put over it.
pub fn with(mut request: Value, more: Value) -> Value {
    let (Value::Object(request_fields), Value::Object(more)) = (&mut request, more) else { panic!("objects") };
    request_fields.extend(more);
    request
}

/// An answer under way. Dropping it closes the connection.
pub struct Stream {
    response: reqwest::Response,
    unread: Vec<u8>,
    pub answer: Answer,
}

impl Stream {
    /// Reads the next event; `false` when the connection has ended.
    pub async fn next(&mut self) -> bool {
        loop {
            if let Some(end) = self.unread.windows(2).position(|w| w == b"\n\n") {
                let event: Vec<u8> = self.unread.drain(..end + 2).collect();
                self.event(std::str::from_utf8(&event).unwrap());
                return true;
            }
            match self.response.chunk().await {
                Ok(Some(bytes)) => self.unread.extend_from_slice(&bytes),
                Ok(None) | Err(_) => return false,
            }
        }
    }

    fn event(&mut self, event: &str) {
        let Some(data) = event.trim_end().strip_prefix("data: ") else {
            assert!(event.starts_with(':'), "{event:?}");
            self.answer.comments += 1;
            return;
        };
        if data == "[DONE]" {
            self.answer.done = true;
            return;
        }
        let value: Value = serde_json::from_str(data).unwrap();
        if let Some(error) = value.get("error") {
            self.answer.error = Some(error.clone());
            return;
        }
        let Some(choice) = value["choices"].get(0) else { return };
        self.answer.take(choice);
    }

    /// Reads until the answer has `count` tokens.
    pub async fn tokens(&mut self, count: usize) {
        while self.answer.pieces.len() < count {
            assert!(self.next().await, "the stream ended after {:?}", self.answer);
        }
    }

    /// Reads to the end.
    pub async fn rest(mut self) -> Answer {
        while self.next().await {}
        self.answer
    }
}

/// An answer that is read as it comes, whatever the test does meanwhile. Dropping it closes the connection.
pub struct Running {
    progress: watch::Receiver<usize>,
    reading: JoinSet<Answer>,
}

impl Running {
    pub fn read(mut stream: Stream) -> Self {
        let (sender, progress) = watch::channel(0);
        let mut reading = JoinSet::new();
        reading.spawn(async move {
            while stream.next().await {
                sender.send_replace(stream.answer.pieces.len());
            }
            stream.answer
        });
        Self { progress, reading }
    }

    /// Tokens so far.
    pub fn count(&self) -> usize {
        *self.progress.borrow()
    }

    /// Waits until the answer has `count` tokens.
    pub async fn tokens(&mut self, count: usize) {
        let there = tokio::time::timeout(PATIENCE, self.progress.wait_for(|n| *n >= count)).await;
        let there = there.unwrap_or_else(|_| panic!("{count} tokens did not come in {PATIENCE:?}")).is_ok();
        assert!(there, "the stream ended after {} tokens instead of {count}", self.count());
    }

    /// Waits for the end.
    pub async fn rest(mut self) -> Answer {
        tokio::time::timeout(PATIENCE, self.reading.join_next()).await.unwrap().unwrap().unwrap()
    }
}

impl Answer {
    fn take(&mut self, choice: &Value) {
        self.text += choice["text"].as_str().unwrap();
        let logprobs = &choice["logprobs"];
        for (i, token) in logprobs["tokens"].as_array().into_iter().flatten().enumerate() {
            let top = logprobs["top_logprobs"][i].as_object().unwrap();
            let mut top: Vec<f64> = top.values().map(|v| v.as_f64().unwrap()).collect();
            top.sort_by(|a, b| b.total_cmp(a));
            let gap = (top.len() > 1).then(|| top[0] - top[1]);
            self.pieces.push(Piece { text: token.as_str().unwrap().to_owned(), gap, at: Instant::now() });
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = Some(finish.to_owned());
        }
    }
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        // Another crate of the workspace builds reqwest with TLS, which then wants to be told by whom.
        let _ = rustls::crypto::ring::default_provider().install_default(); // the second time it is there
        let http = reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(10)).build().unwrap();
        Self { http, base: format!("http://{address}") }
    }

    /// Status of a GET; `None` when nobody answers.
    pub async fn status(&self, path: &str) -> Option<u16> {
        let response = self.http.get(format!("{}{path}", self.base)).timeout(Duration::from_secs(10)).send().await;
        response.ok().map(|r| r.status().as_u16())
    }

    /// The sum of a metric over its labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let response = self.http.get(format!("{}/metrics", self.base)).send().await.unwrap();
        let text = response.text().await.unwrap();
        let is_it = |l: &&str| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ', '_']));
        let lines: Vec<_> = text.lines().filter(is_it).collect();
        assert!(!lines.is_empty(), "no {name} in {text}");
        lines.iter().map(|l| l.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }

    async fn post(&self, body: &Value, id: Option<&str>) -> reqwest::Result<reqwest::Response> {
        let mut request = self.http.post(format!("{}/v1/completions", self.base)).json(body);
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        request.send().await
    }

    /// Begins a streamed answer; on refusal the status and the body.
    pub async fn try_open(&self, body: &Value) -> Result<Stream, (u16, Value)> {
        self.try_open_as(body, None).await
    }

    /// The same with a request id.
    pub async fn try_open_as(&self, body: &Value, id: Option<&str>) -> Result<Stream, (u16, Value)> {
        let response = self.post(body, id).await.map_err(|e| (0, Value::String(e.to_string())))?;
        if response.status() != 200 {
            return Err((response.status().as_u16(), response.json().await.unwrap_or_default()));
        }
        Ok(Stream { response, unread: Vec::new(), answer: Answer::default() })
    }

    /// Begins a streamed answer.
    pub async fn open(&self, body: &Value) -> Stream {
        self.try_open(body).await.unwrap_or_else(|(status, body)| panic!("refused with {status}: {body}"))
    }

    /// A streamed answer to its proper end.
    pub async fn ask(&self, body: &Value) -> Answer {
        let rest = async { self.open(body).await.rest().await };
        tokio::time::timeout(PATIENCE, rest)
            .await
            .unwrap_or_else(|_| panic!("no end of the answer with seed {} in {PATIENCE:?}", body["seed"]))
            .complete()
    }

    /// Status, `Retry-After` and body of an answer that is refused.
    pub async fn refused(&self, body: &Value) -> (u16, Option<String>, Value) {
        let response = self.post(body, None).await.unwrap();
        let after = response.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
        (response.status().as_u16(), after, response.json().await.unwrap_or_default())
    }

    /// An answer at once: status and body.
    pub async fn whole(&self, body: Value) -> (u16, Value) {
        let body = with(body, json!({"stream": false}));
        let response = self.post(&body, None).await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }
}
