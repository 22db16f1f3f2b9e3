#!/usr/bin/env bash
# First process of a node of the plain cluster, in namespaces of its own: containerd, kubelet, kube-proxy.   plain-node.sh RUN NAME ADDRESS
set -euo pipefail
. "$(dirname "$0")/common.sh"
run=$1 name=$2 ip=$3
. "$run/network"
own=$run/nodes/$name
export PATH=$bin:/usr/sbin:/usr/bin:/sbin:/bin
controllers=(cpu cpuacct cpuset memory devices freezer blkio pids systemd)

# First round: into cgroups of its own, which a namespace then shows as the root.
if [ "${4:-}" != inside ]; then
  for controller in "${controllers[@]}"; do
    group=/sys/fs/cgroup/$controller
    for folder in "$cgroup" "$name"; do
      group=$group/$folder
      mkdir -p "$group"
      [ "$controller" != cpuset ] || for part in cpus mems; do cat "$group/../cpuset.$part" >"$group/cpuset.$part"; done
    done
    echo 0 >"$group/cgroup.procs"
  done
  # The number in the sandbox, by which others find these namespaces.
  read -r number _ </proc/self/stat
  echo "$number" >"$own/pid"
  exec unshare --cgroup "$0" "$run" "$name" "$ip" inside
fi

until_true 20 'the network of the node' ip link show eth0
ip link set lo up
ip addr add "$ip/24" dev eth0
ip link set eth0 up
ip route add default via "$nodes.1"

hostname "$name"
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
for controller in "${controllers[@]}"; do
  options=$controller; [ "$controller" != systemd ] || options=none,name=systemd
  mkdir "/sys/fs/cgroup/$controller"
  mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$controller"
done
# What is written to the machine's own folders stays with the node.
for folder in etc var; do
  mkdir -p "$own/over/$folder" "$own/work/$folder"
  mount -t overlay -o "lowerdir=/$folder,upperdir=$own/over/$folder,workdir=$own/work/$folder" overlay "/$folder"
done
for folder in /var/lib/kubelet /var/lib/containerd /var/log/pods; do
  mkdir -p "$own$folder" "$folder"
  mount --bind "$own$folder" "$folder"
done
mkdir -p /var/log/containers /etc/cni/net.d /etc/kubernetes
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/containerd /run/lock
printf '127.0.0.1 localhost\n%s %s\n' "$ip" "$name" >"$own/hosts"
mount --bind "$own/hosts" /etc/hosts
# Nobody answers there; CoreDNS wants one upstream.
echo "nameserver $nodes.1" >"$own/resolv.conf"
mount --make-rshared /
sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1

cat >"$own/containerd.toml" <<TOML
version = 3
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "$(cat "$images/pause.name")"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["$bin/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "$bin/runc"
TOML
cat >"$own/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: { anonymous: { enabled: false }, webhook: { enabled: true }, x509: { clientCAFile: "$run/pki/ca.crt" } }
authorization: { mode: Webhook }
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
nodeStatusUpdateFrequency: 5s
resolvConf: "$own/resolv.conf"
evictionHard: { memory.available: 100Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0% }
imageGCHighThresholdPercent: 100
volumePluginDir: "$own/volume-plugins"
YAML
cat >"$own/kube-proxy.yaml" <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: 10.244.0.0/16
clientConnection: { kubeconfig: "$run/kc/kube-proxy.conf" }
conntrack: { maxPerCore: 0, min: 0 }
bindAddress: $ip
YAML

containerd --config "$own/containerd.toml" >"$run/log/$name-containerd.log" 2>&1 &
until_true 30 containerd ctr version
for tar in kubernetes dns pause; do ctr -n k8s.io images import --all-platforms "$images/$tar.tar" >>"$run/log/$name-import.log" 2>&1; done
kubelet --config="$own/kubelet.yaml" --kubeconfig="$run/kc/$name/kubelet.conf" --hostname-override="$name" --node-ip="$ip" >"$run/log/$name-kubelet.log" 2>&1 &
kube-proxy --config="$own/kube-proxy.yaml" --hostname-override="$name" >"$run/log/$name-kube-proxy.log" 2>&1 &
while :; do sleep 1000 & wait $! || true; done
