#!/usr/bin/env bash
# Runs every fuzz target for SECONDS_EACH seconds (argument, default 60). Inputs that reach new code are kept outside the
# tree; a failing input is left there too, and its path is printed.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-${SECONDS_EACH:-60}}
cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}
tools=$cache/tools
found=$cache/fuzz
export CARGO_TARGET_DIR=$cache/target-fuzz
export PATH=$tools/bin:$PATH

if ! cargo +nightly --version >/dev/null 2>&1; then
  echo "a nightly toolchain is needed: rustup toolchain install nightly --profile minimal" >&2
  exit 1
fi
if ! command -v cargo-fuzz >/dev/null; then
  CARGO_TARGET_DIR=$cache/target-tools cargo install --locked --quiet --root "$tools" cargo-fuzz
fi

failed=()
for target in $(cargo +nightly fuzz list); do
  mkdir -p "$found/corpus/$target" "$found/artifacts/$target"
  cargo +nightly fuzz build "$target"
  echo "== $target, $seconds s"
  # The kept corpus is read; new inputs go to the first folder.
  cargo +nightly fuzz run "$target" "$found/corpus/$target" "fuzz/corpus/$target" -- \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=8192 -print_final_stats=1 \
    -artifact_prefix="$found/artifacts/$target/" || failed+=("$target")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; inputs in $found/artifacts" >&2
  exit 1
fi
