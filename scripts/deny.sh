#!/usr/bin/env bash
# Licences, sources and bans of all crates (deny.toml); known vulnerabilities where their database can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}/tools
export PATH=$tools/bin:$PATH
if ! cargo deny --version >/dev/null 2>&1; then
  echo "installing cargo-deny (once; minutes)"
  build=$(mktemp -d)
  trap 'rm -rf "$build"' EXIT
  CARGO_TARGET_DIR=$build cargo install -q cargo-deny --locked --root "$tools"
fi
# Also the crates of other systems, which no build here needs.
cargo fetch -q --locked
cargo deny --offline --log-level error check bans licenses sources

if ! timeout 120 cargo deny --log-level off fetch db >/dev/null 2>&1; then
  echo "advisories: not checked, the database cannot be reached"
elif ! cargo deny --offline check advisories; then
  echo "advisories: see above; they do not fail this run" >&2
fi
