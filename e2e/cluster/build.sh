#!/usr/bin/env bash
# Brings all that a cluster needs into the cache, each part once per content of what it is made from.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"

[ "$(id -u)" = 0 ] || die 'the cluster needs root: namespaces, a bridge, containers'
mkdir -p "$cache"
exec 9>"$cache/build.lock"
flock 9

"$here/../../scripts/deps.sh" e2e
# Beside the compiler, which keeps all cores busy: this mostly waits for the network.
making=
if [ ! -e "$rootfs" ]; then "$here/lib/rootfs.sh" & making=$!; fi
[ -d "$bin" ] || "$here/lib/binaries.sh"
[ -z "$making" ] || wait "$making"
[ -d "$images" ] || "$here/lib/images.sh"

touch "$bin" "$rootfs" "$images"
# What nothing has used for a week.
find "$cache" -maxdepth 1 \( -name 'bin-*' -o -name 'images-*' -o -name 'rootfs*' -o -name 'go-*' -o -name 'node.*' \) -mtime +7 -exec rm -rf {} +
