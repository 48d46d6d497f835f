#!/usr/bin/env bash
# Brings what a build with `--features cuda` needs to a machine that has Rust, a C compiler and pip, but no
# CUDA toolkit and no GPU: NVIDIA's compiler from its Python wheels, and link stubs for the libraries that
# a GPU machine's driver and toolkit provide at run time.
#
#     kernels/install-cuda.sh [DIR]      DIR: default $CUDA_PREFIX, else ~/.cache/deepseek-v41-cuda
#     source DIR/env.sh
#
# A program linked against the stubs starts without a GPU when $CUDA_STUBS is on LD_LIBRARY_PATH: every driver call then
# returns CUDA_ERROR_STUB_LIBRARY, an ordinary error. Never put that folder on the path of a machine that has a GPU.
set -euo pipefail

dir=${1:-${CUDA_PREFIX:-$HOME/.cache/deepseek-v41-cuda}}
# The versions that toolkit 13.0.2 pins together.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
# The crate that binds the CUDA libraries: its sources list the functions a stub must define.
cudarc=${CUDARC_VERSION:-0.19.10}
mark="1 ${wheels[*]} cudarc-$cudarc"

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
home=$dir/toolkit/nvidia/cu13
if [ "$(cat "$dir/installed" 2>/dev/null)" = "$mark" ] && "$home/bin/nvcc" --version >/dev/null 2>&1; then
    echo "already there: source $dir/env.sh"
    exit 0
fi
for tool in python3 cargo cc; do
    command -v "$tool" >/dev/null || { echo "install-cuda.sh: needs $tool" >&2; exit 1; }
done

# Built aside and moved into place last: an interrupted run leaves nothing that looks complete.
rm -f "$dir/installed"
new=$(mktemp -d "$dir/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile --only-binary=:all: \
    --target "$new" "${wheels[@]}"
cuda=$new/nvidia/cu13
chmod +x "$cuda"/bin/* "$cuda"/nvvm/bin/*
ln -sfn lib "$cuda/lib64" # where nvcc links from
for so in "$cuda"/lib/lib*.so.*; do ln -sfn "${so##*/}" "${so%%.so.*}.so"; done

# ---- stubs: each library's functions, all returning that library's "not available" code ----
crate=$new/crate
mkdir -p "$crate/src" "$cuda/lib/stubs"
: >"$crate/src/lib.rs"
cat >"$crate/Cargo.toml" <<TOML
[package]
name = "stubs"
version = "0.0.0"
edition = "2021"
[dependencies]
cudarc = { version = "=$cudarc", default-features = false, features = ["std", "dynamic-linking", "cuda-13000"] }
[workspace]
TOML
bindings=$(cd "$crate" && cargo metadata --quiet --format-version 1 | python3 -c '
import json, os, sys
print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
stub() { # stub MODULE SONAME CODE
    grep -rhoE 'pub (unsafe )?fn (cu|nvrtc|nccl|pnccl)[A-Za-z0-9_]*\(' "$bindings/src/$1/sys" |
        sed -E 's/.*fn ([A-Za-z0-9_]+)\(/int \1(void) { return '"$3"'; }/' | sort -u >"$new/stub.c"
    cc -w -fno-builtin -shared -fPIC -Wl,-soname,"$2" -o "$cuda/lib/stubs/$2" "$new/stub.c"
    ln -sfn "$2" "$cuda/lib/stubs/${2%.so.*}.so"
}
stub driver libcuda.so.1 34         # CUDA_ERROR_STUB_LIBRARY
stub cublas libcublas.so.13 1       # CUBLAS_STATUS_NOT_INITIALIZED
stub cublaslt libcublasLt.so.13 1
stub curand libcurand.so.10 101     # CURAND_STATUS_NOT_INITIALIZED
stub nvrtc libnvrtc.so.13 3         # NVRTC_ERROR_PROGRAM_CREATION_FAILURE
stub nccl libnccl.so.2 3            # ncclInternalError
rm -rf "$crate" "$new/stub.c"

rm -rf "$dir/toolkit"
mv "$new" "$dir/toolkit"
cat >"$dir/env.sh" <<ENV
export CUDA_HOME=$home CUDA_PATH=$home NVCC=$home/bin/nvcc
export CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90}
export CUDA_STUBS=$home/lib:$home/lib/stubs
case ":\$PATH:" in *":$home/bin:"*) ;; *) export PATH=$home/bin:\$PATH ;; esac
ENV
echo "$mark" >"$dir/installed"
"$home/bin/nvcc" --version | sed -n 4p
echo "done: source $dir/env.sh"
