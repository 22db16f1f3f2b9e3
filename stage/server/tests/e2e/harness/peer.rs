//! A peer that speaks the link's protocol and is no stage.

use std::time::Duration;

use splitmodel_link::setup::{InstanceId, Role, Setup, Versions};
use splitmodel_link::{ActivationDtype, Dialer, Options};

use super::chain::Chain;
use super::models::tiny;

/// What stage `stage` of a chain of the tiny model would say of itself, as the first formation of a new stage 0.
pub fn setup(chain: &Chain, role: Role, stage: usize) -> Setup {
    let config = &chain.configs[stage];
    let root = InstanceId::now().unwrap();
    Setup {
        role,
        chain: config.chain.clone(),
        formation: 1,
        root,
        stage: stage as u16,
        stages: config.stages as u16,
        layers: config.layers,
        n_layers: config.n_layers,
        model: splitmodel_gguf::Model::open(tiny(1)).unwrap().digest().to_owned(),
        n_embd: 128,
        activations: ActivationDtype::F32,
        lanes: config.engine.lanes,
        n_ctx: config.engine.cells(),
        n_ubatch: config.engine.n_ubatch,
        instance: root,
        cache_generation: 0,
        credits: 8,
        max_message_bytes: 1 << 26,
        versions: Versions { software: "99.0.0".to_owned(), llama_cpp: splitmodel_engine::llama_version() },
        features: Vec::new(),
    }
}

/// Dials without certificates.
pub fn dialer(setup: Setup) -> Dialer {
    Dialer { tls: None, setup, options: Options::default(), deadline: Duration::from_secs(20) }
}
