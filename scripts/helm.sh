#!/usr/bin/env bash
# Prints the path of helm: $HELM, one that is installed, or the one that is built for the tests' cluster (once, from its Go module).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${HELM:-}" ]; then
  echo "$HELM"
elif command -v helm; then
  :
else
  . e2e/cluster/lib/common.sh
  [ -x "$bin/helm" ] || e2e/cluster/lib/binaries.sh >&2
  echo "$bin/helm"
fi
