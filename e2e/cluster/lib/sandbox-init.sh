#!/usr/bin/env bash
# First process of a sandbox: mounts what shows its own processes and network, then takes in what others leave behind.
set -euo pipefail
run=$1

# Read before the new /proc: the number outside.
read -r outer _ </proc/self/stat
mount -t proc proc /proc
# sysfs shows the network it was mounted in; the cgroups below it stay.
mkdir -p "$run/cgroup"
mount --rbind /sys/fs/cgroup "$run/cgroup"
umount -l /sys
mount -t sysfs sysfs /sys
mount --rbind "$run/cgroup" /sys/fs/cgroup
umount -l "$run/cgroup"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1
echo "$outer" >"$run/init.pid"
trap 'exit 0' TERM
while :; do sleep 1000 & wait $! || true; done
