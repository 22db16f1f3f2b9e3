//! Any bytes as a GGUF file: header, facts, tokenizer and plans give a result or an error.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use splitmodel_gguf::{Model, Package, SlicePlan};

fuzz_target!(|data: &[u8]| {
    let Ok(model) = Model::from_sources(vec![Arc::new(data.to_vec())]) else {
        return;
    };
    let _ = model.tokenizer();
    for package in [Package::Tokenizer, Package::Embedding] {
        if let Ok(plan) = SlicePlan::new(&model, package) {
            let written = plan.write_to("fuzz", &mut std::io::sink(), &mut |_, _| {}).map(|w| w.bytes);
            assert_eq!(written.ok(), Some(plan.total_bytes()));
        }
    }
    let Ok(facts) = model.facts() else {
        return;
    };
    for &cut in &facts.legal_cuts {
        for (first, end) in [(0, cut), (cut, facts.n_layers)] {
            assert!(SlicePlan::new(&model, Package::Stage { first, end }).is_ok());
        }
    }
});
