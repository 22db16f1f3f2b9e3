//! Prints the manifests that must be taken and refused, one JSON object a line, for the tests on a real API server: `path` is the
//! field that a refusal must name, and null for manifests that are taken.

use std::io::Write as _;

#[path = "../tests/cases/mod.rs"]
mod cases;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let good = cases::good().into_iter().map(|m| (None, m));
    let bad = cases::against_rules().into_iter().chain(cases::against_schema()).map(|(path, m)| (Some(path), m));
    for (path, manifest) in good.chain(bad) {
        writeln!(out, "{}", serde_json::json!({"path": path, "manifest": manifest}))?;
    }
    Ok(())
}
