#!/usr/bin/env bash
# The random tests at length: the first argument is the number of cases of each property (default 200,000).
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}
export PROPTEST_CASES=${1:-200000}
# Schedules of whole chains under faults, and the samplers against their plain reference.
cargo test --release --locked --workspace --test chain --test reference --test grammar
