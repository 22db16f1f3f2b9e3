#!/usr/bin/env bash
# Installs what building and testing need and is missing: Debian packages; with `lint` also the parts of Rust that linting
# needs, with `e2e` also what a cluster needs. Rust itself must be there.
set -euo pipefail

packages=(build-essential cmake libclang-dev ccache python3-venv unzip)
if [ "${1:-}" = e2e ]; then
  packages+=(iptables nftables conntrack iproute2 util-linux debootstrap libseccomp-dev pkg-config kmod procps)
  # Docker's own packages serve as well, and Debian's would put them out.
  [ -x /usr/bin/dockerd ] || packages+=(docker.io)
fi
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  command -v apt-get >/dev/null || { echo "install these by hand: ${missing[*]}" >&2; exit 1; }
  echo "installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

want=1.89
have=$(cargo --version 2>/dev/null | awk '{print $2}') || true
if [ -z "$have" ] || [ "$(printf '%s\n' "$want" "$have" | sort -V | head -1)" != "$want" ]; then
  echo "Rust $want or newer is needed, found: ${have:-none}. Install it with rustup (https://rustup.rs)." >&2
  exit 1
fi

if [ "${1:-}" = lint ]; then
  for part in fmt clippy; do
    cargo "$part" --version >/dev/null 2>&1 && continue
    rustup component add "${part/fmt/rustfmt}" >/dev/null || { echo "cargo $part is missing; install it" >&2; exit 1; }
  done
fi
