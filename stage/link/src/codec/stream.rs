//! Messages over byte streams. Buffers are kept from message to message.

use std::io::{self, IoSlice};

use half::f16;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use zerocopy::IntoBytes;

use super::activations::{f16_row, from_f16};
use super::encode::{encode_head, to_f16};
use super::header::Header;
use super::{ActivationDtype, HEADER_BYTES, Limits, Message, decode_meta};
use crate::error::LinkError;

/// First allocation for sections and records; more only as bytes arrive.
const META_START: usize = 64 << 10;
/// f16 elements converted at a time, at least a row.
const F16_STEP: usize = 32 << 10;

/// Reads messages from a stream.
#[derive(Debug, Default)]
pub struct MessageReader {
    meta: Vec<u8>,
    half: Vec<f16>,
    last_bytes: u64,
}

impl MessageReader {
    /// Bytes of the message read last, header included.
    #[must_use]
    pub fn last_bytes(&self) -> u64 {
        self.last_bytes
    }

    /// Reads one message. The floats of f32 activations are read to where they stay. Not cancel-safe: after a dropped
    /// call the stream is out of step.
    ///
    /// # Errors
    /// [`LinkError::Codec`] for what breaks the protocol; [`LinkError::Io`] when the stream fails or ends, with
    /// `UnexpectedEof` also when it ends between two messages.
    pub async fn read<R: AsyncRead + Unpin>(&mut self, r: &mut R, limits: &Limits) -> Result<Message, LinkError> {
        let mut head = [0; HEADER_BYTES];
        r.read_exact(&mut head).await.map_err(|e| LinkError::io("reading a message", e))?;
        let header = Header::parse(&head, limits)?;
        self.last_bytes = header.total();
        self.fill_meta(r, header.meta_bytes()).await.map_err(|e| LinkError::io("reading sections and rows", e))?;
        let mut message = decode_meta(&header, &self.meta)?;
        if let (Message::Frame(frame), Some(dtype)) = (&mut message, header.dtype) {
            let (rows, width) = (header.records as usize, header.width as usize);
            let mut data = vec![0.0f32; rows * width];
            match dtype {
                ActivationDtype::F32 => {
                    r.read_exact(data.as_mut_bytes()).await.map_err(|e| LinkError::io("reading activations", e))?;
                }
                ActivationDtype::F16 => self.fill_f16(r, width, &mut data).await?,
            }
            frame.activations.width = header.width;
            frame.activations.data = data;
        }
        Ok(message)
    }

    async fn fill_meta<R: AsyncRead + Unpin>(&mut self, r: &mut R, bytes: usize) -> io::Result<()> {
        self.meta.clear();
        self.meta.reserve(bytes.min(META_START));
        let got = r.take(bytes as u64).read_to_end(&mut self.meta).await?;
        if got == bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    async fn fill_f16<R: AsyncRead + Unpin>(
        &mut self,
        r: &mut R,
        width: usize,
        data: &mut [f32],
    ) -> Result<(), LinkError> {
        let step = (F16_STEP / f16_row(width)).max(1);
        for (i, floats) in data.chunks_mut(step * width).enumerate() {
            self.half.resize(floats.len() / width * f16_row(width), f16::ZERO);
            r.read_exact(self.half.as_mut_bytes()).await.map_err(|e| LinkError::io("reading activations", e))?;
            from_f16(&self.half, width, i * step, floats)?;
        }
        Ok(())
    }
}

/// Writes messages to a stream.
#[derive(Debug, Default)]
pub struct MessageWriter {
    head: Vec<u8>,
    half: Vec<f16>,
}

impl MessageWriter {
    /// Writes one message and flushes; returns its bytes. f32 activations are written from where they are. Not cancel-safe.
    ///
    /// # Errors
    /// [`LinkError::Codec`] when the message cannot be sent (nothing is written then), [`LinkError::Io`].
    pub async fn write<W: AsyncWrite + Unpin>(
        &mut self,
        w: &mut W,
        message: &Message,
        dtype: ActivationDtype,
    ) -> Result<u64, LinkError> {
        self.head.clear();
        self.half.clear();
        let payload = match encode_head(message, dtype, &mut self.head)? {
            None => &[],
            Some(a) if dtype == ActivationDtype::F32 => a.data.as_bytes(),
            Some(a) => {
                to_f16(a, &mut self.half);
                self.half.as_bytes()
            }
        };
        write_both(w, &self.head, payload).await.map_err(|e| LinkError::io("writing a message", e))?;
        Ok((self.head.len() + payload.len()) as u64)
    }
}

/// One system call for head and payload where the kernel takes both.
async fn write_both<W: AsyncWrite + Unpin>(w: &mut W, head: &[u8], payload: &[u8]) -> io::Result<()> {
    let mut slices = [IoSlice::new(head), IoSlice::new(payload)];
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        let n = w.write_vectored(left).await?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut left, n);
    }
    w.flush().await
}

/// Reads one message; [`MessageReader`] does the same with buffers that live on.
///
/// # Errors
/// See [`MessageReader::read`].
pub async fn read_message<R: AsyncRead + Unpin>(r: &mut R, limits: &Limits) -> Result<Message, LinkError> {
    MessageReader::default().read(r, limits).await
}

/// Writes one message and flushes; [`MessageWriter`] does the same with buffers that live on.
///
/// # Errors
/// See [`MessageWriter::write`].
pub async fn write_message<W: AsyncWrite + Unpin>(
    w: &mut W,
    message: &Message,
    dtype: ActivationDtype,
) -> Result<(), LinkError> {
    MessageWriter::default().write(w, message, dtype).await.map(|_| ())
}
