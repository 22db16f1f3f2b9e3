//! Delay and bandwidth injected by a sender, for tests and planning.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Most delay that can be injected, microseconds.
pub const MAX_DELAY_US: f64 = 60e6;

/// Injected wire properties, shared by the connections of a stage and changed while they run. Off by default.
#[derive(Debug, Default)]
pub struct Conditioning {
    delay_us: AtomicU32,
    /// Bits of an f64; 0 for no limit.
    bytes_per_second: AtomicU64,
}

/// A conditioning that no wire has.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ConditioningError {
    /// Delay out of range.
    #[error("delay of {0} µs: give a number from 0 to {MAX_DELAY_US}")]
    Delay(f64),
    /// Bandwidth out of range.
    #[error("bandwidth of {0} bytes/s: give a finite number above 0, or none")]
    Bandwidth(f64),
}

impl Conditioning {
    /// Sets delay (µs, finite, from 0) and bandwidth (bytes per second, finite, above 0; `None` for no limit).
    ///
    /// A delay near the peer deadline makes idle peers look dead, as on a real wire.
    ///
    /// # Errors
    /// [`ConditioningError`]; nothing is changed then.
    pub fn set(&self, delay_us: f64, bytes_per_second: Option<f64>) -> Result<(), ConditioningError> {
        if !(0.0..=MAX_DELAY_US).contains(&delay_us) {
            return Err(ConditioningError::Delay(delay_us));
        }
        if let Some(b) = bytes_per_second
            && !(b.is_finite() && b > 0.0)
        {
            return Err(ConditioningError::Bandwidth(b));
        }
        self.delay_us.store(delay_us.round() as u32, Ordering::Relaxed);
        self.bytes_per_second.store(bytes_per_second.map_or(0, f64::to_bits), Ordering::Relaxed);
        Ok(())
    }

    /// Delay in µs and bandwidth in bytes per second.
    #[must_use]
    pub fn get(&self) -> (u32, Option<f64>) {
        let bits = self.bytes_per_second.load(Ordering::Relaxed);
        (self.delay_us.load(Ordering::Relaxed), (bits != 0).then(|| f64::from_bits(bits)))
    }
}

/// Longest a message may occupy the wire; keeps instants in range.
const MAX_TRANSFER: f64 = 3600.0;

/// The imagined wire of one connection.
#[derive(Debug, Default)]
pub(super) struct Wire {
    free_at: Option<Instant>,
}

impl Wire {
    /// When a message that goes out now arrives, by the clock and the size that `now_and_bytes` gives; `None` when nothing
    /// is injected, without asking. Messages follow each other at the speed of the wire and share its delay.
    pub(super) fn release(
        &mut self,
        conditioning: &Conditioning,
        now_and_bytes: impl FnOnce() -> (Instant, u64),
    ) -> Option<Instant> {
        let (delay_us, speed) = conditioning.get();
        if delay_us == 0 && speed.is_none() {
            self.free_at = None;
            return None;
        }
        let (now, bytes) = now_and_bytes();
        let transfer = speed.map_or(0.0, |s| (bytes as f64 / s).min(MAX_TRANSFER));
        let sent = self.free_at.map_or(now, |t| t.max(now)) + Duration::from_secs_f64(transfer);
        self.free_at = Some(sent);
        Some(sent + Duration::from_micros(delay_us.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_no_wire_has() {
        let c = Conditioning::default();
        for bad in [-1.0, f64::NAN, f64::INFINITY, MAX_DELAY_US + 1.0] {
            assert!(matches!(c.set(bad, None), Err(ConditioningError::Delay(_))), "{bad}");
        }
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(c.set(0.0, Some(bad)), Err(ConditioningError::Bandwidth(_))), "{bad}");
        }
        assert_eq!(c.get(), (0, None));
        c.set(1500.0, Some(1e6)).unwrap();
        assert_eq!(c.get(), (1500, Some(1e6)));
    }

    #[test]
    fn delay_is_shared_and_bandwidth_adds_up() {
        let (c, now) = (Conditioning::default(), Instant::now());
        let ms = |n| Some(now + Duration::from_millis(n));
        let mut wire = Wire::default();
        assert_eq!(wire.release(&c, || unreachable!("nothing is injected")), None);
        c.set(10_000.0, None).unwrap();
        assert_eq!(wire.release(&c, || (now, 1000)), ms(10));
        assert_eq!(wire.release(&c, || (now, 1000)), ms(10));
        c.set(10_000.0, Some(1e6)).unwrap();
        assert_eq!(wire.release(&c, || (now, 5000)), ms(15));
        assert_eq!(wire.release(&c, || (now, 5000)), ms(20));
        assert_eq!(wire.release(&c, || (now + Duration::from_millis(50), 5000)), ms(65));
    }
}
