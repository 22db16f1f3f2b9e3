//! The sampler of one session.

use std::collections::HashMap;

use toktrie::SimpleVob;

use crate::{
    GenerationConfig, GrammarFactory, Position, SamplingError, Token,
    draw::uniform,
    grammar::{Allowed, GrammarState, GrammarStop},
    select::{self, Candidate, Filters, Selector},
};

/// A chosen token with what is known about the choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token; it stands at the row's position + 1.
    pub token: Token,
    /// Its log-probability (nats) in the softmax of logits + `logit_bias`: before penalties, grammar and temperature.
    /// NaN unless asked for.
    pub logprob: f32,
    /// Entropy (nats) of that softmax. NaN unless log-probabilities were asked for.
    pub entropy: f32,
    /// Distance of its two best logits; NaN where there is no second.
    pub margin: f32,
    /// The grammar is complete and the token is the end that it demands.
    pub grammar_end: bool,
    /// The `top_logprobs` likeliest tokens of that softmax, best first; empty unless asked for.
    pub top: Vec<(Token, f32)>,
}

/// Sampler state of one session on the last stage: its rows, penalties' counts and grammar.
pub struct SessionSampler {
    config: GenerationConfig,
    rows: Vec<(Position, Token)>,
    /// Tokens at positions from `prompt_tokens` on.
    generated: Vec<Token>,
    generated_counts: HashMap<Token, u32>,
    /// Counts over the last `penalty_last_n` rows.
    window_counts: HashMap<Token, u32>,
    grammar: Option<GrammarState>,
    eog: Vec<Token>,
    work: Vec<f32>,
    best: Vec<Candidate>,
    selector: Selector,
}

impl std::fmt::Debug for SessionSampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionSampler")
            .field("rows", &self.rows.len())
            .field("generated", &self.generated.len())
            .field("grammar", &self.grammar.is_some())
            .finish_non_exhaustive()
    }
}

impl SessionSampler {
    /// A sampler whose rows so far are `config.history` at positions 0...
    ///
    /// # Errors
    /// A bad field, a grammar that cannot be enforced, or a grammar without `grammars`.
    pub fn new(mut config: GenerationConfig, grammars: Option<&GrammarFactory>) -> Result<Self, SamplingError> {
        config.validate()?;
        let mut eog = std::mem::take(&mut config.eog);
        eog.extend(grammars.iter().flat_map(|g| g.eog()));
        eog.sort_unstable();
        eog.dedup();
        let grammar = match (&config.grammar, grammars) {
            (None, _) => None,
            (Some(_), None) => return Err(SamplingError::NoGrammarFactory),
            (Some(spec), Some(factory)) => Some(GrammarState::new(factory, spec, &eog)?),
        };
        let history = std::mem::take(&mut config.history);
        let mut sampler = Self {
            rows: Vec::with_capacity(history.len()),
            generated: Vec::new(),
            generated_counts: HashMap::new(),
            window_counts: HashMap::new(),
            grammar,
            eog,
            work: Vec::new(),
            best: Vec::new(),
            selector: Selector::default(),
            config,
        };
        for (position, token) in history.into_iter().enumerate() {
            let position = Position::try_from(position).map_err(|_| SamplingError::InvalidConfig {
                field: "history",
                reason: "is longer than positions can count".into(),
            })?;
            sampler.commit(position, token)?;
        }
        Ok(sampler)
    }

    /// The position after the last row: what the next row or the next token has, unless media rows come between.
    pub fn next_position(&self) -> Position {
        self.rows.last().map_or(0, |(p, _)| p.saturating_add(1))
    }

    /// Takes a row, of the prompt or generated. A position at or below the last row's first goes back to it, as the wire
    /// demands. Several media rows (token −1) may share a position, and after one positions may jump.
    ///
    /// # Errors
    /// A gap, a negative position, or a token below −1; the sampler is unchanged then.
    pub fn commit(&mut self, position: Position, token: Token) -> Result<(), SamplingError> {
        if position < 0 || token < -1 {
            return Err(SamplingError::InvalidRow { position, token });
        }
        let last = self.rows.last().copied();
        let media_goes_on = token == -1 && last == Some((position, -1));
        let expected = self.next_position();
        if position < expected && !media_goes_on {
            self.truncate(position)?;
            return self.commit(position, token);
        }
        let jump_allowed = last.is_some_and(|(_, t)| t == -1);
        if position > expected && !jump_allowed {
            return Err(SamplingError::PositionGap { expected, got: position });
        }
        self.rows.push((position, token));
        self.window_push();
        if self.is_generated(position) {
            self.generated.push(token);
            *self.generated_counts.entry(token).or_default() += 1;
            if let Some(grammar) = &mut self.grammar {
                grammar.commit(token);
            }
        }
        Ok(())
    }

    /// Forgets the rows at and after `position`; history, penalties and grammar go back with them.
    ///
    /// # Errors
    /// Only where the grammar had to be compiled again and that failed.
    pub fn truncate(&mut self, position: Position) -> Result<(), SamplingError> {
        let kept = self.rows.partition_point(|(p, _)| *p < position);
        if kept == self.rows.len() {
            return Ok(());
        }
        let first_generated = self.rows.len() - self.generated.len();
        let generated_kept = kept.saturating_sub(first_generated);
        if let Some(grammar) = &mut self.grammar {
            grammar.truncate(generated_kept, &self.generated)?;
        }
        for token in self.generated.drain(generated_kept..) {
            decrement(&mut self.generated_counts, token);
        }
        self.rows.truncate(kept);
        self.window_rebuild();
        Ok(())
    }

    /// Chooses the token after the row at `position`, the last one committed, from that row's `logits` (one per token of
    /// the vocabulary). Changes nothing: the token counts once it is committed as a row.
    ///
    /// # Errors
    /// Unusable logits, another row than the last, a bias outside the vocabulary, nothing allowed, or a text that already
    /// left its grammar.
    pub fn sample(&mut self, position: Position, logits: &[f32], want_logprobs: bool) -> Result<Sample, SamplingError> {
        let last = self.rows.last().map(|(p, _)| *p);
        if last != Some(position) {
            return Err(SamplingError::NotTheLastRow { last, got: position });
        }
        let biased = self.apply_bias(logits)?;
        let values = if biased { &self.work } else { logits };
        let scan =
            select::scan(values).map_err(|token| SamplingError::BadLogit { position, token, value: logits[token] })?;
        if scan.max == f32::NEG_INFINITY {
            return Err(SamplingError::NothingAllowed { position });
        }
        let mut sample = Sample {
            token: -1,
            logprob: f32::NAN,
            entropy: f32::NAN,
            margin: if scan.second > f32::NEG_INFINITY { scan.max - scan.second } else { f32::NAN },
            grammar_end: false,
            top: Vec::new(),
        };
        let mut log_sum = f64::NAN;
        if want_logprobs {
            let (sum, entropy) = select::log_sum_and_entropy(values, scan.max);
            log_sum = sum;
            sample.entropy = entropy as f32;
            select::best(values, usize::from(self.config.top_logprobs), &mut self.best);
            sample.top = self.best.iter().map(|c| (c.token, logprob(c.logit, log_sum))).collect();
        }
        let next_is_generated = self.is_generated(position.saturating_add(1));
        let allowed = match &mut self.grammar {
            Some(grammar) if next_is_generated => Some(grammar.allowed().map_err(|stop| match stop {
                GrammarStop::Off(index) => {
                    let first_generated = self.rows.len() - self.generated.len();
                    SamplingError::OffGrammar {
                        position: self.rows.get(first_generated + index).map_or(position, |r| r.0),
                    }
                }
                GrammarStop::Failed(reason) => SamplingError::GrammarFailed { position, reason },
            })?),
            _ => None,
        };
        let penalised = self.has_penalties();
        if !biased && (penalised || allowed.is_some()) {
            self.work.clear();
            self.work.extend_from_slice(logits);
        }
        if penalised {
            self.apply_penalties();
        }
        let altered = penalised || allowed.is_some();
        match allowed {
            Some(Allowed::End) => sample.grammar_end = true,
            Some(Allowed::Tokens { mask, end }) => sample.grammar_end = !self.apply_mask(&mask, end),
            None => {}
        }
        sample.token = if sample.grammar_end {
            self.likeliest_end(logits).ok_or(SamplingError::NothingAllowed { position })?
        } else {
            self.choose(position, logits, biased || altered)?
        };
        if want_logprobs {
            let bias = self.config.logit_bias.iter().find(|(t, _)| *t == sample.token).map_or(0.0, |(_, b)| *b);
            sample.logprob = logprob(logits[sample.token as usize] + bias, log_sum);
        }
        Ok(sample)
    }

    fn choose(&mut self, position: Position, logits: &[f32], altered: bool) -> Result<Token, SamplingError> {
        let values = if altered { &self.work } else { logits };
        let scan =
            select::scan(values).map_err(|token| SamplingError::BadLogit { position, token, value: values[token] })?;
        if scan.max == f32::NEG_INFINITY {
            return Err(SamplingError::NothingAllowed { position });
        }
        if self.config.temperature == 0.0 {
            return Ok(scan.best as Token);
        }
        let filters = Filters {
            top_k: self.config.top_k as usize,
            top_p: f64::from(self.config.top_p),
            min_p: self.config.min_p,
        };
        let u = uniform(self.config.seed, position.saturating_add(1));
        Ok(self.selector.draw(values, scan.max, filters, self.config.temperature, u))
    }

    /// A complete grammar is stronger than a ban: there is nothing else to say.
    fn likeliest_end(&self, logits: &[f32]) -> Option<Token> {
        let mut best: Option<Candidate> = None;
        for &token in &self.eog {
            if let Some(&logit) = logits.get(token as usize)
                && best.is_none_or(|b| logit > b.logit)
            {
                best = Some(Candidate { logit, token });
            }
        }
        best.map(|b| b.token)
    }

    /// Copies `logits` with the bias added, if there is any.
    fn apply_bias(&mut self, logits: &[f32]) -> Result<bool, SamplingError> {
        if self.config.logit_bias.is_empty() {
            return Ok(false);
        }
        self.work.clear();
        self.work.extend_from_slice(logits);
        for &(token, bias) in &self.config.logit_bias {
            let value = self
                .work
                .get_mut(token as usize)
                .ok_or(SamplingError::BiasOutsideVocabulary { token, vocab: logits.len() })?;
            *value += if bias <= -100.0 { f32::NEG_INFINITY } else { bias };
        }
        Ok(true)
    }

    fn has_penalties(&self) -> bool {
        !self.window_counts.is_empty() || (self.has_counted_penalties() && !self.generated_counts.is_empty())
    }

    fn has_counted_penalties(&self) -> bool {
        self.config.presence_penalty != 0.0 || self.config.frequency_penalty != 0.0
    }

    fn apply_penalties(&mut self) {
        let repeat = self.config.repeat_penalty;
        for &token in self.window_counts.keys() {
            if let Some(value) = self.work.get_mut(token as usize) {
                *value = if *value > 0.0 { *value / repeat } else { *value * repeat };
            }
        }
        if self.has_counted_penalties() {
            for (&token, &count) in &self.generated_counts {
                if let Some(value) = self.work.get_mut(token as usize) {
                    *value -= self.config.presence_penalty + self.config.frequency_penalty * count as f32;
                }
            }
        }
    }

    /// Leaves what a grammar allows; `mask` holds text, `end` says whether it may end here. Returns whether text is allowed.
    fn apply_mask(&mut self, mask: &SimpleVob, end: bool) -> bool {
        let work = &mut self.work;
        let ends: Vec<Option<f32>> = self.eog.iter().map(|t| work.get(*t as usize).copied()).collect();
        mask.iter_unset_entries(|id| {
            if let Some(value) = work.get_mut(id) {
                *value = f32::NEG_INFINITY;
            }
        });
        work.iter_mut().skip(mask.len()).for_each(|v| *v = f32::NEG_INFINITY);
        if end {
            for (token, value) in self.eog.iter().zip(ends) {
                if let (Some(slot), Some(value)) = (work.get_mut(*token as usize), value) {
                    *slot = value;
                }
            }
        }
        !mask.is_zero()
    }

    fn is_generated(&self, position: Position) -> bool {
        i64::from(position) >= i64::from(self.config.prompt_tokens)
    }

    /// Rows that `repeat_penalty` looks back over.
    fn window(&self) -> usize {
        match self.config.penalty_last_n {
            _ if self.config.repeat_penalty == 1.0 => 0,
            n => usize::try_from(n).unwrap_or(usize::MAX),
        }
    }

    /// Counts the newest row and forgets the one that left the window.
    fn window_push(&mut self) {
        let window = self.window();
        if window == 0 {
            return;
        }
        if let Some((_, token)) = self.rows.last().filter(|(_, t)| *t >= 0) {
            *self.window_counts.entry(*token).or_default() += 1;
        }
        if let Some(left) = self.rows.len().checked_sub(window).and_then(|n| n.checked_sub(1)) {
            decrement(&mut self.window_counts, self.rows[left].1);
        }
    }

    fn window_rebuild(&mut self) {
        self.window_counts.clear();
        let window = self.window();
        if window > 0 {
            for (_, token) in self.rows.iter().rev().take(window).filter(|(_, t)| *t >= 0) {
                *self.window_counts.entry(*token).or_default() += 1;
            }
        }
    }
}

fn logprob(logit: f32, log_sum: f64) -> f32 {
    (f64::from(logit) - log_sum).min(0.0) as f32
}

fn decrement(counts: &mut HashMap<Token, u32>, token: Token) {
    if let Some(count) = counts.get_mut(&token) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&token);
        }
    }
}
