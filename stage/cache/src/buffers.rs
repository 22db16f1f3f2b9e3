//! Memory for the next whole state. Writing to memory that is new to the process takes several times as long as copying a state
//! does (the kernel clears each page at its first touch), so buffers of states that went are used again, and where there are none
//! a thread makes one ready.

use std::thread::{Builder, JoinHandle};

/// Smaller states are taken in no time, whatever the memory.
const LEAST_PREPARED: u64 = 1 << 20;

/// At most one buffer of a state that went and one that is made. A session's first record takes the made one, and the next is made
/// beside the answer; its last record takes that of the first. So nothing is made while a prompt is computed.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    spare: Vec<u8>,
    making: Option<(u64, JoinHandle<Vec<u8>>)>,
}

impl Buffers {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.spare.capacity() as u64 + self.making.as_ref().map_or(0, |(bytes, _)| *bytes)
    }

    /// The buffer at hand, of any content, else the one that was made, else an empty one.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        if self.spare.capacity() > 0 { std::mem::take(&mut self.spare) } else { self.made() }
    }

    /// Keeps the buffer of a state that went, if it is larger than what is at hand.
    pub(crate) fn put(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() > self.spare.capacity() {
            self.spare = buffer;
        }
    }

    /// Makes a buffer of `bytes` ready, unless one is there.
    pub(crate) fn prepare(&mut self, bytes: u64) {
        let Some(length) = usize::try_from(bytes).ok().filter(|_| self.bytes() == 0 && bytes >= LEAST_PREPARED) else {
            return;
        };
        let make = move || {
            let mut buffer = Vec::new();
            // Zeros would not touch the pages; without memory there is no buffer.
            if buffer.try_reserve_exact(length).is_ok() {
                buffer.resize(length, 1);
            }
            buffer
        };
        // Without a thread the next state takes longer.
        self.making = Builder::new().name("state buffer".to_owned()).spawn(make).ok().map(|thread| (bytes, thread));
    }

    /// Gives up what is at hand.
    pub(crate) fn clear(&mut self) {
        self.spare = Vec::new();
        drop(self.made());
    }

    /// What was made; empty while it is in the making.
    fn made(&mut self) -> Vec<u8> {
        let finished = self.making.take_if(|(_, thread)| thread.is_finished());
        finished.and_then(|(_, thread)| thread.join().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_made_ready_once_and_taken_once() {
        let mut buffers = Buffers::default();
        buffers.prepare(LEAST_PREPARED - 1);
        assert_eq!(buffers.bytes(), 0);
        buffers.prepare(LEAST_PREPARED);
        buffers.prepare(2 * LEAST_PREPARED);
        assert_eq!(buffers.bytes(), LEAST_PREPARED);
        while buffers.making.as_ref().is_some_and(|(_, thread)| !thread.is_finished()) {
            std::thread::yield_now();
        }
        buffers.put(vec![0; 7]);
        assert_eq!((buffers.take().len(), buffers.bytes()), (7, LEAST_PREPARED));
        assert_eq!((buffers.take().len() as u64, buffers.bytes()), (LEAST_PREPARED, 0));
        buffers.put(vec![0; 10]);
        buffers.put(vec![0; 5]);
        assert_eq!(buffers.take().len(), 10, "the larger one");
        buffers.put(vec![0; 10]);
        buffers.clear();
        assert_eq!((buffers.take().len(), buffers.bytes()), (0, 0));
    }
}
