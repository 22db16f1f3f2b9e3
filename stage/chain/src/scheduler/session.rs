//! What the scheduler knows of a session with a lane.

use splitmodel_link::frame::{
    Candidate, Epoch, Lane, Prediction, Report, Row, Section, SessionId, Target, Token, row_flags,
};

use super::types::Request;

/// A session with a lane.
pub(super) struct Session {
    pub(super) lane: Lane,
    pub(super) epoch: Epoch,
    pub(super) tokens: Vec<Token>,
    pub(super) prompt: usize,
    /// The last of `tokens`, which come from an earlier answer and are shown when all stages have what goes before them.
    pub(super) replayed: usize,
    /// Rows sent in this epoch.
    pub(super) sent: usize,
    /// Whether the last stage has this epoch's config.
    pub(super) config_sent: bool,
    /// Whether the stages of this formation know the session.
    pub(super) on_stages: bool,
    /// What its lane is taken to begin with, longest first, until the chain confirms it.
    pub(super) restoring: Option<Vec<Candidate>>,
    /// What its lane began with, as far as is known; protected in the directory.
    pub(super) shares: Option<Candidate>,
    /// Lengths at which its state is still to be recorded, descending.
    pub(super) checkpoints: Vec<usize>,
    /// Exact states recorded in this attempt, until a token shows that its rows were computed.
    pub(super) recorded: Vec<Candidate>,
    pub(super) attempts: u32,
    /// What a stage said first about rows that it dropped, until a token comes.
    pub(super) cause: Option<Report>,
    pub(super) request: Request,
}

impl Session {
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.sent
    }

    /// Tokens to send before its state is recorded, or all.
    pub(super) fn until_checkpoint(&self) -> usize {
        self.checkpoints.last().map_or(self.remaining(), |at| at.saturating_sub(self.sent))
    }

    /// Bytes of its config at most, with its history.
    pub(super) fn config_bytes(&self) -> usize {
        self.request.config.len() + history_bytes(self.sent)
    }

    pub(super) fn target(&self, id: SessionId) -> Target {
        Target { session: id, epoch: self.epoch, lane: self.lane }
    }

    /// Its answer has begun, and no more than its newest token is to be sent.
    pub(super) fn is_decoding(&self) -> bool {
        self.tokens.len() > self.prompt && self.remaining() <= 1
    }

    /// The prediction of the token at index `at`, which was made earlier; nothing but the token is known.
    pub(super) fn known(&self, id: SessionId, at: usize) -> Prediction {
        let before = at.saturating_sub(1);
        Prediction {
            session: id,
            epoch: self.epoch,
            ordinal: u32::try_from(before).unwrap_or(u32::MAX),
            position: i32::try_from(before).unwrap_or(i32::MAX),
            token: self.tokens[at],
            logprob: f32::NAN,
            entropy: f32::NAN,
            margin: f32::NAN,
            mu: f32::NAN,
            draws: 0,
            flags: 0,
            top: Vec::new(),
        }
    }

    /// A session that begins with the prompt of `request`; nothing of it is sent.
    pub(super) fn new(lane: Lane, request: Request) -> Self {
        Self {
            lane,
            epoch: 0,
            tokens: request.prompt.clone(),
            prompt: request.prompt.len(),
            replayed: 0,
            sent: 0,
            config_sent: false,
            on_stages: false,
            restoring: None,
            shares: None,
            checkpoints: Vec::new(),
            recorded: Vec::new(),
            attempts: 0,
            cause: None,
            request,
        }
    }

    /// The next attempt begins after `sent` cells, which all stages have.
    pub(super) fn again_from(&mut self, sent: usize) {
        self.epoch += 1;
        self.sent = sent;
        self.config_sent = false;
        self.restoring = None;
    }

    /// The config, with the tokens that were restored as its history: the sampler did not see them as rows.
    fn config(&self) -> Vec<u8> {
        let mut json = self.request.config.clone();
        // What is no object is refused where it is read.
        if self.sent > 0 && json.last() == Some(&b'}') {
            json.pop();
            json.extend_from_slice(if json.ends_with(b"{") { b"\"history\":" } else { b",\"history\":" });
            // Numbers always have a JSON form.
            json.extend(serde_json::to_vec(&self.tokens[..self.sent]).unwrap_or_default());
            json.push(b'}');
        }
        json
    }

    /// Appends its next `count` rows, and its config before the first.
    pub(super) fn send(&mut self, id: SessionId, count: usize, pending: &mut Vec<Section>, rows: &mut Vec<Row>) {
        if !self.config_sent {
            self.config_sent = true;
            self.on_stages = true;
            pending.push(Section::Config { target: self.target(id), json: self.config() });
            if let Some(context) = self.request.trace {
                pending.push(Section::Trace { session: id, context });
            }
        }
        for at in self.sent..self.sent + count {
            let last = at + 1 == self.tokens.len();
            let logprobs = if self.request.logprobs { row_flags::LOGPROBS } else { 0 };
            rows.push(Row {
                session: id,
                epoch: self.epoch,
                ordinal: u32::try_from(at).unwrap_or(u32::MAX),
                position: i32::try_from(at).unwrap_or(i32::MAX),
                token: self.tokens[at],
                lane: self.lane,
                flags: if last { row_flags::WANT | logprobs } else { 0 },
            });
        }
        self.sent += count;
    }
}

/// Bytes of a history of `tokens` tokens at most.
pub(super) fn history_bytes(tokens: usize) -> usize {
    if tokens == 0 { 0 } else { 12 + 12 * tokens }
}
