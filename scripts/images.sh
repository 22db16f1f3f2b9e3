#!/usr/bin/env bash
# Makes the images splitmodel-operator:test and splitmodel-stage:test of binaries that are built, with no registry: their base
# is a root of this machine's own C library, certificates and an unprivileged user.
#
#   scripts/images.sh               into docker's daemon (TAG=… for another tag, IMAGES="stage" for fewer)
#   scripts/images.sh roots DIR     as folders DIR/operator and DIR/stage, where there is no docker
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${BIN:-${CARGO_TARGET_DIR:-$HOME/.cache/splitmodel/target}/release}
tag=${TAG:-test}
read -ra images <<<"${IMAGES:-operator stage}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The root of a base image, in $1, with the libraries of the system that the files in $2… need.
base_root() {
  local root=$1 file
  shift
  mkdir -p "$root"/{dev,etc/ssl/certs,opt/splitmodel,proc,sys,tmp,usr/bin,usr/lib}
  chmod 1777 "$root/tmp"
  ldd "$@" 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*' | sort -u | while read -r file; do
    case $file in "$bin"/* | "$work"/*) continue ;; esac
    [ -e "$root$file" ] || install -D "$(readlink -f "$file")" "$root$file"
  done
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >"$root/etc/passwd"
  printf 'root:x:0:\nnonroot:x:65532:\n' >"$root/etc/group"
  printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
}

for image in "${images[@]}"; do
  scripts/image-files.sh "$image" "$bin" "$work/$image"
done

if [ "${1:-}" = roots ]; then
  out=${2:?usage: scripts/images.sh roots DIR}
  for image in "${images[@]}"; do
    rm -rf "${out:?}/$image"
    mapfile -t files < <(find "$work/$image" -type f)
    base_root "$out/$image" "${files[@]}"
    cp -r "$work/$image/." "$out/$image/opt/splitmodel/"
  done
  exit
fi

# One base for both: their layers are shared on a node.
mapfile -t files < <(find "$work" -type f)
base_root "$work/base" "${files[@]}"
hash=$(cd "$work/base" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
base=splitmodel-base:$hash
docker image inspect "$base" >/dev/null 2>&1 \
  || tar -C "$work/base" --sort=name --owner=0 --group=0 --mtime=@0 -c . | docker import - "$base" >/dev/null
for image in "${images[@]}"; do
  docker build -q -f "Dockerfile.$image" --target prebuilt --build-arg "BASE_IMAGE=$base" -t "splitmodel-$image:$tag" "$work/$image" \
    >/dev/null
  docker image inspect -f "splitmodel-$image:$tag {{.Id}} {{.Size}} bytes" "splitmodel-$image:$tag"
done
