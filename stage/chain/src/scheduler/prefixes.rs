//! What sessions begin with: prefixes that the stages keep, and the first tokens of earlier answers.

use splitmodel_cache::{Directory, Payload, Place};
use splitmodel_link::frame::{Candidate, Epoch, Lane, MAX_CANDIDATES, Section, SessionId};

use super::session::{Session, history_bytes};
use super::{Event, MAX_CONFIGS, Request, Scheduler};

impl Scheduler {
    /// Whether a session is computing a long part of this prompt just now: once it has, the cells need not be computed again.
    pub(super) fn waits(&self, request: &Request) -> bool {
        let cache = self.limits.cache;
        if request.alone || cache.max_entries == 0 || !cache.payload.can_be_cut() {
            return false;
        }
        let new = |s: &&Session| s.tokens.len() == s.prompt && s.request.namespace == request.namespace;
        let common = |s: &Session| s.tokens.iter().zip(&request.prompt).take_while(|(a, b)| a == b).count();
        let shared = self.sessions.values().filter(new).map(common).max().unwrap_or(0);
        let least = cache.min_tokens.max(1);
        shared >= least && shared >= self.kept.longest(request.namespace, &request.prompt).saturating_add(least)
    }

    /// A free lane for the request: the one that may still hold what it begins with, else the first that holds nothing of use.
    /// Lanes in use stay close together that way, which is cheaper for the stages.
    pub(super) fn pick(&mut self, request: &Request) -> Option<Lane> {
        let best = self.kept.lookup(request.namespace, &request.prompt, 1).first().map(|place| place.page);
        let ended = |lane: &Lane| self.ended.get(usize::from(*lane)).copied().flatten();
        let of_use = |lane: &Lane| ended(lane).is_some_and(|page| self.kept.holds(page));
        let holder = best.and_then(|page| self.free.iter().find(|lane| ended(lane) == Some(page)));
        let lane = *holder.or_else(|| self.free.iter().min_by_key(|lane| (of_use(lane), **lane)))?;
        self.free.retain(|l| *l != lane);
        self.ended[usize::from(lane)] = None;
        Some(lane)
    }

    /// Keeps what was sent of a session: its lane's cells or state, as the stages have it when they come to that. Gives the page
    /// where something is kept that was not before.
    pub(super) fn keep(&mut self, id: SessionId) -> Option<u64> {
        if !self.up || self.probe == Some(id) {
            return None;
        }
        let session = self.sessions.get(&id).filter(|s| s.on_stages)?;
        if session.restoring.is_some() && self.kept.payload().can_be_cut() {
            return None;
        }
        let target = session.target(id);
        let place = self.kept.record(session.request.namespace, &session.tokens[..session.sent])?;
        let resident = candidate(place);
        match self.kept.payload() {
            Payload::Resident => self.share(id, Some(resident)),
            Payload::Copied => {}
            Payload::Exact => self.sessions.get_mut(&id).into_iter().for_each(|s| s.recorded.push(resident)),
        }
        self.pending.push(Section::Record { target, resident });
        Some(place.page)
    }

    /// Notes what a session's lane has begun with, and protects it instead of what was noted before.
    pub(super) fn share(&mut self, id: SessionId, place: Option<Candidate>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let before = std::mem::replace(&mut session.shares, place);
        place.iter().for_each(|p| self.kept.protect(p.page));
        before.iter().for_each(|p| self.kept.release(p.page));
    }

    /// The next attempt of a session begins after `sent` cells, which all stages have.
    pub(super) fn again_from(&mut self, id: SessionId, sent: usize) {
        self.share(id, None);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        for unsure in session.recorded.drain(..) {
            forget(&mut self.kept, &unsure, &mut self.pending);
        }
        // What was not shown yet is made anew.
        session.tokens.truncate(session.tokens.len() - std::mem::take(&mut session.replayed));
        session.again_from(sent);
        let prompt = &session.tokens[..session.prompt];
        session.checkpoints = self.kept.checkpoints(session.request.namespace, prompt, sent);
        session.checkpoints.reverse();
    }

    /// Gives the session its lane, and what it may begin with. Says whether that is known: there is nothing.
    pub(super) fn start(&mut self, id: SessionId, lane: Lane, request: Request) -> bool {
        let session = Session::new(lane, request);
        let namespace = session.request.namespace;
        // The probe shows that tokens are computed.
        let is_probe = self.probe == Some(id);
        // Ids are never used twice.
        self.sessions.insert(id, session);
        self.prefills.push_back(id);
        if !is_probe && self.replay(id) {
            return false;
        }
        let prompt = self.sessions.get(&id).map_or(&[][..], |s| &s.tokens);
        let found = if is_probe { Vec::new() } else { self.kept.lookup(namespace, prompt, MAX_CANDIDATES) };
        if !is_probe && !self.restore(id, found.into_iter().map(candidate).collect()) {
            self.again_from(id, 0);
            self.misses += 1;
            return true;
        }
        is_probe
    }

    /// Begins an attempt of a session with the longest of `candidates`, which stand longest first. `false`: there is none that
    /// can be told to the stages, and nothing was done.
    fn restore(&mut self, id: SessionId, candidates: Vec<Candidate>) -> bool {
        let Some(best) = candidates.first().copied() else { return false };
        let length = best.length as usize;
        let fits = |s: &&Session| s.request.config.len() + history_bytes(length) <= MAX_CONFIGS;
        if self.sessions.get(&id).filter(fits).is_none() {
            return false;
        }
        self.again_from(id, length);
        self.share(id, Some(best));
        if let Some(session) = self.sessions.get_mut(&id) {
            self.pending.push(Section::Restore { target: session.target(id), candidates: candidates.clone() });
            (session.restoring, session.on_stages) = (Some(candidates), true);
        }
        true
    }

    /// Begins an attempt of a session at position 0, of which some stage lost `candidates`. Stage 0 may still have them, and what it
    /// made of them: it need not compute that again for the others.
    fn refill(&mut self, id: SessionId, mut candidates: Vec<Candidate>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|_| self.limits.cache.activations) else { return };
        fit(&mut candidates, self.kept.payload().can_be_cut(), session.prompt.saturating_sub(1));
        let Some(longest) = candidates.iter().map(|c| c.length as usize).max() else { return };
        // Until then its lane has the state of that length at stage 0, and none of a shorter one.
        session.checkpoints.retain(|at| *at >= longest);
        self.pending.push(Section::Refill { target: session.target(id), candidates });
    }

    /// Begins a session with the first tokens of an earlier answer to the same request, where the cells of its whole prompt are
    /// kept. `false`: nothing was done.
    fn replay(&mut self, id: SessionId) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        let (request, prompt) = (&session.request, session.prompt);
        let Some(fingerprint) = request.fingerprint else { return false };
        let known = self.answers.lookup(request.namespace, fingerprint, &session.tokens);
        // At least one token is left to be computed, and ends are found out where they are made.
        let most = request.max_tokens.saturating_sub(1).min(self.limits.context.saturating_sub(prompt + 1));
        let known: Vec<_> = known.iter().copied().take(most).take_while(|t| !request.eog.contains(t)).collect();
        if known.is_empty() {
            return false;
        }
        let all = [&session.tokens, &known[..]].concat();
        let mut found = self.kept.lookup(request.namespace, &all, MAX_CANDIDATES);
        found.retain(|place| place.length as usize >= prompt);
        if !self.restore(id, found.into_iter().map(candidate).collect()) {
            return false;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            (session.tokens, session.replayed) = (all, known.len());
        }
        true
    }

    /// Gives up residents where the cells would not hold them beside the sessions. What residents share among themselves
    /// counts more than once: too much is given up rather than too little.
    pub(super) fn make_room(&mut self) {
        while self.cells_at_most() > self.limits.cells
            && self.kept.cells() > 0
            && let Some(Place { page, slot, .. }) = self.kept.evict()
        {
            self.pending.push(Section::Evict { page, slot });
        }
    }

    fn cells_at_most(&self) -> usize {
        let all = self.sessions.values().map(|s| s.sent).sum::<usize>() + self.kept.cells();
        if all <= self.limits.cells || self.kept.cells() == 0 {
            return all; // the usual case, and enough to know
        }
        let shared = |s: &Session| s.shares.filter(|c| self.kept.holds(c.page)).map_or(0, |c| c.length as usize);
        all - self.sessions.values().map(|s| shared(s).min(s.sent)).sum::<usize>()
    }

    /// The chain says what all stages have of what a session was to begin with.
    pub(super) fn restored(&mut self, id: SessionId, epoch: Epoch, mut length: usize, events: &mut Vec<Event>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|s| s.epoch == epoch) else { return };
        let Some(mut candidates) = session.restoring.take() else { return };
        if candidates.first().is_some_and(|best| length < best.length as usize) {
            self.shortened += 1;
            // Some stage lost those; the others need not keep them.
            let (replays, most) = (session.replayed > 0, session.prompt.saturating_sub(1));
            let mut lost = Vec::new();
            candidates.retain(|c| {
                let there = c.length as usize <= length;
                lost.extend((!there).then_some(*c));
                there
            });
            if replays {
                // Without the earlier answer at least one token of the prompt is left to be computed.
                fit(&mut candidates, self.kept.payload().can_be_cut(), most);
            }
            if !self.prefills.contains(&id) {
                self.prefills.push_back(id);
            }
            // Told to the stages when stage 0 has taken what it needs of them.
            let mut evictions = Vec::new();
            lost.iter().for_each(|c| forget(&mut self.kept, c, &mut evictions));
            // A lane that holds more cannot always be cut, so it is filled anew.
            let again = self.restore(id, candidates);
            if !again {
                self.again_from(id, 0);
                self.refill(id, lost);
            }
            self.pending.append(&mut evictions);
            if again {
                return;
            }
            length = 0;
        }
        let count = if length > 0 { &mut self.hits } else { &mut self.misses };
        *count += 1;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        events.push(Event::Restored(id, length.min(session.prompt)));
        let replayed = std::mem::take(&mut session.replayed);
        if replayed > 0 {
            self.replays += 1;
            self.replayed_tokens += replayed as u64;
        }
        for at in session.tokens.len() - replayed..session.tokens.len() {
            events.push(Event::Token(id, Box::new(session.known(id, at))));
        }
    }
}

fn candidate(place: Place) -> Candidate {
    let Place { page, length, slot } = place;
    Candidate { page, length, slot }
}

/// Forgets what some stage may not have, and tells the others.
fn forget(kept: &mut Directory, lost: &Candidate, pending: &mut Vec<Section>) {
    let &Candidate { page, length, slot } = lost;
    if kept.forget(&Place { page, length, slot }) {
        pending.push(Section::Evict { page, slot });
    }
}

/// Leaves at most `most` tokens of each candidate, where a part of one can be used.
fn fit(candidates: &mut Vec<Candidate>, can_be_cut: bool, most: usize) {
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    if can_be_cut {
        candidates.iter_mut().for_each(|c| c.length = c.length.min(most));
    }
    candidates.retain(|c| (1..=most).contains(&c.length));
}
