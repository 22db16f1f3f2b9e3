#!/usr/bin/env bash
# Prints the folder of the cluster's programs: kubectl, helm, …
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
echo "$bin"
