//! Text to tokens, with an early end for what cannot fit.

use super::memo::Scope;
use super::off_thread::Asker;
use crate::app::App;
use crate::backend::Token;
use crate::error::ApiError;
use crate::template::specials::Segment;
use crate::types::common::Common;

/// More bytes per token of room than this are unusual, so that counting in pieces first is cheap on the whole.
const USUAL_BYTES: usize = 8;
/// Bytes of a piece.
const PIECE: usize = 64 << 10;

/// A prompt as it grows.
pub(crate) struct Tokens<'a> {
    app: &'a App,
    asker: &'a Asker,
    /// For a prompt that must fit the context: the request's field, and whose texts these are.
    of: Option<(&'static str, Scope)>,
    out: Vec<Token>,
}

impl<'a> Tokens<'a> {
    /// A prompt out of `field` of a request, to be answered.
    pub(crate) fn prompt(app: &'a App, asker: &'a Asker, field: &'static str, common: &Common) -> Self {
        let scope = Scope::of(common.cache_key.as_deref(), common.tenant.as_deref());
        Self { app, asker, of: Some((field, scope)), out: Vec::new() }
    }

    /// Tokens of any number.
    pub(crate) fn any(app: &'a App, asker: &'a Asker) -> Self {
        Self { app, asker, of: None, out: Vec::new() }
    }

    /// Adds a control token.
    pub(crate) fn special(&mut self, token: Token) {
        self.out.push(token);
    }

    /// Adds ordinary text, in which no control token is looked for.
    ///
    /// # Errors
    /// The prompt certainly does not fit, or the text cannot be tokenized.
    pub(crate) fn text(&mut self, text: &str) -> Result<(), ApiError> {
        self.asker.waits()?;
        self.bytes_fit(text.len())?;
        self.pieces_fit(text)?;
        let tokenize = || self.app.backend.tokenize(text, false);
        match self.of {
            Some((_, scope)) => self.app.memo.tokens(scope, text, &mut self.out, tokenize),
            None => {
                self.out.extend(tokenize()?);
                Ok(())
            }
        }
    }

    /// Adds text whose author writes the whole prompt: control tokens may be in it.
    ///
    /// # Errors
    /// As for [`Tokens::text`].
    pub(crate) fn with_specials(&mut self, text: &str) -> Result<(), ApiError> {
        self.bytes_fit(text.len())?;
        for segment in self.app.specials.split(text) {
            match segment {
                Segment::Special(token) => self.special(token),
                Segment::Text(text) => self.text(text)?,
            }
        }
        Ok(())
    }

    /// Refuses text of which even the longest tokens are too many. Takes no time, whatever the length.
    ///
    /// # Errors
    /// `context_length_exceeded`.
    pub(crate) fn bytes_fit(&self, bytes: usize) -> Result<(), ApiError> {
        self.fits(self.out.len() + bytes.div_ceil(self.app.longest_token))
    }

    /// Counts a long text in pieces, so that one far too long costs no more than the context.
    fn pieces_fit(&self, text: &str) -> Result<(), ApiError> {
        let n_ctx = self.app.card().n_ctx as usize;
        let room = n_ctx.saturating_sub(self.out.len());
        if self.of.is_none() || text.len() <= PIECE.max(room.saturating_mul(USUAL_BYTES)) {
            return Ok(());
        }
        let (mut count, mut rest) = (0usize, text);
        while !rest.is_empty() {
            self.asker.waits()?;
            let mut end = rest.len().min(PIECE);
            while !rest.is_char_boundary(end) {
                end -= 1;
            }
            let (piece, after) = rest.split_at(end);
            count += self.app.backend.tokenize(piece, false)?.len();
            // Cuts may split tokens. A fifth of all is far more than that can be.
            self.fits(self.out.len() + count - count / 5)?;
            rest = after;
        }
        Ok(())
    }

    fn fits(&self, at_least: usize) -> Result<(), ApiError> {
        let n_ctx = self.app.card().n_ctx;
        match self.of {
            Some((field, _)) if at_least >= n_ctx as usize => Err(ApiError::far_too_long(field, at_least, n_ctx)),
            _ => Ok(()),
        }
    }

    /// The tokens; with `bos` a prompt of a model that wants one begins with it, once.
    pub(crate) fn finish(mut self, bos: bool) -> Vec<Token> {
        let card = self.app.card();
        if let (true, true, Some(bos)) = (bos, card.add_bos, &card.bos)
            && self.out.first() != Some(&bos.id)
        {
            self.out.insert(0, bos.id);
        }
        self.out
    }
}
