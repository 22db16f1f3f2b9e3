#!/usr/bin/env bash
# Builds the engine with the feature `vulkan` and runs slices of a tiny model on Mesa's software driver (Debian).
# A target folder of its own, for another feature set builds llama.cpp again.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}
headers=$cache/tools/vulkan-headers
arch=$(dpkg --print-architecture)
triple=$(gcc -print-multiarch)

packages=(glslc mesa-vulkan-drivers libvulkan1)
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  echo "installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# ggml wants newer headers than Debian 12 has: those of Debian 13, unpacked aside. Nothing of it is installed.
if [ ! -f "$headers/ready" ]; then
  rm -rf "$headers"
  mkdir -p "$headers"/apt/{lists,archives}/partial
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [arch=$arch signed-by=$keyring] http://deb.debian.org/debian trixie main" >"$headers/apt/sources.list"
  touch "$headers/apt/status"
  apt=(apt-get -q -o "Dir::State=$headers/apt" -o "Dir::State::status=$headers/apt/status" -o "Dir::Cache=$headers/apt"
    -o "Dir::Etc::sourcelist=$headers/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "APT::Sandbox::User=$(id -un)")
  (cd "$headers" && "${apt[@]}" update && "${apt[@]}" download libvulkan-dev spirv-headers)
  for deb in "$headers"/*.deb; do dpkg -x "$deb" "$headers"; done
  # The loader is that of this machine.
  mkdir -p "$headers/usr/lib/$triple"
  ln -sf "/usr/lib/$triple/libvulkan.so.1" "$headers/usr/lib/$triple/libvulkan.so"
  rm -rf "$headers/apt" "$headers"/*.deb
  touch "$headers/ready"
fi

export CARGO_TARGET_DIR=$cache/target-vulkan
export CMAKE_PREFIX_PATH=$headers/usr
export LIBRARY_PATH=$headers/usr/lib/$triple
driver=(/usr/share/vulkan/icd.d/lvp_icd*.json)
# Drivers of type CPU are left out unless named; fused kernels span layers, and a cut would change them.
export VK_DRIVER_FILES=${driver[0]} GGML_VK_VISIBLE_DEVICES=0 GGML_VK_DISABLE_FUSION=1
exec cargo test --release --locked -p splitmodel-engine --features vulkan --test vulkan -- --ignored "$@"
