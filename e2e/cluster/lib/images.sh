#!/usr/bin/env bash
# Makes the images of the cluster's own pods and the image of kind's nodes, which holds them, in the cache.
set -euo pipefail
. "$(dirname "$0")/common.sh"

out=$images.part
rm -rf "$out"
mkdir -p "$out"
root=$(mktemp -d "$cache/node.XXXXXX")
daemon=
finish() {
  [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; }
  rm -rf --one-file-system "$root"
}
trap finish EXIT

say 'making the images of the cluster'
tar -C "$root" -xf "$rootfs"

layer=$root/.layer
# copy FILE...: from the Debian root, with the libraries that it needs.
copy() {
  local file library
  for file; do
    (cd "$root" && cp --parents -L "$file" "$layer")
    for library in $(chroot "$root" ldd "/$file" 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*'); do
      (cd "$root" && cp --parents -L "${library#/}" "$layer")
    done
  done
}

# One image for all of Kubernetes: one layer, stored once.
mkdir -p "$layer"/{usr/local/bin,tmp,etc}
cp "$bin/kube" "$layer/usr/local/bin/kube"
for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy etcd; do ln -s kube "$layer/usr/local/bin/$name"; done
copy usr/sbin/nft usr/sbin/xtables-nft-multi usr/sbin/conntrack bin/kmod
(cd "$root" && cp -r --parents usr/lib/*/xtables "$layer")
for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do ln -s xtables-nft-multi "$layer/usr/sbin/$name"; done
refs=()
while read -r ref; do
  case $ref in
    */coredns:*) dns=$ref ;;
    */pause:*) ;;
    *) refs+=(--ref "$ref") ;;
  esac
done < <("$bin/kubeadm" config images list --kubernetes-version "$kubernetes" 2>/dev/null)
"$here/image.py" "$out/kubernetes.tar" --root "$layer" "${refs[@]}" >/dev/null

rm -rf "$layer"; mkdir -p "$layer"; cp "$bin/dns" "$layer/coredns"
"$here/image.py" "$out/dns.tar" --root "$layer" --ref "$dns" --entrypoint /coredns >/dev/null

# The name that kind's configuration of containerd wants; the plain cluster uses the same.
pause=$(sed -n 's/.*sandbox_image = "\(.*\)"/\1/p' "$bin/kind-files/etc/containerd/config.toml")
echo "$pause" >"$out/pause.name"
rm -rf "$layer"; mkdir -p "$layer"; cp "$bin/pause" "$layer/pause"
"$here/image.py" "$out/pause.tar" --root "$layer" --ref "$pause" --entrypoint /pause --user 65535:65535 >/dev/null

rm -rf "$layer"; mkdir -p "$layer"; cp "$bin/files" "$layer/files"
"$here/image.py" "$out/files.tar" --root "$layer" --ref localhost/files:1 --entrypoint /files --user 65534:65534 >/dev/null
rm -rf "$layer"

# What kind's own Dockerfile does to a Debian root.
cp -r --no-preserve=mode "$bin/kind-files/." "$root/"
chmod 755 "$root"/usr/local/bin/* "$root"/kind "$root"/kind/bin "$root"/kind/bin/*
rm -rf "$root"/LICENSES
rm -f "$root"/lib/systemd/system/{multi-user,local-fs}.target.wants/* "$root"/etc/systemd/system/*.wants/* \
  "$root"/lib/systemd/system/sockets.target.wants/*{udev,initctl}* "$root"/lib/systemd/system/basic.target.wants/* \
  "$root"/lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service
echo ReadKMsg=no >>"$root/etc/systemd/journald.conf"
ln -sf /usr/lib/systemd/systemd "$root/sbin/init"
chroot "$root" systemctl enable kubelet.service containerd.service undo-mount-hacks.service >/dev/null 2>&1
chroot "$root" systemctl mask systemd-binfmt.service >/dev/null 2>&1
mkdir -p "$root"/{etc/kubernetes/manifests,opt/cni/bin,kind/manifests}
echo -n "$kubernetes" >"$root/kind/version"
cp "$here/kind/storage.yaml" "$root/kind/manifests/default-storage.yaml"

cp "$bin"/{containerd,containerd-shim-runc-v2,ctr} "$root/usr/local/bin/"
cp "$bin/runc" "$root/usr/local/sbin/runc"
cp "$bin"/cni/* "$root/opt/cni/bin/"
cp "$bin/kube" "$root/usr/bin/kubelet"
ln "$root/usr/bin/kubelet" "$root/usr/bin/kubeadm"
ln "$root/usr/bin/kubelet" "$root/usr/bin/kubectl"
# Root may lack the right to make a process less likely to be killed.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"
sed -i '/^OOMScoreAdjust=/d' "$root/etc/systemd/system/containerd.service"
PATH=$bin:$PATH ctr oci spec | python3 -c '
import json, sys
spec = json.load(sys.stdin)
spec["process"].pop("rlimits", None)
json.dump(spec, sys.stdout)' >"$root/etc/containerd/cri-base.json"

say 'putting them into the node image'
state=$root/.containerd
mkdir -p "$state"
cat >"$state/config.toml" <<TOML
version = 3
root = "$root/var/lib/containerd"
state = "$state/run"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
  address = "$state/socket"
[ttrpc]
  address = "$state/socket.ttrpc"
TOML
PATH=$bin:$PATH containerd --config "$state/config.toml" >"$cache/containerd.log" 2>&1 &
daemon=$!
until_true 30 containerd "$bin/ctr" -a "$state/socket" version
for tar in "$out"/*.tar; do
  "$bin/ctr" -a "$state/socket" -n k8s.io images import --no-unpack --local "$tar" >/dev/null
done
kill "$daemon"; wait "$daemon" 2>/dev/null || true; daemon=
rm -rf "$state"

tar -C "$root" --one-file-system -cf "$out/node.layer" .
"$here/image.py" "$out/node.tar" --layer "$out/node.layer" --ref "localhost/kind-node:$kubernetes" --env container=docker \
  --stop-signal SIGRTMIN+3 --entrypoint /usr/local/bin/entrypoint /sbin/init >/dev/null
rm "$out/node.layer"
rm -rf "$images"
mv "$out" "$images"
say "images: $(du -sh "$images" | cut -f1)"
