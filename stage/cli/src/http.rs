//! The HTTP side: one client, errors that say what to do.
use std::net::IpAddr;
use std::time::Duration;

use reqwest::{Client, Url};

use crate::error::CliError;

/// Time a connection may take.
const CONNECT: Duration = Duration::from_secs(10);

/// The address of an API, checked, without a slash at the end.
///
/// # Errors
/// [`CliError::Flag`] when it is no `http://` or `https://` address.
pub fn base(url: &str) -> Result<Url, CliError> {
    let bad = |message: String| CliError::Flag { flag: "url", message };
    let parsed = Url::parse(url).map_err(|e| bad(format!("`{url}`: {e}; write http://host:port")))?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
        return Err(bad(format!("`{url}` is no http:// or https:// address")));
    }
    Ok(parsed)
}

/// `path` under `base`, whether or not that ends in `/` or `/v1`.
///
/// # Errors
/// [`CliError::Flag`] when the two do not make an address.
pub fn join(base: &Url, path: &str) -> Result<Url, CliError> {
    let root = base.as_str().trim_end_matches('/').trim_end_matches("/v1");
    Url::parse(&format!("{root}/{path}")).map_err(|e| CliError::Flag { flag: "url", message: e.to_string() })
}

/// What becomes of a connection whose answer is complete.
#[derive(Clone, Copy, Debug)]
pub enum Idle {
    /// The next request goes over it. When the server ended it meanwhile, and that did not come through yet, the request fails.
    Kept,
    /// Each request has its own.
    Closed,
}

/// A client for `base`. Proxies are not asked for this machine's own addresses.
///
/// # Errors
/// [`CliError::Api`] when TLS cannot be set up.
pub fn client(base: &Url, idle: Idle) -> Result<Client, CliError> {
    // A second call finds it installed: fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let host = base.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let local = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let builder = Client::builder().connect_timeout(CONNECT);
    let builder = if local { builder.no_proxy() } else { builder };
    let builder = match idle {
        Idle::Kept => builder,
        Idle::Closed => builder.pool_max_idle_per_host(0),
    };
    builder.build().map_err(|e| api_error(base, &e))
}

/// What failed, with its causes and the remedy.
#[must_use]
pub fn api_error(url: &Url, error: &reqwest::Error) -> CliError {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(e) = cause {
        message = e.to_string();
        cause = e.source();
    }
    if error.is_connect() {
        message
            .push_str("; is the server running? `splitmodel status` shows what runs here, --url names another address");
    }
    CliError::Api { url: url.to_string(), message }
}

/// The server's words for an answer that is no success: the `error.message` of its body, or its first characters.
#[must_use]
pub fn refusal(url: &Url, status: u16, body: &str) -> CliError {
    let parsed: Option<serde_json::Value> = serde_json::from_str(body).ok();
    let words = parsed
        .as_ref()
        .and_then(|v| v.pointer("/error/message"))
        .and_then(|v| v.as_str())
        .map_or_else(|| body.trim().chars().take(200).collect(), |words| words.trim_end_matches('.').to_owned());
    let remedy = match status {
        401 | 403 => "; give the API's key with --api-key",
        404 => "; is this an OpenAI API, and is --model one that it lists?",
        _ => "",
    };
    let colon = if words.is_empty() { "" } else { ": " };
    CliError::Api { url: url.to_string(), message: format!("HTTP {status}{colon}{words}{remedy}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_join_whatever_the_user_wrote() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(join(&base(url).unwrap(), "v1/models").unwrap().as_str(), "http://h:1/v1/models");
        }
        assert_eq!(join(&base("https://h/p").unwrap(), "ready").unwrap().as_str(), "https://h/p/ready");
    }

    #[test]
    fn bad_addresses_name_the_flag() {
        for url in ["127.0.0.1:8000", "ftp://h", "", "http://"] {
            let text = base(url).unwrap_err().to_string();
            assert!(text.starts_with("--url: "), "{text}");
        }
    }

    #[test]
    fn refusals_carry_the_servers_words() {
        let url = base("http://h").unwrap();
        let text = refusal(&url, 401, r#"{"error":{"message":"wrong key"}}"#).to_string();
        assert!(text.contains("HTTP 401: wrong key") && text.contains("--api-key"), "{text}");
        assert!(refusal(&url, 500, "").to_string().ends_with("HTTP 500"));
    }
}
