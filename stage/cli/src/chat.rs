//! `splitmodel chat`: a conversation over the OpenAI API.
use std::io::IsTerminal;

use reqwest::{Client, RequestBuilder, Url};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::args::{ChatArgs, ChatOptions};
use crate::error::CliError;
use crate::sse::Events;
use crate::{http, ui};

/// Bytes of an answer that is no stream.
const MAX_BODY: usize = 1 << 20;

/// `splitmodel chat`.
///
/// # Errors
/// As [`talk`].
pub async fn run(args: ChatArgs) -> Result<(), CliError> {
    talk(&args.url, args.chat).await
}

/// Talks with the API at `url` until the input ends. On a terminal, an error ends the turn only; otherwise it ends the command.
///
/// # Errors
/// [`CliError`].
pub async fn talk(url: &str, options: ChatOptions) -> Result<(), CliError> {
    let interactive = std::io::stdin().is_terminal();
    let mut chat = Chat::open(url, options).await?;
    if interactive {
        ui::note(&format!("{} at {}; /reset starts anew, /exit ends", chat.model, chat.base));
    }
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    loop {
        if interactive {
            ui::text("> ")?;
        }
        let line = tokio::select! {
            line = lines.next_line() => line,
            _ = tokio::signal::ctrl_c(), if interactive => break,
        };
        let line = line.map_err(|source| CliError::System { action: "read the input", source })?;
        let Some(line) = line else { break };
        match line.trim() {
            "" => continue,
            "/exit" if interactive => break,
            "/reset" if interactive => {
                chat.reset();
                continue;
            }
            message => {
                let turn = tokio::select! {
                    turn = chat.turn(message) => turn,
                    _ = tokio::signal::ctrl_c(), if interactive => {
                        chat.forget_turn();
                        Ok(())
                    }
                };
                match turn {
                    Err(error) if interactive && !error.is_closed_output() => ui::note(&format!("error: {error}")),
                    other => other?,
                }
                ui::line("")?;
            }
        }
    }
    Ok(())
}

struct Chat {
    client: Client,
    base: Url,
    url: Url,
    model: String,
    options: ChatOptions,
    messages: Vec<Value>,
}

impl Chat {
    async fn open(url: &str, options: ChatOptions) -> Result<Self, CliError> {
        let base = http::base(url)?;
        // Minutes may lie between two turns, and the pod of the last one may be gone.
        let client = http::client(&base, http::Idle::Closed)?;
        let url = http::join(&base, "v1/chat/completions")?;
        let model = match &options.model {
            Some(model) => model.clone(),
            None => first_model(&client, &http::join(&base, "v1/models")?, options.api_key.as_deref()).await?,
        };
        let mut chat = Self { client, base, url, model, options, messages: Vec::new() };
        chat.reset();
        Ok(chat)
    }

    fn reset(&mut self) {
        self.messages = self.options.system.iter().map(|s| json!({"role": "system", "content": s})).collect();
    }

    /// Takes back a message that got no whole answer, so that the roles keep alternating.
    fn forget_turn(&mut self) {
        if self.messages.last().is_some_and(|m| m["role"] == "user") {
            self.messages.pop();
        }
    }

    async fn turn(&mut self, message: &str) -> Result<(), CliError> {
        self.messages.push(json!({"role": "user", "content": message}));
        match self.answer().await {
            Ok(text) => {
                self.messages.push(json!({"role": "assistant", "content": text}));
                Ok(())
            }
            Err(error) => {
                self.forget_turn();
                Err(error)
            }
        }
    }

    /// Streams one answer to standard output and returns it.
    async fn answer(&self) -> Result<String, CliError> {
        let mut body = json!({"model": self.model, "messages": self.messages, "stream": true});
        if let Some(n) = self.options.max_tokens {
            body["max_tokens"] = json!(n);
        }
        if let Some(t) = self.options.temperature {
            body["temperature"] = json!(t);
        }
        let request = with_key(self.client.post(self.url.clone()), self.options.api_key.as_deref());
        let mut response = request.json(&body).send().await.map_err(|e| http::api_error(&self.url, &e))?;
        let status = response.status();
        if !status.is_success() {
            return Err(http::refusal(&self.url, status.as_u16(), &text_of(response, &self.url).await?));
        }
        let failed = |message: String| CliError::Api { url: self.url.to_string(), message };
        let mut events = Events::default();
        let mut answer = String::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| http::api_error(&self.url, &e))? {
            for data in events.push(&chunk).map_err(|e| failed(e.to_string()))? {
                if data == "[DONE]" {
                    return Ok(answer);
                }
                let event: Value =
                    serde_json::from_str(&data).map_err(|e| failed(format!("an event is not JSON: {e}")))?;
                if let Some(error) = event.get("error") {
                    let words = error["message"].as_str().unwrap_or("an error without words");
                    return Err(failed(format!("the answer ended early: {words}")));
                }
                if let Some(text) = event.pointer("/choices/0/delta/content").and_then(Value::as_str) {
                    ui::text(text)?;
                    answer.push_str(text);
                }
            }
        }
        Err(failed("the connection ended before the answer did; see the server's log".into()))
    }
}

fn with_key(request: RequestBuilder, key: Option<&str>) -> RequestBuilder {
    match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    }
}

/// The body as text, as much of it as is worth reading.
async fn text_of(mut response: reqwest::Response, url: &Url) -> Result<String, CliError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|e| http::api_error(url, &e))? {
        let room = MAX_BODY - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if body.len() == MAX_BODY {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

async fn first_model(client: &Client, url: &Url, key: Option<&str>) -> Result<String, CliError> {
    let response = with_key(client.get(url.clone()), key).send().await.map_err(|e| http::api_error(url, &e))?;
    let status = response.status();
    let body = text_of(response, url).await?;
    if !status.is_success() {
        return Err(http::refusal(url, status.as_u16(), &body));
    }
    let listed: Option<Value> = serde_json::from_str(&body).ok();
    listed
        .as_ref()
        .and_then(|v| v.pointer("/data/0/id"))
        .and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or_else(|| CliError::Api { url: url.to_string(), message: "lists no model; name one with --model".into() })
}
