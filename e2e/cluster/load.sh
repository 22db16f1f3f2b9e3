#!/usr/bin/env bash
# Brings images into every node that runs pods.   load.sh RUN TAR...
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
run=$1; shift
for node in $(cat "$run/workers"); do
  for tar; do
    "$here/node.sh" "$run" "$node" env CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS=1 ctr -n k8s.io images import --all-platforms --digests - <"$tar" >/dev/null
  done
done
