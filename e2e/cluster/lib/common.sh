# Sourced by the scripts of the cluster: where things lie, and what several of them need.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}/cluster

kubernetes=v1.37.2
containerd=2.4.2
runc=1.5.3

say() { printf '[%4d s] %s\n' "$SECONDS" "$*" >&2; }
die() { printf '%s\n' "$*" >&2; exit 1; }

# key FILE...: names what is made of these files.
key() { cat "$@" | sha256sum | cut -c1-16; }

binaries_key() { (cd "$here" && key go.mod go.sum ./*/main.go runc/go.mod runc/go.sum lib/common.sh lib/binaries.sh); }
rootfs_key() { (cd "$here" && key lib/rootfs.sh); }
images_key() { (cd "$here" && { binaries_key; rootfs_key; cat lib/images.sh image.py kind/storage.yaml; } | key /dev/stdin); }

bin=$cache/bin-$(binaries_key)
rootfs=$cache/rootfs-$(rootfs_key).tar
images=$cache/images-$(images_key)

# until_true SECONDS WHAT COMMAND...: runs the command again and again until it succeeds.
until_true() {
  local limit=$((SECONDS + $1)) what=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$limit" ] || { echo "gave up waiting: $what" >&2; return 1; }
    sleep 0.3
  done
}

# A process that has ended may stay a zombie for a while: that counts as ended.
alive() { [ -n "${1:-}" ] && [ -d "/proc/$1" ] && ! grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
