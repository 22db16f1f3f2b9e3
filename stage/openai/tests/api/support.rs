//! A scripted backend with a byte-level vocabulary, the real router on a real loopback listener, and a bare HTTP client.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use serde_json::{Value, json};
use splitmodel_openai::{
    ApiConfig, ApiError, Backend, Door, EndReason, GenEvent, GenerateRequest, Generation, GrammarSpec, Missing,
    ModelCard, Readiness, ServeLimits, SpecialToken, Startup, SubmitError, Token, TokenEvent, router, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

pub const IM_START: Token = 256;
pub const IM_END: Token = 257;
pub const END_OF_TEXT: Token = 258;
/// The first token of more than one byte.
pub const FIRST_WORD: Token = 300;
pub const WORDS: [&str; 4] = ["Hello", " world", "STOP", "🎉"];
pub const N_CTX: u32 = 512;

pub const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// What the model does.
#[derive(Clone)]
pub enum Act {
    Token(Token),
    /// A token again and again until the limit.
    Forever(Token),
    Fail(ApiError),
    /// Nothing more, until the client goes.
    Hang,
    /// Nothing more until it is told.
    Wait(Arc<tokio::sync::Notify>),
}

pub type Script = Box<dyn Fn(&GenerateRequest) -> Vec<Act> + Send + Sync>;

pub struct Fake {
    card: ModelCard,
    table: Vec<Vec<u8>>,
    script: Script,
    admit: Option<SubmitError>,
    seen: Mutex<Vec<GenerateRequest>>,
    dropped: UnboundedSender<u32>,
    gate: Gate,
}

/// Where texts wait for being tokenized.
#[derive(Default)]
pub struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
    inside: AtomicUsize,
    /// Most texts at once.
    pub most: AtomicUsize,
    /// Bytes and texts that went through.
    pub bytes: AtomicUsize,
    pub texts: AtomicUsize,
}

impl Gate {
    pub fn set(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    pub fn inside(&self) -> usize {
        self.inside.load(SeqCst)
    }

    fn pass(&self, bytes: usize) {
        self.most.fetch_max(self.inside.fetch_add(1, SeqCst) + 1, SeqCst);
        drop(self.changed.wait_while(self.closed.lock().unwrap(), |closed| *closed).unwrap());
        self.bytes.fetch_add(bytes, SeqCst);
        self.texts.fetch_add(1, SeqCst);
        self.inside.fetch_sub(1, SeqCst);
    }
}

/// Tokens of a text, one byte each.
pub fn bytes(text: &str) -> Vec<Act> {
    text.bytes().map(|b| Act::Token(Token::from(b))).collect()
}

pub fn word(text: &str) -> Act {
    Act::Token(FIRST_WORD + WORDS.iter().position(|w| *w == text).unwrap() as Token)
}

impl Backend for Fake {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn tokenize(&self, text: &str, _add_special: bool) -> Result<Vec<Token>, ApiError> {
        self.gate.pass(text.len());
        Ok(text.bytes().map(Token::from).collect())
    }

    fn token_bytes(&self, token: Token) -> &[u8] {
        usize::try_from(token).ok().and_then(|t| self.table.get(t)).map(Vec::as_slice).unwrap_or_default()
    }

    fn check_grammar(&self, spec: &GrammarSpec) -> Result<(), String> {
        match spec {
            GrammarSpec::JsonSchema(schema) if schema["type"] == "no-such-type" => Err("no such type".to_owned()),
            _ => Ok(()),
        }
    }

    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        if let Some(error) = &self.admit {
            return Err(error.clone());
        }
        let (dropped, index) = (self.dropped.clone(), request.index);
        let (sender, generation) = Generation::channel(request.max_tokens, move || {
            let _ = dropped.send(index);
        });
        let acts = (self.script)(&request);
        let (limit, top) = (request.max_tokens as usize, usize::from(request.config.top_logprobs));
        self.seen.lock().unwrap().push(request);
        tokio::spawn(async move {
            let event = |token| {
                let top = (0..top).map(|i| (token + i as Token, -0.5 - i as f32)).collect();
                GenEvent::Token(TokenEvent { token, logprob: -0.5, top })
            };
            let mut made = 0;
            let mut open = sender.send(GenEvent::Started { cached_tokens: 3 });
            for act in acts {
                if made == limit || !open {
                    break;
                }
                // Lets the reader see one token at a time.
                tokio::task::yield_now().await;
                match act {
                    Act::Token(token) => {
                        open = sender.send(event(token));
                        made += 1;
                    }
                    Act::Forever(token) => {
                        while made < limit && open {
                            tokio::task::yield_now().await;
                            open = sender.send(event(token));
                            made += 1;
                        }
                    }
                    Act::Fail(error) => {
                        let _ = sender.send(GenEvent::Failed(error));
                        return;
                    }
                    Act::Hang => std::future::pending::<()>().await,
                    Act::Wait(told) => told.notified().await,
                }
            }
            let reason = if made == limit { EndReason::Length } else { EndReason::Stop(Some(IM_END)) };
            let _ = sender.send(GenEvent::Done(reason));
        });
        Ok(generation)
    }

    fn readiness(&self) -> Readiness {
        match &self.admit {
            None => Readiness::Ready,
            Some(error) => Readiness::NotReady(error.to_string()),
        }
    }

    fn metrics(&self) -> String {
        "# TYPE fake_steps counter\nfake_steps_total 7\n".to_owned()
    }
}

pub struct Server {
    pub addr: std::net::SocketAddr,
    pub fake: Arc<Fake>,
    pub dropped: UnboundedReceiver<u32>,
    /// Ends the server when sent or dropped.
    pub stop: Option<oneshot::Sender<()>>,
    pub task: tokio::task::JoinHandle<()>,
}

/// A process that fetches its model.
pub struct Fetching;

impl Startup for Fetching {
    fn missing(&self) -> Missing {
        let reason = "the model is being fetched, 1.5 of 3 GB".to_owned();
        Missing { phase: "fetching".to_owned(), progress: Some(0.5), reason }
    }

    fn metrics(&self) -> String {
        "# TYPE fake_bytes counter\nfake_bytes_total 5\n".to_owned()
    }
}

pub struct Setup {
    pub config: ApiConfig,
    pub limits: ServeLimits,
    pub n_ctx: u32,
    pub admit: Option<SubmitError>,
    pub template: Option<&'static str>,
    /// Prompts begin with `END_OF_TEXT`.
    pub add_bos: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            config: ApiConfig::default(),
            limits: ServeLimits::default(),
            n_ctx: N_CTX,
            admit: None,
            template: Some(CHATML),
            add_bos: false,
        }
    }
}

impl Server {
    pub async fn start(script: impl Fn(&GenerateRequest) -> Vec<Act> + Send + Sync + 'static) -> Self {
        Self::with(Setup::default(), script).await
    }

    pub async fn with(setup: Setup, script: impl Fn(&GenerateRequest) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let mut table: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
        let specials = [("<|im_start|>", IM_START), ("<|im_end|>", IM_END), ("<|endoftext|>", END_OF_TEXT)]
            .map(|(text, id)| SpecialToken { text: text.to_owned(), id });
        table.extend(specials.iter().map(|s| s.text.clone().into_bytes()));
        table.resize(FIRST_WORD as usize, Vec::new());
        table.extend(WORDS.iter().map(|w| w.as_bytes().to_vec()));
        let card = ModelCard {
            id: "fake-model".to_owned(),
            aliases: vec!["owner/alias".to_owned()],
            created: 1_700_000_000,
            n_ctx: setup.n_ctx,
            n_vocab: table.len() as u32,
            chat_template: setup.template.map(str::to_owned),
            bos: setup.add_bos.then(|| specials[2].clone()),
            eos: Some(specials[1].clone()),
            add_bos: setup.add_bos,
            eog: vec![IM_END, END_OF_TEXT],
            special_tokens: specials.to_vec(),
            media: false,
        };
        let (sender, dropped) = unbounded_channel();
        let fake = Arc::new(Fake {
            card,
            table,
            script: Box::new(script),
            admit: setup.admit,
            seen: Mutex::new(Vec::new()),
            dropped: sender,
            gate: Gate::default(),
        });
        let door = Door::new(Arc::new(Fetching), &setup.config.cors).unwrap();
        door.open(router(fake.clone(), setup.config).unwrap());
        let (addr, stop, task) = listen(door, setup.limits).await;
        Self { addr, fake, dropped, stop: Some(stop), task }
    }

    pub fn gate(&self) -> &Gate {
        &self.fake.gate
    }

    pub fn seen(&self) -> Vec<GenerateRequest> {
        self.fake.seen.lock().unwrap().clone()
    }

    /// Sends a request but for the end of its body.
    pub async fn open_part(&self, path: &str, headers: &[(&str, &str)], body: &[u8], part: usize) -> TcpStream {
        self.begin(("POST", path), headers, (body.len(), &body[..part])).await
    }

    pub async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        self.begin((method, path), headers, (body.len(), body)).await
    }

    async fn begin(
        &self,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        (len, body): (usize, &[u8]),
    ) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        for (key, value) in headers {
            head += &format!("{key}: {value}\r\n");
        }
        head += &format!("content-length: {len}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        stream
    }

    pub async fn raw(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.open(method, path, headers, body).await;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        Answer::parse(&bytes)
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.raw("GET", path, &[], b"").await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes()).await
    }

    /// A chat with one user message and more fields.
    pub async fn chat(&self, more: Value) -> Answer {
        let mut body = json!({"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.post("/v1/chat/completions", &body).await
    }

    pub async fn completion(&self, more: Value) -> Answer {
        let mut body = json!({"model": "fake-model", "prompt": "Hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.post("/v1/completions", &body).await
    }
}

/// Serves `door` on a port of its own.
pub async fn listen(
    door: Door,
    limits: ServeLimits,
) -> (std::net::SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, (stop, stopped)) = (listener.local_addr().unwrap(), oneshot::channel());
    let task = tokio::spawn(serve(listener, door, limits, async {
        let _ = stopped.await;
    }));
    (addr, stop, task)
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a response head");
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> =
            lines.filter_map(|l| l.split_once(": ")).map(|(k, v)| (k.to_ascii_lowercase(), v.to_owned())).collect();
        let mut rest = &bytes[end + 4..];
        let chunked = headers.iter().any(|(k, v)| k == "transfer-encoding" && v == "chunked");
        let mut body = Vec::new();
        while chunked && !rest.is_empty() {
            let line = rest.windows(2).position(|w| w == b"\r\n").expect("a chunk length");
            let n = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
            body.extend_from_slice(&rest[line + 2..line + 2 + n]);
            rest = &rest[line + 2 + n + 2..];
        }
        if !chunked {
            body = rest.to_vec();
        }
        Self { status, headers, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The JSON of a good answer.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }

    /// The error of a bad one, with all four keys.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        assert!(self.header("content-type").unwrap().starts_with("application/json"));
        let error = self.json()["error"].clone();
        let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(!error["message"].as_str().unwrap().is_empty());
        error
    }

    /// The chunks of a stream that ended with `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        assert!(self.header("content-type").unwrap().starts_with("text/event-stream"));
        let text = std::str::from_utf8(&self.body).expect("whole characters");
        let mut data: Vec<&str> = text
            .split("\n\n")
            .filter(|b| !b.is_empty() && !b.starts_with(':'))
            .map(|b| b.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter().map(|d| serde_json::from_str(d).unwrap()).collect()
    }
}

/// The joined content of choice `index` of a chat stream.
pub fn content(chunks: &[Value], index: u64) -> String {
    choices(chunks, index).filter_map(|c| c["delta"]["content"].as_str().map(str::to_owned)).collect()
}

pub fn finishes(chunks: &[Value], index: u64) -> Vec<String> {
    choices(chunks, index).filter_map(|c| c["finish_reason"].as_str().map(str::to_owned)).collect()
}

pub fn choices(chunks: &[Value], index: u64) -> impl Iterator<Item = &Value> {
    chunks.iter().filter_map(|c| c["choices"].as_array()).flatten().filter(move |c| c["index"] == index)
}
