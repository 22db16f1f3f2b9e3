#!/usr/bin/env bash
# The tests on a real cluster, of binaries that are built.   e2e/run.sh [pytest's arguments]
#   E2E_KEEP=1 leaves the cluster running for the next time (e2e/cluster/down.sh ends it); E2E_CLUSTER=kind|plain asks for one kind
set -euo pipefail
cd "$(dirname "$0")/.."
export SPLITMODEL_BIN=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}/release
for binary in splitmodel kubectl-splitmodel splitmodel-stage splitmodel-operator examples/manifests; do
  [ -x "$SPLITMODEL_BIN/$binary" ] || { echo "$SPLITMODEL_BIN/$binary is missing; run: make e2e" >&2; exit 1; }
done
venv=$(scripts/venv.sh tests/api/requirements.txt)
exec "$venv/bin/python" -m pytest e2e/tests -q -p no:cacheprovider -s --durations=12 "$@"
