#!/usr/bin/env bash
# Makes a Python environment with what FILE requires, once per content of FILE, and prints its directory.
set -euo pipefail

file=${1:?usage: scripts/venv.sh requirements.txt}
cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}
venv=$cache/venv-$( { cat "$file"; python3 -V; } | sha256sum | cut -c1-16)

if [ ! -e "$venv/complete" ]; then
  echo "installing what ${file##*/} names into $venv" >&2
  rm -rf "$venv"
  mkdir -p "$cache"
  python3 -m venv "$venv" >&2
  "$venv/bin/pip" install -q --disable-pip-version-check -r "$file" >&2
  touch "$venv/complete"
fi
echo "$venv"
