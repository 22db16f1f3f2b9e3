#!/usr/bin/env bash
# The random tests at length, then a real chain under load and faults: `scripts/soak.sh [CASES] [MINUTES]`, by default 200,000
# cases of each property and 30 minutes; 0 leaves that part out.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}
cases=${1:-200000}
minutes=${2:-30}
# Schedules of whole chains under faults, and the samplers against their plain reference.
if [ "$cases" != 0 ]; then
  PROPTEST_CASES=$cases cargo test --release --locked --workspace --test chain --test reference --test grammar
fi
if [ "$minutes" != 0 ]; then
  venv=$(scripts/venv.sh tests/api/requirements.txt)
  SPLITMODEL_BIN=$CARGO_TARGET_DIR/release "$venv/bin/python" scripts/soak_chain.py --minutes "$minutes"
fi
