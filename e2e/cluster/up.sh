#!/usr/bin/env bash
# Brings up a cluster of one control plane and two workers: by kind, or where docker cannot run by itself.
#   up.sh RUN [kind|plain]     RUN is a folder for all of its state; RUN/kubeconfig is there when this returns
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
[ $# -ge 1 ] || die 'usage: up.sh RUN [kind|plain]'
run=$(mkdir -p "$1" && cd "$1" && pwd) wanted=${2:-any}

"$here/build.sh"
if alive "$(cat "$run/sandbox.pid" 2>/dev/null || true)"; then
  [ -e "$run/ready" ] && { say "the cluster in $run runs already"; exit; }
  "$here/down.sh" "$run"
fi
try() {
  # One chain: within a condition `set -e` does not hold.
  mkdir -p "$run"/{log,volumes} && "$here/lib/sandbox.sh" start "$run" && "$here/lib/$1.sh" "$run" && "$here/lib/settle.sh" "$run"
}

if [ "$wanted" != plain ]; then
  say 'bringing up a cluster with kind'
  code=0; try kind || code=$?
  if [ "$code" != 0 ]; then
    "$here/down.sh" "$run"
    # 3: docker or kind cannot run here; anything else is a fault that another kind of cluster must not hide.
    [ "$code" = 3 ] && [ "$wanted" = any ] || exit "$code"
    say 'docker or kind cannot run here (see above): bringing up the plain cluster instead'
    wanted=plain
  fi
fi
if [ "$wanted" = plain ]; then
  say 'bringing up a plain cluster: containerd and kubelet in namespaces'
  try plain || { "$here/down.sh" "$run"; exit 1; }
fi
touch "$run/ready"
say "the cluster is up ($(cat "$run/mode")): KUBECONFIG=$run/kubeconfig"
