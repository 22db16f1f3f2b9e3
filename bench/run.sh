#!/usr/bin/env bash
# Measures chains of 1 and 3 stages against llama-server and llama.cpp's RPC backend, on this machine, in one run.
# Arguments go to compare.py (--runs 5, --streams 1,2,4,8).
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}/release
peers=$(bench/peers.sh)
venv=$(scripts/venv.sh tests/api/requirements.txt)
model=$(readlink -f examples/models/SmolLM2-135M-Instruct.Q4_1.gguf)
scratch=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$scratch" examples/.bench-?.yaml
}
trap finish EXIT
start() { local log=$1; shift; "$@" >"$scratch/$log.log" 2>&1 & pids+=($!); }
ready() { # url, what
  for _ in $(seq 240); do curl -sf "$1" >/dev/null && return; sleep 0.5; done
  echo "$2 does not answer; its log:" >&2; tail -20 "$scratch/$2.log" >&2; exit 1
}

common=(-m "$model" --parallel 8 -c 16384 --no-warmup --host 127.0.0.1 -t 1 -tb 1 --jinja)
start llama-server "$peers/llama-server" "${common[@]}" --port 18101
start rpc-1 "$peers/ggml-rpc-server" -H 127.0.0.1 -p 18111 -t 1
start rpc-2 "$peers/ggml-rpc-server" -H 127.0.0.1 -p 18112 -t 1
sleep 2
start llama-rpc "$peers/llama-server" "${common[@]}" --port 18102 --rpc 127.0.0.1:18111,127.0.0.1:18112 -ngl 99
for stages in 1 3; do
  sed "s/stages: .*/stages: $stages/; s/parallel: .*/parallel: 8/" examples/smollm2.yaml >"examples/.bench-$stages.yaml"
  start "chain-$stages" "$bin/splitmodel" up "examples/.bench-$stages.yaml" --threads 1 --port "1820$stages" --state-dir "$scratch/state-$stages"
done
ready http://127.0.0.1:18101/health llama-server
ready http://127.0.0.1:18102/health llama-rpc
for stages in 1 3; do ready "http://127.0.0.1:1820$stages/ready" "chain-$stages"; rm -f "examples/.bench-$stages.yaml"; done

"$venv/bin/python" bench/compare.py llama-server=http://127.0.0.1:18101 llama-rpc=http://127.0.0.1:18102 \
  1-stage=http://127.0.0.1:18201 3-stages=http://127.0.0.1:18203 "$@"
