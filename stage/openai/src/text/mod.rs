//! From tokens to the text that a client sees: whole characters, cut at stop strings, with the tokens that made it.

mod stop;
mod utf8;

use std::collections::VecDeque;

use stop::StopMatcher;
use utf8::Utf8Decoder;

use crate::backend::TokenEvent;

/// A piece of the answer that may be sent.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// Whole characters; never part of a stop string.
    pub(crate) text: String,
    /// The tokens whose text begins in this piece or before it and was not reported yet.
    pub(crate) tokens: Vec<TokenEvent>,
    /// A stop string is complete: this is the last piece.
    pub(crate) stopped: bool,
}

/// Decodes one answer.
#[derive(Debug)]
pub(crate) struct TextDecoder {
    utf8: Utf8Decoder,
    stop: StopMatcher,
    /// Tokens not reported yet, each with the length of the text decoded before it.
    waiting: VecDeque<(usize, TokenEvent)>,
    keep_tokens: bool,
    decoded: usize,
    released: usize,
}

impl TextDecoder {
    /// A decoder that cuts at `stops`; with `keep_tokens` pieces carry their tokens.
    pub(crate) fn new(stops: &[String], keep_tokens: bool) -> Self {
        Self {
            utf8: Utf8Decoder::default(),
            stop: StopMatcher::new(stops),
            waiting: VecDeque::new(),
            keep_tokens,
            decoded: 0,
            released: 0,
        }
    }

    /// Takes a token and its bytes; gives what may be sent now.
    pub(crate) fn push(&mut self, token: TokenEvent, bytes: &[u8]) -> Piece {
        if self.keep_tokens {
            self.waiting.push_back((self.decoded, token));
        }
        let (mut text, mut piece) = (String::new(), Piece::default());
        self.utf8.push(bytes, &mut text);
        self.decoded += text.len();
        piece.stopped = self.stop.push(&text, &mut piece.text);
        self.release(&mut piece);
        piece
    }

    /// Ends the answer without a stop string: everything held back is sent.
    pub(crate) fn finish(&mut self) -> Piece {
        let (mut text, mut piece) = (String::new(), Piece::default());
        self.utf8.finish(&mut text);
        piece.stopped = self.stop.push(&text, &mut piece.text) || self.stop.finish(&mut piece.text);
        if piece.stopped {
            self.release(&mut piece);
        } else {
            piece.tokens.extend(self.waiting.drain(..).map(|(_, token)| token));
        }
        piece
    }

    fn release(&mut self, piece: &mut Piece) {
        self.released += piece.text.len();
        while self.waiting.front().is_some_and(|(start, _)| *start < self.released) {
            piece.tokens.extend(self.waiting.pop_front().map(|(_, token)| token));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token(id: i32) -> TokenEvent {
        TokenEvent { token: id, logprob: -1.0, top: Vec::new() }
    }

    /// Text and token ids of all pieces, and whether a stop string came.
    fn run(chunks: &[Vec<u8>], stops: &[String]) -> (String, Vec<i32>, bool) {
        let mut d = TextDecoder::new(stops, true);
        let (mut text, mut ids) = (String::new(), Vec::new());
        for (i, chunk) in chunks.iter().enumerate() {
            let piece = d.push(token(i as i32), chunk);
            text.push_str(&piece.text);
            ids.extend(piece.tokens.iter().map(|t| t.token));
            if piece.stopped {
                return (text, ids, true);
            }
        }
        let piece = d.finish();
        text.push_str(&piece.text);
        ids.extend(piece.tokens.iter().map(|t| t.token));
        (text, ids, piece.stopped)
    }

    #[test]
    fn tokens_of_a_split_character_come_with_it() {
        let mut d = TextDecoder::new(&[], true);
        assert_eq!(d.push(token(0), &[0xF0, 0x9F]), Piece::default());
        assert_eq!(d.push(token(1), &[0x8E]), Piece::default());
        let piece = d.push(token(2), &[0x89]);
        assert_eq!((piece.text.as_str(), piece.tokens.len()), ("🎉", 3));
    }

    #[test]
    fn tokens_of_a_stop_string_are_not_reported() {
        let stops = ["cd".to_owned()];
        let chunks: Vec<Vec<u8>> = ["a", "b", "c", "d", "e"].iter().map(|s| s.as_bytes().to_vec()).collect();
        assert_eq!(run(&chunks, &stops), ("ab".to_owned(), vec![0, 1], true));
    }

    proptest! {
        #[test]
        fn any_split_into_tokens_gives_the_reference(
            chunks in proptest::collection::vec(
                proptest::collection::vec(
                    proptest::sample::select(vec![b'a', b'b', 0xC3, 0xA9, 0xF0, 0x9F, 0x8E, 0x89]), 0..4), 0..12),
            stops in proptest::collection::vec("[abé]{1,3}", 0..3),
        ) {
            let lossy = String::from_utf8_lossy(&chunks.concat()).into_owned();
            let want = stops.iter().filter_map(|s| lossy.find(s.as_str())).min();
            let (text, ids, stopped) = run(&chunks, &stops);
            prop_assert_eq!(&text, &lossy[..want.unwrap_or(lossy.len())]);
            prop_assert_eq!(stopped, want.is_some());
            // Tokens come once and in order; without a stop all of them do.
            prop_assert_eq!(&ids, &(0..ids.len() as i32).collect::<Vec<_>>());
            if !stopped {
                prop_assert_eq!(ids.len(), chunks.len());
            }
        }
    }
}
