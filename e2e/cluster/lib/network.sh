#!/usr/bin/env bash
# Pods' network: every node gets its range of addresses, and a route to those of the others.   network.sh RUN
set -euo pipefail
. "$(dirname "$0")/common.sh"
run=$1
export KUBECONFIG=$run/kubeconfig PATH=$bin:$PATH

facts() { kubectl get nodes -o jsonpath='{range .items[*]}{.metadata.name} {.status.addresses[?(@.type=="InternalIP")].address} {.spec.podCIDR}{"\n"}{end}'; }
all_known() { facts | awk 'NF != 3 { missing = 1 } END { exit missing || NR < wanted }' wanted="$1"; }
until_true 60 'the address ranges of all nodes' all_known 3 || { facts >&2; exit 1; }

facts >"$run/nodes.txt"
while read -r node ip range; do
  # The plain cluster's API server is beside the nodes, not on one.
  "$here/lib/sandbox.sh" in "$run" ip route replace "$range" via "$ip"
  routes=$(awk -v own="$node" '$1 != own { printf "ip route replace %s via %s; ", $3, $2 }' "$run/nodes.txt")
  "$here/node.sh" "$run" "$node" sh -c "$routes mkdir -p /etc/cni/net.d; cat >/etc/cni/net.d/10-pods.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "ptp", "ipMasq": false, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state",
    "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "$range"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
done <"$run/nodes.txt"
