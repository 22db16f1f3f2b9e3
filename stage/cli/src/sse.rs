//! Server-sent events, as much of them as an OpenAI stream uses.

/// Bytes an event may have before the stream is taken for something else.
const MAX_EVENT: usize = 4 << 20;

/// The stream is not a stream of events.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// An event does not end.
    #[error("an event of the stream is longer than {MAX_EVENT} bytes")]
    TooLong,
    /// An event is not text.
    #[error("an event of the stream is not UTF-8")]
    NotText,
}

/// Cuts chunks of bytes into the data of events.
#[derive(Debug, Default)]
pub struct Events {
    pending: Vec<u8>,
    data: Option<String>,
}

impl Events {
    /// Takes the next chunk, cut anywhere; returns the data of the events it completed.
    ///
    /// # Errors
    /// [`SseError`].
    pub fn push(&mut self, chunk: &[u8]) -> Result<Vec<String>, SseError> {
        let mut complete = Vec::new();
        for part in chunk.split_inclusive(|&b| b == b'\n') {
            let held = self.pending.len() + self.data.as_ref().map_or(0, String::len);
            if held + part.len() > MAX_EVENT {
                return Err(SseError::TooLong);
            }
            self.pending.extend_from_slice(part);
            if self.pending.last() == Some(&b'\n') {
                let line = std::mem::take(&mut self.pending);
                let line = std::str::from_utf8(&line).map_err(|_| SseError::NotText)?;
                complete.extend(self.line(line.trim_end_matches(['\n', '\r'])));
            }
        }
        Ok(complete)
    }

    fn line(&mut self, line: &str) -> Option<String> {
        if line.is_empty() {
            return self.data.take();
        }
        let value = line.strip_prefix("data:")?;
        let value = value.strip_prefix(' ').unwrap_or(value);
        match &mut self.data {
            Some(data) => {
                data.push('\n');
                data.push_str(value);
            }
            None => self.data = Some(value.to_owned()),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str =
        ": ping\n\ndata: {\"a\":1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: é\n\ndata: [DONE]\n\n";

    #[test]
    fn events_are_cut_at_blank_lines() {
        let events = Events::default().push(STREAM.as_bytes()).unwrap();
        assert_eq!(events, ["{\"a\":1}", "two\nlines", "é", "[DONE]"]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut events = Events::default();
        let chunk = vec![b'x'; 1 << 20];
        assert!((0..4).all(|_| events.push(&chunk) == Ok(vec![])));
        assert_eq!(events.push(&chunk), Err(SseError::TooLong));
        let mut events = Events::default();
        let line = [b"data:".as_slice(), &chunk, b"\n"].concat();
        assert!((0..6).any(|_| events.push(&line) == Err(SseError::TooLong)));
        assert_eq!(Events::default().push(b"data: \xff\n\n"), Err(SseError::NotText));
    }

    proptest! {
        #[test]
        fn where_the_chunks_are_cut_does_not_matter(cuts in prop::collection::vec(0..STREAM.len(), 0..20)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut events = Events::default();
            let mut got = Vec::new();
            for pair in cuts.windows(2) {
                got.extend(events.push(&STREAM.as_bytes()[pair[0]..pair[1]]).unwrap());
            }
            prop_assert_eq!(got, Events::default().push(STREAM.as_bytes()).unwrap());
        }

        #[test]
        fn any_bytes_are_taken_without_panic(chunks in prop::collection::vec(any::<Vec<u8>>(), 0..10)) {
            let mut events = Events::default();
            for chunk in chunks {
                if events.push(&chunk).is_err() {
                    break;
                }
            }
        }
    }
}
