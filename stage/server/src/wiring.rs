//! Forms the chain: dials, accepts, joins connections to the engine, and forms it again when one of them ends
//! (docs/wire.md, section 1).

mod events;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use splitmodel_control::{Phase, StageConfig, StatusHub, config};
use splitmodel_link::connection::Conditioning;
use splitmodel_link::frame::{ErrorClass, Frame, Report};
use splitmodel_link::setup::{Formations, InstanceId, Refusal, RefusalCode, Role, Setup, Versions};
use splitmodel_link::{
    Acceptor, ActivationDtype, Agreed, Answer, Connection, Dialer, Event, Handshakes, Inbound, Message, Options,
    Permit, TlsStore, accept_into, dial,
};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::coordinator::Coordinator;
use crate::engine::{EngineQueue, Output};
use crate::metrics::{Line, Metrics};
use events::{ended, is_final, lost};

/// For everything between dialling and an agreed setup.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at once.
const HANDSHAKES: usize = 64;
/// First and longest pause between attempts to reach a peer.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What a loaded stage says of itself in every setup.
#[derive(Clone, Debug)]
pub struct Identity {
    /// This process.
    pub instance: InstanceId,
    /// Digest of the model.
    pub model: String,
    /// Width of a row.
    pub n_embd: u32,
    /// Cells of the KV cache, as llama.cpp made it.
    pub n_ctx: u32,
    /// KV sequences, the probe's included.
    pub lanes: u32,
    /// Version of llama.cpp.
    pub llama_cpp: String,
}

/// The links of a stage.
pub struct Wiring {
    config: StageConfig,
    identity: Identity,
    tls: Option<TlsStore>,
    options: Options,
    queue: EngineQueue,
    status: StatusHub,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
    linked: watch::Sender<bool>,
}

/// Why links cannot be set up at all.
#[derive(Debug, thiserror::Error)]
pub enum WiringError {
    /// The link's address cannot be listened on.
    #[error("link.bind: {address} cannot be listened on: {source}")]
    Bind {
        /// The address.
        address: std::net::SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The certificates cannot be used.
    #[error("link.tls: {0}")]
    Tls(#[from] splitmodel_link::tls::TlsError),
    /// A neighbour's address is missing.
    #[error("{0} is missing")]
    Address(&'static str),
}

/// What the links of a stage work with.
pub struct Parts {
    /// The engine.
    pub queue: EngineQueue,
    /// Where phases and errors show.
    pub status: StatusHub,
    /// Where formations are counted.
    pub metrics: Arc<Metrics>,
    /// Injected wire properties.
    pub conditioning: Arc<Conditioning>,
    /// Certificates, where the configuration names some.
    pub tls: Option<TlsStore>,
    /// Ends everything, in order.
    pub shutdown: CancellationToken,
}

/// The certificates of a stage, of its links and of its control service. `None`: it has none.
///
/// # Errors
/// [`WiringError::Tls`].
pub fn certificates(config: &StageConfig) -> Result<Option<TlsStore>, WiringError> {
    let tls = config.link.tls.as_ref();
    Ok(tls.map(|t| TlsStore::from_pem_files(&t.ca, &t.cert, &t.key)).transpose()?)
}

impl Wiring {
    /// Links of a loaded stage.
    #[must_use]
    pub fn new(config: &StageConfig, identity: Identity, parts: Parts) -> Self {
        let options = Options {
            peer_deadline: Duration::from_millis(config.link.peer_deadline_ms.into()),
            send_queue: config.max_in_flight() as usize + 2,
            conditioning: parts.conditioning,
        };
        let Parts { queue, status, metrics, tls, shutdown, .. } = parts;
        let linked = watch::Sender::new(false);
        Self { config: config.clone(), identity, tls, options, queue, status, metrics, shutdown, linked }
    }

    /// Follows whether the links of this stage are up.
    #[must_use]
    pub fn linked(&self) -> watch::Receiver<bool> {
        self.linked.subscribe()
    }

    /// Keeps the chain formed until shutdown. `coordinator` is stage 0's; its chain of one needs no links.
    ///
    /// # Errors
    /// [`WiringError`] when it cannot begin.
    pub async fn run(self: Arc<Self>, coordinator: Option<Arc<Coordinator>>) -> Result<(), WiringError> {
        match coordinator {
            Some(coordinator) if self.config.stages == 1 => {
                self.run_alone(&coordinator).await;
                Ok(())
            }
            Some(coordinator) => self.run_first(coordinator).await,
            None => self.run_later().await,
        }
    }

    async fn run_alone(&self, coordinator: &Arc<Coordinator>) {
        let answers = Arc::downgrade(coordinator);
        let take = move |predictions| {
            if let Some(coordinator) = answers.upgrade() {
                coordinator.answered(1, predictions);
            }
        };
        self.queue.attach(1, Output::Local(Box::new(take)));
        self.metrics.formed();
        let status = self.status.clone();
        let hung = move |why: String| {
            // No formation can cure it: liveness has the process started again.
            tracing::error!(why, "the engine does not answer");
            status.set_error(&format!("the engine does not answer: {why}"), false);
        };
        self.show_formation(1);
        coordinator.formed(1, None, Box::new(hung));
        self.shutdown.cancelled().await;
        coordinator.lost(1);
    }

    async fn run_first(self: Arc<Self>, coordinator: Arc<Coordinator>) -> Result<(), WiringError> {
        let downstream = self.config.link.downstream.clone().ok_or(WiringError::Address("link.downstream"))?;
        let formation = Arc::new(AtomicU64::new(0));
        let (returned, mut returns) = mpsc::channel(4);
        let listener = self.listen().await?;
        let accepting = tokio::spawn(Arc::clone(&self).accept_returns(listener, Arc::clone(&formation), returned));
        let mut pause = BACK_OFF.0;
        while !self.shutdown.is_cancelled() {
            let number = formation.fetch_add(1, Ordering::Relaxed) + 1;
            let (whole, why) = self.form(number, &downstream, &coordinator, &mut returns).await;
            if self.shutdown.is_cancelled() {
                break;
            }
            self.show_break(&why, whole);
            pause = if whole { BACK_OFF.0 } else { (pause * 2).min(BACK_OFF.1) };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.shutdown.cancelled() => {}
            }
        }
        accepting.abort();
        Ok(())
    }

    /// One formation from the first dial to its end. Says whether it was whole, and why it ended.
    async fn form(
        &self,
        number: u64,
        downstream: &str,
        coordinator: &Arc<Coordinator>,
        returns: &mut mpsc::Receiver<(Connection, Agreed)>,
    ) -> (bool, String) {
        let dialer = self.dialer(self.setup(Role::Data, number, self.identity.instance), 1);
        let dialled = tokio::select! {
            dialled = dial(downstream, &dialer) => dialled,
            () = self.shutdown.cancelled() => return (false, String::new()),
        };
        let mut down = match dialled {
            Ok((connection, _)) => connection,
            Err(e) => return (false, format!("stage 1 at {downstream}: {e}")),
        };
        let mut back = loop {
            tokio::select! {
                event = down.receiver.next() => if let Some(why) = ended(event, "stage 1", &down.sender) {
                    return (false, why);
                },
                Some((connection, agreed)) = returns.recv() => if agreed.theirs.formation == number { break connection },
                () = self.shutdown.cancelled() => return (false, String::new()),
            }
        };
        let (break_chain, mut broken) = mpsc::unbounded_channel();
        self.queue.attach(number, Output::Link(down.sender.clone()));
        self.metrics.formed();
        self.metrics.connected(Line::Downstream, down.sender.clone());
        self.metrics.connected(Line::Return, back.sender.clone());
        coordinator.formed(
            number,
            Some(down.sender.clone()),
            Box::new(move |why| {
                let _ = break_chain.send(why); // the formation may be over
            }),
        );
        self.show_formation(number);
        let why = loop {
            tokio::select! {
                biased;
                event = back.receiver.next() => match event {
                    Some(Event::Message(Inbound { message: Message::Predictions(p), permit })) => {
                        coordinator.answered(number, p);
                        drop(permit);
                    }
                    other => if let Some(why) = ended(other, "the last stage", &back.sender) { break why },
                },
                event = down.receiver.next() => if let Some(why) = ended(event, "stage 1", &down.sender) { break why },
                Some(why) = broken.recv() => {
                    let report = self.report(ErrorClass::Timeout, why.clone());
                    down.sender.fail(report);
                    break why;
                }
                () = self.shutdown.cancelled() => {
                    down.sender.goodbye().await;
                    break "shutdown".to_owned();
                }
            }
        };
        coordinator.lost(number);
        self.queue.detach(number);
        (true, why)
    }

    async fn accept_returns(
        self: Arc<Self>,
        listener: TcpListener,
        formation: Arc<AtomicU64>,
        returned: mpsc::Sender<(Connection, Agreed)>,
    ) {
        let this = Arc::clone(&self);
        let decide = move |theirs: &Setup| {
            let now = formation.load(Ordering::Relaxed);
            if theirs.role != Role::Return || theirs.formation != now {
                let remedy = "a connection of another formation is not let in";
                return Err(Refusal::differ(RefusalCode::Formation, "formation", now, theirs.formation, remedy));
            }
            Ok(this.answer(this.setup(Role::Return, now, this.identity.instance), theirs))
        };
        let acceptor = self.acceptor(Arc::new(decide));
        self.accept_each(listener, acceptor, returned).await;
    }

    async fn run_later(self: Arc<Self>) -> Result<(), WiringError> {
        let next = if self.config.is_last() { &self.config.link.return_to } else { &self.config.link.downstream };
        let field = if self.config.is_last() { "link.return" } else { "link.downstream" };
        let next = next.clone().ok_or(WiringError::Address(field))?;
        let listener = self.listen().await?;
        let seen = Arc::new(std::sync::Mutex::new(Formations::default()));
        let (this, admitted) = (Arc::clone(&self), Arc::clone(&seen));
        let decide = move |theirs: &Setup| {
            let mut seen = admitted.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            seen.admit(theirs.root, theirs.formation)?;
            Ok(this.answer(this.setup(Role::Data, theirs.formation, theirs.root), theirs))
        };
        let acceptor = self.acceptor(Arc::new(decide));
        let (accepted, mut upstreams) = mpsc::channel(1);
        let accepting = tokio::spawn(Arc::clone(&self).accept_each(listener, acceptor, accepted));
        let mut waiting = None;
        while !self.shutdown.is_cancelled() {
            let upstream = match waiting.take() {
                Some(upstream) => Some(upstream),
                None => tokio::select! {
                    upstream = upstreams.recv() => upstream,
                    () = self.shutdown.cancelled() => None,
                },
            };
            let Some((connection, agreed)) = upstream else { break };
            let hold = |root| seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).hold(root);
            hold(Some(agreed.theirs.root));
            // A newer formation ends the one that runs: its upstream has given it up.
            tokio::select! {
                why = self.serve_formation(connection, &agreed, &next) => self.show_break(&why, true),
                newer = upstreams.recv() => waiting = newer,
            }
            hold(None);
            self.queue.detach(agreed.theirs.formation);
        }
        accepting.abort();
        Ok(())
    }

    /// One formation on a later stage: reaches the next stage, then hands frames through until a connection ends.
    async fn serve_formation(&self, mut up: Connection, agreed: &Agreed, next: &str) -> String {
        let (formation, root) = (agreed.theirs.formation, agreed.theirs.root);
        let mut early = Vec::new();
        let mut down = match self.reach_next(&mut up, formation, root, next, &mut early).await {
            Ok(down) => down,
            Err(why) => return why,
        };
        self.queue.attach(formation, Output::Link(down.sender.clone()));
        self.metrics.formed();
        self.metrics.connected(Line::Upstream, up.sender.clone());
        let line = if self.config.is_last() { Line::Return } else { Line::Downstream };
        self.metrics.connected(line, down.sender.clone());
        for (frame, permit) in early {
            self.queue.frame_from_link(formation, frame, permit);
        }
        self.show_formation(formation);
        loop {
            tokio::select! {
                biased;
                event = up.receiver.next() => match event {
                    Some(Event::Message(Inbound { message: Message::Frame(frame), permit })) => {
                        self.queue.frame_from_link(formation, frame, permit);
                    }
                    other => if let Some(why) = ended(other, "the upstream stage", &up.sender) {
                        down.sender.close();
                        return why;
                    },
                },
                event = down.receiver.next() => if let Some(why) = ended(event, "the next stage", &down.sender) {
                    up.sender.fail(self.report(ErrorClass::PeerLost, why.clone()));
                    return why;
                },
                () = self.shutdown.cancelled() => {
                    up.sender.goodbye().await;
                    down.sender.goodbye().await;
                    return "shutdown".to_owned();
                }
            }
        }
    }

    /// Dials the next stage until it is there. Stage 0 may hear of the whole chain, and send, before this stage hears the
    /// last word of its own dial: such frames go into `early`, as many as there are credits.
    async fn reach_next(
        &self,
        up: &mut Connection,
        formation: u64,
        root: InstanceId,
        next: &str,
        early: &mut Vec<(Frame, Permit)>,
    ) -> Result<Connection, String> {
        let (role, peer) = if self.config.is_last() { (Role::Return, 0) } else { (Role::Data, self.config.stage + 1) };
        let dialer = self.dialer(self.setup(role, formation, root), peer);
        let mut pause = BACK_OFF.0;
        loop {
            tokio::select! {
                dialled = dial(next, &dialer) => match dialled {
                    Ok((connection, _)) => return Ok(connection),
                    Err(e) => {
                        let why = format!("stage {peer} at {next}: {e}");
                        self.status.set_error(&why, false);
                        tracing::debug!(%why, "not reached");
                        if is_final(&e) {
                            up.sender.fail(self.report(ErrorClass::PeerLost, why.clone()));
                            return Err(why);
                        }
                    }
                },
                why = lost(up, early) => return Err(why),
                () = self.shutdown.cancelled() => return Err("shutdown".to_owned()),
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                why = lost(up, early) => return Err(why),
            }
            pause = (pause * 2).min(BACK_OFF.1);
        }
    }

    async fn listen(&self) -> Result<TcpListener, WiringError> {
        let address = self.config.link.bind;
        TcpListener::bind(address).await.map_err(|source| WiringError::Bind { address, source })
    }

    /// Lets peers in who agree with this stage, as long as `inbox` has places.
    async fn accept_each(
        self: Arc<Self>,
        listener: TcpListener,
        acceptor: Acceptor,
        inbox: mpsc::Sender<(Connection, Agreed)>,
    ) {
        let mut handshakes = Handshakes::new(HANDSHAKES);
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: others may give some back.
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::time::sleep(BACK_OFF.1).await;
                    continue;
                }
            };
            let (acceptor, inbox) = (acceptor.clone(), inbox.clone());
            let full = handshakes.spawn(async move {
                if let Err(error) = accept_into(stream, &acceptor, &inbox).await {
                    tracing::warn!(%address, %error, "a connection was refused");
                }
            });
            if full {
                tracing::warn!(limit = HANDSHAKES, "too many unfinished handshakes: the oldest was ended");
            }
        }
    }

    fn setup(&self, role: Role, formation: u64, root: InstanceId) -> Setup {
        let (c, id) = (&self.config, &self.identity);
        // The validated configuration keeps both far below 65,536.
        let small = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
        Setup {
            role,
            chain: c.chain.clone(),
            formation,
            root,
            stage: small(c.stage),
            stages: small(c.stages),
            layers: c.layers,
            n_layers: c.n_layers,
            model: id.model.clone(),
            n_embd: id.n_embd,
            activations: match c.link.activations {
                config::Activations::F32 => ActivationDtype::F32,
                config::Activations::F16 => ActivationDtype::F16,
            },
            lanes: id.lanes,
            n_ctx: id.n_ctx,
            n_ubatch: c.engine.n_ubatch,
            instance: id.instance,
            cache_generation: 0,
            credits: c.link.credits.unwrap_or(2 * c.max_in_flight() + 2),
            max_message_bytes: c.link.max_message_bytes.into(),
            versions: Versions { software: env!("CARGO_PKG_VERSION").to_owned(), llama_cpp: id.llama_cpp.clone() },
            features: Vec::new(),
        }
    }

    /// DNS name in the certificate of a stage; without TLS nobody looks at it.
    fn name(&self, stage: u32) -> String {
        let names = self.config.link.tls.as_ref().map(|t| &t.names);
        names.and_then(|n| n.get(stage as usize)).cloned().unwrap_or_default()
    }

    fn answer(&self, setup: Setup, theirs: &Setup) -> Answer {
        Answer { setup, peer_name: self.name(theirs.stage.into()) }
    }

    fn dialer(&self, setup: Setup, peer: u32) -> Dialer {
        let tls = self.tls.clone().map(|tls| (tls, self.name(peer)));
        Dialer { tls, setup, options: self.options.clone(), deadline: HANDSHAKE }
    }

    fn acceptor(&self, decide: Arc<dyn splitmodel_link::Decide>) -> Acceptor {
        Acceptor { tls: self.tls.clone(), decide, options: self.options.clone(), deadline: HANDSHAKE }
    }

    fn report(&self, class: ErrorClass, message: String) -> Report {
        let stage = u16::try_from(self.config.stage).unwrap_or(u16::MAX);
        Report { stage, class, record: None, session: 0, message }
    }

    fn show_formation(&self, number: u64) {
        tracing::info!(formation = number, "the links of this stage are up");
        self.status.update(|s| {
            s.formation = number;
            s.last_error.clear();
            s.set_phase(Phase::Linked);
        });
        self.linked.send_replace(true);
    }

    fn show_break(&self, why: &str, whole: bool) {
        self.linked.send_replace(false);
        if whole {
            tracing::warn!(why, "the formation ended");
        } else {
            tracing::debug!(why, "the chain is not formed");
        }
        self.status.update(|s| {
            why.clone_into(&mut s.last_error);
            if s.phase() != Phase::Draining {
                s.set_phase(Phase::Loaded);
            }
        });
    }
}
