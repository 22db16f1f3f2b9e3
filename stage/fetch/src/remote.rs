//! A remote file, read in ranges.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures::stream::{self, StreamExt, TryStreamExt};
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LAST_MODIFIED};
use reqwest::{Response, StatusCode, Url};
use splitmodel_gguf::Source;
use tokio::time::timeout;

use crate::HttpError;
use crate::address::shown;
use crate::client::{Client, Tries, failed, refusal};
use crate::stream::Segments;

/// Bytes of the first request: the header of most shards, and the beginning of a whole one.
const HEAD: u64 = 256 << 10;
/// Small reads at once.
const AT_ONCE: usize = 8;

/// What tells this version of a file from others.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    len: u64,
    etag: Option<String>,
    modified: Option<String>,
}

/// A file on a server. Its identity is that of the first answer; another one later is an error.
pub(crate) struct Remote {
    file: Arc<File>,
    head: Vec<u8>,
}

pub(crate) struct File {
    client: Arc<Client>,
    url: Url,
    identity: OnceLock<Identity>,
    /// Where redirects led to, until that fails.
    found: Mutex<Option<Url>>,
}

impl Remote {
    /// Asks for the beginning of the file at `url`.
    pub(crate) fn open(client: Arc<Client>, url: Url) -> splitmodel_gguf::Result<Self> {
        let file = Arc::new(File { client: client.clone(), url, identity: OnceLock::new(), found: Mutex::new(None) });
        let mut head = Vec::new();
        let read = client
            .runtime()
            .and_then(|runtime| runtime.block_on(file.get(0..HEAD, &mut |bytes| head.extend_from_slice(bytes))));
        read.map_err(|e| e.into_gguf(shown(&file.url), "open the file"))?;
        Ok(Self { file, head })
    }

    fn in_head(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.head.get(start..start.checked_add(len)?)
    }

    fn identity(&self) -> io::Result<&Identity> {
        self.file.identity.get().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Refuses a range beyond the end.
    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|end| self.identity().is_ok_and(|i| *end <= i.len));
        end.map(drop).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl Source for Remote {
    fn len(&self) -> io::Result<u64> {
        Ok(self.identity()?.len)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        match self.in_head(offset, buf.len()) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => {
                let runtime = self.file.client.runtime().map_err(HttpError::into_io)?;
                runtime.block_on(self.file.fill(offset, buf)).map_err(HttpError::into_io)?;
            }
        }
        Ok(())
    }

    fn read_many(&self, reads: &mut [(u64, Vec<u8>)]) -> io::Result<()> {
        let mut far = Vec::new();
        for (offset, buf) in reads {
            self.check(*offset, buf.len() as u64)?;
            match self.in_head(*offset, buf.len()) {
                Some(bytes) => buf.copy_from_slice(bytes),
                None => far.push(self.file.fill(*offset, buf)),
            }
        }
        let all = stream::iter(far).buffer_unordered(AT_ONCE).try_collect::<()>();
        let runtime = self.file.client.runtime().map_err(HttpError::into_io)?;
        runtime.block_on(all).map_err(HttpError::into_io)
    }

    fn stream(&self, offset: u64, len: u64) -> io::Result<Option<Box<dyn Read + '_>>> {
        self.check(offset, len)?;
        if let Some(bytes) = usize::try_from(len).ok().and_then(|len| self.in_head(offset, len)) {
            return Ok(Some(Box::new(bytes)));
        }
        Ok(Some(Box::new(Segments::new(self.file.clone(), offset..offset + len))))
    }

    fn version(&self) -> Option<String> {
        // The length alone would take another file for this one.
        let Identity { len, etag, modified } = self.file.identity.get()?;
        (etag.is_some() || modified.is_some()).then(|| format!("{len} {etag:?} {modified:?}"))
    }

    fn describe(&self) -> String {
        shown(&self.file.url)
    }
}

impl File {
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    async fn fill(&self, offset: u64, buf: &mut [u8]) -> Result<(), HttpError> {
        let range = offset..offset + buf.len() as u64;
        let mut at = 0;
        self.get(range, &mut |bytes| {
            if let Some(place) = buf.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
            at += bytes.len();
        })
        .await
    }

    /// Brings `range`, piece by piece in order; what breaks off goes on where it was.
    pub(crate) async fn get(&self, range: Range<u64>, take: &mut (dyn FnMut(&[u8]) + Send)) -> Result<(), HttpError> {
        let mut tries = Tries::new(&self.client.patience);
        let mut range = range;
        loop {
            let before = range.start;
            let Err(error) = self.attempt(&mut range, take).await else {
                return Ok(());
            };
            self.forget_found();
            if range.start > before {
                tries.progress();
            }
            tries.wait(error).await?;
        }
    }

    /// One request; `range` shrinks by what it brought, and is empty at the end.
    async fn attempt(&self, range: &mut Range<u64>, take: &mut (dyn FnMut(&[u8]) + Send)) -> Result<(), HttpError> {
        if range.is_empty() {
            return Ok(());
        }
        let mut response = self.ask(range).await?;
        let (start, end) = self.identify(&response, range)?;
        // The file may be shorter than what was asked for at first.
        range.end = end;
        if start != range.start {
            return Err(HttpError::Answer(format!("bytes from {start} instead of {}", range.start)));
        }
        let stall = self.client.patience.stall;
        while !range.is_empty() {
            let piece = timeout(stall, response.chunk()).await.map_err(|_| HttpError::Stalled(stall))?;
            let Some(piece) = piece.map_err(failed)? else {
                return Err(HttpError::Connection("the connection ended early".to_owned()));
            };
            let wanted = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
            let piece = piece.get(..wanted).unwrap_or(&piece);
            self.client.beat();
            take(piece);
            range.start += piece.len() as u64;
        }
        Ok(())
    }

    /// The answer with the bytes; from where redirects led to earlier, as long as that works.
    async fn ask(&self, range: &Range<u64>) -> Result<Response, HttpError> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(found) = found {
            let (response, _, _) = self.client.send(&found, range).await?;
            if response.status() == StatusCode::PARTIAL_CONTENT {
                return Ok(response);
            }
            // Signed addresses expire: the server gives another one.
            self.forget_found();
        }
        let (response, from, credentials) = self.client.send(&self.url, range).await?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Err(self.refused(&response, credentials));
        }
        if from != self.url {
            *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(from);
        }
        Ok(response)
    }

    fn forget_found(&self) {
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn refused(&self, response: &Response, credentials: bool) -> HttpError {
        if response.status() != StatusCode::RANGE_NOT_SATISFIABLE {
            return refusal(response, credentials);
        }
        let now = content_range(response.headers()).map_or(0, |(_, total)| total);
        match self.identity.get() {
            Some(known) => HttpError::Changed { what: "size", before: known.len.to_string(), now: now.to_string() },
            None => HttpError::Empty,
        }
    }

    /// Checks an answer against what was asked for and against the file's identity, which the first one sets. Gives the
    /// range of its bytes.
    fn identify(&self, response: &Response, asked: &Range<u64>) -> Result<(u64, u64), HttpError> {
        let headers = response.headers();
        let Some((Some((start, end)), len)) = content_range(headers) else {
            return Err(HttpError::Answer("HTTP 206 without a range and the file's length".to_owned()));
        };
        if end > len || end != asked.end.min(len) || start >= end {
            return Err(HttpError::Answer(format!("bytes {start} to {end} of {len} for {asked:?}")));
        }
        if headers.get(CONTENT_LENGTH).is_some_and(|n| n.to_str().ok() != Some((end - start).to_string().as_str())) {
            return Err(HttpError::Answer("a Content-Length that is not that of the range".to_owned()));
        }
        let text = |name| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let now = Identity { len, etag: text(ETAG), modified: text(LAST_MODIFIED) };
        let known = self.identity.get_or_init(|| now.clone());
        let changed = |what, before: &Option<String>, now: &Option<String>| {
            let show = |v: &Option<String>| v.clone().unwrap_or_else(|| "absent".to_owned());
            HttpError::Changed { what, before: show(before), now: show(now) }
        };
        if known.len != now.len {
            return Err(changed("size", &Some(known.len.to_string()), &Some(now.len.to_string())));
        }
        if known.etag != now.etag {
            return Err(changed("ETag", &known.etag, &now.etag));
        }
        // Where there is an ETag, servers that mirror one another may have other dates.
        if known.etag.is_none() && known.modified != now.modified {
            return Err(changed("Last-Modified", &known.modified, &now.modified));
        }
        Ok((start, end))
    }
}

/// `bytes 0-99/1000` → (0 to 100, 1000); `bytes */1000` → no range.
fn content_range(headers: &HeaderMap) -> Option<(Option<(u64, u64)>, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.trim().strip_prefix("bytes ")?;
    let (range, len) = text.split_once('/')?;
    let len = len.parse().ok()?;
    if range == "*" {
        return Some((None, len));
    }
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    Some((Some((first, last.checked_add(1)?)), len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        let parse = |text: &str| content_range(&HeaderMap::from_iter([(CONTENT_RANGE, text.parse().unwrap())]));
        assert_eq!(parse("bytes 0-99/1000"), Some((Some((0, 100)), 1000)));
        assert_eq!(parse("bytes */1000"), Some((None, 1000)));
        for text in ["bytes 0-99/*", "0-99/1000", "bytes 0-/5", "bytes -1-2/5", "bytes 0-18446744073709551615/1", ""] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
