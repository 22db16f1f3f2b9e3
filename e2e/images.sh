#!/usr/bin/env bash
# Makes the two images of the binaries that are built and brings them into the nodes of a cluster.   images.sh RUN
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:?usage: e2e/images.sh RUN}
tars=$run/images
mkdir -p "$tars"

if [ "$(cat "$run/mode")" = kind ]; then
  # Debian's docker, also where another one comes first in PATH.
  export DOCKER_HOST=unix://$run/docker.sock PATH=/usr/bin:$PATH
  scripts/images.sh
  for image in operator stage; do docker save -o "$tars/$image.tar" "splitmodel-$image:test"; done
else
  # The same files and settings without docker's build.
  scripts/images.sh roots "$tars/roots"
  for image in operator stage; do
    e2e/cluster/image.py "$tars/$image.tar" --root "$tars/roots/$image" --ref "docker.io/library/splitmodel-$image:test" --user 65532:65532 \
      --env PATH=/opt/splitmodel:/usr/local/bin:/usr/bin:/bin --entrypoint "/opt/splitmodel/splitmodel-$image" >/dev/null
  done
fi
e2e/cluster/load.sh "$run" "$tars/operator.tar" "$tars/stage.tar"
rm -r "$tars"
