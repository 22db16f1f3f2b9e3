//! A directory as bytes, for a stage 0 that starts again: `SMDX`, version, number of entries; each entry's page, slot, namespace,
//! number of tokens and tokens, the one used longest ago first; then eight bytes of the BLAKE3 of all that. Integers are little-endian.

use crate::directory::{Directory, Place, Settings};
use crate::{Namespace, Token};

const MAGIC: [u8; 4] = *b"SMDX";
const VERSION: u32 = 1;
const CHECK: usize = 8;
/// More pages than can have been made after the snapshot was: where a clock went back, `first_page` does not stand behind them.
const UNSEEN: u64 = 1 << 20;

/// Why bytes are no directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// They were changed or cut off.
    #[error("the directory of prefixes is not what was written")]
    Damaged,
    /// Another version wrote them.
    #[error("the directory of prefixes has version {0}, which this program does not read")]
    Version(u32),
}

fn check(bytes: &[u8]) -> [u8; CHECK] {
    let mut out = [0; CHECK];
    out.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECK]);
    out
}

impl Directory {
    /// All entries as bytes.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 64 * self.len() + 4 * self.tokens());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        let entries = self.oldest_first();
        out.extend((entries.len() as u64).to_le_bytes());
        for (place, namespace, tokens) in entries {
            out.extend(place.page.to_le_bytes());
            out.extend(place.slot.to_le_bytes());
            out.extend(namespace.bytes());
            out.extend(place.length.to_le_bytes());
            tokens.iter().for_each(|t| out.extend(t.to_le_bytes()));
        }
        let check = check(&out);
        out.extend(check);
        out
    }

    /// The directory of a [snapshot](Self::snapshot), as far as `settings` have room: of too many entries the last used ones.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn restore(settings: Settings, bytes: &[u8]) -> Result<Self, SnapshotError> {
        let (body, sum) = bytes.split_at_checked(bytes.len().saturating_sub(CHECK)).ok_or(SnapshotError::Damaged)?;
        if check(body) != sum {
            return Err(SnapshotError::Damaged);
        }
        let mut rest = Rest(body);
        if rest.take()? != MAGIC {
            return Err(SnapshotError::Damaged);
        }
        let version = u32::from_le_bytes(rest.take()?);
        if version != VERSION {
            return Err(SnapshotError::Version(version));
        }
        let mut directory = Self::new(settings);
        for _ in 0..u64::from_le_bytes(rest.take()?) {
            let page = u64::from_le_bytes(rest.take()?);
            if page > u64::MAX / 2 {
                return Err(SnapshotError::Damaged);
            }
            let slot = u16::from_le_bytes(rest.take()?);
            let namespace = Namespace::of(rest.take()?);
            let length = u32::from_le_bytes(rest.take()?);
            let tokens = (0..length).map(|_| Ok(Token::from_le_bytes(rest.take()?))).collect::<Result<Vec<_>, _>>()?;
            directory.put(Place { page, length, slot }, namespace, &tokens);
        }
        if !rest.0.is_empty() {
            return Err(SnapshotError::Damaged);
        }
        directory.skip(UNSEEN);
        Ok(directory)
    }
}

/// What is left to be read.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(SnapshotError::Damaged)?;
        self.0 = rest;
        Ok(*first)
    }
}
