#!/bin/sh
# Copies what an image holds in /opt/splitmodel from a folder of built binaries: image-files.sh operator|stage FROM TO
set -eu

image=${1:?usage: image-files.sh operator|stage FROM TO} from=${2:?} to=${3:?}
binary=$from/splitmodel-$image
[ -x "$binary" ] || { echo "$binary is missing; run: make build" >&2; exit 1; }
mkdir -p "$to"
cp "$binary" "$to/"
[ "$image" = stage ] || exit 0

# The process finds libraries beside itself, by their short version, and backends in backends/.
libraries=0
for library in "$from"/lib*.so.[0-9]; do
  [ -e "$library" ] || continue
  cp -L "$library" "$to/"
  libraries=$((libraries + 1))
done
[ "$libraries" -gt 0 ] || { echo "llama.cpp's libraries are missing in $from" >&2; exit 1; }
mkdir -p "$to/backends"
cp -L "$from"/backends/*.so "$to/backends/"
