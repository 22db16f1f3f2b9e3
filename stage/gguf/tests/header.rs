//! Headers: what is written is read again, and nothing hostile panics or reads more than it may.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // helpers of tests are tests too

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use splitmodel_gguf::encode::{Layout, TensorSpec};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::value::{OwnedValue, Value};
use splitmodel_gguf::{Error, Header, Limits, Source, TensorType};

fn values() -> impl Strategy<Value = OwnedValue> {
    prop_oneof![
        any::<u8>().prop_map(OwnedValue::u8),
        any::<i8>().prop_map(OwnedValue::i8),
        any::<u16>().prop_map(OwnedValue::u16),
        any::<i16>().prop_map(OwnedValue::i16),
        any::<u32>().prop_map(OwnedValue::u32),
        any::<i32>().prop_map(OwnedValue::i32),
        any::<u64>().prop_map(OwnedValue::u64),
        any::<i64>().prop_map(OwnedValue::i64),
        (-1e30f32..1e30).prop_map(OwnedValue::f32),
        (-1e300f64..1e300).prop_map(OwnedValue::f64),
        any::<bool>().prop_map(OwnedValue::bool),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(OwnedValue::str),
        prop::collection::vec(any::<u32>(), 0..9).prop_map(|v| OwnedValue::u32s(&v)),
        prop::collection::vec(any::<i32>(), 0..9).prop_map(|v| OwnedValue::i32s(&v)),
        prop::collection::vec(-1e9f32..1e9, 0..9).prop_map(|v| OwnedValue::f32s(&v)),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(|v| OwnedValue::bools(&v)),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9).prop_map(|v| OwnedValue::strs(&v)),
    ]
}

fn tensors() -> impl Strategy<Value = (usize, Vec<u64>)> {
    (0..TensorType::ALL.len(), prop::collection::vec(1u64..4, 1..=4))
}

fn layout(entries: &[(String, OwnedValue)], tensors: &[(usize, Vec<u64>)], alignment: u32) -> Layout {
    let mut layout = Layout::with_alignment(alignment.into());
    layout.set("general.alignment", OwnedValue::u32(alignment));
    for (key, value) in entries {
        layout.set(key, value.clone());
    }
    for (i, (ty, dims)) in tensors.iter().enumerate() {
        let ty = TensorType::ALL[*ty];
        let mut dims = dims.clone();
        dims[0] *= ty.block_elements();
        layout.push(TensorSpec { name: format!("t{i}"), dims, ty });
    }
    layout
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(
        entries in prop::collection::vec(("[a-z]{1,9}(\\.[a-zé]{1,9})?", values()), 0..12),
        tensors in prop::collection::vec(tensors(), 0..8),
        alignment in 0u32..8,
    ) {
        let layout = layout(&entries, &tensors, 1 << alignment);
        let encoded = layout.encode("test").unwrap();
        let mut bytes = encoded.header.clone();
        bytes.resize(encoded.total_bytes as usize, 0);
        let header = Header::read(&bytes).unwrap();
        for (key, _) in &entries {
            let last = entries.iter().rev().find(|(k, _)| k == key).unwrap();
            prop_assert_eq!(header.owned(key).unwrap(), last.1.clone());
            prop_assert_eq!(header.get(key), last.1.view());
            if let Some(Value::Array(a)) = header.get(key) {
                prop_assert_eq!(a.iter().count(), a.len());
            }
        }
        prop_assert_eq!(header.tensors().len(), layout.tensors().len());
        for ((read, written), offset) in header.tensors().iter().zip(layout.tensors()).zip(&encoded.offsets) {
            prop_assert_eq!(&read.name, &written.name);
            prop_assert_eq!(&read.dims, &written.dims);
            prop_assert_eq!(read.ty, written.ty);
            prop_assert_eq!(read.offset, *offset);
            prop_assert_eq!(Some(read.bytes), written.bytes());
        }
    }

    #[test]
    fn flipped_and_random_bytes_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = small_model();
        for (at, value) in flips {
            let at = at.index(1200.min(bytes.len()));
            bytes[at] = value;
        }
        let limits = Limits { header_bytes: 1 << 20, ..Limits::default() };
        if let Ok(h) = Header::read_with(&bytes, &limits) {
            for key in h.keys() {
                if let Some(Value::Array(a)) = h.get(key) {
                    prop_assert!(a.iter().count() <= bytes.len());
                }
            }
            for t in h.tensors() {
                prop_assert!(t.offset + t.bytes <= bytes.len() as u64);
            }
        }
    }

    #[test]
    fn garbage_after_the_magic_never_panics(tail in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _ = Header::read(&bytes);
    }
}

/// A file with every kind of value and some tensors.
fn small_model() -> Vec<u8> {
    let entries = [
        ("general.architecture".to_owned(), OwnedValue::str("llama")),
        ("a".to_owned(), OwnedValue::strs(&["one", "two", "three"])),
        ("b".to_owned(), OwnedValue::u32s(&[1, 2, 3])),
        ("c".to_owned(), OwnedValue::f64(1.5)),
        ("d".to_owned(), OwnedValue::bools(&[true, false])),
    ];
    let layout = layout(&entries, &[(0, vec![4, 4]), (3, vec![1, 3]), (12, vec![1, 1, 2])], 32);
    let encoded = layout.encode("test").unwrap();
    let mut bytes = encoded.header;
    bytes.resize(encoded.total_bytes as usize, 7);
    bytes
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let bytes = small_model();
    let data_end = Header::read(&bytes).unwrap().tensors().iter().map(|t| t.offset + t.bytes).max().unwrap();
    for n in 0..data_end as usize {
        let e = Header::read(&bytes[..n].to_vec()).unwrap_err().to_string();
        assert!(e.contains("<memory>"), "{n}: {e}");
    }
    Header::read(&bytes[..data_end as usize].to_vec()).unwrap();
}

#[test]
fn every_bit_flip_of_a_real_header_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Tiny { layers: 3, ..Tiny::new(Arch::Llama) }.write(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let header = Header::read(&bytes).unwrap().raw().len();
    // a file whose data are shared by all mutations, so that only the header is copied
    for bit in (0..header * 8).step_by(37) {
        let mutated = Mutated { base: &bytes, at: bit / 8, mask: 1 << (bit % 8) };
        let _ = Header::read(&mutated);
    }
}

struct Mutated<'a> {
    base: &'a [u8],
    at: usize,
    mask: u8,
}

impl Source for Mutated<'_> {
    fn len(&self) -> io::Result<u64> {
        Ok(self.base.len() as u64)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        buf.copy_from_slice(&self.base[start..start + buf.len()]);
        if let Some(b) = self.at.checked_sub(start).and_then(|at| buf.get_mut(at)) {
            *b ^= self.mask;
        }
        Ok(())
    }

    fn describe(&self) -> String {
        format!("bit flip in byte {}", self.at)
    }
}

/// Pretends to be a huge file; counts what is read.
struct Huge {
    start: Vec<u8>,
    read: AtomicU64,
}

impl Source for Huge {
    fn len(&self) -> io::Result<u64> {
        Ok(1 << 60)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read.fetch_add(buf.len() as u64, Ordering::Relaxed);
        for (i, b) in buf.iter_mut().enumerate() {
            *b = self.start.get(offset as usize + i).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "<huge>".to_owned()
    }
}

fn start(n_tensors: u64, n_keys: u64) -> Vec<u8> {
    let mut b = b"GGUF\x03\0\0\0".to_vec();
    b.extend(n_tensors.to_le_bytes());
    b.extend(n_keys.to_le_bytes());
    b
}

fn refused(bytes: Vec<u8>) -> (String, u64) {
    let huge = Huge { start: bytes, read: AtomicU64::new(0) };
    let limits = Limits { header_bytes: 1 << 20, ..Limits::default() };
    let e = Header::read_with(&huge, &limits).unwrap_err();
    (e.to_string(), huge.read.load(Ordering::Relaxed))
}

#[test]
fn huge_counts_are_refused_before_anything_is_read() {
    let string = |b: &mut Vec<u8>, s: &str| {
        b.extend((s.len() as u64).to_le_bytes());
        b.extend(s.as_bytes());
    };
    let mut cases =
        vec![(start(u64::MAX, 0), "tensors"), (start(0, u64::MAX), "metadata keys"), (start(1 << 19, 0), "at most")];
    let mut b = start(0, 1);
    b.extend(u64::MAX.to_le_bytes());
    cases.push((b, "metadata key 0 is"));
    for (ty, n, what) in [
        (8u32, u64::MAX, "elements"),
        (8, 1 << 25, "larger than the limit"),
        (10, 1 << 25, "larger than the limit"),
        (9, 1, "array of arrays"),
    ] {
        let mut b = start(0, 1);
        string(&mut b, "key");
        b.extend(9u32.to_le_bytes());
        b.extend(ty.to_le_bytes());
        b.extend(n.to_le_bytes());
        cases.push((b, what));
    }
    for (dims, what) in [
        (vec![u64::MAX, 2], "2^63"),
        (vec![0], "dimension of 0"),
        (vec![1; 5], "5 dimensions"),
        (vec![1 << 61], "beyond the end"),
    ] {
        let mut b = start(1, 0);
        string(&mut b, "t");
        b.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| b.extend(d.to_le_bytes()));
        b.extend(0u32.to_le_bytes());
        b.extend(0u64.to_le_bytes());
        cases.push((b, what));
    }
    for (bytes, what) in cases {
        let (message, read) = refused(bytes);
        assert!(message.contains(what), "wanted '{what}', got '{message}'");
        assert!(read <= 1 << 20, "{message}: {read} bytes were read");
    }
}

#[test]
fn wrong_magic_versions_and_byte_order_are_named() {
    let with = |version: u32| {
        let mut b = b"GGUF".to_vec();
        b.extend(version.to_le_bytes());
        b.extend([0; 16]);
        b
    };
    assert!(Header::read(&b"GGML\0\0\0\0".to_vec()).unwrap_err().to_string().contains("not a GGUF file"));
    assert!(Header::read(&with(1)).unwrap_err().to_string().contains("version 1"));
    assert!(Header::read(&with(4)).unwrap_err().to_string().contains("version 4"));
    assert!(Header::read(&with(3u32.swap_bytes())).unwrap_err().to_string().contains("big-endian"));
    assert_eq!(Header::read(&with(2)).unwrap().version(), 2);
}

/// One entry of `general.alignment` and tensors with hand-made offsets.
fn placed(offsets: &[(&str, u64)], len: usize) -> Result<Header, Error> {
    let mut b = start(offsets.len() as u64, 0);
    for (name, offset) in offsets {
        b.extend((name.len() as u64).to_le_bytes());
        b.extend(name.as_bytes());
        b.extend(1u32.to_le_bytes());
        b.extend(16u64.to_le_bytes());
        b.extend(0u32.to_le_bytes());
        b.extend(offset.to_le_bytes());
    }
    let data = b.len().next_multiple_of(32);
    b.resize(data + len, 0);
    Header::read(&b)
}

#[test]
fn misplaced_tensors_are_refused_by_name() {
    placed(&[("a", 64), ("b", 0)], 128).unwrap();
    for (offsets, len, what) in [
        (&[("a", 0), ("b", 32)][..], 128, "tensor 'b': its data overlap those of 'a'"),
        (&[("a", 0), ("b", 0)], 128, "overlap"),
        (&[("a", 0), ("b", 65)], 256, "tensor 'b': data offset 65"),
        (&[("a", 0), ("b", 64)], 100, "tensor 'b': 64 bytes at offset 64"),
        (&[("a", 0), ("b", u64::MAX - 31)], 128, "tensor 'b'"),
        (&[("a", 0), ("a", 64)], 128, "twice"),
    ] {
        let e = placed(offsets, len).unwrap_err().to_string();
        assert!(e.contains(what), "wanted '{what}', got '{e}'");
    }
}

#[test]
fn duplicate_and_empty_keys_and_bad_alignment_are_refused() {
    let keys = |keys: &[&str]| {
        let mut b = start(0, keys.len() as u64);
        for key in keys {
            b.extend((key.len() as u64).to_le_bytes());
            b.extend(key.as_bytes());
            b.extend(4u32.to_le_bytes());
            b.extend(3u32.to_le_bytes());
        }
        Header::read(&b).unwrap_err().to_string()
    };
    assert!(keys(&["a", "b", "a"]).contains("'a' appears twice"));
    assert!(keys(&["a", ""]).contains("key 1 is empty"));
    assert!(keys(&["general.alignment"]).contains("power of two"));
}

#[test]
fn getters_name_the_key_of_a_wrong_type() {
    let mut layout = Layout::default();
    layout.set("n", OwnedValue::i32(-1));
    layout.set("s", OwnedValue::str([0xff, 0xfe]));
    layout.set("l", OwnedValue::u32s(&[1, 2]));
    let h = Header::read(&layout.encode("test").unwrap().header).unwrap();
    assert!(h.u32("n").unwrap_err().to_string().contains("'n'"));
    assert!(h.str("s").unwrap_err().to_string().contains("UTF-8"));
    assert!(h.per_layer_u32("l", 3).unwrap_err().to_string().contains("it has 2"));
    assert_eq!(h.per_layer_u32("l", 2).unwrap(), Some(vec![1, 2]));
    assert!(h.required_u32("absent").unwrap_err().to_string().contains("is missing"));
    assert_eq!(h.u32("absent").unwrap(), None);
}
