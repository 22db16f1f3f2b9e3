#!/usr/bin/env bash
# Measures chains of 1, 2 and 3 stages against llama-server with one thread and with all and llama.cpp's RPC backend, on this
# machine, in one run. Arguments go to compare.py (--runs 7, --streams 1,4,8, --prompts 512,2048).
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}/release
peers=$(bench/peers.sh)
model=$(readlink -f examples/models/SmolLM2-135M-Instruct.Q4_1.gguf)
cores=$(nproc)
scratch=$(mktemp -d)
declare -A pid
finish() {
  for name in "${!pid[@]}"; do kill -TERM "${pid[$name]}" 2>/dev/null || true; done
  for name in "${!pid[@]}"; do wait "${pid[$name]}" 2>/dev/null || true; done
  rm -rf "$scratch" examples/.bench-?.yaml
}
trap finish EXIT
start() { local name=$1; shift; "$@" >"$scratch/$name.log" 2>&1 & pid[$name]=$!; }
ready() { # url, what
  for _ in $(seq 240); do curl -sf "$1" >/dev/null && return; sleep 0.5; done
  echo "$2 does not answer; its log:" >&2; tail -20 "$scratch/$2.log" >&2; exit 1
}

# As much for each: 8 sequences of 4,096 tokens.
common=(-m "$model" --parallel 8 -c 32768 --no-warmup --host 127.0.0.1 --jinja)
start llama-all "$peers/llama-server" "${common[@]}" -t "$cores" -tb "$cores" --port 18100
start llama-one "$peers/llama-server" "${common[@]}" -t 1 -tb 1 --port 18101
start rpc-1 "$peers/ggml-rpc-server" -H 127.0.0.1 -p 18111 -t 1
start rpc-2 "$peers/ggml-rpc-server" -H 127.0.0.1 -p 18112 -t 1
sleep 2
start llama-rpc "$peers/llama-server" "${common[@]}" -t 1 -tb 1 --port 18102 --rpc 127.0.0.1:18111,127.0.0.1:18112 -ngl 99
for stages in 1 2 3; do
  sed "s/stages: .*/stages: $stages/; s/parallel: .*/parallel: 8/; s/contextLength: .*/contextLength: 4096/" \
    examples/smollm2.yaml >"examples/.bench-$stages.yaml"
  # All cores for each stage, one stage at a time.
  start "stages-$stages" "$bin/splitmodel" up "examples/.bench-$stages.yaml" --threads "$cores" --port "1820$stages" \
    --state-dir "$scratch/state-$stages"
done
ready http://127.0.0.1:18100/health llama-all
ready http://127.0.0.1:18101/health llama-one
ready http://127.0.0.1:18102/health llama-rpc
for stages in 1 2 3; do ready "http://127.0.0.1:1820$stages/ready" "stages-$stages"; done

chains=()
for stages in 1 2 3; do chains+=("stages-$stages=http://127.0.0.1:1820$stages@${pid[stages-$stages]}"); done
python3 bench/compare.py --base llama-all,llama-one \
  "llama-all=http://127.0.0.1:18100@${pid[llama-all]}" "llama-one=http://127.0.0.1:18101@${pid[llama-one]}" \
  "llama-rpc=http://127.0.0.1:18102@${pid[llama-rpc]},${pid[rpc-1]},${pid[rpc-2]}" "${chains[@]}" "$@"
