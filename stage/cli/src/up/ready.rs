//! When the API is ready, and what to do with it then.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::error::CliError;
use crate::http;

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(150);
/// Time for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The URL at which this machine reaches an API that listens on `address`.
#[must_use]
pub fn url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

/// A command that can be pasted; with `keyed`, the key is taken from a variable.
#[must_use]
pub fn curl_line(url: &str, model: &str, keyed: bool) -> String {
    let key = if keyed { " -H \"Authorization: Bearer $SPLITMODEL_API_KEY\"" } else { "" };
    let body = serde_json::json!({
        "model": model,
        "stream": true,
        "messages": [{"role": "user", "content": "Hello!"}],
    });
    let quoted = body.to_string().replace('\'', r"'\''");
    format!("curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'")
}

/// Resolves when `/ready` of the API answers 200: a token has crossed the whole chain.
///
/// # Errors
/// [`CliError`] when it cannot even be asked.
pub async fn until_ready(api: SocketAddr) -> Result<(), CliError> {
    let base = http::base(&url(api))?;
    let client = http::client(&base, http::Idle::Kept)?;
    let ready = http::join(&base, "ready")?;
    loop {
        let answer = client.get(ready.clone()).timeout(TIMEOUT).send().await;
        if answer.is_ok_and(|r| r.status() == 200) {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_can_be_dialled() {
        assert_eq!(url("0.0.0.0:80".parse().unwrap()), "http://127.0.0.1:80");
        assert_eq!(url("[::]:80".parse().unwrap()), "http://[::1]:80");
        assert_eq!(url("192.0.2.1:80".parse().unwrap()), "http://192.0.2.1:80");
    }

    #[test]
    fn the_curl_line_survives_a_shell() {
        let line = curl_line("http://h:1", "it's", false);
        assert!(line.contains(r#""model":"it'\''s""#) && !line.contains("Authorization"), "{line}");
        assert!(curl_line("http://h:1", "m", true).contains("Bearer $SPLITMODEL_API_KEY\""));
    }
}
