//! What became of the messages written last: a ring that the writer fills and anybody reads, without a lock.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Messages remembered. A power of two: the slot of a message is the end of its number.
const SLOTS: usize = 64;

/// How a frame, or predictions, got onto the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Number of the frame, as in the message.
    pub seq: u64,
    /// From the call that sent it to the begin of its writing: queue, credits, injected delay. Microseconds.
    pub waited_us: u32,
    /// Of that, the time it stood first in the queue and the peer granted no credit. Microseconds.
    pub credit_us: u32,
    /// Encoding it and handing its bytes to the transport. Microseconds.
    pub wrote_us: u32,
    /// Bytes of the message, before TLS.
    pub bytes: u64,
}

/// One message, guarded by `stamp`: 0 while it is being replaced, else the number of the message plus 1.
#[derive(Debug, Default)]
struct Slot {
    stamp: AtomicU64,
    /// `waited_us` in the low half, `credit_us` in the high one.
    waits: AtomicU64,
    wrote_us: AtomicU64,
    bytes: AtomicU64,
}

/// The last [`SLOTS`] messages by their numbers. One writer, any number of readers.
#[derive(Debug)]
pub(super) struct WriteLog([Slot; SLOTS]);

impl Default for WriteLog {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Slot::default()))
    }
}

impl WriteLog {
    fn slot(&self, seq: u64) -> &Slot {
        &self.0[(seq % SLOTS as u64) as usize]
    }

    /// Notes a message; for the writing task only.
    pub(super) fn note(&self, w: &Written) {
        let slot = self.slot(w.seq);
        slot.stamp.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        slot.waits.store(u64::from(w.credit_us) << 32 | u64::from(w.waited_us), Ordering::Relaxed);
        slot.wrote_us.store(w.wrote_us.into(), Ordering::Relaxed);
        slot.bytes.store(w.bytes, Ordering::Relaxed);
        slot.stamp.store(w.seq.wrapping_add(1), Ordering::Release);
    }

    /// The note of a message, unless it is too old or not there yet.
    pub(super) fn get(&self, seq: u64) -> Option<Written> {
        let (slot, stamp) = (self.slot(seq), seq.checked_add(1)?);
        if slot.stamp.load(Ordering::Acquire) != stamp {
            return None;
        }
        let waits = slot.waits.load(Ordering::Relaxed);
        let written = Written {
            seq,
            waited_us: waits as u32,
            credit_us: (waits >> 32) as u32,
            wrote_us: slot.wrote_us.load(Ordering::Relaxed) as u32,
            bytes: slot.bytes.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        (slot.stamp.load(Ordering::Relaxed) == stamp).then_some(written)
    }
}

/// Whole microseconds; more than an hour is as good as an hour.
pub(super) fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every field follows from the number, so that a torn note is seen.
    fn note(seq: u64) -> Written {
        let n = seq as u32;
        Written { seq, waited_us: n, credit_us: !n, wrote_us: n.wrapping_mul(3), bytes: seq.wrapping_mul(5) }
    }

    #[test]
    fn the_last_ones_are_there_and_older_ones_are_not() {
        let log = WriteLog::default();
        for seq in [0, 1, u64::MAX - 1, u64::MAX] {
            assert_eq!(log.get(seq), None);
        }
        for seq in 0..1000 {
            log.note(&note(seq));
            assert_eq!(log.get(seq + 1), None);
            for old in 0..=seq {
                assert_eq!(log.get(old), (seq - old < SLOTS as u64).then(|| note(old)), "{old} after {seq}");
            }
        }
        // A number that a peer made up is as good as any, but the last has no stamp.
        for seq in [u64::MAX - 1, u64::MAX] {
            log.note(&note(seq));
        }
        assert_eq!((log.get(u64::MAX - 1), log.get(u64::MAX)), (Some(note(u64::MAX - 1)), None));
    }

    #[test]
    fn readers_beside_the_writer_never_see_halves() {
        const NOTES: u64 = 200_000;
        let (log, newest) = (WriteLog::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut seq = 0;
                    while seq < NOTES * SLOTS as u64 {
                        // All numbers share one slot, so readers are overtaken all the time.
                        seq = newest.load(Ordering::Relaxed);
                        for seq in [seq, seq + SLOTS as u64] {
                            if let Some(written) = log.get(seq) {
                                assert_eq!(written, note(seq));
                            }
                        }
                    }
                });
            }
            for i in 0..=NOTES {
                log.note(&note(i * SLOTS as u64));
                newest.store(i * SLOTS as u64, Ordering::Relaxed);
            }
        });
        assert_eq!(log.get(NOTES * SLOTS as u64), Some(note(NOTES * SLOTS as u64)));
    }
}
