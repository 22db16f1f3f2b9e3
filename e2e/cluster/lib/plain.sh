#!/usr/bin/env bash
# The cluster without docker: the control plane's processes in the sandbox, each node in namespaces of its own.   plain.sh RUN
set -euo pipefail
. "$(dirname "$0")/common.sh"
run=$1
. "$run/network"

[ -d /sys/fs/cgroup/memory ] || die 'the plain cluster needs the cgroup hierarchies of version 1'
address=$nodes.1 pki=$run/pki
mkdir -p "$pki" "$run"/{kc,etcd,nodes}
export PATH=$bin:/usr/sbin:/usr/bin:/sbin:/bin
within() { "$here/lib/sandbox.sh" in "$run" "$@"; }
# begin NAME COMMAND...: in the background of the sandbox, where it ends with it.
begin() {
  local name=$1; shift
  # shellcheck disable=SC2016
  within sh -c 'log=$1; shift; setsid "$@" >"$log" 2>&1 </dev/null &' - "$run/log/$name.log" "$@"
}

within sh -c "ip link add nodes type bridge && ip addr add $address/24 dev nodes && ip link set nodes up"

cat >"$run/kubeadm.yaml" <<YAML
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: { advertiseAddress: $address, bindPort: 6443 }
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: $kubernetes
certificatesDir: $pki
controlPlaneEndpoint: $address:6443
networking: { serviceSubnet: 10.96.0.0/16, podSubnet: 10.244.0.0/16 }
YAML
certify() { within kubeadm init phase "$@" --config "$run/kubeadm.yaml" >>"$run/log/kubeadm.log" 2>&1; }
certify certs all
for who in controller-manager scheduler super-admin; do certify kubeconfig "$who" --kubeconfig-dir "$run/kc"; done
cp "$run/kc/super-admin.conf" "$run/kubeconfig"
chmod 600 "$run/kubeconfig"
export KUBECONFIG=$run/kubeconfig

begin etcd etcd --name one --data-dir "$run/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster one=http://127.0.0.1:2380 --unsafe-no-fsync
begin kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address="$address" --advertise-address="$address" --secure-port=6443 \
  --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
  --kubelet-client-certificate="$pki/apiserver-kubelet-client.crt" --kubelet-client-key="$pki/apiserver-kubelet-client.key" \
  --kubelet-preferred-address-types=InternalIP --service-account-issuer=https://kubernetes.default.svc.cluster.local \
  --service-account-key-file="$pki/sa.pub" --service-account-signing-key-file="$pki/sa.key" --service-cluster-ip-range=10.96.0.0/16 \
  --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy-client \
  --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group --requestheader-username-headers=X-Remote-User \
  --proxy-client-cert-file="$pki/front-proxy-client.crt" --proxy-client-key-file="$pki/front-proxy-client.key" \
  --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true
until_true 180 'the API server' kubectl get --raw=/readyz || { tail -5 "$run/log/kube-apiserver.log" >&2; exit 1; }
manager=$run/kc/controller-manager.conf
begin kube-controller-manager kube-controller-manager --kubeconfig="$manager" --authentication-kubeconfig="$manager" --authorization-kubeconfig="$manager" \
  --leader-elect=false --use-service-account-credentials=true --service-account-private-key-file="$pki/sa.key" --root-ca-file="$pki/ca.crt" \
  --client-ca-file="$pki/ca.crt" --cluster-signing-cert-file="$pki/ca.crt" --cluster-signing-key-file="$pki/ca.key" \
  --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --allocate-node-cidrs=true --cluster-cidr=10.244.0.0/16 \
  --service-cluster-ip-range=10.96.0.0/16 --node-cidr-mask-size=24
scheduler=$run/kc/scheduler.conf
begin kube-scheduler kube-scheduler --kubeconfig="$scheduler" --authentication-kubeconfig="$scheduler" --authorization-kubeconfig="$scheduler" --leader-elect=false
# Logs and exec go from the API server to the kubelets as this user.
kubectl create clusterrolebinding apiserver-kubelet --clusterrole=system:kubelet-api-admin --user=kube-apiserver-kubelet-client >/dev/null
within kubeadm kubeconfig user --config "$run/kubeadm.yaml" --client-name system:kube-proxy >"$run/kc/kube-proxy.conf" 2>>"$run/log/kubeadm.log"

echo plain >"$run/mode"
number=10
for node in node1 node2 node3; do
  number=$((number + 1))
  mkdir -p "$run/nodes/$node"
  certify kubeconfig kubelet --node-name "$node" --kubeconfig-dir "$run/kc/$node"
  begin "$node" unshare --net --mount --pid --uts --ipc --fork --kill-child --propagation private \
    "$here/lib/plain-node.sh" "$run" "$node" "$nodes.$number"
  until_true 30 "node $node" test -s "$run/nodes/$node/pid" || { tail -5 "$run/log/$node.log" >&2; exit 1; }
  within ip link add "$node" type veth peer name eth0 netns "$(cat "$run/nodes/$node/pid")"
  within ip link set "$node" master nodes up
done
until_true 60 'all nodes' sh -c '[ "$(kubectl get nodes -o name | wc -l)" = 3 ]'
kubectl label node node1 node-role.kubernetes.io/control-plane= >/dev/null
kubectl taint node node1 node-role.kubernetes.io/control-plane:NoSchedule >/dev/null

sed 's#^networking:#dns: { imageRepository: registry.k8s.io/coredns }\n&#' "$run/kubeadm.yaml" >"$run/kubeadm-dns.yaml"
within kubeadm init phase addon coredns --config "$run/kubeadm-dns.yaml" --kubeconfig "$run/kubeconfig" >>"$run/log/kubeadm.log" 2>&1
