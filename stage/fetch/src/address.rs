//! From a source to an address.

use std::path::PathBuf;

use reqwest::Url;

use crate::FetchError;

/// Where a model is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Local(PathBuf),
    Remote(Url),
}

fn bad<T>(source: &str, what: impl std::fmt::Display) -> Result<T, FetchError> {
    Err(FetchError::Source(format!("`{}`: {what}", shown_text(source))))
}

/// A source as errors may show it: a query may be a password.
fn shown_text(source: &str) -> &str {
    source.split(['?', '#']).next().unwrap_or_default()
}

/// The address as errors and logs may show it.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_username(""); // an address without a host has none
    let _ = url.set_password(None);
    url.to_string()
}

/// The address that `source` means; `hf://` leads to `hf_endpoint`.
pub(crate) fn parse(source: &str, hf_endpoint: &str) -> Result<Address, FetchError> {
    let Some((scheme, rest)) = source.split_once("://") else {
        return Ok(Address::Local(source.into()));
    };
    match scheme {
        "file" => Ok(Address::Local(rest.into())),
        "https" => https(source).map(Address::Remote),
        "hf" => hf(source, rest, hf_endpoint).map(Address::Remote),
        "http" => bad(
            shown_text(source),
            "http:// is not read, as nothing vouches for what it brings; use https://, or hf:// with the mirror's address in \
             HF_ENDPOINT",
        ),
        "pvc" | "oci" => {
            bad(source, format_args!("{scheme}:// is mounted by the operator; here use file:// and the path"))
        }
        _ => bad(source, format_args!("{scheme}:// is unknown; use file://, https:// or hf://")),
    }
}

fn https(source: &str) -> Result<Url, FetchError> {
    let url = match Url::parse(source) {
        Ok(url) => url,
        Err(e) => return bad(source.rsplit_once('@').map_or(source, |(_, host)| host), e),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return bad(&shown(&url), "passwords do not belong into the address; put them into a credentials directory");
    }
    if url.path().ends_with('/') {
        return bad(source, "the path of a file is missing");
    }
    Ok(url)
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text != "."
        && text != ".."
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn hf(source: &str, rest: &str, endpoint: &str) -> Result<Url, FetchError> {
    const FORM: &str = "must look like hf://owner/repo/file.gguf or hf://owner/repo@revision/file.gguf";
    let mut parts = rest.splitn(3, '/');
    let (Some(owner), Some(repo), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return bad(source, FORM);
    };
    let (repo, revision) = repo.split_once('@').unwrap_or((repo, "main"));
    let path: Vec<_> = path.split('/').collect();
    if ![owner, repo, revision].into_iter().all(is_word) || path.iter().any(|p| matches!(*p, "" | "." | "..")) {
        return bad(source, FORM);
    }
    let wrong = |what: &str| bad::<Url>("HF_ENDPOINT", what);
    let Ok(mut url) = Url::parse(endpoint) else {
        return wrong("is no address; write one such as https://huggingface.co");
    };
    if !matches!(url.scheme(), "http" | "https") || !url.username().is_empty() || url.password().is_some() {
        return wrong("must be an http:// or https:// address without a password");
    }
    url.set_query(None);
    url.set_fragment(None);
    let Ok(mut segments) = url.path_segments_mut() else {
        return wrong("is no address that has paths");
    };
    segments.pop_if_empty().extend([owner, repo, "resolve", revision]).extend(path);
    drop(segments);
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(source: &str, endpoint: &str) -> String {
        match parse(source, endpoint).unwrap() {
            Address::Remote(url) => url.to_string(),
            Address::Local(path) => panic!("{path:?}"),
        }
    }

    #[test]
    fn sources_become_addresses() {
        assert_eq!(parse("/a/b.gguf", "").unwrap(), Address::Local("/a/b.gguf".into()));
        assert_eq!(parse("file:///a/b.gguf", "").unwrap(), Address::Local("/a/b.gguf".into()));
        assert_eq!(remote("https://h:8443/a.gguf?sig=1", ""), "https://h:8443/a.gguf?sig=1");
        let hub = "https://huggingface.co";
        assert_eq!(remote("hf://o/r/d/m.gguf", hub), "https://huggingface.co/o/r/resolve/main/d/m.gguf");
        assert_eq!(
            remote("hf://o/r@v1/m 1.gguf", "http://mirror:80/hub/"),
            "http://mirror/hub/o/r/resolve/v1/m%201.gguf"
        );
    }

    #[test]
    fn what_is_no_source_is_refused_and_keeps_its_secrets() {
        for source in [
            "http://h/a?secret",
            "https://u:secret@h/a",
            "https://u:secret@/a",
            "https://h/a/?secret",
            "hf://o/r",
            "hf://o/../m.gguf",
            "hf://o/r/../m.gguf",
            "hf://o/r@a:b/m.gguf",
            "pvc://c/m.gguf?secret",
            "ftp://h/m#secret",
            "https://",
        ] {
            let text = parse(source, "https://huggingface.co").unwrap_err().to_string();
            assert!(text.starts_with("model.source: ") && !text.contains("secret"), "{source}: {text}");
        }
        for endpoint in ["", "huggingface.co", "ftp://h", "https://u:secret@h", "data:secret"] {
            let text = parse("hf://o/r/m.gguf", endpoint).unwrap_err().to_string();
            assert!(text.contains("HF_ENDPOINT") && !text.contains("secret"), "{endpoint}: {text}");
        }
    }
}
