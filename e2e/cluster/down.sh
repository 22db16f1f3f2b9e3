#!/usr/bin/env bash
# Ends a cluster that up.sh began, and takes away all that it left, but not its logs.   down.sh RUN
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
run=$1
[ -d "$run" ] || exit 0
run=$(cd "$run" && pwd)
"$here/lib/sandbox.sh" stop "$run"
find "$run" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf --one-file-system {} +
