use std::net::SocketAddr;

use super::{ConfigError, StageConfig};

/// Most lanes of a chain: llama.cpp's limit of sequences.
const MAX_LANES: u32 = super::MAX_SEQUENCES;
/// Smallest message that holds every section and a handful of rows of a small model; stages find out together whether
/// theirs fit.
const MIN_MESSAGE: u32 = splitmodel_link::codec::MAX_SECTION_BYTES as u32 + (64 << 10);
/// Largest message a 32-bit length allows with room to spare.
const MAX_MESSAGE: u32 = 1 << 30;

type Check = Result<(), ConfigError>;

fn invalid(field: &'static str, message: impl Into<String>) -> Check {
    Err(ConfigError::Invalid { field, message: message.into() })
}

fn at_least_one(field: &'static str, value: u32) -> Check {
    if value == 0 { invalid(field, "is 0; it must be at least 1") } else { Ok(()) }
}

/// Whether `text` is `host:port` with a host and a port that can be dialled.
fn host_port(field: &'static str, text: &str) -> Check {
    let parts = text.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>()));
    match parts {
        Some((host, Ok(port)))
            if !host.is_empty()
                && port != 0
                && (!host.contains(':') || host.starts_with('['))
                && !host.contains(char::is_whitespace) =>
        {
            Ok(())
        }
        _ => invalid(field, format!("`{text}` is not an address; write host:port, such as 127.0.0.1:7101")),
    }
}

impl StageConfig {
    /// Checks what the types cannot say. Touches no file and no network.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the first field found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_place()?;
        self.check_model()?;
        self.check_link()?;
        self.check_api()?;
        self.check_engine()?;
        self.check_scheduling()?;
        self.check_telemetry()?;
        self.check_binds()
    }

    fn check_place(&self) -> Check {
        let name_ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        if self.chain.is_empty() || self.chain.len() > 253 || !self.chain.chars().all(name_ok) {
            return invalid("chain", "must be 1 to 253 letters, digits, `-`, `.` or `_`");
        }
        at_least_one("stages", self.stages)?;
        if self.stage >= self.stages {
            return invalid(
                "stage",
                format!("is {}, but `stages` is {}: indices go from 0 to {}", self.stage, self.stages, self.stages - 1),
            );
        }
        at_least_one("n_layers", self.n_layers)?;
        let [first, end] = self.layers;
        if first >= end {
            return invalid("layers", format!("[{first}, {end}] holds no layer; write [first, end) with first < end"));
        }
        if end > self.n_layers {
            return invalid("layers", format!("[{first}, {end}] ends beyond the model's {} layers", self.n_layers));
        }
        if self.is_first() != (first == 0) {
            return invalid("layers", "stage 0, and no other, starts at layer 0");
        }
        if self.is_last() != (end == self.n_layers) {
            return invalid(
                "layers",
                format!("the last stage, and no other, ends at layer {} (`n_layers`)", self.n_layers),
            );
        }
        Ok(())
    }

    fn check_model(&self) -> Check {
        if self.model.source.trim().is_empty() {
            return invalid("model.source", "is empty; name a GGUF file, such as file:///models/model.gguf");
        }
        if let Some(digest) = &self.model.digest
            && (digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return invalid("model.digest", "must be 64 hex digits (BLAKE3 of the model's header)");
        }
        if self.model.credentials.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            return invalid("model.credentials", "is empty; name a directory with a file `token`, or leave it out");
        }
        if self.cache.dir.as_os_str().is_empty() {
            return invalid("cache.dir", "is empty; name a directory for slices");
        }
        Ok(())
    }

    fn check_link(&self) -> Check {
        let link = &self.link;
        match (&link.downstream, self.is_last()) {
            (None, false) => return invalid("link.downstream", "is missing; every stage but the last dials the next"),
            (Some(_), true) => return invalid("link.downstream", "is set on the last stage, which has no next stage"),
            (Some(address), false) => host_port("link.downstream", address)?,
            (None, true) => {}
        }
        match (&link.return_to, self.is_last() && self.stages > 1) {
            (None, true) => {
                return invalid("link.return", "is missing; the last stage dials stage 0's link with its predictions");
            }
            (Some(_), false) => return invalid("link.return", "is set, but only the last of several stages dials it"),
            (Some(address), true) => host_port("link.return", address)?,
            (None, false) => {}
        }
        if link.peer_deadline_ms < 100 {
            return invalid("link.peer_deadline_ms", "is below 100 ms; busy peers would be taken for dead");
        }
        if link.credits == Some(0) {
            return invalid("link.credits", "is 0; nothing could ever be sent");
        }
        if !(MIN_MESSAGE..=MAX_MESSAGE).contains(&link.max_message_bytes) {
            let got = link.max_message_bytes;
            let range = format!("is {got}; it must be between {MIN_MESSAGE} and {MAX_MESSAGE}");
            return invalid("link.max_message_bytes", range);
        }
        match &link.tls {
            Some(tls) if tls.names.len() != self.stages as usize => invalid(
                "link.tls.names",
                format!("has {} names for {} stages; give one per stage, in order", tls.names.len(), self.stages),
            ),
            Some(tls) if tls.names.iter().any(|n| n.trim().is_empty()) => {
                invalid("link.tls.names", "has an empty name")
            }
            None if self.stages > 1 && !link.insecure && !link.bind.ip().is_loopback() => invalid(
                "link.tls",
                format!(
                    "is missing while `link.bind` {} is no loopback address; give certificates, or set `link.insecure: true`",
                    link.bind
                ),
            ),
            _ => Ok(()),
        }
    }

    fn check_api(&self) -> Check {
        let Some(api) = &self.api else {
            return if self.is_first() { invalid("api", "is missing; stage 0 serves the API") } else { Ok(()) };
        };
        if !self.is_first() {
            return invalid("api", "is set, but only stage 0 serves the API");
        }
        if api.model.trim().is_empty() {
            return invalid("api.model", "is empty; name the model as clients will");
        }
        if api.aliases.iter().any(|a| a.trim().is_empty()) {
            return invalid("api.aliases", "has an empty name");
        }
        if api.api_keys.iter().any(|k| k.expose().trim().is_empty()) {
            return invalid("api.api_keys", "has an empty key, which every client would present");
        }
        at_least_one("api.keep_alive_ms", api.keep_alive_ms)?;
        at_least_one("api.header_timeout_ms", api.header_timeout_ms)?;
        at_least_one("api.max_connections", api.max_connections)
    }

    fn check_engine(&self) -> Check {
        let engine = &self.engine;
        at_least_one("engine.context_length", engine.context_length)?;
        at_least_one("engine.n_ubatch", engine.n_ubatch)?;
        if engine.lanes == 0 || engine.lanes > MAX_LANES {
            return invalid("engine.lanes", format!("is {}; it must be 1 to {MAX_LANES}", engine.lanes));
        }
        let cells = u64::from(engine.context_length) * u64::from(engine.lanes);
        if engine.n_ctx.is_none() && cells > u64::from(i32::MAX as u32) {
            return invalid(
                "engine.context_length",
                format!("× `engine.lanes` is {cells} cells, more than llama.cpp can count; lower one of them"),
            );
        }
        if let Some(n_ctx) = engine.n_ctx
            && (n_ctx < engine.context_length || n_ctx > i32::MAX as u32)
        {
            return invalid("engine.n_ctx", "must hold at least one session of `engine.context_length`, below 2³¹");
        }
        if engine.n_batch < engine.n_ubatch {
            return invalid(
                "engine.n_batch",
                format!("is {}, below `engine.n_ubatch` ({})", engine.n_batch, engine.n_ubatch),
            );
        }
        if engine.n_ubatch < engine.lanes {
            return invalid("engine.n_ubatch", format!("must be at least `engine.lanes` ({})", engine.lanes));
        }
        if engine.cache_type_v.is_quantized() && engine.flash_attn == super::FlashAttention::Off {
            return invalid(
                "engine.cache_type_v",
                format!("{} needs flash attention; set `engine.flash_attn: on`", engine.cache_type_v.name()),
            );
        }
        if engine.threads == Some(0) {
            return invalid("engine.threads", "is 0; leave it out to use every core");
        }
        engine.rpc.iter().try_for_each(|server| host_port("engine.rpc", server))
    }

    fn check_scheduling(&self) -> Check {
        let s = &self.scheduling;
        if s.max_in_flight == Some(0) {
            return invalid("scheduling.max_in_flight", "is 0; leave it out for one frame per stage");
        }
        at_least_one("scheduling.prefill_chunk", self.prefill_chunk())?;
        at_least_one("scheduling.prefill_chunk_shared", self.prefill_chunk_shared())?;
        let n_ubatch = self.engine.n_ubatch;
        if self.prefill_chunk() > n_ubatch {
            return invalid(
                "scheduling.prefill_chunk",
                format!("is {}, above `engine.n_ubatch` ({n_ubatch})", self.prefill_chunk()),
            );
        }
        if self.prefill_chunk_shared() > n_ubatch {
            return invalid(
                "scheduling.prefill_chunk_shared",
                format!("is {}, above `engine.n_ubatch` ({n_ubatch})", self.prefill_chunk_shared()),
            );
        }
        at_least_one("scheduling.recovery_deadline_s", s.recovery_deadline_s)?;
        at_least_one("scheduling.admission_deadline_s", s.admission_deadline_s)?;
        if self.log.level.trim().is_empty() {
            return invalid("log.level", "is empty; write error, warn, info, debug or trace");
        }
        Ok(())
    }

    fn check_telemetry(&self) -> Check {
        let t = &self.telemetry;
        if !(0.0..=1.0).contains(&t.sample_ratio) {
            return invalid("telemetry.sample_ratio", format!("is {}; it must be between 0 and 1", t.sample_ratio));
        }
        at_least_one("telemetry.queue", t.queue)?;
        if self.kv_cache.disk_bytes > 0 && self.schedule_log.is_some() {
            let what = "tells nothing of states that were there before it began; leave it out, or kv_cache.disk_bytes";
            return invalid("schedule_log", what);
        }
        if self.kv_cache.activation_bytes > 0 && self.schedule_log.is_some() {
            let what = "cannot be replayed where stage 0 gives kept activations, which other batches made; leave it out, or \
                        kv_cache.activation_bytes";
            return invalid("schedule_log", what);
        }
        at_least_one("kv_cache.min_tokens", self.kv_cache.min_tokens)?;
        at_least_one("kv_cache.shared_prefix_stride_tokens", self.kv_cache.shared_prefix_stride_tokens)?;
        at_least_one("kv_cache.shared_prefix_record_limit", self.kv_cache.shared_prefix_record_limit)?;
        match &t.otlp_endpoint {
            Some(url) if !(url.starts_with("http://") || url.starts_with("https://")) => invalid(
                "telemetry.otlp_endpoint",
                format!("`{url}` is no URL of a collector; write one such as http://collector:4317"),
            ),
            _ => Ok(()),
        }
    }

    fn check_binds(&self) -> Check {
        let mut taken: Vec<(&str, SocketAddr)> = Vec::with_capacity(5);
        let link = (self.stages > 1).then_some(("link.bind", self.link.bind));
        let api = self.api.as_ref().map(|a| ("api.bind", a.bind));
        let metrics = self.metrics.map(|m| ("metrics.bind", m.bind));
        for (field, address) in link
            .into_iter()
            .chain([("control.bind", self.control.bind)])
            .chain([("health.bind", self.health.bind)])
            .chain(api)
            .chain(metrics)
        {
            if let Some((other, _)) = taken.iter().find(|(_, a)| *a == address && address.port() != 0) {
                return invalid(field, format!("{address} is taken by `{other}`; give each service a port of its own"));
            }
            taken.push((field, address));
        }
        Ok(())
    }
}
