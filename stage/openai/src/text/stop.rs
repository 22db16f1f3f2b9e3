//! Stop strings.

/// Finds the earliest stop string in a text that arrives in pieces, and holds back only what may be the start of one.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text not given out: the longest end of the text so far that is a true start of a stop string.
    held: String,
    /// No more than this is ever held.
    longest: usize,
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings are left out (they would match before anything is written).
    pub(crate) fn new(stops: &[String]) -> Self {
        let stops: Vec<String> = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        Self { stops, held: String::new(), longest }
    }

    /// Takes `text`, appends to `out` what surely comes before any stop string. True when the earliest one is complete:
    /// `out` then ends just before it, and the matcher is done.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.longest == 0 {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let open = self.open_start();
        // A complete stop string waits while one that began before it may still be completed: the earliest in the text
        // counts, however the text is cut into tokens.
        match self.earliest() {
            Some(at) if at <= open => self.cut(at, out),
            _ => {
                out.push_str(&self.held[..open]);
                self.held.drain(..open);
                false
            }
        }
    }

    /// Ends the text: what was held is ordinary text after all, unless a stop string waited in it (then true).
    pub(crate) fn finish(&mut self, out: &mut String) -> bool {
        if let Some(at) = self.earliest() {
            return self.cut(at, out);
        }
        out.push_str(&std::mem::take(&mut self.held));
        false
    }

    fn cut(&mut self, at: usize, out: &mut String) -> bool {
        out.push_str(&self.held[..at]);
        self.held.clear();
        true
    }

    fn earliest(&self) -> Option<usize> {
        self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min()
    }

    /// Where the longest end of `held` begins that starts a stop string; its length if none does.
    fn open_start(&self) -> usize {
        let from = self.held.len().saturating_sub(self.longest.saturating_sub(1));
        self.held
            .char_indices()
            .map(|(i, _)| i)
            .filter(|i| *i >= from)
            .find(|i| self.stops.iter().any(|s| s.starts_with(&self.held[*i..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The whole text at once: cut at the earliest stop.
    fn naive(text: &str, stops: &[String]) -> (String, bool) {
        match stops.iter().filter_map(|s| text.find(s.as_str())).min() {
            Some(at) => (text[..at].to_owned(), true),
            None => (text.to_owned(), false),
        }
    }

    fn run(chunks: &[String], stops: &[String]) -> (String, bool) {
        let (mut m, mut out) = (StopMatcher::new(stops), String::new());
        for chunk in chunks {
            if m.push(chunk, &mut out) {
                return (out, true);
            }
        }
        let stopped = m.finish(&mut out);
        (out, stopped)
    }

    fn owned(list: &[&str]) -> Vec<String> {
        list.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn a_stop_across_pieces_leaks_nothing() {
        assert_eq!(run(&owned(&["ab", "cS", "TO", "Pde"]), &owned(&["STOP"])), ("abc".to_owned(), true));
        assert_eq!(run(&owned(&["STO", "PS"]), &owned(&["STOP"])), (String::new(), true));
    }

    #[test]
    fn a_false_start_is_given_out() {
        assert_eq!(run(&owned(&["STO", "STO", "X"]), &owned(&["STOP"])), ("STOSTOX".to_owned(), false));
        assert_eq!(run(&owned(&["aST"]), &owned(&["STOP"])), ("aST".to_owned(), false));
    }

    #[test]
    fn a_long_stop_does_not_delay_ordinary_text() {
        let (mut m, mut out) = (StopMatcher::new(&owned(&["\u{2}never never never"])), String::new());
        for i in 1..20 {
            assert!(!m.push("x", &mut out));
            assert_eq!(out.len(), i);
        }
    }

    #[test]
    fn the_earliest_counts_even_if_a_later_one_is_complete_before_it() {
        let stops = owned(&["abc", "b"]);
        assert_eq!(run(&owned(&["xab", "cd"]), &stops), ("x".to_owned(), true));
        assert_eq!(run(&owned(&["xab", "d"]), &stops), ("xa".to_owned(), true));
        assert_eq!(run(&owned(&["xab"]), &stops), ("xa".to_owned(), true));
    }

    #[test]
    fn a_multibyte_stop_is_matched_on_characters() {
        assert_eq!(run(&owned(&["ab", "🎉", "cd"]), &owned(&["🎉c"])), ("ab".to_owned(), true));
    }

    fn alphabet(len: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        // Few letters, so that true and false starts are frequent.
        proptest::collection::vec(proptest::sample::select(vec!['a', 'b', 'é', '🎉']), len).prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_naive_answer_and_nothing_needless_is_held(
            chunks in proptest::collection::vec(alphabet(0..5), 0..10),
            stops in proptest::collection::vec(alphabet(1..5), 0..4),
        ) {
            let text = chunks.concat();
            prop_assert_eq!(run(&chunks, &stops), naive(&text, &stops));
            let (mut m, mut out, mut seen) = (StopMatcher::new(&stops), String::new(), String::new());
            for chunk in &chunks {
                seen.push_str(chunk);
                if m.push(chunk, &mut out) {
                    break;
                }
                // Given out is a start of the final answer, and all that is held is a true start of some stop.
                prop_assert!(naive(&text, &stops).0.starts_with(&out));
                let held = &seen[out.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|s| s.starts_with(held) && s != held), "{:?}", held);
            }
        }
    }
}
