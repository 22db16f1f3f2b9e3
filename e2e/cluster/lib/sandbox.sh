#!/usr/bin/env bash
# A place for one cluster: own network, mounts and processes, so that several clusters, and the machine itself, do not meet.
# Ending its first process ends all in it. Only cgroups, one link to it, and some settings of the kernel are outside.
#   sandbox.sh start RUN | stop RUN | in RUN COMMAND...
set -euo pipefail
. "$(dirname "$0")/common.sh"

action=$1 run=$2; shift 2
# Settings of the whole kernel that kubelet and docker change.
settings=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes
  fs.inotify.max_user_instances fs.inotify.max_user_watches net.netfilter.nf_conntrack_max)

# The link's name is the lock: the kernel makes it once.
take_slot() {
  local n
  for n in $(seq 0 63); do
    if ip link add "sme2e$n" type veth peer name outside netns "$1" 2>/dev/null; then echo "$n"; return; fi
  done
  die 'no address range is free: too many clusters run'
}

save_settings() {
  exec 8>"$cache/settings.lock"; flock 8
  [ -e "$cache/settings" ] || sysctl -e "${settings[@]}" 2>/dev/null >"$cache/settings" || true
  flock -u 8
}

# The last cluster puts them back.
restore_settings() {
  exec 8>"$cache/settings.lock"; flock 8
  local other
  for other in "$cache"/runs/*/sandbox.pid; do
    if [ -e "$other" ] && alive "$(cat "$other")"; then flock -u 8; return; fi
  done
  if [ -e "$cache/settings" ]; then sysctl -q -p "$cache/settings" >/dev/null 2>&1 || true; rm "$cache/settings"; fi
  flock -u 8
}

remove_cgroups() {
  local group
  for group in /sys/fs/cgroup/"$1" /sys/fs/cgroup/*/"$1"; do
    [ -d "$group" ] || continue
    for _ in $(seq 50); do
      find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
      [ -d "$group" ] || break
      sleep 0.1
    done
  done
}

start() {
  save_settings
  rm -f "$run/init.pid"
  setsid unshare --net --mount --pid --fork --kill-child --propagation private "$here/lib/sandbox-init.sh" "$run" \
    >"$run/log/sandbox.log" 2>&1 </dev/null 9>&- &
  echo $! >"$run/sandbox.pid"
  until_true 20 'the sandbox' test -s "$run/init.pid" || { cat "$run/log/sandbox.log" >&2; return 1; }
  local slot; slot=$(take_slot "$(cat "$run/init.pid")")
  cat >"$run/network" <<NET
slot=$slot
outside=10.213.$slot.1
inside=10.213.$slot.2
nodes=10.214.$slot
cgroup=splitmodel-e2e-$slot
NET
  # A control plane that gets no processor ends itself: on a busy machine the cluster comes first.
  if [ -d /sys/fs/cgroup/cpu ]; then
    mkdir -p "/sys/fs/cgroup/cpu/splitmodel-e2e-$slot"
    echo 8192 >"/sys/fs/cgroup/cpu/splitmodel-e2e-$slot/cpu.shares"
  fi
  ip addr add "10.213.$slot.1/30" dev "sme2e$slot"
  ip link set "sme2e$slot" up
  ip route add "10.214.$slot.0/24" via "10.213.$slot.2" dev "sme2e$slot" onlink
  "$0" in "$run" sh -c "ip addr add 10.213.$slot.2/30 dev outside && ip link set outside up && ip route add default via 10.213.$slot.1"
}

stop() {
  local pid; pid=$(cat "$run/sandbox.pid" 2>/dev/null || true)
  if alive "$pid"; then
    kill -9 "$pid" 2>/dev/null || true
    for _ in $(seq 100); do alive "$pid" || alive "$(cat "$run/init.pid" 2>/dev/null)" || break; sleep 0.1; done
  fi
  if [ -e "$run/network" ]; then
    . "$run/network"
    # The kernel removes the link with the network; wait, so that its range is free.
    ip link del "sme2e$slot" 2>/dev/null || true
    remove_cgroups "$cgroup"
  fi
  restore_settings
}

case $action in
  start | stop) "$action" ;;
  in) exec nsenter -t "$(cat "$run/init.pid")" --net --mount --pid -- "$@" ;;
  *) die "sandbox.sh knows no $action" ;;
esac
