//! A long range as one stream: in segments, of which several are under way at once where that is fast.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::AbortHandle;

use crate::HttpError;
use crate::remote::File;

/// Bytes of a segment; as much may wait in memory for each one under way.
const SEGMENT: u64 = 8 << 20;
/// Most segments under way.
const MOST: usize = 4;
/// A segment that takes less lets one more be under way; one that takes longer, one less.
const QUICK: Duration = Duration::from_secs(2);
const SLOW: Duration = Duration::from_secs(8);

type Piece = Result<Vec<u8>, HttpError>;

struct Segment {
    pieces: UnboundedReceiver<Piece>,
    /// Bytes to come.
    left: u64,
    begun: Instant,
    task: AbortHandle,
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) struct Segments {
    file: Arc<File>,
    /// What no segment has been begun for.
    rest: Range<u64>,
    under_way: VecDeque<Segment>,
    at_once: usize,
    piece: io::Cursor<Vec<u8>>,
    /// Why no more comes.
    error: Option<HttpError>,
}

impl Segments {
    pub(crate) fn new(file: Arc<File>, range: Range<u64>) -> Self {
        Self { file, rest: range, under_way: VecDeque::new(), at_once: 1, piece: io::Cursor::default(), error: None }
    }

    fn begin(&mut self) -> Result<(), HttpError> {
        let range = self.rest.start..self.rest.end.min(self.rest.start + SEGMENT);
        self.rest.start = range.end;
        let left = range.end - range.start;
        // Not more than the segment ever waits in it.
        let (sender, pieces) = unbounded_channel();
        let file = self.file.clone();
        let task = async move {
            let mut take = |piece: &[u8]| {
                let _ = sender.send(Ok(piece.to_vec())); // the reader may have gone; this task ends with it
            };
            if let Err(error) = file.get(range, &mut take).await {
                let _ = sender.send(Err(error)); // as above
            }
        };
        let task = self.file.client().runtime()?.spawn(task).abort_handle();
        self.under_way.push_back(Segment { pieces, left, begun: Instant::now(), task });
        Ok(())
    }

    /// The next piece, waiting for it only if `wait`.
    fn next(&mut self, wait: bool) -> Result<bool, HttpError> {
        loop {
            while !self.rest.is_empty() && self.under_way.len() < self.at_once {
                self.begin()?;
            }
            let Some(first) = self.under_way.front_mut() else { return Ok(false) };
            let piece = if wait {
                first.pieces.blocking_recv()
            } else {
                match first.pieces.try_recv() {
                    Ok(piece) => Some(piece),
                    Err(_) => return Ok(false),
                }
            };
            if let Some(piece) = piece {
                let piece = piece?;
                first.left = first.left.saturating_sub(piece.len() as u64);
                self.piece = io::Cursor::new(piece);
                return Ok(true);
            }
            if first.left > 0 {
                return Err(HttpError::Connection("the download ended early".to_owned()));
            }
            let took = first.begun.elapsed();
            self.under_way.pop_front();
            if took < QUICK {
                self.at_once = (self.at_once + 1).min(MOST);
            } else if took > SLOW {
                self.at_once = (self.at_once - 1).max(1);
            }
        }
    }
}

impl Read for Segments {
    /// Waits for the first byte, and takes what else is there.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while let Some(left) = buf.get_mut(done..).filter(|left| !left.is_empty()) {
            let n = self.piece.read(left)?;
            done += n;
            if n > 0 {
                continue;
            }
            match self.error.clone().map_or_else(|| self.next(done == 0), Err) {
                Ok(true) => {}
                Ok(false) => break,
                // What came before it is good.
                Err(error) if done > 0 => {
                    self.error = Some(error);
                    break;
                }
                Err(error) => {
                    self.error = Some(error.clone());
                    return Err(error.into_io());
                }
            }
        }
        Ok(done)
    }
}
