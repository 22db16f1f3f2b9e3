//! Bytes of tokens to whole characters.

/// Turns bytes that arrive in pieces into text. What could still become a character is held back (3 bytes at most); what no
/// longer can becomes U+FFFD, one for each maximal invalid part, as `String::from_utf8_lossy` does.
#[derive(Debug, Default)]
pub(crate) struct Utf8Decoder {
    held: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends to `out` the characters that `bytes` complete.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest = if self.held.is_empty() {
            bytes
        } else {
            self.held.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.held);
            &joined[..]
        };
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => return out.push_str(text),
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    // Valid by the error's own word: nothing is replaced here.
                    out.push_str(&String::from_utf8_lossy(good));
                    match error.error_len() {
                        Some(len) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &bad[len..];
                        }
                        None => {
                            self.held = bad.to_vec();
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Ends the text: an unfinished character becomes one U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !std::mem::take(&mut self.held).is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(chunks: &[&[u8]]) -> String {
        let (mut d, mut out) = (Utf8Decoder::default(), String::new());
        for chunk in chunks {
            d.push(chunk, &mut out);
        }
        d.finish(&mut out);
        out
    }

    #[test]
    fn lone_lead_bytes_become_one_replacement_each_as_soon_as_they_cannot_go_on() {
        let (mut d, mut out) = (Utf8Decoder::default(), String::new());
        d.push(&[0xF0], &mut out);
        assert_eq!(out, "");
        d.push(&[0xF0], &mut out);
        assert_eq!(out, "\u{FFFD}");
        d.finish(&mut out);
        assert_eq!(out, "\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn a_character_split_over_four_tokens_is_whole() {
        assert_eq!(decode(&[&[0xF0], &[0x9F], &[0x8E], &[0x89], b"!"]), "🎉!");
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        // Real text, cut text and noise of the bytes that matter.
        let piece = prop_oneof![
            "\\PC{0,4}".prop_map(String::into_bytes),
            proptest::collection::vec(
                proptest::sample::select(vec![0x61, 0x80, 0xBF, 0xC3, 0xE2, 0xE0, 0xED, 0xF0, 0xF4, 0x9F, 0xFF]),
                0..4
            ),
        ];
        proptest::collection::vec(piece, 0..8).prop_map(|v| v.concat())
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_lossy_text(bytes in bytes(), cuts in proptest::collection::vec(0usize..64, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(decode(&chunks), String::from_utf8_lossy(&bytes).into_owned());
        }

        #[test]
        fn never_holds_a_whole_character(bytes in bytes()) {
            let (mut d, mut out) = (Utf8Decoder::default(), String::new());
            for i in 0..bytes.len() {
                d.push(&bytes[i..=i], &mut out);
                // What is held is the start of some character, and there is no more text to be had from these bytes.
                let whole = match std::str::from_utf8(&bytes[..=i]) {
                    Ok(text) => Some(text.to_owned()),
                    Err(_) => None,
                };
                if let Some(text) = whole {
                    prop_assert_eq!(&out, &text);
                }
                prop_assert!(d.held.len() <= 3);
            }
        }
    }
}
