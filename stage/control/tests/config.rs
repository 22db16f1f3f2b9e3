//! The configuration file: defaults, round trips, refusals.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]
use proptest::prelude::*;
use splitmodel_control::config::{
    Activations, ApiConfig, BindConfig, CacheType, ConfigError, FlashAttention, LogFormat, Secret, SplitMode,
    StageConfig, TelemetryConfig, Tier, TlsConfig,
};

const FIRST: &str = "
chain: smollm2-0
stage: 0
stages: 3
layers: [0, 12]
n_layers: 30
model: { source: file:///models/m.gguf }
cache: { dir: /var/cache/slices }
link: { downstream: '127.0.0.1:7201' }
api: { bind: '127.0.0.1:8000', model: smollm2, api_keys: [s3cret] }
";

fn first() -> StageConfig {
    StageConfig::from_yaml(FIRST).unwrap()
}

fn refused(change: impl FnOnce(&mut StageConfig)) -> String {
    let mut config = first();
    change(&mut config);
    config.validate().unwrap_err().to_string()
}

#[test]
fn the_smallest_file_gets_the_documented_defaults() {
    let c = first();
    assert_eq!(c.link.bind.to_string(), "127.0.0.1:7101");
    assert_eq!(c.control.bind.to_string(), "127.0.0.1:7102");
    assert_eq!(c.health.bind.to_string(), "127.0.0.1:7103");
    assert_eq!(c.link.activations, Activations::F32);
    assert_eq!(c.engine.cells(), 4096 * 4);
    assert!(!c.engine.kv_unified && c.engine.mmap && !c.engine.mlock && !c.engine.swa_full);
    assert_eq!(c.max_in_flight(), 3);
    assert_eq!((c.residents(), c.kv_cache.min_tokens), (8, 64));
    assert_eq!(c.scheduling.recovery_deadline_s, 60);
    assert_eq!((c.log.format, c.telemetry.tier, c.metrics), (LogFormat::Text, Tier::Summary, None));
    assert_eq!(c.telemetry, TelemetryConfig::default());
    let api = c.api.clone().unwrap();
    assert_eq!((api.keep_alive_ms, api.header_timeout_ms, api.max_connections), (10_000, 30_000, 4096));
    assert!(c.is_first() && !c.is_last());
}

#[test]
fn keys_do_not_show_in_debug_output() {
    assert!(!format!("{:?}", first()).contains("s3cret"));
    assert_eq!(first().api.unwrap().api_keys[0].expose(), "s3cret");
}

#[test]
fn unknown_fields_are_refused_by_name_at_every_level() {
    for (extra, name) in [
        ("bogus: 1\n", "bogus"),
        ("engine: { n_gpu_layer: 3 }\n", "n_gpu_layer"),
        ("scheduling: { prefil_chunk: 3 }\n", "prefil_chunk"),
        ("log: { colour: red }\n", "colour"),
        ("control: { bind: '127.0.0.1:1', tls: true }\n", "tls"),
    ] {
        let error = StageConfig::from_yaml(&format!("{FIRST}{extra}")).unwrap_err();
        assert!(matches!(error, ConfigError::Parse { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn flash_attention_on_and_off_are_words_not_booleans() {
    for (word, value) in [("on", FlashAttention::On), ("off", FlashAttention::Off), ("auto", FlashAttention::Auto)] {
        let c = StageConfig::from_yaml(&format!("{FIRST}engine: {{ flash_attn: {word} }}\n")).unwrap();
        assert_eq!(c.engine.flash_attn, value);
        assert_eq!(StageConfig::from_yaml(&c.to_yaml().unwrap()).unwrap(), c);
    }
}

#[test]
fn files_are_read_by_their_ending_and_errors_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("s.json");
    std::fs::write(&json, first().to_json().unwrap()).unwrap();
    assert_eq!(StageConfig::load(&json).unwrap(), first());
    let yaml = dir.path().join("s.yaml");
    std::fs::write(&yaml, "chain: [").unwrap();
    assert!(StageConfig::load(&yaml).unwrap_err().to_string().contains("s.yaml"));
    let missing = StageConfig::load(&dir.path().join("none.yaml")).unwrap_err();
    assert!(matches!(missing, ConfigError::Read { .. }));
    assert!(missing.to_string().contains("none.yaml"));
}

#[test]
fn a_pod_listens_on_every_address_with_certificates_or_by_an_explicit_word() {
    let mut config = first();
    config.link.bind = "0.0.0.0:7101".parse().unwrap();
    for (bind, port) in [(&mut config.control, 7102), (&mut config.health, 7103)] {
        bind.bind = format!("[::]:{port}").parse().unwrap();
    }
    config.api.as_mut().unwrap().bind = "0.0.0.0:8000".parse().unwrap();
    config.metrics = Some(BindConfig { bind: "0.0.0.0:7104".parse().unwrap() });
    config.model.credentials = Some("/credentials".into());
    let names = (0..config.stages).map(|i| format!("m-0-{i}.ns.svc")).collect();
    let tls = TlsConfig { ca: "a".into(), cert: "b".into(), key: "c".into(), names };
    for (tls, insecure, ok) in [(Some(tls), false, true), (None, true, true), (None, false, false)] {
        (config.link.tls, config.link.insecure) = (tls, insecure);
        assert_eq!(config.validate().is_ok(), ok);
        if ok {
            assert_eq!(StageConfig::from_json(&config.to_json().unwrap()).unwrap(), config);
        }
    }
}

#[test]
fn every_refusal_names_its_field() {
    type Case = (&'static str, fn(&mut StageConfig));
    let cases: &[Case] = &[
        ("chain:", |c| c.chain = "a b".into()),
        ("stages:", |c| c.stages = 0),
        ("stage:", |c| c.stage = 3),
        ("n_layers:", |c| c.n_layers = 0),
        ("layers:", |c| c.layers = [5, 5]),
        ("layers:", |c| c.layers = [0, 31]),
        ("layers:", |c| c.layers = [1, 12]),
        ("layers:", |c| c.layers = [0, 30]),
        ("model.source:", |c| c.model.source = " ".into()),
        ("model.digest:", |c| c.model.digest = Some("xyz".into())),
        ("model.credentials:", |c| c.model.credentials = Some("".into())),
        ("cache.dir:", |c| c.cache.dir = "".into()),
        ("link.downstream:", |c| c.link.downstream = None),
        ("link.downstream:", |c| c.link.downstream = Some("localhost".into())),
        ("link.downstream:", |c| c.link.downstream = Some("::1:7000".into())),
        ("link.downstream:", |c| c.link.downstream = Some("h:0".into())),
        ("link.return:", |c| c.link.return_to = Some("h:1".into())),
        ("link.peer_deadline_ms:", |c| c.link.peer_deadline_ms = 1),
        ("link.credits:", |c| c.link.credits = Some(0)),
        ("link.max_message_bytes:", |c| c.link.max_message_bytes = 10),
        ("link.tls:", |c| c.link.bind = "0.0.0.0:7101".parse().unwrap()),
        ("link.tls.names:", |c| {
            c.link.tls = Some(TlsConfig { ca: "a".into(), cert: "b".into(), key: "c".into(), names: vec!["x".into()] });
        }),
        ("telemetry.sample_ratio:", |c| c.telemetry.sample_ratio = 1.5),
        ("telemetry.sample_ratio:", |c| c.telemetry.sample_ratio = f64::NAN),
        ("kv_cache.min_tokens:", |c| c.kv_cache.min_tokens = 0),
        ("kv_cache.shared_prefix_stride_tokens:", |c| c.kv_cache.shared_prefix_stride_tokens = 0),
        ("kv_cache.shared_prefix_record_limit:", |c| c.kv_cache.shared_prefix_record_limit = 0),
        ("schedule_log:", |c| {
            c.kv_cache.disk_bytes = 1;
            c.schedule_log = Some("log".into());
        }),
        ("schedule_log:", |c| {
            c.kv_cache.activation_bytes = 1;
            c.schedule_log = Some("log".into());
        }),
        ("telemetry.queue:", |c| c.telemetry.queue = 0),
        ("telemetry.otlp_endpoint:", |c| c.telemetry.otlp_endpoint = Some("collector:4317".into())),
        ("metrics.bind:", |c| c.metrics = Some(c.control)),
        ("api:", |c| c.api = None),
        ("api.model:", |c| c.api.as_mut().unwrap().model.clear()),
        ("api.api_keys:", |c| c.api.as_mut().unwrap().api_keys = vec![Secret::new(String::new())]),
        ("api.keep_alive_ms:", |c| c.api.as_mut().unwrap().keep_alive_ms = 0),
        ("api.header_timeout_ms:", |c| c.api.as_mut().unwrap().header_timeout_ms = 0),
        ("api.max_connections:", |c| c.api.as_mut().unwrap().max_connections = 0),
        ("engine.context_length:", |c| c.engine.context_length = 0),
        ("engine.context_length:", |c| c.engine.context_length = u32::MAX),
        ("engine.lanes:", |c| c.engine.lanes = 257),
        ("engine.n_ctx:", |c| c.engine.n_ctx = Some(1)),
        ("engine.n_batch:", |c| c.engine.n_batch = 1),
        ("engine.n_ubatch:", |c| c.engine.n_ubatch = 0),
        ("engine.n_ubatch:", |c| c.engine.n_ubatch = 2),
        ("engine.cache_type_v:", |c| {
            c.engine.cache_type_v = CacheType::Q8_0;
            c.engine.flash_attn = FlashAttention::Off;
        }),
        ("engine.threads:", |c| c.engine.threads = Some(0)),
        ("engine.rpc:", |c| c.engine.rpc = vec!["nowhere".into()]),
        ("scheduling.max_in_flight:", |c| c.scheduling.max_in_flight = Some(0)),
        ("scheduling.prefill_chunk:", |c| c.scheduling.prefill_chunk = Some(513)),
        ("scheduling.prefill_chunk_shared:", |c| c.scheduling.prefill_chunk_shared = Some(0)),
        ("scheduling.recovery_deadline_s:", |c| c.scheduling.recovery_deadline_s = 0),
        ("log.level:", |c| c.log.level.clear()),
        ("health.bind:", |c| c.health.bind = c.control.bind),
        ("api.bind:", |c| c.api.as_mut().unwrap().bind = c.link.bind),
    ];
    for (index, (field, change)) in cases.iter().enumerate() {
        let text = refused(*change);
        assert!(text.starts_with(field), "case {index}: expected `{field}`, got `{text}`");
    }
}

#[test]
fn the_last_stage_needs_a_return_address_and_a_chain_of_one_none() {
    let mut last = first();
    last.stage = 2;
    last.layers = [20, 30];
    last.api = None;
    last.link.downstream = None;
    assert!(last.validate().unwrap_err().to_string().starts_with("link.return:"));
    last.link.return_to = Some("[::1]:7101".into());
    last.validate().unwrap();
    last.link.downstream = Some("h:1".into());
    assert!(last.validate().unwrap_err().to_string().starts_with("link.downstream:"));

    let mut one = first();
    one.stages = 1;
    one.layers = [0, 30];
    one.link.downstream = None;
    one.link.bind = "0.0.0.0:7101".parse().unwrap();
    one.validate().unwrap();
    assert!(one.is_first() && one.is_last());
    assert_eq!(one.max_in_flight(), 1);
}

fn any_config() -> impl Strategy<Value = StageConfig> {
    let text = "[ -~äß]{1,20}";
    let api = prop::option::of((text, prop::collection::vec(text, 0..3), prop::collection::vec(text, 0..2)));
    let cache = prop::sample::select(vec![CacheType::F32, CacheType::Bf16, CacheType::Iq4Nl, CacheType::Q5_1]);
    let modes = prop::sample::select(vec![SplitMode::None, SplitMode::Layer, SplitMode::Row]);
    let numbers = (any::<u32>(), any::<[u32; 2]>(), any::<u64>(), any::<Option<u32>>(), any::<bool>());
    (text, api, cache, modes, numbers, prop::option::of(text)).prop_map(
        |(name, api, cache, mode, numbers, optional)| {
            let mut c = first();
            let (number, layers, bytes, maybe, flag) = numbers;
            c.chain.clone_from(&name);
            c.stage = number;
            c.layers = layers;
            c.model.source = name;
            c.model.digest.clone_from(&optional);
            c.cache.max_bytes = bytes;
            c.link.credits = maybe;
            c.link.insecure = flag;
            c.link.return_to.clone_from(&optional);
            c.engine.cache_type_k = cache;
            c.engine.cache_type_v = cache;
            c.engine.split_mode = mode;
            c.engine.threads = maybe;
            c.engine.mlock = flag;
            c.schedule_log = optional.map(Into::into);
            c.api = api.map(|(model, aliases, keys)| ApiConfig {
                model,
                aliases,
                api_keys: keys.into_iter().map(Secret::new).collect(),
                ..first().api.unwrap()
            });
            c
        },
    )
}

proptest! {
    // Valid or not, what is written is read back: validation happens after parsing, so it cannot hide a loss.
    #[test]
    fn text_round_trips(config in any_config()) {
        let yaml = config.to_yaml().unwrap();
        let json = config.to_json().unwrap();
        let valid = config.validate().is_ok();
        match (StageConfig::from_yaml(&yaml), StageConfig::from_json(&json)) {
            (Ok(a), Ok(b)) => {
                prop_assert!(valid);
                prop_assert_eq!(&a, &config);
                prop_assert_eq!(&b, &config);
            }
            (Err(ConfigError::Invalid { field: a, .. }), Err(ConfigError::Invalid { field: b, .. })) => {
                prop_assert!(!valid);
                prop_assert_eq!(a, b);
                let reread: StageConfig = serde_json::from_str(&json).unwrap();
                prop_assert_eq!(&reread, &config);
                let reread: StageConfig = serde_saphyr::from_str(&yaml).unwrap();
                prop_assert_eq!(&reread, &config);
            }
            (a, b) => prop_assert!(false, "yaml {a:?}, json {b:?}\n{yaml}"),
        }
    }

    #[test]
    fn any_text_is_refused_without_panic(text in "\\PC{0,200}") {
        prop_assert!(StageConfig::from_yaml(&text).is_err());
        prop_assert!(StageConfig::from_json(&text).is_err());
    }
}
