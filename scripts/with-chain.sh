#!/usr/bin/env bash
# Runs COMMAND while a chain of STAGES stages serves the sample model. $SPLITMODEL_URL is its address. Nothing is left running.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

stages=${1:?usage: scripts/with-chain.sh STAGES COMMAND…}
shift
bin=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}/release
state=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
up=

finish() {
  if [ -n "$up" ]; then
    kill -TERM "$up" 2>/dev/null || true
    # Its stages end when it does, however that is.
    for _ in $(seq 100); do kill -0 "$up" 2>/dev/null || break; sleep 0.2; done
    kill -KILL "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
  fi
  rm -rf "$state"
}
trap finish EXIT
trap 'exit 130' INT TERM PIPE

# One thread a stage: threads that wait for each other on busy cores are slow beyond all measure.
"$bin/splitmodel" up "$root/examples/smollm2.yaml" --stages "$stages" --port "$port" --state-dir "$state" --grace 2 \
  --threads 1 >"$state/out" 2>&1 </dev/null &
up=$!
export SPLITMODEL_URL=http://127.0.0.1:$port
for _ in $(seq 600); do
  kill -0 "$up" 2>/dev/null || { cat "$state/out" >&2; echo "the chain ended before it was ready" >&2; exit 1; }
  grep -q '^ready: ' "$state/out" && break
  sleep 0.2
done
grep -q '^ready: ' "$state/out" || { cat "$state/out" >&2; echo "the chain was not ready in 2 minutes" >&2; exit 1; }

code=0
"$@" || code=$?
[ "$code" = 0 ] || { echo "what the chain said:" >&2; cat "$state/out" >&2; tail -n 50 "$state"/run/*/stage-*.log >&2 || true; }
exit "$code"
