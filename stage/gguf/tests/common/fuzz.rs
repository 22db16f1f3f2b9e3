//! What must hold for any bytes as a GGUF file. The fuzz target and `fuzz_corpus.rs` run the same function.

use std::io;
use std::sync::Arc;

use splitmodel_gguf::{Model, Package, SlicePlan, Source};

/// Length of the files that inputs become.
const FILE: u64 = 4 << 20;
/// Longest package that is written out; longer ones are planned only.
const WRITTEN: u64 = 64 << 10;

/// A file that begins with these bytes and goes on with zeros: inputs need no weights.
struct Padded(Vec<u8>);

impl Source for Padded {
    fn len(&self) -> io::Result<u64> {
        Ok(FILE.max(self.0.len() as u64))
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > FILE.max(self.0.len() as u64)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let given = usize::try_from(offset).ok().and_then(|start| self.0.get(start..)).unwrap_or_default();
        let given = &given[..given.len().min(buf.len())];
        buf.fill(0);
        buf[..given.len()].copy_from_slice(given);
        Ok(())
    }

    fn describe(&self) -> String {
        "<fuzz>".to_owned()
    }
}

/// The model that begins with `bytes`.
pub fn open(bytes: &[u8]) -> splitmodel_gguf::Result<Model> {
    Model::from_sources(vec![Arc::new(Padded(bytes.to_vec()))])
}

/// Header, tokenizer, facts and plans give a result or an error; a package that is written is as long as planned.
pub fn header(bytes: &[u8]) {
    let Ok(model) = open(bytes) else { return };
    let _ = model.tokenizer();
    let mut packages = vec![Package::Tokenizer, Package::Embedding];
    if let Ok(facts) = model.facts() {
        packages.push(Package::Stage { first: 0, end: facts.n_layers });
        for &cut in facts.legal_cuts.iter().take(8) {
            for (first, end) in [(0, cut), (cut, facts.n_layers)] {
                let package = Package::Stage { first, end };
                assert!(SlicePlan::new(&model, package).is_ok(), "{package} of a legal cut");
                packages.push(package);
            }
        }
    }
    for package in packages {
        let Ok(plan) = SlicePlan::new(&model, package) else { continue };
        if plan.total_bytes() <= WRITTEN {
            let mut out = Vec::new();
            let written = plan.write_to("fuzz", &mut out, &mut |_, _| {}).map(|w| w.bytes).unwrap();
            assert_eq!((written, out.len() as u64), (plan.total_bytes(), plan.total_bytes()), "{package}");
            // What this writes, it reads.
            Model::from_sources(vec![Arc::new(out)]).unwrap();
        }
    }
}
