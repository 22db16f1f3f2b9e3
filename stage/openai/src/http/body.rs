//! Request bodies: limited, decompressed, parsed.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use flate2::read::{GzDecoder, ZlibDecoder};
use futures::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::error::{ApiError, ErrorClass};

/// What is read and thrown away of a body that is too large, so that its sender sees the answer and not a reset.
const DRAIN_BYTES: usize = 64 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(10);
/// Longest pause within a body: who sends no more must not hold a connection for ever.
const PAUSE: Duration = Duration::from_secs(30);
/// Seconds after which a client may try again when bodies take all the memory they may.
const RETRY_AFTER: u32 = 5;

enum Encoding {
    Plain,
    Gzip,
    Deflate,
}

/// A body as it came, within the limits.
pub(crate) struct RawBody {
    bytes: Vec<u8>,
    encoding: Encoding,
    limit: usize,
    /// Its part of the memory for bodies.
    _share: Share,
}

/// Reads the body of a request.
pub(crate) async fn read(request: Request, app: &App) -> Result<RawBody, ApiError> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers)?;
    let (encoding, limit) = (encoding(&parts.headers)?, app.config.body_limit);
    let mut share = Share { all: app.bodies.clone(), own: None };
    let bytes = collect(&parts.headers, body, limit, &mut share).await?;
    Ok(RawBody { bytes, encoding, limit, _share: share })
}

/// What a body takes of the memory for bodies, in KiB.
struct Share {
    all: Arc<Semaphore>,
    own: Option<OwnedSemaphorePermit>,
}

impl Share {
    /// Takes room for `bytes` in all. Without waiting: bodies that wait for each other would hold what they have.
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let has = self.own.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let kib = u32::try_from(bytes.div_ceil(1024).saturating_sub(has)).unwrap_or(u32::MAX);
        let more = self.all.clone().try_acquire_many_owned(kib).map_err(|_| {
            let message = format!("Too many large requests are under way. Try again in {RETRY_AFTER} s.");
            ApiError::new(ErrorClass::Unavailable, message).with_retry_after(RETRY_AFTER)
        })?;
        match &mut self.own {
            Some(own) => own.merge(more),
            None => self.own = Some(more),
        }
        Ok(())
    }
}

impl RawBody {
    /// The JSON in it, decompressed within the same limit. Takes a while for large bodies.
    pub(crate) fn json(self) -> Result<Value, ApiError> {
        let bytes = match self.encoding {
            Encoding::Plain => self.bytes,
            Encoding::Gzip => inflate(GzDecoder::new(&self.bytes[..]), self.limit)?,
            Encoding::Deflate => inflate(ZlibDecoder::new(&self.bytes[..]), self.limit)?,
        };
        if bytes.is_empty() {
            return Err(ApiError::new(ErrorClass::InvalidRequest, "The body is empty; a JSON object is needed."));
        }
        serde_json::from_slice(&bytes)
            .map_err(|e| ApiError::new(ErrorClass::InvalidRequest, format!("The body is not valid JSON: {e}.")))
    }
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let message = "The body must be JSON; send `Content-Type: application/json`.";
    Err(ApiError::new(ErrorClass::UnsupportedMedia, message))
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, ApiError> {
    let value = headers.get(header::CONTENT_ENCODING).map(|v| v.to_str().unwrap_or("?").trim().to_ascii_lowercase());
    match value.as_deref() {
        None | Some("" | "identity") => Ok(Encoding::Plain),
        Some("gzip" | "x-gzip") => Ok(Encoding::Gzip),
        Some("deflate") => Ok(Encoding::Deflate),
        Some(_) => {
            let message = "This Content-Encoding is not read here; send the body plain, gzip or deflate.";
            Err(ApiError::new(ErrorClass::UnsupportedMedia, message))
        }
    }
}

async fn collect(headers: &HeaderMap, body: Body, limit: usize, share: &mut Share) -> Result<Vec<u8>, ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let mut stream = body.into_data_stream();
    if announced.is_some_and(|n| n > limit) {
        // Who asks before sending is told at once.
        if !headers.contains_key(header::EXPECT) {
            drain(&mut stream).await;
        }
        return Err(too_large(limit));
    }
    let mut bytes = Vec::new();
    let late = |_| ApiError::new(ErrorClass::InvalidRequest, format!("No more of the body came for {PAUSE:?}."));
    while let Some(chunk) = tokio::time::timeout(PAUSE, stream.next()).await.map_err(late)? {
        let chunk =
            chunk.map_err(|_| ApiError::new(ErrorClass::InvalidRequest, "The body ended before it was complete."))?;
        if bytes.len() + chunk.len() > limit {
            drain(&mut stream).await;
            return Err(too_large(limit));
        }
        if let Err(busy) = share.grow(bytes.len() + chunk.len()) {
            share.own = None;
            drain(&mut stream).await;
            return Err(busy);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

async fn drain(stream: &mut BodyDataStream) {
    let read = async {
        let mut left = DRAIN_BYTES;
        while let Some(Ok(chunk)) = stream.next().await {
            match left.checked_sub(chunk.len()) {
                Some(n) => left = n,
                None => break,
            }
        }
    };
    // Late or not, the answer is the same.
    let _late = tokio::time::timeout(DRAIN_TIME, read).await;
}

fn inflate(reader: impl Read, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::new();
    reader
        .take(limit as u64 + 1)
        .read_to_end(&mut out)
        .map_err(|e| ApiError::new(ErrorClass::InvalidRequest, format!("The compressed body cannot be read: {e}.")))?;
    if out.len() > limit {
        return Err(too_large(limit));
    }
    Ok(out)
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(ErrorClass::TooLarge, format!("The body is larger than the {limit} bytes this server reads."))
}
