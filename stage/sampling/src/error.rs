//! What can go wrong while sampling.

use crate::{Position, Token};

/// An error of the sampling crate. None of them leaves a sampler unusable: [`crate::SessionSampler::truncate`] to an
/// earlier position undoes the row that caused it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A field of the generation config holds a value that has no meaning.
    #[error("generation config: `{field}` {reason}")]
    InvalidConfig {
        /// Name of the field as in the JSON.
        field: &'static str,
        /// What is wrong and what is accepted.
        reason: String,
    },
    /// A JSON schema, regular expression or Lark grammar cannot be enforced.
    #[error("the {kind} cannot be enforced: {reason}")]
    InvalidGrammar {
        /// "JSON schema", "regular expression", …
        kind: &'static str,
        /// The compiler's words.
        reason: String,
    },
    /// The config asks for a grammar and the sampler was made without a factory.
    #[error("the generation config asks for a grammar, but this stage has no vocabulary to compile it for")]
    NoGrammarFactory,
    /// The vocabulary cannot be used for grammars.
    #[error("vocabulary unfit for grammars: {0}")]
    InvalidVocabulary(String),
    /// A row does not follow the rows before it.
    #[error("row at position {got} does not follow: the session's next position is {expected}; send the rows between")]
    PositionGap {
        /// The next position this sampler takes.
        expected: Position,
        /// The position that was given.
        got: Position,
    },
    /// A position or token below what can exist.
    #[error("row at position {position} with token {token}: positions start at 0 and tokens at -1 (media)")]
    InvalidRow {
        /// The row's position.
        position: Position,
        /// The row's token.
        token: Token,
    },
    /// Sampling was asked for a row that is not the last one committed.
    #[error(
        "logits are of the row at position {got}, but the session's last row is at {last:?}; commit or truncate first"
    )]
    NotTheLastRow {
        /// Position of the last row, if there is one.
        last: Option<Position>,
        /// The position that was given.
        got: Position,
    },
    /// A logit is NaN or +∞: the computation upstream failed.
    #[error("logit of token {token} is {value}: the model's output at position {position} is not usable")]
    BadLogit {
        /// Position of the row.
        position: Position,
        /// The first such token.
        token: usize,
        /// Its value.
        value: f32,
    },
    /// `logit_bias` names a token outside the vocabulary.
    #[error("`logit_bias` names token {token}, but the vocabulary has {vocab} tokens")]
    BiasOutsideVocabulary {
        /// The token named.
        token: Token,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Bans, grammar and the model's own −∞ leave no token.
    #[error(
        "no token is allowed after position {position}: the bans in `logit_bias` and the grammar exclude all of them"
    )]
    NothingAllowed {
        /// Position of the row.
        position: Position,
    },
    /// The text already left the grammar (a draft that will be taken back).
    #[error("the token at position {position} is not in the grammar; truncate to it before sampling on")]
    OffGrammar {
        /// Position of the first token outside the grammar.
        position: Position,
    },
    /// The grammar engine gave up (too complex at this point, or an internal error).
    #[error("the grammar cannot go on after position {position}: {reason}")]
    GrammarFailed {
        /// Position of the row.
        position: Position,
        /// The engine's words.
        reason: String,
    },
}
