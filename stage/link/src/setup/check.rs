//! Whether two setups make a connection. Pure.

use std::collections::VecDeque;
use std::fmt::Display;

use super::{InstanceId, MINOR, Refusal, RefusalCode, Role, Setup};
use crate::codec::{ActivationDtype, HEADER_BYTES, Limits, MAX_SECTION_BYTES, Shape};
use crate::frame::RawRow;

/// Which end of the connection we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// We opened it.
    Dialler,
    /// The peer opened it.
    Acceptor,
}

/// What two stages agreed on.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreed {
    /// Minor version in use: the lower of the two.
    pub minor: u16,
    /// Our setup.
    pub ours: Setup,
    /// The peer's setup.
    pub theirs: Setup,
}

impl Agreed {
    /// Width and type of the activations.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { width: self.ours.n_embd, dtype: self.ours.activations }
    }

    /// How activations travel.
    #[must_use]
    pub fn dtype(&self) -> ActivationDtype {
        self.ours.activations
    }

    /// What we accept.
    #[must_use]
    pub fn inbound(&self) -> Limits {
        Limits { max_message_bytes: self.ours.max_message_bytes, shape: Some(self.shape()) }
    }

    /// What the peer accepts.
    #[must_use]
    pub fn outbound(&self) -> Limits {
        Limits { max_message_bytes: self.theirs.max_message_bytes, shape: Some(self.shape()) }
    }
}

const SAME_MANIFEST: &str = "start all stages of the chain from the same manifest";
const SAME_MODEL: &str = "all slices must be cut from the same model file";
const CUTS: &str = "the slices must be neighbours: check the cuts and the address of the next stage";

/// Compares two setups. `side` says which end `ours` is on.
///
/// # Errors
/// The first difference, with both values.
pub fn check(ours: &Setup, theirs: &Setup, side: Side) -> Result<Agreed, Refusal> {
    use RefusalCode::{Build, Chain, Formation, Model, Shape};
    same(Chain, "chain", &ours.chain, &theirs.chain, "the address leads to a stage of another chain")?;
    same(RefusalCode::Role, "role", ours.role, theirs.role, "one side expects another connection")?;
    same(Formation, "root", ours.root, theirs.root, "the peer belongs to a formation of another stage 0")?;
    same(Formation, "formation", ours.formation, theirs.formation, "the peer belongs to an older formation")?;
    same(Shape, "stages", ours.stages, theirs.stages, SAME_MANIFEST)?;
    same(Model, "model", &ours.model, &theirs.model, SAME_MODEL)?;
    same(Shape, "n_layers", ours.n_layers, theirs.n_layers, SAME_MODEL)?;
    same(Shape, "n_embd", ours.n_embd, theirs.n_embd, SAME_MODEL)?;
    same(Shape, "activations", ours.activations, theirs.activations, SAME_MANIFEST)?;
    same(Shape, "lanes", ours.lanes, theirs.lanes, SAME_MANIFEST)?;
    same(Shape, "n_ctx", ours.n_ctx, theirs.n_ctx, SAME_MANIFEST)?;
    same(Shape, "n_ubatch", ours.n_ubatch, theirs.n_ubatch, SAME_MANIFEST)?;
    let build = "run the same release on all stages; backends may differ";
    same(Build, "versions.llama_cpp", &ours.versions.llama_cpp, &theirs.versions.llama_cpp, build)?;
    check_adjacent(ours, theirs, side)?;
    check_range(ours, theirs)?;
    Ok(Agreed { minor: MINOR, ours: ours.clone(), theirs: theirs.clone() })
}

fn same<T: PartialEq + Display>(
    code: RefusalCode,
    field: &str,
    ours: T,
    theirs: T,
    remedy: &str,
) -> Result<(), Refusal> {
    if ours == theirs { Ok(()) } else { Err(Refusal::differ(code, field, ours, theirs, remedy)) }
}

/// Both sides know the same of stages and layers here, so both find the same fault.
fn check_adjacent(ours: &Setup, theirs: &Setup, side: Side) -> Result<(), Refusal> {
    let (dialler, acceptor) = match side {
        Side::Dialler => (ours, theirs),
        Side::Acceptor => (theirs, ours),
    };
    let last = ours.stages.saturating_sub(1);
    let differ =
        |field, ours: String, theirs: String| Err(Refusal::differ(RefusalCode::Adjacency, field, ours, theirs, CUTS));
    let neighbours = match ours.role {
        Role::Data => dialler.stage.checked_add(1) == Some(acceptor.stage) && acceptor.stage <= last,
        Role::Return => dialler.stage == last && acceptor.stage == 0 && last > 0,
    };
    if !neighbours {
        let text = |s: &Setup| format!("stage {} of {}", s.stage, s.stages);
        return differ("stage", text(ours), text(theirs));
    }
    let whole = |s: &Setup| {
        let [first, end] = s.layers;
        first < end && end <= s.n_layers && (s.stage != 0 || first == 0) && (s.stage != last || end == s.n_layers)
    };
    let touch = match ours.role {
        Role::Data => dialler.layers[1] == acceptor.layers[0],
        Role::Return => true,
    };
    if !(touch && whole(ours) && whole(theirs)) {
        let text = |s: &Setup| format!("[{}, {}) of {}", s.layers[0], s.layers[1], s.n_layers);
        return differ("layers", text(ours), text(theirs));
    }
    Ok(())
}

/// A connection on which nothing could ever be sent, or not every frame, is no connection.
fn check_range(ours: &Setup, theirs: &Setup) -> Result<(), Refusal> {
    if ours.credits == 0 || theirs.credits == 0 {
        let remedy = "each side must accept at least one message";
        return Err(Refusal::differ(RefusalCode::Shape, "credits", ours.credits, theirs.credits, remedy));
    }
    let row = size_of::<RawRow>() as u64 + ours.activations.row_bytes(ours.n_embd);
    let rows = u64::from(ours.n_ubatch).saturating_mul(row);
    let need = rows.saturating_add(HEADER_BYTES as u64 + MAX_SECTION_BYTES);
    let (a, b) = (ours.max_message_bytes, theirs.max_message_bytes);
    if a.min(b) < need {
        let remedy = format!(
            "a frame of `n_ubatch` = {} rows with its sections takes up to {need} bytes: raise the limit or lower `n_ubatch`",
            ours.n_ubatch
        );
        return Err(Refusal::differ(RefusalCode::Shape, "max_message_bytes", a, b, &remedy));
    }
    Ok(())
}

/// Formations a stage has seen, so that no ghost of an old connection or of an old stage 0 is let in.
#[derive(Clone, Debug, Default)]
pub struct Formations {
    seen: VecDeque<(InstanceId, u64)>,
    holder: Option<InstanceId>,
}

/// Instances of stage 0 remembered; the oldest is forgotten.
const MAX_ROOTS: usize = 64;

impl Formations {
    /// The stage belongs to a formation of `root` now, or to none.
    pub fn hold(&mut self, root: Option<InstanceId>) {
        self.holder = root;
    }

    /// Lets a formation in if it is the highest yet of its stage 0, and that stage 0 was not started before the one whose
    /// formation holds the stage: one that was replaced, on a machine that nobody reaches, must not fight with its successor.
    ///
    /// # Errors
    /// A refusal with the instance that holds the stage, or the number seen before.
    pub fn admit(&mut self, root: InstanceId, formation: u64) -> Result<(), Refusal> {
        if let Some(holder) = self.holder.filter(|holder| root < *holder) {
            let remedy = "the stage serves a stage 0 that was started later; end the older one";
            return Err(Refusal::differ(RefusalCode::Formation, "root", holder, root, remedy));
        }
        let at = self.seen.iter().position(|(r, _)| *r == root);
        if let Some((_, highest)) = at.and_then(|i| self.seen.get(i))
            && formation <= *highest
        {
            let remedy = "a connection of an older formation is not let in";
            return Err(Refusal::differ(RefusalCode::Formation, "formation", highest, formation, remedy));
        }
        if let Some(i) = at {
            self.seen.remove(i);
        } else if self.seen.len() == MAX_ROOTS {
            self.seen.pop_front();
        }
        self.seen.push_back((root, formation));
        Ok(())
    }
}
