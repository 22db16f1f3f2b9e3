#!/usr/bin/env bash
# The random tests at length, then random requests to chains whose caches are small, then a real chain under load and faults:
# `scripts/soak.sh [CASES] [MINUTES] [REQUESTS]`, by default 200,000 cases of each property, 30 minutes, and 10,000 requests to each tiny model
# and three for every hundred of these to the sample model; 0 leaves that part out.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}
cases=${1:-200000}
minutes=${2:-30}
requests=${3:-10000}
# Schedules of whole chains under faults, and the samplers against their plain reference.
if [ "$cases" != 0 ]; then
  PROPTEST_CASES=$cases cargo test --release --locked --workspace --test chain --test reference --test grammar
fi
if [ "$requests" != 0 ]; then
  SPLITMODEL_REQUESTS=$requests SPLITMODEL_SAMPLE_REQUESTS=$((requests * 3 / 100)) \
    cargo test --release --locked --workspace --test e2e -- pressure:: --nocapture --test-threads 2
fi
if [ "$minutes" != 0 ]; then
  venv=$(scripts/venv.sh tests/api/requirements.txt)
  SPLITMODEL_BIN=$CARGO_TARGET_DIR/release "$venv/bin/python" scripts/soak_chain.py --minutes "$minutes"
fi
