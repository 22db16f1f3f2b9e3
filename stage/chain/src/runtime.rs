//! What the worker needs of a model slice. `splitmodel-engine` implements it over llama.cpp, tests over arithmetic.

use splitmodel_link::frame::{ErrorClass, Lane, Position, Token};

/// Error of a computation. The rows of the batch are not in the cache afterwards as far as the worker can tell; it
/// removes them.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum RuntimeError {
    /// The KV cache has no room for the batch.
    #[error("the KV cache is full: no room for {rows} more cells; lower `parallel` or `contextLength`, or add memory")]
    CacheFull {
        /// Rows of the refused batch.
        rows: usize,
    },
    /// llama.cpp refused the batch.
    #[error("llama_decode failed with code {code} on {rows} rows")]
    Decode {
        /// llama.cpp's return code.
        code: i32,
        /// Rows of the batch.
        rows: usize,
    },
    /// Activations or logits did not have the expected shape.
    #[error("the slice gave {got} values where {want} were expected: {what}")]
    Shape {
        /// What was read.
        what: &'static str,
        /// Values expected.
        want: usize,
        /// Values seen.
        got: usize,
    },
    /// A sequence's state could not be taken or set.
    #[error("the state of a sequence cannot be {done}: {why}")]
    State {
        /// What was tried: taken, or set.
        done: &'static str,
        /// What is known of the cause.
        why: &'static str,
    },
    /// Reading embedding rows failed.
    #[error("embedding rows cannot be read: {0}")]
    Embedding(String),
}

impl RuntimeError {
    /// Its class on the link.
    #[must_use]
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Embedding(_) => ErrorClass::Io,
            Self::CacheFull { .. } | Self::Decode { .. } | Self::Shape { .. } | Self::State { .. } => {
                ErrorClass::Backend
            }
        }
    }
}

/// Rows of one computation, as parallel slices of equal length.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// KV sequence of each row.
    pub lanes: &'a [Lane],
    /// Position of each row.
    pub positions: &'a [Position],
    /// Whether the last stage needs logits of the row.
    pub want: &'a [bool],
    /// Activations, `rows × width`, row-major.
    pub input: &'a [f32],
}

/// One slice of a model with its KV cache. All calls come from one thread.
pub trait Runtime {
    /// Floats in a row of activations, in and out.
    fn width(&self) -> usize;

    /// Whether the slice holds the last layer and the head.
    fn is_last(&self) -> bool;

    /// Removes the cells of `lane` at positions in `[from, to)`; negative bounds mean "from the start" and "to the end".
    /// `false` when the cache cannot remove that part (recurrent state): the caller then removes the whole lane.
    fn seq_rm(&mut self, lane: Lane, from: Position, to: Position) -> bool;

    /// Makes `to` share the cells of `from` at positions in `[begin, end)`.
    fn seq_cp(&mut self, from: Lane, to: Lane, begin: Position, end: Position);

    /// Puts the whole state of `lane` into `out`, in place of what was there: bytes that [`Runtime::set_state`] of a slice of the
    /// same layers and settings takes.
    ///
    /// # Errors
    /// [`RuntimeError::State`].
    fn state(&mut self, lane: Lane, out: &mut Vec<u8>) -> Result<(), RuntimeError>;

    /// Puts a state into `lane`, in place of what it held.
    ///
    /// # Errors
    /// [`RuntimeError::State`], when there is no room for it; `lane` may hold anything then.
    fn set_state(&mut self, lane: Lane, state: &[u8]) -> Result<(), RuntimeError>;

    /// Empties the cache.
    fn clear(&mut self);

    /// Whether each lane has a cache of its own: what an idle lane holds then costs the others neither room nor time.
    fn has_own_caches(&self) -> bool;

    /// Highest position held by `lane`, −1 when empty.
    fn pos_max(&self, lane: Lane) -> Position;

    /// Looks up embedding rows of `tokens` (stage 0 only) and appends them to `out`, `tokens.len() × width` floats.
    ///
    /// # Errors
    /// When a token is out of range or the table cannot be read.
    fn embed(&mut self, tokens: &[Token], out: &mut Vec<f32>) -> Result<(), RuntimeError>;

    /// Computes a batch. On stages before the last, the activations of all rows are then in [`Runtime::activations`]; on
    /// the last, the logits of the rows with `want` are in [`Runtime::logits`].
    ///
    /// # Errors
    /// [`RuntimeError`]; the cache may hold some of the rows.
    fn decode(&mut self, batch: Batch<'_>) -> Result<(), RuntimeError>;

    /// Activations of the last computation, `rows × width`, row-major.
    fn activations(&self) -> &[f32];

    /// Logits of row `row` of the last computation, one per vocabulary entry.
    ///
    /// # Errors
    /// When the row was computed without `want`.
    fn logits(&self, row: usize) -> Result<&[f32], RuntimeError>;
}
