#!/usr/bin/env bash
# Runs a command on a node.   node.sh RUN NODE COMMAND...
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
run=$1 node=$2; shift 2
if [ "$(cat "$run/mode")" = kind ]; then
  exec "$here/lib/sandbox.sh" in "$run" env DOCKER_HOST="unix://$run/docker.sock" /usr/bin/docker exec -i "$node" "$@"
fi
exec "$here/lib/sandbox.sh" in "$run" nsenter -t "$(cat "$run/nodes/$node/pid")" --net --mount --pid --uts --ipc --cgroup -- env PATH="$bin:$PATH" "$@"
