#!/usr/bin/env bash
# Builds llama-server and ggml-rpc-server from the source distribution of llama-cpp-python 0.3.36 (MIT), once, into the cache.
# Prints the folder of the binaries.
set -euo pipefail

cache=${SPLITMODEL_CACHE:-$HOME/.cache/splitmodel}
version=0.3.36
out=$cache/peers/llama-cpp-python-$version
if [ ! -x "$out/bin/llama-server" ]; then
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  python3 -m venv "$tmp/venv" >&2
  "$tmp/venv/bin/pip" install -q --upgrade pip >&2
  "$tmp/venv/bin/pip" download -q --no-deps --no-binary llama-cpp-python -d "$tmp" "llama-cpp-python==$version" >&2
  mkdir -p "$out/src"
  tar -xzf "$tmp"/llama_cpp_python-*.tar.gz -C "$out/src" --strip-components 1
  # A dangling link there makes ninja configure for ever.
  rm -f "$out/src/vendor/llama.cpp/.git"
  # GCC 12.2 miscompiles ggml's AMX code: batches end in a signal.
  cmake -S "$out/src/vendor/llama.cpp" -B "$out/build" -DCMAKE_BUILD_TYPE=Release -DGGML_RPC=ON -DGGML_OPENMP=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DBUILD_SHARED_LIBS=OFF -DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16' >&2
  cmake --build "$out/build" --target llama-server ggml-rpc-server -j "$(nproc)" >&2
  ln -sfn build/bin "$out/bin"
fi
echo "$out/bin"
