//! A byte-level BPE tokenizer with few merges: any text round-trips.

use crate::encode::Layout;
use crate::value::OwnedValue;

/// Tokens: 256 bytes, the merges, three control tokens, and padding.
pub const N_VOCAB: u32 = 320;

/// The chat template: ChatML.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
     message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' \
     }}{% endif %}";

/// Ġ is a space.
const MERGES: &[&str] = &[
    "Ġ t", "h e", "Ġt he", "i n", "a n", "e r", "o u", "r e", "Ġ a", "o n", "Ġ s", "Ġ w", "a t", "e n", "Ġ o", "i t",
    "e s", "Ġa n", "Ġan d", "in g",
];

const CONTROL: &[&str] = &["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// GPT-2's printable stand-in for a byte.
fn stand_in(byte: u8) -> char {
    let plain = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|&b| !plain(b)).count() as u32;
    char::from_u32(256 + before).unwrap_or('\u{fffd}')
}

pub(super) fn metadata(layout: &mut Layout) {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|b| stand_in(b).to_string()).collect();
    tokens.extend(MERGES.iter().map(|m| m.replace(' ', "")));
    let first_control = tokens.len();
    tokens.extend(CONTROL.iter().map(|&t| t.to_owned()));
    let end_control = tokens.len();
    while tokens.len() < N_VOCAB as usize {
        tokens.push(format!("<|unused_{}|>", tokens.len()));
    }
    // 1 normal, 3 control, 5 unused
    let kind = |i: usize| {
        if i < first_control {
            1
        } else if i < end_control {
            3
        } else {
            5
        }
    };
    let kinds: Vec<i32> = (0..tokens.len()).map(kind).collect();
    let id = |name: &str| OwnedValue::u32(tokens.iter().position(|t| t == name).unwrap_or(0) as u32);
    let mut set = |key: &str, v| layout.set(format!("tokenizer.ggml.{key}"), v);
    set("model", OwnedValue::str("gpt2"));
    // a pre-tokenizer that keeps the spaces of the text when tokens become text again
    set("pre", OwnedValue::str("smollm"));
    set("tokens", OwnedValue::strs(&tokens));
    set("token_type", OwnedValue::i32s(&kinds));
    set("merges", OwnedValue::strs(MERGES));
    set("bos_token_id", id("<|im_start|>"));
    set("eos_token_id", id("<|im_end|>"));
    set("padding_token_id", id("<|endoftext|>"));
    set("add_bos_token", OwnedValue::bool(false));
    layout.set("tokenizer.chat_template", OwnedValue::str(CHAT_TEMPLATE));
}
