use std::path::{Path, PathBuf};
use std::sync::Arc;

use splitmodel_chain::runtime::{Batch, Runtime, RuntimeError};
use splitmodel_gguf::slice::keys;
use splitmodel_gguf::{Boundary, Model as Gguf};
use splitmodel_link::frame::{Lane, Position, Token};

use crate::calls::{RowOrder, next_call};
use crate::llama::context::{Context, Input, Rows};
use crate::llama::model::{Model, Progress};
use crate::streams::{MAX_FILL, Plan, Row};
use crate::{EmbeddingTable, EngineConfig, EngineError, MemoryUse};

/// Files of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceFiles {
    /// The stage's package.
    pub slice: PathBuf,
    /// The embedding package; needed on stage 0.
    pub embedding: Option<PathBuf>,
}

/// Where rows come from.
enum Source {
    /// Activations. Stage 0 has the table.
    Rows { table: Option<EmbeddingTable>, scale: f32 },
    /// Token ids of an unsplit model, carried as floats of a row one wide: exact below 2²⁴.
    Tokens,
}

/// Where the logits of the last computation are.
enum Logits {
    None,
    /// In llama.cpp's buffer, by row.
    Context,
    /// Copied, since several calls were needed.
    Copied(Vec<f32>),
}

/// Layers of a model with their KV cache: a stage of a chain, or an unsplit model.
pub struct Slice {
    context: Context,
    source: Source,
    order: RowOrder,
    plan: Plan,
    /// Widest gap between lanes that is filled.
    widest: usize,
    last: bool,
    width: usize,
    n_embd: usize,
    n_vocab: usize,
    lanes: u32,
    layers: (u32, u32),
    memory: MemoryUse,
    /// Output of the last layer.
    rows: Vec<f32>,
    /// Incoming rows, where they are scaled.
    scaled: Vec<f32>,
    tokens: Vec<Token>,
    logits: Logits,
    /// Of each row of the last computation: where its logits are, by row of the call or in the copy.
    wanted: Vec<Option<u32>>,
}

/// Refuses what llama.cpp would abort the process on.
pub(crate) fn check_file(path: &Path) -> Result<Gguf, EngineError> {
    Gguf::open(path).map_err(|e| EngineError::file(path, e))
}

fn key(gguf: &Gguf, path: &Path, name: &str) -> Result<u32, EngineError> {
    gguf.header().required_u32(name).map_err(|e| EngineError::file(path, e))
}

impl Slice {
    /// Loads the package of a stage and makes its context. `progress` gets the loaded share, 0 to 1, and cancels by
    /// returning `false`. Devices that are asked for and missing are errors: nothing falls back to the CPU.
    ///
    /// # Errors
    /// [`EngineError`], naming the file, field or device.
    pub fn load(files: &SliceFiles, config: &EngineConfig, progress: Progress<'_>) -> Result<Self, EngineError> {
        config.validate()?;
        let path = files.slice.as_path();
        let gguf = check_file(path)?;
        let (first, end, of) =
            (key(&gguf, path, keys::FIRST)?, key(&gguf, path, keys::END)?, key(&gguf, path, keys::LAYERS)?);
        let layers = key(&gguf, path, &gguf.arch_key("block_count"))?;
        if first >= end || end > of || end - first != layers {
            let reason = format!("it says layers {first}..{end} of {of} and has {layers}; write it again");
            return Err(EngineError::file(path, reason));
        }
        let n_embd = key(&gguf, path, &gguf.arch_key("embedding_length"))?;
        let boundary = gguf.family().map_err(|e| EngineError::file(path, e))?.boundary(n_embd);
        let table = Self::table(files, first, &boundary)?;
        let last = end == of;
        let capture = (!last).then(|| boundary.output_tensor(layers));
        let scale = if first == 0 { 1.0 } else { boundary.input_scale };
        let mut slice = Self::open(path, config, Source::Rows { table, scale }, capture.as_deref(), progress)?;
        slice.layers = (first, end);
        if slice.n_embd != n_embd as usize {
            return Err(EngineError::file(path, format!("its width is {}, not {n_embd}", slice.n_embd)));
        }
        if let Source::Rows { table: Some(table), .. } = &slice.source
            && table.width() != slice.n_embd
        {
            let reason = format!("the embedding table has rows of {}, the slice of {n_embd}", table.width());
            return Err(EngineError::file(path, reason));
        }
        Ok(slice)
    }

    /// Loads an unsplit model: the reference for slices. Its rows are one float wide and carry token ids, so whatever drives
    /// a chain of stages drives it too.
    ///
    /// # Errors
    /// As [`Slice::load`].
    pub fn load_whole(path: &Path, config: &EngineConfig, progress: Progress<'_>) -> Result<Self, EngineError> {
        config.validate()?;
        let gguf = check_file(path)?;
        let layers = key(&gguf, path, &gguf.arch_key("block_count"))?;
        let mut slice = Self::open(path, config, Source::Tokens, None, progress)?;
        slice.layers = (0, layers);
        Ok(slice)
    }

    fn table(files: &SliceFiles, first: u32, boundary: &Boundary) -> Result<Option<EmbeddingTable>, EngineError> {
        match (&files.embedding, first) {
            (Some(path), 0) => Ok(Some(EmbeddingTable::open(path, boundary.embedding_scale)?)),
            (None, 0) => Err(EngineError::file(&files.slice, "stage 0 needs the embedding package too")),
            _ => Ok(None),
        }
    }

    fn open(
        path: &Path,
        config: &EngineConfig,
        source: Source,
        capture: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Self, EngineError> {
        let (model, model_log) = Model::load(path, config, progress)?;
        let (n_embd, n_embd_inp, n_vocab) = (model.n_embd(), model.n_embd_inp(), model.n_vocab());
        if n_embd == 0 || n_embd != n_embd_inp {
            let reason =
                format!("rows going in have {n_embd_inp} floats, rows coming out {n_embd}: it cannot be chained");
            return Err(EngineError::file(path, reason));
        }
        let (order, unified) = match model.row_order() {
            RowOrder::Kept if !config.kv_unified => (RowOrder::Streams, false),
            order => (order, true),
        };
        let config = &EngineConfig { kv_unified: unified, ..config.clone() };
        let (context, context_log) = Context::new(Arc::new(model), path, config, capture)?;
        let memory = MemoryUse::from_log(model_log.lines().chain(context_log.lines()));
        let rows = context.max_rows();
        let (width, last) = (if matches!(source, Source::Tokens) { 1 } else { n_embd }, capture.is_none());
        Ok(Self {
            source,
            order,
            plan: Plan::default(),
            widest: config.widest_gap.map_or(if memory.is_on_host() { 0 } else { MAX_FILL }, |lanes| lanes as usize),
            last,
            width,
            n_embd,
            n_vocab,
            lanes: config.lanes,
            layers: (0, 0),
            memory,
            rows: Vec::with_capacity(if last { 0 } else { rows.saturating_mul(n_embd) }),
            scaled: Vec::new(),
            tokens: Vec::new(),
            logits: Logits::None,
            wanted: Vec::with_capacity(rows),
            context,
        })
    }

    /// Layers of the whole model that this slice holds: first, and one past the last.
    #[must_use]
    pub fn layers(&self) -> (u32, u32) {
        self.layers
    }

    /// Most rows of a batch.
    #[must_use]
    pub fn max_rows(&self) -> usize {
        self.context.max_rows()
    }

    /// Cells of the KV cache; llama.cpp rounds `n_ctx` up.
    #[must_use]
    pub fn cells(&self) -> u32 {
        self.context.cells()
    }

    /// KV sequences.
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.lanes
    }

    /// Entries of the vocabulary: floats of a row of logits. 1 on stages before the last.
    #[must_use]
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Bytes in use, by llama.cpp's account.
    #[must_use]
    pub fn memory(&self) -> &MemoryUse {
        &self.memory
    }

    /// Lowest position held by `lane`, −1 when empty. Above 0 where a sliding window has dropped cells: such a lane cannot
    /// be trimmed to below its window.
    #[must_use]
    pub fn pos_min(&self, lane: Lane) -> Position {
        if self.context.has_lane(lane) { self.context.pos_min(lane) } else { -1 }
    }

    /// Checks everything that llama.cpp would abort on or read beyond.
    fn check(&self, batch: &Batch<'_>) -> Result<(), RuntimeError> {
        let rows = batch.lanes.len();
        let wrong = |what, want, got| Err(RuntimeError::Shape { what, want, got });
        let shape = |what, want, got| if want == got { Ok(()) } else { wrong(what, want, got) };
        shape("positions of a batch", rows, batch.positions.len())?;
        shape("want flags of a batch", rows, batch.want.len())?;
        shape("input values of a batch", rows.saturating_mul(self.width), batch.input.len())?;
        if rows > self.context.max_rows() {
            return wrong("rows of a batch, at most", self.context.max_rows(), rows);
        }
        if let Some(&lane) = batch.lanes.iter().find(|&&l| !self.context.has_lane(l)) {
            return wrong("a lane below the number of lanes", self.lanes as usize, usize::from(lane));
        }
        // llama.cpp adds 1 to positions, and −1 marks an empty cell.
        if batch.positions.iter().any(|p| !(0..Position::MAX).contains(p)) {
            return Err(RuntimeError::Decode { code: -1, rows });
        }
        Ok(())
    }

    /// Turns `batch.input` into what llama.cpp takes.
    fn prepare(&mut self, input: &[f32]) -> Result<(), RuntimeError> {
        match self.source {
            Source::Tokens => {
                self.tokens.clear();
                for &x in input {
                    let token = x as Token;
                    if token as f32 != x || usize::try_from(token).map_or(true, |t| t >= self.n_vocab) {
                        return Err(RuntimeError::Embedding(format!("{x} is no token of {}", self.n_vocab)));
                    }
                    self.tokens.push(token);
                }
            }
            Source::Rows { scale, .. } if scale != 1.0 => {
                self.scaled.clear();
                self.scaled.extend(input.iter().map(|x| x * scale));
            }
            Source::Rows { .. } => {}
        }
        Ok(())
    }

    fn compute(&mut self, batch: &Batch<'_>) -> Result<(), RuntimeError> {
        if self.order == RowOrder::Streams {
            let mut plan = std::mem::take(&mut self.plan);
            let result = self.compute_streams(batch, &mut plan);
            self.plan = plan;
            return result;
        }
        let rows = batch.lanes.len();
        let mut start = 0;
        while start < rows {
            let call = next_call(self.order, batch.lanes, start);
            let values = call.start * self.n_embd..call.end * self.n_embd;
            let input = match self.source {
                Source::Tokens => Input::Tokens(&self.tokens[call.clone()]),
                Source::Rows { scale: 1.0, .. } => Input::Embeddings(&batch.input[values]),
                Source::Rows { .. } => Input::Embeddings(&self.scaled[values]),
            };
            let lanes = &batch.lanes[call.clone()];
            let want = &batch.want[call.clone()];
            match self.context.decode(&Rows { input, lanes, positions: &batch.positions[call.clone()], want }) {
                0 => {}
                1 => return Err(RuntimeError::CacheFull { rows }),
                code => return Err(RuntimeError::Decode { code, rows }),
            }
            if self.last {
                self.keep_logits(want, call.len() == rows)?;
            } else {
                self.keep_rows(lanes)?;
            }
            start = call.end;
        }
        Ok(())
    }

    /// As [`Slice::compute`], each lane with a cache of its own.
    fn compute_streams(&mut self, batch: &Batch<'_>, plan: &mut Plan) -> Result<(), RuntimeError> {
        let rows = batch.lanes.len();
        let cells = i64::from(self.context.cells() / self.lanes.max(1));
        plan.make(batch.lanes, self.widest, |lane| i64::from(self.context.pos_max(lane)) + 1 < cells);
        if !self.last {
            self.rows.resize(rows * self.n_embd, 0.0);
        }
        self.wanted.resize(rows, None);
        let mut start = 0;
        for at in 0..plan.ends.len() {
            let call = start..plan.ends[at];
            start = call.end;
            self.gather(batch, plan, call.clone());
            let input = match self.source {
                Source::Tokens => Input::Tokens(&plan.tokens),
                Source::Rows { .. } => Input::Embeddings(&plan.input),
            };
            let (lanes, positions, want) = (&plan.lanes[..], &plan.positions[..], &plan.want[..]);
            let code = self.context.decode(&Rows { input, lanes, positions, want });
            for (row, position) in plan.rows[call.clone()].iter().zip(positions).filter(|(row, _)| row.of.is_none()) {
                self.context.seq_rm(row.lane, *position, -1);
            }
            match code {
                0 => {}
                1 => return Err(RuntimeError::CacheFull { rows }),
                code => return Err(RuntimeError::Decode { code, rows }),
            }
            let only = plan.ends.len() == 1;
            if self.last {
                self.scatter_logits(&plan.rows[call], want, only)?
            } else {
                self.scatter_rows(&plan.rows[call])?
            }
        }
        Ok(())
    }

    /// Puts the rows of a call into the plan's buffers.
    fn gather(&self, batch: &Batch<'_>, plan: &mut Plan, call: std::ops::Range<usize>) {
        plan.begin();
        for at in call {
            let Row { lane, of } = plan.rows[at];
            plan.lanes.push(lane);
            plan.positions.push(of.map_or_else(|| self.context.pos_max(lane) + 1, |i| batch.positions[i]));
            plan.want.push(of.is_some_and(|i| batch.want[i]));
            let values = |i: usize| i * self.n_embd..(i + 1) * self.n_embd;
            match (&self.source, of) {
                (Source::Tokens, of) => plan.tokens.push(of.map_or(0, |i| self.tokens[i])),
                (Source::Rows { .. }, None) => plan.input.resize(plan.input.len() + self.n_embd, 0.0),
                (Source::Rows { scale: 1.0, .. }, Some(i)) => plan.input.extend_from_slice(&batch.input[values(i)]),
                (Source::Rows { .. }, Some(i)) => plan.input.extend_from_slice(&self.scaled[values(i)]),
            }
        }
    }

    /// Puts the output of a call where its rows stand in the frame.
    fn scatter_rows(&mut self, call: &[Row]) -> Result<(), RuntimeError> {
        let want = call.len() * self.n_embd;
        let mixed = call.iter().any(|row| row.lane != call[0].lane);
        let shape = |what, got| RuntimeError::Shape { what, want, got };
        let values = self.context.captured(mixed).map_err(|what| shape(what, 0))?;
        if values.len() != want {
            return Err(shape("output of the last layer", values.len()));
        }
        for (row, values) in call.iter().zip(values.chunks_exact(self.n_embd)) {
            if let Some(i) = row.of {
                self.rows[i * self.n_embd..(i + 1) * self.n_embd].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// Notes where the logits of a call's rows are: in llama.cpp's buffer where it is the frame's only one, else copied.
    fn scatter_logits(&mut self, call: &[Row], want: &[bool], only: bool) -> Result<(), RuntimeError> {
        for (at, row) in call.iter().enumerate().filter(|(at, _)| want[*at]) {
            let Some(i) = row.of else { continue };
            if only {
                (self.logits, self.wanted[i]) = (Logits::Context, Some(at as u32));
                continue;
            }
            let logits = self.context.logits(at).ok_or(missing(self.n_vocab))?;
            let count = if let Logits::Copied(all) = &mut self.logits {
                all.extend_from_slice(logits);
                all.len() / self.n_vocab.max(1)
            } else {
                self.logits = Logits::Copied(logits.to_vec());
                1
            };
            self.wanted[i] = Some(count as u32 - 1);
        }
        Ok(())
    }

    fn keep_rows(&mut self, lanes: &[Lane]) -> Result<(), RuntimeError> {
        let want = lanes.len() * self.n_embd;
        let mixed = lanes.iter().any(|l| *l != lanes[0]);
        match self.context.captured(mixed) {
            Ok(values) if values.len() == want => self.rows.extend_from_slice(values),
            Ok(values) => {
                return Err(RuntimeError::Shape { what: "output of the last layer", want, got: values.len() });
            }
            Err(what) => return Err(RuntimeError::Shape { what, want, got: 0 }),
        }
        Ok(())
    }

    fn keep_logits(&mut self, want: &[bool], only_call: bool) -> Result<(), RuntimeError> {
        let mut count = self.wanted.iter().flatten().count() as u32;
        for (row, &wanted) in want.iter().enumerate() {
            let index = if only_call { row as u32 } else { count };
            self.wanted.push(wanted.then_some(index));
            if !wanted {
                continue;
            }
            count += 1;
            if only_call {
                self.logits = Logits::Context;
                continue;
            }
            let logits = self.context.logits(row).ok_or(missing(self.n_vocab))?;
            if let Logits::Copied(all) = &mut self.logits {
                all.extend_from_slice(logits);
            } else {
                self.logits = Logits::Copied(logits.to_vec());
            }
        }
        Ok(())
    }
}

fn missing(want: usize) -> RuntimeError {
    RuntimeError::Shape { what: "logits of a row", want, got: 0 }
}

impl Runtime for Slice {
    fn width(&self) -> usize {
        self.width
    }

    fn is_last(&self) -> bool {
        self.last
    }

    fn seq_rm(&mut self, lane: Lane, from: Position, to: Position) -> bool {
        // A lane that does not exist holds nothing.
        !self.context.has_lane(lane) || self.context.seq_rm(lane, from, to)
    }

    fn seq_cp(&mut self, from: Lane, to: Lane, begin: Position, end: Position) {
        if self.context.has_lane(from) && self.context.has_lane(to) {
            self.context.seq_cp(from, to, begin, end);
        } else {
            tracing::error!(from, to, lanes = self.lanes, "seq_cp between lanes that do not exist was ignored");
        }
    }

    fn state(&mut self, lane: Lane, out: &mut Vec<u8>) -> Result<(), RuntimeError> {
        let taken = self.context.has_lane(lane) && self.context.state(lane, out);
        taken.then_some(()).ok_or(RuntimeError::State { done: "taken", why: "llama.cpp gave none" })
    }

    fn set_state(&mut self, lane: Lane, state: &[u8]) -> Result<(), RuntimeError> {
        let set = self.context.has_lane(lane) && self.context.set_state(lane, state);
        set.then_some(()).ok_or(RuntimeError::State { done: "set", why: "llama.cpp found no room for it" })
    }

    fn has_own_caches(&self) -> bool {
        self.order == RowOrder::Streams
    }

    fn clear(&mut self) {
        self.context.clear();
    }

    fn pos_max(&self, lane: Lane) -> Position {
        if self.context.has_lane(lane) { self.context.pos_max(lane) } else { -1 }
    }

    fn embed(&mut self, tokens: &[Token], out: &mut Vec<f32>) -> Result<(), RuntimeError> {
        match &mut self.source {
            Source::Tokens => {
                out.extend(tokens.iter().map(|&t| t as f32));
                Ok(())
            }
            Source::Rows { table: Some(table), .. } => {
                table.lookup(tokens, out).map_err(|error| {
                    // Paths are for the log: what a stage reports may reach clients.
                    tracing::error!(%error, "embedding rows cannot be read");
                    RuntimeError::Embedding("the table on disk failed; the stage's log says more".to_owned())
                })
            }
            Source::Rows { table: None, .. } => {
                Err(RuntimeError::Embedding("only stage 0 has the embedding table".to_owned()))
            }
        }
    }

    fn decode(&mut self, batch: Batch<'_>) -> Result<(), RuntimeError> {
        self.rows.clear();
        self.wanted.clear();
        match &mut self.logits {
            Logits::Copied(all) => all.clear(),
            logits => *logits = Logits::None,
        }
        let result = self.check(&batch).and_then(|()| self.prepare(batch.input)).and_then(|()| self.compute(&batch));
        if result.is_err() {
            // Nothing of a failed computation is given out.
            self.rows.clear();
            self.wanted.clear();
        }
        result
    }

    fn activations(&self) -> &[f32] {
        &self.rows
    }

    fn logits(&self, row: usize) -> Result<&[f32], RuntimeError> {
        let error = || missing(self.n_vocab);
        let index = self.wanted.get(row).copied().flatten().ok_or_else(error)? as usize;
        match &self.logits {
            Logits::None => None,
            Logits::Context => self.context.logits(index),
            Logits::Copied(all) => all.chunks_exact(self.n_vocab.max(1)).nth(index),
        }
        .ok_or_else(error)
    }
}
