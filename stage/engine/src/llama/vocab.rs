//! Reading a vocabulary.

use std::ffi::c_char;

use llama_cpp_sys_2 as sys;
use splitmodel_link::frame::Token;

use super::backend::text;
use super::model::Model;

/// A token's role, from its attributes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Plain,
    Control,
    UserDefined,
}

fn known(token: Token) -> Option<Token> {
    (token >= 0).then_some(token)
}

impl Model {
    /// Whether there is a vocabulary. llama.cpp aborts on the questions below where there is none, as in stage packages.
    pub(crate) fn has_vocabulary(&self) -> bool {
        // SAFETY: the vocabulary lives as long as the model; so below.
        unsafe { sys::llama_vocab_type(self.vocab()) != sys::LLAMA_VOCAB_TYPE_NONE }
    }

    pub(crate) fn bos(&self) -> Option<Token> {
        // SAFETY: as above.
        known(unsafe { sys::llama_vocab_bos(self.vocab()) })
    }

    pub(crate) fn eos(&self) -> Option<Token> {
        // SAFETY: as above.
        known(unsafe { sys::llama_vocab_eos(self.vocab()) })
    }

    pub(crate) fn eot(&self) -> Option<Token> {
        // SAFETY: as above.
        known(unsafe { sys::llama_vocab_eot(self.vocab()) })
    }

    pub(crate) fn add_bos(&self) -> bool {
        // SAFETY: as above.
        unsafe { sys::llama_vocab_get_add_bos(self.vocab()) }
    }

    pub(crate) fn add_eos(&self) -> bool {
        // SAFETY: as above.
        unsafe { sys::llama_vocab_get_add_eos(self.vocab()) }
    }

    /// `token` must be below the vocabulary's size; so below.
    pub(crate) fn is_eog(&self, token: Token) -> bool {
        // SAFETY: as above.
        unsafe { sys::llama_vocab_is_eog(self.vocab(), token) }
    }

    pub(crate) fn role(&self, token: Token) -> Role {
        // SAFETY: as above.
        let attr = unsafe { sys::llama_vocab_get_attr(self.vocab(), token) };
        if attr & sys::LLAMA_TOKEN_ATTR_CONTROL != 0 {
            Role::Control
        } else if attr & sys::LLAMA_TOKEN_ATTR_USER_DEFINED != 0 {
            Role::UserDefined
        } else {
            Role::Plain
        }
    }

    pub(crate) fn token_text(&self, token: Token) -> String {
        // SAFETY: as above; the string belongs to the vocabulary.
        unsafe { text(sys::llama_vocab_get_text(self.vocab(), token)) }
    }

    /// Bytes of a token; those of special tokens are empty unless `special`.
    pub(crate) fn piece(&self, token: Token, special: bool, out: &mut Vec<u8>) {
        let start = out.len();
        let mut room = 64;
        loop {
            out.resize(start + room, 0);
            let to = out[start..].as_mut_ptr().cast::<c_char>();
            // SAFETY: `to` has `room` bytes; nothing is written beyond.
            let n = unsafe { sys::llama_token_to_piece(self.vocab(), token, to, room as i32, 0, special) };
            match usize::try_from(n) {
                Ok(n) => return out.truncate(start + n.min(room)),
                // A negative answer is the room needed.
                Err(_) if n != i32::MIN && n.unsigned_abs() as usize > room => room = n.unsigned_abs() as usize,
                Err(_) => return out.truncate(start),
            }
        }
    }

    /// Token ids of `text`. `None` when it is too long for llama.cpp.
    pub(crate) fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Option<Vec<Token>> {
        let len = i32::try_from(text.len()).ok()?;
        let mut room = text.len() / 3 + 8;
        loop {
            let mut out = vec![0; room];
            let max = i32::try_from(room).ok()?;
            let from = text.as_ptr().cast::<c_char>();
            // SAFETY: the text has `len` bytes, `out` has room for `max` tokens.
            let n = unsafe {
                sys::llama_tokenize(self.vocab(), from, len, out.as_mut_ptr(), max, add_special, parse_special)
            };
            match usize::try_from(n) {
                Ok(n) => {
                    out.truncate(n);
                    return Some(out);
                }
                Err(_) if n == i32::MIN || n.unsigned_abs() as usize <= room => return None,
                Err(_) => room = n.unsigned_abs() as usize,
            }
        }
    }
}
