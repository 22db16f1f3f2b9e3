#![allow(clippy::single_range_in_vec_init, clippy::reversed_empty_ranges, reason = "ranges of layers, wrong ones too")]

use std::ops::Range;

use proptest::prelude::*;
use splitmodel_gguf::{LayerFacts, ModelFacts, TensorType, facts::IllegalCut, facts::SliceNeeds};

use crate::{
    Device, Layout, MemoryModel, PlanError, PlanOptions, plan,
    solve::{Goal, Search},
};

const MIB: u64 = 1 << 20;

fn layer(weight_bytes: u64) -> LayerFacts {
    LayerFacts {
        weight_bytes,
        kv_k_elements: 192,
        kv_v_elements: 192,
        window: None,
        recurrent: false,
        recurrent_bytes: 0,
    }
}

/// Facts as gguf derives them, cuts included.
fn model(layers: Vec<LayerFacts>, needs: SliceNeeds, special_layer_counts: Vec<u32>) -> ModelFacts {
    let mut facts = ModelFacts {
        arch: "llama".into(),
        name: "test".into(),
        digest: "00".into(),
        n_layers: layers.len() as u32,
        n_embd: 576,
        n_vocab: 49_152,
        context_train: 8192,
        n_head: 9,
        head_dim_k: 64,
        head_dim_v: 64,
        tied_head: true,
        embedding_bytes: 30 * MIB,
        head_bytes: 30 * MIB,
        other_bytes: 2304,
        layers,
        needs,
        special_layer_counts,
        legal_cuts: vec![],
        illegal_cuts: vec![],
    };
    for layer in 1..facts.n_layers {
        match facts.check_range(0, layer).and_then(|()| facts.check_range(layer, facts.n_layers)) {
            Ok(()) => facts.legal_cuts.push(layer),
            Err(e) => facts.illegal_cuts.push(IllegalCut { layer, reason: e.to_string() }),
        }
    }
    facts
}

/// 30 layers of 2.2 MB and a head worth 13.6 of them.
fn smollm2() -> ModelFacts {
    model(vec![layer(2_200_000); 30], SliceNeeds::default(), vec![])
}

fn devices(memory: &[Option<u64>]) -> Vec<Device> {
    memory.iter().enumerate().map(|(i, m)| Device::new(format!("gpu-{i}"), *m)).collect()
}

fn stages(count: u32) -> PlanOptions {
    PlanOptions { layout: Layout::Stages(count), ..PlanOptions::default() }
}

fn layers(list: &[Range<u32>]) -> PlanOptions {
    PlanOptions { layout: Layout::Layers(list.to_vec()), ..PlanOptions::default() }
}

fn cuts(plan: &crate::Plan) -> Vec<Range<u32>> {
    plan.stages.iter().map(|s| s.first..s.end).collect()
}

#[test]
fn the_head_counts_its_bytes() {
    let two = plan(&smollm2(), &devices(&[None, None]), &stages(2)).unwrap();
    assert_eq!(cuts(&two), [0..22, 22..30]);
    let three = plan(&smollm2(), &devices(&[None, None, None]), &stages(3)).unwrap();
    assert_eq!(cuts(&three), [0..15, 15..29, 29..30]);
    assert!((three.stages.iter().map(|s| s.cost_share).sum::<f64>() - 1.0).abs() < 1e-9);
    assert!(three.notes.is_empty() && three.warnings.is_empty() && three.unused.is_empty());
    assert_eq!(three.stages[0].bytes.embedding, 30 * MIB);
    assert_eq!((three.stages[2].bytes.head, three.stages[1].bytes.head), (30 * MIB, 0));
}

#[test]
fn faster_devices_get_more() {
    let mut pair = devices(&[None, None]);
    pair[1].speed = 3.0;
    let facts = model(vec![layer(10 * MIB); 41], SliceNeeds::default(), vec![]);
    let made = plan(&facts, &pair, &stages(2)).unwrap();
    // 11 × 10 : (30 × 10 + 30) / 3.
    assert_eq!(cuts(&made), [0..11, 11..41]);
}

#[test]
fn memory_bounds_stages_and_small_devices_are_left_out() {
    let facts = model(vec![layer(100 * MIB); 10], SliceNeeds::default(), vec![]);
    let options = PlanOptions { lanes: 1, context_length: 256, n_ubatch: 16, headroom: 0.0, ..PlanOptions::default() };
    let made = plan(&facts, &devices(&[Some(800 * MIB), Some(50 * MIB), Some(400 * MIB)]), &options).unwrap();
    assert_eq!(made.stages.iter().map(|s| s.device).collect::<Vec<_>>(), [0, 2]);
    assert!(made.stages.iter().all(|s| s.headroom.unwrap() >= 0));
    assert_eq!(made.unused.len(), 1);
    assert!(made.unused[0].reason.starts_with("too small: its smallest stage"), "{}", made.unused[0].reason);
    // Everything on one device where it fits: no device is taken that is not needed.
    let made = plan(&facts, &devices(&[Some(8000 * MIB), Some(8000 * MIB)]), &options).unwrap();
    assert_eq!(cuts(&made), [0..10]);
    assert_eq!(made.unused[0].reason, "not needed: the chain fits on 1 of the devices");
}

#[test]
fn what_does_not_fit_names_stage_device_and_bytes() {
    let facts = model(vec![layer(100 * MIB); 10], SliceNeeds::default(), vec![]);
    let options = PlanOptions { headroom: 0.0, ..stages(2) };
    let error = plan(&facts, &devices(&[Some(400 * MIB), Some(400 * MIB)]), &options).unwrap_err();
    let PlanError::DoesNotFit(short) = &error else { panic!("{error}") };
    assert_eq!(short.usable, 400 * MIB);
    let needed = short.bytes.weights + short.bytes.kv + short.bytes.compute;
    assert_eq!(short.missing, needed - 400 * MIB);
    // No other cut misses less at its worst stage.
    let memory = MemoryModel::new(&facts, &options);
    let least = (1..10)
        .map(|cut| [0..cut, cut..10].map(|r| memory.stage(r).on_device(false)).into_iter().max().unwrap())
        .min()
        .unwrap();
    assert_eq!(short.missing, least - 400 * MIB);
    let text = error.to_string();
    for part in ["stage ", "gpu-", "weights ", "KV ", "compute ", "missing", "contextLength"] {
        assert!(text.contains(part), "{text}");
    }
    // Without a number of stages, all devices are tried.
    let error = plan(&facts, &devices(&[Some(100 * MIB); 3]), &PlanOptions::default()).unwrap_err();
    let PlanError::DoesNotFit(short) = error else { panic!("{error}") };
    assert_eq!(short.stages, 3);
}

#[test]
fn windows_and_states_shrink_caches() {
    let mut facts = smollm2();
    let options = PlanOptions { lanes: 3, residents: 2, resident_tokens: 1000, ..PlanOptions::default() };
    let full = MemoryModel::new(&facts, &options);
    let cells = (3u64 * 4096 + 1000).next_multiple_of(256);
    assert_eq!(full.cells(), cells);
    assert_eq!(full.stage(0..1).kv, cells * 2 * (192 + 192));
    let q8 = PlanOptions { cache_type_k: TensorType::Q8_0, cache_type_v: TensorType::F32, ..options.clone() };
    assert_eq!(MemoryModel::new(&facts, &q8).stage(0..1).kv, cells * (192 / 32 * 34 + 192 * 4));
    facts.layers[0].window = Some(512);
    // Three lanes and two residents.
    let window = (512u64 * 5 + 512).next_multiple_of(256);
    assert_eq!(MemoryModel::new(&facts, &options).stage(0..1).kv, window * 2 * 384);
    let swa_full = PlanOptions { swa_full: true, ..options.clone() };
    assert_eq!(MemoryModel::new(&facts, &swa_full).stage(0..1).kv, cells * 2 * 384);
    facts.layers[0] =
        LayerFacts { kv_k_elements: 0, kv_v_elements: 0, recurrent: true, recurrent_bytes: 77, ..layer(5) };
    assert_eq!(MemoryModel::new(&facts, &options).stage(0..1).kv, 5 * 77);
}

#[test]
fn lanes_have_caches_of_their_own() {
    let mut facts = smollm2();
    let options = PlanOptions { lanes: 3, context_length: 4000, ..PlanOptions::default() };
    let model = MemoryModel::new(&facts, &options);
    assert_eq!(model.cells(), 3 * 4096);
    assert_eq!(model.stage(0..1).kv, 3 * 4096 * 2 * (192 + 192));
    facts.layers[0].window = Some(500);
    let model = MemoryModel::new(&facts, &options);
    assert_eq!(model.stage(0..1).kv, 3 * 1024 * 2 * 384, "500 + 512, rounded up");
    assert_eq!(model.stage(0..1).compute, 512 * (6 * 1024 + 4 * 4 * 576 + 4 * 8 * 576));
    // A state for each lane needs one cache of all of them.
    facts.layers[1].recurrent = true;
    assert_eq!(MemoryModel::new(&facts, &options).cells(), (3u64 * 4000).next_multiple_of(256));
}

#[test]
fn compute_follows_the_formula() {
    let facts = smollm2();
    let options = PlanOptions::default();
    let middle = MemoryModel::new(&facts, &options).stage(3..5);
    let cells = 4096u64;
    assert_eq!(middle.compute, 512 * (6 * cells + 4 * 4 * 576 + 4 * 8 * 576));
    let last = MemoryModel::new(&facts, &options).stage(5..30);
    assert_eq!(last.compute, 512 * (6 * cells + 4 * 4 * 576 + 4 * 49_152));
    let scores = PlanOptions { flash_attn: false, ..options };
    let middle = MemoryModel::new(&facts, &scores).stage(3..5);
    assert_eq!(middle.compute, 512 * (4 * cells + 4 * 4 * 576 + 4 * 9 * cells));
    assert_eq!(MemoryModel::new(&facts, &scores).stage(5..3), Default::default());
    assert_eq!(MemoryModel::new(&facts, &scores).stage(0..31), Default::default());
}

#[test]
fn embedding_counts_on_the_host_only() {
    let facts = smollm2();
    let options = stages(2);
    let mut hosts = devices(&[None, None]);
    hosts[0].host = true;
    let on_host = plan(&facts, &hosts, &options).unwrap();
    let on_gpu = plan(&facts, &devices(&[None, None]), &options).unwrap();
    assert_eq!(on_host.stages[0].total, on_gpu.stages[0].total + 30 * MIB);
    assert_eq!(on_host.stages[1].total, on_gpu.stages[1].total);
}

/// Every sixth layer attends to everything, the others to a window.
fn windowed() -> ModelFacts {
    let layers = (0..12).map(|i| LayerFacts { window: (i % 6 != 5).then_some(512), ..layer(MIB) }).collect();
    model(layers, SliceNeeds { windowed: true, ..SliceNeeds::default() }, vec![])
}

#[test]
fn cuts_snap_to_legal_ones_and_say_so() {
    let mut facts = windowed();
    facts.head_bytes = 0;
    // The last layer alone would be best on the slow device, but it has no window.
    let mut pair = devices(&[None, None]);
    pair[1].speed = 0.09;
    assert_eq!(facts.illegal_cuts.iter().map(|c| c.layer).collect::<Vec<_>>(), [11]);
    let made = plan(&facts, &pair, &stages(2)).unwrap();
    assert_eq!(cuts(&made), [0..10, 10..12]);
    assert_eq!(made.notes.len(), 1);
    assert!(made.notes[0].contains("begins at layer 10 instead of 11"), "{}", made.notes[0]);
    assert!(made.notes[0].contains("sliding-window"), "{}", made.notes[0]);
}

#[test]
fn the_users_layers_win() {
    let facts = smollm2();
    let made = plan(&facts, &devices(&[Some(40 * MIB), None, None]), &layers(&[0..10, 10..30])).unwrap();
    assert_eq!(cuts(&made), [0..10, 10..30]);
    assert_eq!(made.warnings.len(), 1, "{:?}", made.warnings);
    assert!(
        made.warnings[0].contains("stage 0 (layers 0-9)") && made.warnings[0].contains("gpu-0"),
        "{:?}",
        made.warnings
    );
    assert!(made.stages[0].headroom.unwrap() < 0);
    assert_eq!(made.unused[0].reason, "there are more devices than stages");
    let error = plan(&facts, &devices(&[Some(20 * MIB), None]), &layers(&[0..10, 10..30])).unwrap_err();
    assert!(matches!(error, PlanError::CannotLoad { stage: 0, .. }), "{error}");
    let error = plan(&facts, &devices(&[None]), &layers(&[0..10, 10..30])).unwrap_err();
    assert_eq!(error, PlanError::NotEnoughDevices { stages: 2, devices: 1 });
}

#[test]
fn the_users_layers_must_be_possible() {
    let facts = windowed();
    let two = devices(&[None, None, None]);
    let text = |ranges: &[Range<u32>]| plan(&facts, &two, &layers(ranges)).unwrap_err().to_string();
    assert!(text(&[0..11, 11..12]).contains("nearest legal cuts: 10"));
    assert!(text(&[0..5, 5..6, 6..12]).contains("sliding-window"), "{}", text(&[0..5, 5..6, 6..12]));
    for (ranges, stage) in [
        (vec![1..12], 0),
        (vec![0..4, 5..12], 1),
        (vec![0..6, 5..12], 1),
        (vec![0..6, 6..11], 1),
        (vec![0..6, 6..13], 1),
        (vec![0..6, 6..6, 6..12], 1),
        (vec![0..9, 9..4], 1),
        (vec![0..20, 20..12], 0),
    ] {
        let error = plan(&facts, &two, &layers(&ranges)).unwrap_err();
        assert!(matches!(error, PlanError::Ranges { stage: s, .. } if s == stage), "{ranges:?}: {error}");
        assert!(error.to_string().contains("layers run from 0 to 11"), "{error}");
    }
}

#[test]
fn special_layer_counts_are_avoided() {
    let facts = model(vec![layer(MIB); 9], SliceNeeds::default(), vec![4]);
    let made = plan(&facts, &devices(&[None, None]), &stages(2)).unwrap();
    assert!(made.stages.iter().all(|s| s.end - s.first != 4), "{:?}", cuts(&made));
    let whole = model(vec![layer(MIB); 4], SliceNeeds::default(), vec![4]);
    let error = plan(&whole, &devices(&[None, None]), &stages(2)).unwrap_err();
    assert_eq!(error, PlanError::TooManyStages { stages: 2, layers: 4, most: 1 });
    assert_eq!(cuts(&plan(&whole, &devices(&[None, None]), &PlanOptions::default()).unwrap()), [0..4]);
}

#[test]
fn nonsense_is_refused() {
    let facts = smollm2();
    let one = devices(&[None]);
    let bad = [
        ("lanes", PlanOptions { lanes: 0, ..PlanOptions::default() }),
        ("lanes", PlanOptions { lanes: 200, residents: 57, ..PlanOptions::default() }),
        ("context_length", PlanOptions { context_length: 0, ..PlanOptions::default() }),
        ("n_ubatch", PlanOptions { n_ubatch: 0, ..PlanOptions::default() }),
        ("headroom", PlanOptions { headroom: 1.0, ..PlanOptions::default() }),
        ("headroom", PlanOptions { headroom: f64::NAN, ..PlanOptions::default() }),
        ("stages", stages(0)),
        ("stages", stages(65)),
        ("layers", layers(&[])),
    ];
    for (name, options) in bad {
        match plan(&facts, &one, &options).unwrap_err() {
            PlanError::Invalid { field, .. } => assert_eq!(field, name),
            other => panic!("{name}: {other}"),
        }
    }
    let bad_devices = [vec![], vec![Device { speed: 0.0, ..Device::new("a", None) }], devices(&[None; 129])];
    for list in bad_devices {
        let error = plan(&facts, &list, &PlanOptions::default()).unwrap_err();
        assert!(matches!(error, PlanError::Invalid { field: "devices", .. }), "{error}");
    }
    let torn = ModelFacts { n_layers: 31, ..smollm2() };
    assert!(matches!(plan(&torn, &one, &PlanOptions::default()), Err(PlanError::Invalid { field: "model", .. })));
    let error = plan(&facts, &one, &stages(2)).unwrap_err();
    assert_eq!(error, PlanError::NotEnoughDevices { stages: 2, devices: 1 });
    let error = plan(&facts, &devices(&[None; 64]), &stages(31)).unwrap_err();
    assert_eq!(error, PlanError::TooManyStages { stages: 31, layers: 30, most: 30 });
}

#[test]
fn hostile_sizes_do_not_overflow() {
    let mut facts = model(vec![layer(u64::MAX / 2); 8], SliceNeeds::default(), vec![]);
    facts.head_bytes = u64::MAX;
    facts.n_embd = u32::MAX;
    facts.n_vocab = u32::MAX;
    facts.layers[0].kv_k_elements = u64::MAX;
    facts.legal_cuts.push(4_000_000);
    let options = PlanOptions {
        context_length: u32::MAX,
        resident_tokens: u64::MAX,
        n_ubatch: u32::MAX,
        lanes: 255,
        ..stages(2)
    };
    let made = plan(&facts, &devices(&[None, None]), &options).unwrap();
    assert_eq!(made.stages.len(), 2);
    assert!(plan(&facts, &devices(&[Some(1), Some(1)]), &options).is_err());
}

/// 64 unlike devices and 200 layers: the work stays far from the 82 million steps of a plain search over cuts.
#[test]
fn large_plans_take_little_work() {
    let facts = model((0..200u64).map(|i| layer(300 * MIB + i * 7919 * 1024)).collect(), SliceNeeds::default(), vec![]);
    let unlike: Vec<Device> = (0..64u64)
        .map(|i| Device {
            speed: 1.0 + (i * 37 % 11) as f64 / 3.0,
            ..Device::new(format!("gpu-{i}"), Some((2_500 + i * 53 % 17 * 700) * MIB))
        })
        .collect();
    for count in [24, 40, 64] {
        let options = PlanOptions { lanes: 1, context_length: 1024, n_ubatch: 32, ..stages(count) };
        let memory = MemoryModel::new(&facts, &options);
        let search = Search::new(&facts, &memory, &unlike, &options);
        assert_eq!(search.fitting_counts() & (1 << count), 1 << count);
        let best = search.best(Goal::Cost, count).unwrap();
        assert_eq!(best.len(), count as usize);
        println!("{count} stages: {} steps", search.steps.get());
        assert!(search.steps.get() < 3_000_000, "{} steps", search.steps.get());
    }
    let started = std::time::Instant::now();
    let made =
        plan(&facts, &unlike, &PlanOptions { lanes: 1, context_length: 1024, ..PlanOptions::default() }).unwrap();
    println!("{} stages in {:?}", made.stages.len(), started.elapsed());
}

#[test]
fn the_table() {
    let facts = smollm2();
    let mut list = devices(&[Some(1024 * MIB), Some(4096 * MIB), Some(100 * MIB)]);
    list[0].name = "node-a/0".into();
    let text = plan(&facts, &list, &stages(2)).unwrap().to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "STAGE  DEVICE    LAYERS   WEIGHTS         KV    COMPUTE      TOTAL   HEADROOM  COST");
    assert_eq!(lines[1], "    0  node-a/0    0-21  46.2 MiB  264.0 MiB   25.5 MiB  335.7 MiB  688.3 MiB   50%");
    assert_eq!(lines[2], "    1  gpu-1      22-29  46.8 MiB   96.0 MiB  112.5 MiB  255.3 MiB    3.8 GiB   50%");
    assert_eq!(lines[3], "Stage 0 also holds the embedding table in host memory: 30.0 MiB.");
    assert!(lines[4].starts_with("gpu-2 is not used: "), "{text}");
}

#[test]
fn plans_travel_as_json() {
    let made = plan(&smollm2(), &devices(&[None, Some(MIB << 12)]), &stages(2)).unwrap();
    let json = serde_json::to_string(&made).unwrap();
    assert_eq!(serde_json::from_str::<crate::Plan>(&json).unwrap(), made);
    let options: PlanOptions = serde_json::from_str(r#"{"layout": {"stages": 3}, "lanes": 2}"#).unwrap();
    assert_eq!((options.layout, options.lanes), (Layout::Stages(3), 2));
}

/// All ways to put `count` legal ranges on devices in order.
fn every_plan(facts: &ModelFacts, devices: usize, count: usize) -> Vec<Vec<(usize, Range<u32>)>> {
    fn extend(
        facts: &ModelFacts,
        devices: usize,
        count: usize,
        so_far: &[(usize, Range<u32>)],
        all: &mut Vec<Vec<(usize, Range<u32>)>>,
    ) {
        let (device, first) = so_far.last().map_or((0, 0), |(d, r)| (d + 1, r.end));
        if so_far.len() == count {
            if first == facts.n_layers {
                all.push(so_far.to_vec());
            }
            return;
        }
        for d in device..devices {
            for end in first + 1..=facts.n_layers {
                let cut = end == facts.n_layers || facts.legal_cuts.contains(&end);
                if cut && facts.check_range(first, end).is_ok() {
                    extend(facts, devices, count, &[so_far, &[(d, first..end)]].concat(), all);
                }
            }
        }
    }
    let mut all = Vec::new();
    extend(facts, devices, count, &[], &mut all);
    all
}

fn facts_strategy() -> impl Strategy<Value = ModelFacts> {
    let one = (1u64..200, prop::option::of(Just(64u32)), 0u64..1000);
    let needs = prop_oneof![
        3 => Just(SliceNeeds::default()),
        1 => Just(SliceNeeds { windowed: true, ..SliceNeeds::default() }),
    ];
    (prop::collection::vec(one, 1..9), needs, prop::collection::vec(1u32..5, 0..2), 0u64..400).prop_map(
        |(list, needs, special, head)| {
            let layers = list
                .into_iter()
                .map(|(w, window, kv)| LayerFacts { window, kv_k_elements: kv, ..layer(w * MIB) })
                .collect();
            ModelFacts { head_bytes: head * MIB, ..model(layers, needs, special) }
        },
    )
}

fn devices_strategy() -> impl Strategy<Value = Vec<Device>> {
    let one = (prop::option::of(10u64..900), 1u32..8, any::<bool>());
    prop::collection::vec(one, 1..5).prop_map(|list| {
        let make = |(i, (m, speed, host)): (usize, (Option<u64>, u32, bool))| Device {
            name: format!("d{i}"),
            memory: m.map(|m| m * MIB),
            speed: f64::from(speed),
            host,
        };
        list.into_iter().enumerate().map(make).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Against brute force: the slowest stage is as fast as it can be, and what is refused has no plan.
    #[test]
    fn plans_are_optimal(facts in facts_strategy(), list in devices_strategy(), count in prop::option::of(1u32..5)) {
        let layout = count.map_or(Layout::Auto, Layout::Stages);
        let options = PlanOptions { layout, lanes: 2, context_length: 512, n_ubatch: 64, ..PlanOptions::default() };
        let memory = MemoryModel::new(&facts, &options);
        let usable = |d: usize| list[d].usable(options.headroom).unwrap_or(u64::MAX);
        let over = |d: usize, r: &Range<u32>| {
            memory.stage(r.clone()).on_device(list[d].host).saturating_sub(usable(d))
        };
        let cost = |d: usize, r: &Range<u32>| memory.stage(r.clone()).weights as f64 / list[d].speed;
        let slowest = |p: &[(usize, Range<u32>)]| p.iter().map(|(d, r)| cost(*d, r)).fold(0.0, f64::max);
        let squares = |p: &[(usize, Range<u32>)]| p.iter().map(|(d, r)| cost(*d, r).powi(2)).sum::<f64>();
        let fitting = |n: usize| {
            let mut all = every_plan(&facts, list.len(), n);
            all.retain(|p| p.iter().all(|(d, r)| over(*d, r) == 0));
            all
        };
        let wanted = match count {
            Some(n) => n as usize,
            None => (1..=list.len()).find(|n| !fitting(*n).is_empty()).unwrap_or(0),
        };
        match plan(&facts, &list, &options) {
            Ok(made) => {
                let got: Vec<_> = made.stages.iter().map(|s| (s.device, s.first..s.end)).collect();
                prop_assert_eq!(got.len(), wanted);
                let all = fitting(wanted);
                prop_assert!(all.contains(&got), "{:?} is no legal plan that fits", got);
                let best = all.iter().map(|p| slowest(p)).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(slowest(&got), best);
                let even = all.iter().filter(|p| slowest(p) == best).map(|p| squares(p)).fold(f64::INFINITY, f64::min);
                prop_assert!(squares(&got) <= even * (1.0 + 1e-12));
                prop_assert_eq!(got[0].1.start, 0);
                prop_assert_eq!(got[got.len() - 1].1.end, facts.n_layers);
                prop_assert_eq!(made.unused.len() + got.len(), list.len());
                for s in &made.stages {
                    prop_assert!(s.headroom.is_none_or(|free| free >= 0));
                }
                drop(made.to_string());
            }
            Err(PlanError::DoesNotFit(short)) => {
                prop_assert!(wanted == 0 || fitting(wanted).is_empty());
                let all = every_plan(&facts, list.len(), short.stages);
                let least = all.iter().map(|p| p.iter().map(|(d, r)| over(*d, r)).max().unwrap()).min();
                prop_assert_eq!(Some(short.missing), least);
                prop_assert!(short.missing > 0);
            }
            Err(PlanError::TooManyStages { stages, .. }) => {
                prop_assert!(every_plan(&facts, list.len(), stages as usize).is_empty());
            }
            Err(PlanError::NotEnoughDevices { .. }) => prop_assert!(wanted > list.len()),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// Any ranges, however wrong, give a plan with exactly these or an error.
    #[test]
    fn explicit_ranges_are_kept_or_refused(
        facts in facts_strategy(), list in devices_strategy(), ranges in prop::collection::vec((0u32..10, 0u32..10), 1..4),
    ) {
        let ranges: Vec<Range<u32>> = ranges.into_iter().map(|(a, b)| a..b).collect();
        if let Ok(made) = plan(&facts, &list, &layers(&ranges)) {
            prop_assert_eq!(cuts(&made), ranges.clone());
            prop_assert!(ranges.iter().all(|r| facts.check_range(r.start, r.end).is_ok()));
        }
    }
}
