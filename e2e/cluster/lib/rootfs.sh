#!/usr/bin/env bash
# A Debian root with what a Kubernetes node needs beside its binaries, as a tar in the cache.
set -euo pipefail
. "$(dirname "$0")/common.sh"

packages=systemd,systemd-sysv,dbus,conntrack,iptables,nftables,iproute2,kmod,mount,util-linux,libseccomp2,procps,ca-certificates,hostname
root=$(mktemp -d "$cache/rootfs.XXXXXX")
trap 'rm -rf --one-file-system "$root"' EXIT
say 'making a Debian root for the nodes'
/usr/sbin/debootstrap --variant=minbase --include="$packages" bookworm "$root" >"$cache/debootstrap.log" 2>&1 \
  || { tail -20 "$cache/debootstrap.log" >&2; die 'debootstrap failed'; }
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/* "$root"/var/log/*
tar -C "$root" -cf "$rootfs.part" --one-file-system .
mv "$rootfs.part" "$rootfs"
say "Debian root: $(du -sh "$rootfs" | cut -f1)"
