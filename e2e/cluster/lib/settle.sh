#!/usr/bin/env bash
# What every cluster gets once its nodes are known: pods' network, fake GPUs, volumes; then waits until all is ready.   settle.sh RUN
set -euo pipefail
. "$(dirname "$0")/common.sh"
run=$1
export KUBECONFIG=$run/kubeconfig PATH=$bin:$PATH

# A volume on a node that a claim of the class `standard` may take.
volume() {
  mkdir -p -m 777 "$run/volumes/claims/$1-$2"
  chmod 777 "$run/volumes/claims/$1-$2"
  cat <<YAML
---
apiVersion: v1
kind: PersistentVolume
metadata: { name: "$1-$2" }
spec:
  capacity: { storage: 2Gi }
  accessModes: [ReadWriteOnce]
  storageClassName: standard
  persistentVolumeReclaimPolicy: Retain
  hostPath: { path: "$run/volumes/claims/$1-$2" }
  nodeAffinity: { required: { nodeSelectorTerms: [{ matchExpressions: [{ key: kubernetes.io/hostname, operator: In, values: ["$1"] }] }] } }
YAML
}

"$here/lib/network.sh" "$run"
kubectl get nodes -o name -l '!node-role.kubernetes.io/control-plane' | sed 's#^node/##' >"$run/workers"
kubectl wait --for=condition=Ready nodes --all --timeout=120s >/dev/null
"$here/load.sh" "$run" "$images/files.tar"
for node in $(cat "$run/workers"); do
  kubectl label node "$node" --overwrite nvidia.com/gpu.memory=24576 nvidia.com/gpu.product=Fake >/dev/null
  kubectl patch node "$node" --subresource=status --type=merge \
    -p '{"status":{"capacity":{"nvidia.com/gpu":"2"},"allocatable":{"nvidia.com/gpu":"2"}}}' >/dev/null
  for number in 1 2 3 4; do volume "$node" "$number"; done
done | kubectl apply -f - >/dev/null
kubectl -n kube-system scale deployment coredns --replicas=1 >/dev/null
kubectl -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
