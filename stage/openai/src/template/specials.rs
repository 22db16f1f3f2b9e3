//! Control tokens in a prompt's text.

use std::collections::HashSet;

use aho_corasick::{AhoCorasick, BuildError, MatchKind};

use crate::backend::{SpecialToken, Token};

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    /// Ordinary text, to be tokenized without looking for control tokens.
    Text(&'a str),
    /// A control token.
    Special(Token),
}

/// Finds the texts of control tokens, the longest at each place.
#[derive(Debug)]
pub(crate) struct Specials {
    /// `None` where the vocabulary has no control token.
    finder: Option<AhoCorasick>,
    ids: Vec<Token>,
    set: HashSet<Token>,
    /// Every proper beginning and end of a token's text.
    begins: HashSet<String>,
    ends: HashSet<String>,
    longest: usize,
}

impl Specials {
    /// A finder of `tokens`; those with empty texts are left out.
    pub(crate) fn new(tokens: &[SpecialToken]) -> Result<Self, BuildError> {
        let tokens: Vec<&SpecialToken> = tokens.iter().filter(|t| !t.text.is_empty()).collect();
        let texts: Vec<&str> = tokens.iter().map(|t| t.text.as_str()).collect();
        let finder = if texts.is_empty() {
            None
        } else {
            Some(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&texts)?)
        };
        let cuts = || texts.iter().flat_map(|t| parts(t));
        Ok(Self {
            finder,
            ids: tokens.iter().map(|t| t.id).collect(),
            set: tokens.iter().map(|t| t.id).collect(),
            begins: cuts().map(|(begin, _)| begin.to_owned()).collect(),
            ends: cuts().map(|(_, end)| end.to_owned()).collect(),
            longest: texts.iter().map(|t| t.len()).max().unwrap_or(0),
        })
    }

    /// Whether `token` is a control token; its text is not shown.
    pub(crate) fn contains(&self, token: Token) -> bool {
        self.set.contains(&token)
    }

    /// Splits `text`; texts between tokens are not empty.
    pub(crate) fn split<'a>(&self, text: &'a str) -> Vec<Segment<'a>> {
        let (mut out, mut from) = (Vec::new(), 0);
        for found in self.finder.iter().flat_map(|f| f.find_iter(text)) {
            if found.start() > from {
                out.push(Segment::Text(&text[from..found.start()]));
            }
            out.push(Segment::Special(self.ids[found.pattern().as_usize()]));
            from = found.end();
        }
        if from < text.len() {
            out.push(Segment::Text(&text[from..]));
        }
        out
    }

    /// Byte offsets in `text` where a mark must go so that no control token can be read in it, alone or together with
    /// what a template puts before or after: behind the first character of every control token's text (overlapping ones
    /// too), before a beginning that could end one, behind an end that could begin one. Ascending.
    pub(crate) fn breaks(&self, text: &str) -> Vec<usize> {
        let Some(finder) = &self.finder else { return Vec::new() };
        let mut out = Vec::new();
        let mut from = 0;
        while let Some(found) = finder.find(&text[from..]) {
            let start = from + found.start();
            let first = text[start..].chars().next().map_or(1, char::len_utf8);
            out.push(start + first);
            // Texts that overlap this one are broken on their own.
            from = start + first;
        }
        // Templates trim white space, so what counts are the first and last characters that stay.
        let head = text.len() - text.trim_start().len();
        let tail = text.trim_end().len();
        if head < tail {
            let body = &text[head..tail];
            let lengths = 1..=body.len().min(self.longest);
            if lengths.clone().any(|n| body.get(..n).is_some_and(|b| self.ends.contains(b))) {
                out.push(head);
            }
            if lengths.clone().any(|n| body.get(body.len() - n..).is_some_and(|e| self.begins.contains(e))) {
                out.push(tail);
            }
        }
        out.sort_unstable();
        out.dedup();
        out
    }
}

/// All ways to cut `text` into two parts that are not empty.
fn parts(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.char_indices().skip(1).map(|(i, _)| text.split_at(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials() -> Specials {
        let token = |text: &str, id| SpecialToken { text: text.to_owned(), id };
        Specials::new(&[token("<|a|>", 1), token("<|a|>x", 2), token("<s>", 3)]).unwrap()
    }

    #[test]
    fn the_longest_token_at_a_place_is_taken() {
        use Segment::{Special, Text};
        assert_eq!(specials().split("<s>hi<|a|>x<|a|>"), [Special(3), Text("hi"), Special(2), Special(1)]);
        assert_eq!(specials().split(""), []);
    }

    #[test]
    fn every_token_in_a_text_is_broken() {
        let s = specials();
        for text in ["<|a|>", "x<s><s>", "<<s>", "<|<|a|>a|>", "s>", "<|a", ">", "<", "  |>  "] {
            let mut broken = String::new();
            let breaks = s.breaks(text);
            for (i, c) in text.char_indices() {
                if breaks.contains(&i) {
                    broken.push('#');
                }
                broken.push(c);
            }
            if breaks.contains(&text.len()) {
                broken.push('#');
            }
            for around in ["", "<", "<|", "<|a", "<|a|", "<s"]
                .iter()
                .flat_map(|b| ["", ">", "|>", "a|>", "s>"].iter().map(move |e| (*b, *e)))
            {
                let whole = format!("{}{}{}", around.0, broken.trim(), around.1);
                assert!(s.split(&whole).iter().all(|p| matches!(p, Segment::Text(_))), "{whole}");
            }
        }
        assert_eq!(s.breaks("ordinary text"), Vec::<usize>::new());
    }
}
