//! Where a request stands in its client's trace: W3C's `traceparent`.

/// The header that carries it.
pub(crate) const HEADER: &str = "traceparent";

/// What a client's `traceparent` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace; not zero.
    pub trace_id: [u8; 16],
    /// The client's span; not zero.
    pub parent_id: [u8; 8],
    /// Whether the client records the trace.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads version 00, `00-<32 hex>-<16 hex>-<2 hex>` in lower case; `None` for anything else, as if there were no header.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut part = || parts.next();
        let (version, trace_id, parent_id, [flags]) =
            (hex::<1>(part()?)?, hex::<16>(part()?)?, hex::<8>(part()?)?, hex::<1>(part()?)?);
        let good = parts.next().is_none() && version == [0] && trace_id != [0; 16] && parent_id != [0; 8];
        good.then_some(Self { trace_id, parent_id, sampled: flags & 1 == 1 })
    }
}

/// `N` bytes of exactly `2 × N` lower-case digits.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    if pairs.len() != N {
        return None;
    }
    let mut out = [0; N];
    for (byte, [high, low]) in out.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4) | digit(*low)?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_example_of_the_standard() {
        let parent = TraceParent::parse(GOOD).unwrap();
        assert_eq!(parent.trace_id[..2], [0x4b, 0xf9]);
        assert_eq!(parent.parent_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
        assert!(parent.sampled);
        assert!(!TraceParent::parse(&GOOD.replace("-01", "-02")).unwrap().sampled);
    }

    #[test]
    fn nothing_else_is_taken() {
        let bad = [
            "",
            "00",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47é-00f067aa0ba902b7-01",
            "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_01",
        ];
        for text in bad {
            assert_eq!(TraceParent::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in ".{0,80}") {
            let _ = TraceParent::parse(&text);
        }

        #[test]
        fn what_is_written_is_read(id in any::<[u8; 16]>(), span in any::<[u8; 8]>(), flags in any::<u8>()) {
            let text = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
            let read = TraceParent::parse(&format!("00-{}-{}-{flags:02x}", text(&id), text(&span)));
            let want = TraceParent { trace_id: id, parent_id: span, sampled: flags % 2 == 1 };
            prop_assert_eq!(read, (id != [0; 16] && span != [0; 8]).then_some(want));
        }
    }
}
