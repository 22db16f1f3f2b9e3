#!/usr/bin/env bash
# Builds every program of the cluster from Go modules into the cache. Go's caches (7 GB) go when all is built.
set -euo pipefail
. "$(dirname "$0")/common.sh"

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die 'Go 1.26 is needed to build the cluster (https://go.dev/dl)'
work=$cache/go-$(binaries_key)
out=$bin.part
mkdir -p "$work/tmp" "$out/cni"
export GOMODCACHE=$work/mod GOCACHE=$work/build GOFLAGS='-mod=readonly -modcacherw -buildvcs=false -trimpath' GOTMPDIR=$work/tmp CGO_ENABLED=0
# Hundreds of lines.
exec 2> >(grep -v '^go: downloading' >&2)
# The compiler collects garbage less often: memory for time.
export GOGC=${GOGC:-400}

symbols=(-s -w -X "github.com/containerd/containerd/v2/version.Version=$containerd")
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  symbols+=(-X "$package.gitVersion=$kubernetes" -X "$package.gitMajor=1" -X "$package.gitMinor=37" -X "$package.gitTreeState=clean"
    -X "$package.gitCommit=0000000000000000000000000000000000000000" -X "$package.buildDate=2026-01-01T00:00:00Z")
done
# Nobody debugs these: without DWARF the compiler has less to do.
build() { go build -gcflags=all=-dwarf=false -tags 'no_btrfs no_devmapper no_zfs no_aufs' -ldflags "${symbols[*]}" "$@"; }

cd "$here"
say 'building Kubernetes, etcd, containerd, CoreDNS, helm, kind'
modules=github.com/containerd/containerd/v2/cmd
build -o "$out/" ./kube ./dns ./files ./runtime \
  $modules/containerd $modules/containerd-shim-runc-v2 $modules/ctr helm.sh/helm/v4/cmd/helm sigs.k8s.io/kind
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubeadm kubectl etcd; do
  ln -f "$out/kube" "$out/$name"
done
plugins=github.com/containernetworking/plugins/plugins
build -o "$out/cni/" $plugins/ipam/host-local $plugins/main/loopback $plugins/main/ptp $plugins/meta/portmap

say 'building runc, the pause program'
(cd runc && CGO_ENABLED=1 go build -tags 'seccomp netgo osusergo' -ldflags "-s -w -extldflags -static -X main.version=$runc" \
  -o "$out/runc" github.com/opencontainers/runc)
gcc -Os -static -DVERSION="$kubernetes" -o "$out/pause" "$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)/build/pause/linux/pause.c"
strip "$out/pause"
# What the node image takes from kind.
cp -r "$(go list -m -f '{{.Dir}}' sigs.k8s.io/kind)/images/base/files" "$out/kind-files"
chmod -R u+w "$out/kind-files"

rm -rf "$bin"
mv "$out" "$bin"
[ -n "${SPLITMODEL_KEEP_GO:-}" ] || rm -rf "$work"
say "binaries: $(du -sh "$bin" | cut -f1)"
