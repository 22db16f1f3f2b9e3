#!/usr/bin/env bash
# Every test: of the crates, of their documentation, the API with the official client against running chains, the charts, and all of it
# on a real cluster.
set -euo pipefail
cd "$(dirname "$0")/.."

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}
flags=(--release --locked --workspace)
step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

step 'building the tests'
# Everything at once: with other selections cargo would build crates again with other features.
cargo build "${flags[@]}" --all-targets

out=$(mktemp)
trap 'rm -f "$out"' EXIT

step 'tests of the crates'
rust=0
cargo test "${flags[@]}" --all-targets --no-fail-fast 2>&1 | tee "$out" | grep -vE '^test .* ok$|^$|^running ' || rust=${PIPESTATUS[0]}
step 'examples in the documentation of the crates'
cargo test "${flags[@]}" --doc --no-fail-fast 2>&1 | tee -a "$out" | grep -E '^test result|FAILED|error|panicked' || rust=$((rust + PIPESTATUS[0]))

step 'the API, with the official client, over 1 and 3 stages'
api=0
venv=$(scripts/venv.sh tests/api/requirements.txt)
SPLITMODEL_BIN=$CARGO_TARGET_DIR/release "$venv/bin/python" -m pytest tests/api -q -p no:cacheprovider 2>&1 | tee -a "$out" || api=${PIPESTATUS[0]}

step 'the charts'
charts=0
HELM=$(scripts/helm.sh) "$venv/bin/python" -m pytest tests/charts -q -p no:cacheprovider 2>&1 | tee -a "$out" || charts=${PIPESTATUS[0]}

step 'a real cluster'
e2e=0
e2e/run.sh 2>&1 | tee -a "$out" || e2e=${PIPESTATUS[0]}

step 'result'
count() { grep -oE "[0-9]+ $1" "$out" | awk '{n += $1} END {print n + 0}'; }
echo "$(count passed) passed, $(count failed) failed, $(count ignored) ignored, $(count skipped) skipped"
[ "$rust" = 0 ] && [ "$api" = 0 ] && [ "$charts" = 0 ] && [ "$e2e" = 0 ]
