//! Streaming and plain answers: text, framing, usage, ends, clients that go away.

use std::time::Duration;

use crate::support::{Act, FIRST_WORD, N_CTX, Server, Setup, bytes, choices, content, finishes, word};
use serde_json::json;
use splitmodel_openai::{ApiConfig, ApiError, ErrorClass};
use tokio::io::AsyncReadExt;

#[tokio::test]
async fn streamed_text_is_the_plain_text_in_whole_characters() {
    // Every byte is a token of its own, so each character is split.
    let server = Server::start(|_| bytes("Ça 🎉👩‍👩‍👧 日本語 ½")).await;
    let plain = server.chat(json!({})).await.ok();
    assert_eq!(plain["choices"][0]["message"]["content"], "Ça 🎉👩‍👩‍👧 日本語 ½");
    assert_eq!(plain["choices"][0]["finish_reason"], "stop");
    let chunks = server.chat(json!({"stream": true})).await.chunks();
    assert_eq!(content(&chunks, 0), "Ça 🎉👩‍👩‍👧 日本語 ½");
    assert!(!content(&chunks, 0).contains('\u{FFFD}'));
    assert_eq!(finishes(&chunks, 0), ["stop"]);
}

#[tokio::test]
async fn invalid_bytes_become_replacement_characters_both_ways() {
    let server = Server::start(|_| vec![Act::Forever(0xF0)]).await;
    let plain = server.chat(json!({"max_tokens": 6})).await.ok();
    assert_eq!(plain["choices"][0]["message"]["content"], "\u{FFFD}".repeat(6));
    assert_eq!(plain["usage"]["completion_tokens"], 6);
    let chunks = server.chat(json!({"max_tokens": 6, "stream": true})).await.chunks();
    assert_eq!(content(&chunks, 0), "\u{FFFD}".repeat(6));
    assert_eq!(finishes(&chunks, 0), ["length"]);
}

#[tokio::test]
async fn chunks_come_in_the_order_that_clients_rely_on() {
    let server = Server::start(|_| vec![word("Hello"), word(" world")]).await;
    let chunks = server.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await.chunks();
    let roles: Vec<bool> = choices(&chunks, 0).map(|c| c["delta"].get("role").is_some()).collect();
    assert_eq!(roles, [true, false, false, false]);
    assert_eq!(choices(&chunks, 0).last().unwrap()["finish_reason"], "stop");
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    // The token that ended the answer was made, too.
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert_eq!(chunks.iter().filter(|c| c.get("usage").is_some()).count(), 1);
    for key in ["id", "created", "object", "model"] {
        assert!(chunks.iter().all(|c| c[key] == chunks[0][key]), "{key}");
    }
    let plain = server.chat(json!({"stream": true})).await.chunks();
    assert!(plain.iter().all(|c| c.get("usage").is_none() && !c["choices"].as_array().unwrap().is_empty()));
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_answer_and_frees_its_lane() {
    let mut server = Server::start(|_| {
        let mut acts = bytes("one S");
        acts.extend([Act::Token(i32::from(b'T')), Act::Token(i32::from(b'O')), Act::Token(i32::from(b'P'))]);
        acts.push(Act::Forever(i32::from(b'x')));
        acts
    })
    .await;
    for stream in [false, true] {
        let answer = server.chat(json!({"stop": ["STOP", "never"], "stream": stream})).await;
        if stream {
            assert_eq!(content(&answer.chunks(), 0), "one ");
            assert_eq!(finishes(&answer.chunks(), 0), ["stop"]);
        } else {
            let json = answer.ok();
            assert_eq!(json["choices"][0]["message"]["content"], "one ");
            assert_eq!(json["choices"][0]["finish_reason"], "stop");
            assert_eq!(json["usage"]["completion_tokens"], 8);
        }
        assert_eq!(server.dropped.recv().await, Some(0));
    }
}

#[tokio::test]
async fn held_text_is_given_out_at_the_limit_and_at_the_end() {
    let server = Server::start(|_| bytes("abcSTO")).await;
    for (limit, finish) in [(6, "length"), (100, "stop")] {
        let json = server.chat(json!({"stop": "STOP", "max_tokens": limit})).await.ok();
        assert_eq!(json["choices"][0]["message"]["content"], "abcSTO");
        assert_eq!(json["choices"][0]["finish_reason"], finish);
        let chunks = server.chat(json!({"stop": "STOP", "max_tokens": limit, "stream": true})).await.chunks();
        assert_eq!(content(&chunks, 0), "abcSTO");
        assert_eq!(finishes(&chunks, 0), [finish]);
    }
}

#[tokio::test]
async fn choices_keep_apart_and_the_prompt_counts_once() {
    let server = Server::start(|r| bytes(["zero", "one", "two"][r.index as usize])).await;
    let plain = server.chat(json!({"n": 3, "seed": 5})).await.ok();
    for (i, text) in ["zero", "one", "two"].iter().enumerate() {
        assert_eq!(plain["choices"][i]["index"], i);
        assert_eq!(plain["choices"][i]["message"]["content"], *text);
    }
    let seen = server.seen();
    assert_eq!(seen.iter().map(|r| r.config.seed).collect::<Vec<_>>(), [5, 6, 7]);
    assert_eq!(plain["usage"]["prompt_tokens"], seen[0].prompt.len());
    assert_eq!(plain["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(plain["usage"]["completion_tokens"], 4 + 3 + 3 + 3);
    let chunks = server.chat(json!({"n": 3, "stream": true})).await.chunks();
    for (i, text) in ["zero", "one", "two"].iter().enumerate() {
        let i = i as u64;
        assert_eq!(content(&chunks, i), *text);
        assert_eq!(finishes(&chunks, i), ["stop"]);
        assert_eq!(choices(&chunks, i).filter(|c| c["delta"].get("role").is_some()).count(), 1);
    }
    // Without a seed every choice has its own.
    let seeds: std::collections::HashSet<u64> = server.seen().iter().skip(3).map(|r| r.config.seed).collect();
    assert_eq!(seeds.len(), 3);
}

#[tokio::test]
async fn log_probabilities_come_with_their_text() {
    let server = Server::start(|_| bytes("é!STOP")).await;
    let ask = json!({"logprobs": true, "top_logprobs": 2, "stop": ["STOP"]});
    let plain = server.chat(ask.clone()).await.ok();
    let whole = plain["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(
        whole.iter().map(|t| t["bytes"].clone()).collect::<Vec<_>>(),
        [json!([0xC3]), json!([0xA9]), json!([b'!'])]
    );
    assert_eq!(whole[0]["token"], "\\xc3");
    assert!(whole.iter().all(|t| t["top_logprobs"].as_array().unwrap().len() == 2));
    let mut streamed = ask;
    streamed["stream"] = json!(true);
    let chunks = server.chat(streamed).await.chunks();
    let parts: Vec<_> =
        choices(&chunks, 0).filter_map(|c| c["logprobs"]["content"].as_array().cloned()).flatten().collect();
    assert_eq!(parts, whole);
    // Not asked for: none.
    assert!(server.chat(json!({})).await.ok()["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn completions_have_their_own_shapes() {
    let server = Server::start(|_| vec![word("Hello"), word("🎉"), word(" world")]).await;
    let json = server.completion(json!({"logprobs": 2, "max_tokens": 3})).await.ok();
    assert_eq!(json["object"], "text_completion");
    let choice = &json["choices"][0];
    assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some("Hello🎉 world"), Some("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(["Hello", "🎉", " world"]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 5, 6]));
    assert_eq!(choice["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 2);
    let chunks = server.completion(json!({"stream": true, "echo": true})).await.chunks();
    let text: String = choices(&chunks, 0).filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(text, "HiHello🎉 world");
    assert_eq!(server.completion(json!({})).await.ok()["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn several_prompts_give_choices_in_order() {
    let server = Server::start(|r| bytes(&format!("{}", r.prompt.len()))).await;
    let json = server.completion(json!({"prompt": ["a", "bb", "ccc"], "n": 2})).await.ok();
    let texts: Vec<&str> = json["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["1", "1", "2", "2", "3", "3"]);
    assert_eq!(json["usage"]["prompt_tokens"], 6);
    assert_eq!(json["usage"]["prompt_tokens_details"]["cached_tokens"], 9);
    let json = server.completion(json!({"prompt": [[1, 2], [IM]], "max_tokens": 1})).await.ok();
    assert_eq!(json["choices"].as_array().unwrap().len(), 2);
    assert_eq!(server.seen().last().unwrap().prompt, [IM]);
    // Who writes the whole prompt may write control tokens.
    server.completion(json!({"prompt": "a<|im_start|>b"})).await.ok();
    assert_eq!(server.seen().last().unwrap().prompt, [i32::from(b'a'), IM, i32::from(b'b')]);
}
const IM: i32 = crate::support::IM_START;

#[tokio::test]
async fn the_context_is_a_limit_that_is_told_before_any_header() {
    let server = Server::start(|_| vec![Act::Forever(i32::from(b'x'))]).await;
    let long = "y".repeat(N_CTX as usize);
    for stream in [false, true] {
        let error =
            server.chat(json!({"messages": [{"role": "user", "content": long}], "stream": stream})).await.error(400);
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().contains("512"));
    }
    let json = server.chat(json!({})).await.ok();
    assert_eq!(json["choices"][0]["finish_reason"], "length");
    assert_eq!(json["usage"]["total_tokens"], N_CTX);
    let json = server.chat(json!({"max_tokens": 9, "max_completion_tokens": 7})).await.ok();
    assert_eq!(json["usage"]["completion_tokens"], 7);
}

#[tokio::test]
async fn a_failure_is_http_before_the_first_step_and_an_event_after() {
    let failed = ApiError::new(ErrorClass::Unavailable, "stage 1 is gone").with_retry_after(3);
    let error = failed.clone();
    let server = Server::start(move |_| vec![Act::Token(FIRST_WORD), Act::Fail(error.clone())]).await;
    let chunks = server.chat(json!({"stream": true})).await.chunks();
    assert_eq!(content(&chunks, 0), "Hello");
    assert_eq!(chunks.last().unwrap()["error"]["message"], "stage 1 is gone");
    assert!(finishes(&chunks, 0).is_empty());
    let plain = server.chat(json!({})).await;
    plain.error(503);
    assert_eq!(plain.header("retry-after"), Some("3"));
}

#[tokio::test]
async fn every_class_of_error_has_its_status_type_and_code() {
    let table = [
        (ErrorClass::InvalidRequest, 400, "invalid_request_error", None),
        (ErrorClass::NotImplemented, 501, "invalid_request_error", Some("not_implemented")),
        (ErrorClass::RateLimit, 429, "rate_limit_error", Some("rate_limit_exceeded")),
        (ErrorClass::Internal, 500, "server_error", Some("internal_error")),
        (ErrorClass::Backend, 500, "server_error", Some("backend_error")),
        (ErrorClass::Io, 500, "server_error", Some("io_error")),
        (ErrorClass::Unavailable, 503, "service_unavailable_error", Some("unavailable")),
        (ErrorClass::Timeout, 503, "service_unavailable_error", Some("timeout")),
    ];
    for (class, status, kind, code) in table {
        let failed = ApiError::new(class, "what happened").with_retry_after(4);
        let server = Server::start(move |r| {
            // The first request fails at once, the second after a token.
            let token = (r.max_tokens == 9).then_some(Act::Token(FIRST_WORD));
            token.into_iter().chain([Act::Fail(failed.clone())]).collect()
        })
        .await;
        let plain = server.chat(json!({})).await;
        let event =
            server.chat(json!({"stream": true, "max_tokens": 9})).await.chunks().pop().unwrap()["error"].clone();
        assert_eq!(plain.header("retry-after"), Some("4"));
        for error in [plain.error(status), event] {
            let want = json!({"message": "what happened", "type": kind, "param": null, "code": code});
            assert_eq!(error, want, "{class:?}");
        }
        let metrics = String::from_utf8(server.get("/metrics").await.body).unwrap();
        let label = format!("http_response_status_code=\"{status}\",error_type=\"{}\"}} 1", code.unwrap_or(kind));
        assert!(metrics.contains(&label), "{label} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_at_once() {
    for stream in [false, true] {
        let mut server = Server::start(|_| vec![word("Hello"), Act::Hang]).await;
        let body =
            json!({"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, "n": 2});
        let headers = [("content-type", "application/json")];
        let mut client = server.open("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes()).await;
        if stream {
            let mut seen = Vec::new();
            while !String::from_utf8_lossy(&seen).contains("Hello") {
                let mut part = [0; 1024];
                let n = client.read(&mut part).await.unwrap();
                seen.extend_from_slice(&part[..n]);
            }
        } else {
            while server.seen().len() < 2 {
                tokio::task::yield_now().await;
            }
        }
        assert!(server.dropped.try_recv().is_err());
        drop(client);
        let mut gone = [server.dropped.recv().await.unwrap(), server.dropped.recv().await.unwrap()];
        gone.sort_unstable();
        assert_eq!(gone, [0, 1]);
    }
}

#[tokio::test]
async fn a_silent_stream_gets_comments() {
    let config = ApiConfig { keep_alive: Duration::from_millis(20), ..ApiConfig::default() };
    let server = Server::with(Setup { config, ..Setup::default() }, |_| vec![word("Hello"), Act::Hang]).await;
    let body = json!({"model": "fake-model", "messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let headers = [("content-type", "application/json")];
    let mut client = server.open("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes()).await;
    let mut seen = String::new();
    while !seen.contains(": keep-alive\n\n") {
        let mut part = [0; 1024];
        let n = client.read(&mut part).await.unwrap();
        assert!(n > 0, "the stream ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&part[..n]));
    }
}
