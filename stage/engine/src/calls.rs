//! How the rows of a frame are given to `llama_decode`. Activations come back in llama.cpp's order of rows, which it does
//! not tell; so a call only has rows whose order it keeps.

use std::ops::Range;

use splitmodel_link::frame::Lane;

/// What llama.cpp does with the rows of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Attention only: rows of a unified cache stay as they are.
    Kept,
    /// Recurrent layers too: rows are grouped by sequence.
    Grouped,
    /// Recurrent layers only: rows are grouped, and one computation takes sequences of consecutive numbers.
    Consecutive,
    /// Attention only, each lane with a cache of its own: rows are planned by [`crate::streams`].
    Streams,
}

/// The next call from `start`: the longest run of rows whose order llama.cpp keeps. `start < lanes.len()`.
pub(crate) fn next_call(order: RowOrder, lanes: &[Lane], start: usize) -> Range<usize> {
    let rest = &lanes[start..];
    if order == RowOrder::Kept {
        return start..lanes.len();
    }
    let same = rest.iter().take_while(|&&l| l == rest[0]).count();
    if same > 1 {
        return start..start + same;
    }
    // One row of each of several sequences. Repeats end the run.
    let mut len = 1;
    while len < rest.len() && !rest[..len].contains(&rest[len]) {
        let next = rest[len];
        if order == RowOrder::Consecutive && Some(next) != rest[len - 1].checked_add(1) {
            break;
        }
        // A longer run of that sequence is a call of its own.
        if rest.get(len + 1) == Some(&next) {
            break;
        }
        len += 1;
    }
    start..start + len
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of each call.
    fn calls(order: RowOrder, lanes: &[Lane]) -> Vec<usize> {
        let mut start = 0;
        let mut out = Vec::new();
        while start < lanes.len() {
            let call = next_call(order, lanes, start);
            assert_eq!(call.start, start);
            start = call.end;
            out.push(call.len());
        }
        out
    }

    #[test]
    fn attention_takes_the_frame_as_it_is() {
        assert_eq!(calls(RowOrder::Kept, &[3, 1, 1, 0, 3]), [5]);
    }

    #[test]
    fn grouped_rows_are_cut_where_the_order_would_change() {
        assert_eq!(calls(RowOrder::Grouped, &[0, 0, 0, 1, 1]), [3, 2]);
        assert_eq!(calls(RowOrder::Grouped, &[3, 1, 2]), [3]);
        assert_eq!(calls(RowOrder::Grouped, &[3, 1, 3, 1]), [2, 2]);
        assert_eq!(calls(RowOrder::Grouped, &[2, 1, 1, 0]), [1, 2, 1]);
    }

    #[test]
    fn recurrent_rows_need_consecutive_lanes() {
        assert_eq!(calls(RowOrder::Consecutive, &[1, 2, 3]), [3]);
        assert_eq!(calls(RowOrder::Consecutive, &[3, 1, 2]), [1, 2]);
        assert_eq!(calls(RowOrder::Consecutive, &[u16::MAX, 0]), [1, 1]);
    }
}
