//! The `Authorization` header, from a directory as a mounted Secret is one.

use std::io::Read;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::HeaderValue;

use crate::FetchError;

/// Longest token, user name or password.
const MAX_SECRET: u64 = 16 << 10;

/// What `dir` says: `token`, or `username` and `password`. The header's value is marked as sensitive.
pub(crate) fn read(dir: &Path) -> Result<HeaderValue, FetchError> {
    let wrong = |what: String| FetchError::Credentials { dir: dir.to_owned(), what };
    let file = |name: &str| -> Result<Option<String>, FetchError> {
        let open = match std::fs::File::open(dir.join(name)) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(wrong(format!("`{name}` cannot be read: {e}"))),
        };
        let mut text = String::new();
        let read = open.take(MAX_SECRET + 1).read_to_string(&mut text);
        read.map_err(|e| wrong(format!("`{name}` cannot be read: {e}")))?;
        if text.len() as u64 > MAX_SECRET {
            return Err(wrong(format!("`{name}` is longer than {MAX_SECRET} bytes")));
        }
        let text = text.trim_end_matches(['\n', '\r']);
        if text.is_empty() { Err(wrong(format!("`{name}` is empty"))) } else { Ok(Some(text.to_owned())) }
    };
    if !dir.is_dir() {
        return Err(wrong("is no directory".to_owned()));
    }
    let header = match (file("token")?, file("username")?, file("password")?) {
        (Some(token), _, _) => format!("Bearer {}", token.trim()),
        (None, Some(user), Some(_)) if user.contains(':') => {
            return Err(wrong("`username` has a colon, which Basic authentication cannot send".to_owned()));
        }
        (None, Some(user), Some(password)) => format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))),
        _ => return Err(wrong("has neither a file `token` nor the files `username` and `password`".to_owned())),
    };
    // The error would show nothing of it either; say which characters it may have.
    let mut value = HeaderValue::from_str(&header)
        .map_err(|_| wrong("hold characters that no HTTP header can carry; use visible ASCII".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_before_passwords_and_nothing_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let wrong = || read(dir.path()).unwrap_err().to_string();
        assert!(wrong().contains("neither"));
        put("username", "me");
        assert!(wrong().contains("neither"));
        put("password", "hidden\n");
        let value = read(dir.path()).unwrap();
        assert_eq!(value.to_str().unwrap(), "Basic bWU6aGlkZGVu");
        assert_eq!(format!("{value:?}"), "Sensitive");
        put("username", "m:e");
        assert!(wrong().contains("colon"));
        put("token", "hf_hidden\r\n");
        assert_eq!(read(dir.path()).unwrap().to_str().unwrap(), "Bearer hf_hidden");
        put("token", "\n");
        assert!(wrong().contains("`token` is empty"));
        put("token", "hid\nXYZ");
        assert!(wrong().contains("characters") && !wrong().contains("XYZ"), "{}", wrong());
        put("token", &"x".repeat(20_000));
        assert!(wrong().contains("longer"));
        assert!(read(&dir.path().join("token")).unwrap_err().to_string().contains("no directory"));
    }
}
