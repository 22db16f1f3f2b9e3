#!/usr/bin/env bash
# The cluster by kind in a sandbox: Debian's docker, one control plane, two workers.   kind.sh RUN
set -euo pipefail
. "$(dirname "$0")/common.sh"
run=$1
. "$run/network"

within() { "$here/lib/sandbox.sh" in "$run" env -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY "${client[@]}" "$@"; }
# Debian's docker, also where another one comes first in PATH.
client=(DOCKER_HOST="unix://$run/docker.sock" PATH="$bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME="$run")

mkdir -p "$run/docker"
# shellcheck disable=SC2016
within sh -c 'log=$1; shift; setsid "$@" >"$log" 2>&1 </dev/null &' - "$run/log/dockerd.log" \
  dockerd --data-root "$run/docker/lib" --exec-root "$run/docker/run" --pidfile "$run/docker/pid" -H "unix://$run/docker.sock" \
  --storage-driver overlay2 --cgroup-parent "/$cgroup" --default-address-pool "base=$nodes.0/24,size=24" --bridge none \
  --add-runtime "front=$bin/runtime" --default-runtime front
until_true 30 dockerd within docker info || { tail -5 "$run/log/dockerd.log" >&2; exit 3; }
within docker load -qi "$images/node.tar" >/dev/null || exit 3

cat >"$run/kind.yaml" <<YAML
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: e2e
networking: { kubeProxyMode: nftables, disableDefaultCNI: true, apiServerAddress: $inside, apiServerPort: 6443 }
kubeadmConfigPatches:
- |
  kind: KubeletConfiguration
  apiVersion: kubelet.config.k8s.io/v1beta1
  failCgroupV1: false
  nodeStatusUpdateFrequency: 5s
- |
  kind: ClusterConfiguration
  apiVersion: kubeadm.k8s.io/v1beta4
  etcd: { local: { dataDir: /var/lib/etcd, extraArgs: [{ name: unsafe-no-fsync, value: "true" }] } }
  controllerManager: { extraArgs: [{ name: leader-elect, value: "false" }] }
  scheduler: { extraArgs: [{ name: leader-elect, value: "false" }] }
nodes:
- { role: control-plane, extraMounts: [{ hostPath: $run/volumes, containerPath: $run/volumes }] }
- { role: worker, extraMounts: [{ hostPath: $run/volumes, containerPath: $run/volumes }] }
- { role: worker, extraMounts: [{ hostPath: $run/volumes, containerPath: $run/volumes }] }
YAML
within kind create cluster --config "$run/kind.yaml" --image "localhost/kind-node:$kubernetes" --kubeconfig "$run/kubeconfig" --retain >"$run/log/kind.log" 2>&1 \
  || { tail -30 "$run/log/kind.log" >&2; exit 3; }
# Published ports and the nodes are reached from outside of the sandbox.
within iptables -I DOCKER-USER -i outside -j ACCEPT
echo kind >"$run/mode"
