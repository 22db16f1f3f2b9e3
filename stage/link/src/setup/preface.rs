//! The fixed bytes before the setup document, and the documents on a stream.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Refusal, RefusalCode, Setup};
use crate::error::LinkError;

/// Major version of the protocol.
pub const MAJOR: u16 = 1;
/// Highest minor version spoken.
pub const MINOR: u16 = 0;
/// Bytes of the preface.
pub const PREFACE_BYTES: usize = 20;
/// Largest document after a preface, bytes.
pub const MAX_DOCUMENT_BYTES: u32 = 16_384;

const MAGIC: [u8; 8] = *b"SPLTMDL\x01";
const SETUP: u8 = 0;
const REFUSAL: u8 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPreface {
    magic: [u8; 8],
    major: U16,
    minor: U16,
    kind: u8,
    reserved: [u8; 3],
    length: U32,
}

const _: () = assert!(size_of::<RawPreface>() == PREFACE_BYTES);

/// What a peer says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// Its setup, and the highest minor it speaks.
    Setup(Box<Setup>, u16),
    /// No.
    Refusal(Box<Refusal>),
}

/// Reads preface and document.
///
/// # Errors
/// [`LinkError::Refusing`] with what the peer must be told when the bytes are no preface of this protocol or the document
/// cannot be read; [`LinkError::Io`].
pub async fn read_hello<R: AsyncRead + Unpin>(r: &mut R) -> Result<Hello, LinkError> {
    let mut head = [0; PREFACE_BYTES];
    r.read_exact(&mut head).await.map_err(|e| LinkError::io("reading the peer's setup", e))?;
    let raw: RawPreface = zerocopy::transmute!(head);
    let refuse = |code, message: String| Err(LinkError::Refusing(Refusal::new(code, message)));
    if raw.magic != MAGIC {
        return refuse(RefusalCode::Malformed, "the peer does not speak this protocol: no \"SPLTMDL\" preface".into());
    }
    if raw.major.get() != MAJOR {
        let refusal =
            Refusal::differ(RefusalCode::Version, "major", MAJOR, raw.major, "run releases of the same major");
        return Err(LinkError::Refusing(refusal));
    }
    if raw.reserved != [0; 3] {
        return refuse(RefusalCode::Malformed, format!("reserved bytes of the preface are {:?}, not 0", raw.reserved));
    }
    let length = raw.length.get();
    if length > MAX_DOCUMENT_BYTES {
        let message = format!("a setup of {length} bytes is more than the limit of {MAX_DOCUMENT_BYTES}");
        return refuse(RefusalCode::Malformed, message);
    }
    let mut document = vec![0; length as usize];
    r.read_exact(&mut document).await.map_err(|e| LinkError::io("reading the peer's setup", e))?;
    let parsed = match raw.kind {
        SETUP => serde_json::from_slice(&document).map(|s| Hello::Setup(Box::new(s), raw.minor.get())),
        REFUSAL => serde_json::from_slice(&document).map(|r| Hello::Refusal(Box::new(r))),
        kind => return refuse(RefusalCode::Malformed, format!("a preface of unknown kind {kind}")),
    };
    parsed.or_else(|e| refuse(RefusalCode::Malformed, format!("the document after the preface cannot be read: {e}")))
}

/// Writes preface and setup.
///
/// # Errors
/// [`LinkError::Io`]; also for a setup over [`MAX_DOCUMENT_BYTES`].
pub async fn write_setup<W: AsyncWrite + Unpin>(w: &mut W, setup: &Setup) -> Result<(), LinkError> {
    write_hello(w, SETUP, serde_json::to_vec(setup)).await
}

/// Writes preface and refusal.
///
/// # Errors
/// [`LinkError::Io`].
pub async fn write_refusal<W: AsyncWrite + Unpin>(w: &mut W, refusal: &Refusal) -> Result<(), LinkError> {
    write_hello(w, REFUSAL, serde_json::to_vec(refusal)).await
}

async fn write_hello<W: AsyncWrite + Unpin>(
    w: &mut W,
    kind: u8,
    document: Result<Vec<u8>, serde_json::Error>,
) -> Result<(), LinkError> {
    let what = "writing our setup";
    let document = document.map_err(|e| LinkError::io(what, e.into()))?;
    let length = match u32::try_from(document.len()) {
        Ok(n) if n <= MAX_DOCUMENT_BYTES => n,
        _ => {
            let message = format!("{} bytes are more than the limit of {MAX_DOCUMENT_BYTES}", document.len());
            return Err(LinkError::io(what, std::io::Error::other(message)));
        }
    };
    let raw = RawPreface {
        magic: MAGIC,
        major: MAJOR.into(),
        minor: MINOR.into(),
        kind,
        reserved: [0; 3],
        length: length.into(),
    };
    let bytes = [raw.as_bytes(), &document].concat();
    w.write_all(&bytes).await.map_err(|e| LinkError::io(what, e))?;
    w.flush().await.map_err(|e| LinkError::io(what, e))
}
