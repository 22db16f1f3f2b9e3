use std::path::Path;

use splitmodel_link::frame::Token;

use crate::EngineError;
use crate::llama::model::Model;
use crate::llama::vocab::Role;

/// A token that text contains only on purpose: `<|im_end|>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Id.
    pub id: Token,
    /// How it is written.
    pub text: String,
    /// Whether it is a control token, which is not part of generated text; else user-defined text.
    pub control: bool,
}

/// A model's vocabulary, without weights. Shared by threads.
pub struct Tokenizer {
    model: Model,
    n_vocab: usize,
    eog: Vec<Token>,
    special: Vec<SpecialToken>,
}

impl Tokenizer {
    /// Loads the vocabulary of a tokenizer package or of a whole model.
    ///
    /// # Errors
    /// [`EngineError::File`] when it is no GGUF file or has no tokens, [`EngineError::Load`] with llama.cpp's reason.
    pub fn load(path: &Path) -> Result<Self, EngineError> {
        crate::slice::check_file(path)?;
        let model = Model::load_vocabulary(path)?;
        let n_vocab = model.n_vocab();
        if n_vocab == 0 || !model.has_vocabulary() {
            return Err(EngineError::file(path, "it has no tokens; the tokenizer package of the model is needed here"));
        }
        let ids = 0..Token::try_from(n_vocab).unwrap_or(Token::MAX);
        let eog = ids.clone().filter(|&t| model.is_eog(t)).collect();
        let special = ids
            .filter_map(|id| {
                let control = match model.role(id) {
                    Role::Plain => return None,
                    role => role == Role::Control,
                };
                Some(SpecialToken { id, text: model.token_text(id), control })
            })
            .collect();
        Ok(Self { model, n_vocab, eog, special })
    }

    /// Entries of the vocabulary; ids are below it.
    #[must_use]
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Whether `token` is an id of the vocabulary.
    #[must_use]
    pub fn contains(&self, token: Token) -> bool {
        usize::try_from(token).is_ok_and(|t| t < self.n_vocab)
    }

    /// Beginning of sequence.
    #[must_use]
    pub fn bos(&self) -> Option<Token> {
        self.model.bos()
    }

    /// End of sequence.
    #[must_use]
    pub fn eos(&self) -> Option<Token> {
        self.model.eos()
    }

    /// End of turn.
    #[must_use]
    pub fn eot(&self) -> Option<Token> {
        self.model.eot()
    }

    /// Whether [`Tokenizer::tokenize`] with `add_special` puts `bos` in front.
    #[must_use]
    pub fn add_bos(&self) -> bool {
        self.model.add_bos()
    }

    /// Whether [`Tokenizer::tokenize`] with `add_special` puts `eos` at the end.
    #[must_use]
    pub fn add_eos(&self) -> bool {
        self.model.add_eos()
    }

    /// Every token that ends a generation, by id.
    #[must_use]
    pub fn eog(&self) -> &[Token] {
        &self.eog
    }

    /// Whether `token` ends a generation.
    #[must_use]
    pub fn is_eog(&self, token: Token) -> bool {
        self.eog.binary_search(&token).is_ok()
    }

    /// Control and user-defined tokens, by id.
    #[must_use]
    pub fn special_tokens(&self) -> &[SpecialToken] {
        &self.special
    }

    /// Ids of `text`. `add_special` adds `bos` and `eos` as the model wants them; `parse_special` takes the text of special
    /// tokens for these tokens (for templates; never for what users wrote).
    ///
    /// # Errors
    /// [`EngineError::Tokenize`] for 2 GiB of text or more.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, EngineError> {
        self.model.tokenize(text, add_special, parse_special).ok_or_else(|| EngineError::Tokenize {
            bytes: text.len(),
            reason: "llama.cpp takes less than 2 GiB".to_owned(),
        })
    }

    /// Exact bytes of a token, often part of a character. Special tokens have their text with `special`, else nothing; an id
    /// outside the vocabulary has no bytes.
    #[must_use]
    pub fn token_bytes(&self, token: Token, special: bool) -> Vec<u8> {
        let mut out = Vec::new();
        self.append_bytes(token, special, &mut out);
        out
    }

    /// As [`Tokenizer::token_bytes`], appended to `out`.
    pub fn append_bytes(&self, token: Token, special: bool, out: &mut Vec<u8>) {
        if self.contains(token) {
            self.model.piece(token, special, out);
        }
    }
}
