#!/usr/bin/env bash
# Brings what a build with `--features cuda` needs to a machine that has Rust, a C compiler and pip, but no
# CUDA toolkit and no GPU: NVIDIA's compiler from its Python wheels, and link stubs for the libraries that
# a GPU machine's driver and toolkit provide at run time.
#
#     kernels/install-cuda.sh [DIR]      DIR: default $CUDA_PREFIX, else ~/.cache/deepseek-v41-cuda
#     source DIR/env.sh
#
# Also two stand-ins for nvcc that save candle's own kernels, most of the time of a build. Give each a
# CARGO_TARGET_DIR of its own: cargo does not notice another NVCC.
#     NVCC=$NVCC_CHECK    none of them: `cargo check` and `cargo clippy`, which link nothing
#     NVCC=$NVCC_LEAN     without GGUF and candle's mixture of experts, which nothing here uses: programs that run
#
# A program linked against the stubs starts without a GPU when $CUDA_STUBS is on LD_LIBRARY_PATH: every driver call then
# returns CUDA_ERROR_STUB_LIBRARY, an ordinary error. Never put that folder on the path of a machine that has a GPU.
set -euo pipefail

dir=${1:-${CUDA_PREFIX:-$HOME/.cache/deepseek-v41-cuda}}
# The versions that toolkit 13.0.2 pins together.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
# The crate that binds the CUDA libraries: its sources list the functions a stub must define.
cudarc=${CUDARC_VERSION:-0.19.10}
mark="2 ${wheels[*]} cudarc-$cudarc"

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
python3 -m pip --version >/dev/null 2>&1 || { echo "install-cuda.sh: needs pip (Debian: python3-pip)" >&2; exit 1; }

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

# ---- nvcc for those who do not need candle's kernels: any other package's sources are compiled as they are ----
cat >"$dir/nvcc-lean" <<'LEAN'
#!/usr/bin/env bash
set -euo pipefail
nvcc=${0%/*}/toolkit/nvidia/cu13/bin/nvcc
[[ $PWD == */candle-kernels-* ]] || exec "$nvcc" "$@"
all=" $* " out='' folder='' source='' previous=''
for arg; do
    case $previous in -o) out=$arg ;; --output-directory) folder=$arg ;; esac
    [[ $arg == *.cu ]] && source=$arg
    previous=$arg
done
if [[ $all == *" -c "* ]]; then # an object of the static library: nothing in it
    exec cc -x c -c /dev/null -o "$out"
elif [[ $all == *" --lib "* ]]; then
    rm -f "$out"
    exec ar crs "$out"
elif [[ $all == *" --ptx "* && $0 == *-check ]]; then
    stem=${source##*/}
    : >"$folder/${stem%.cu}.ptx"
else
    exec "$nvcc" "$@"
fi
LEAN
chmod +x "$dir/nvcc-lean"
ln -sfn nvcc-lean "$dir/nvcc-check"

# CUDA_COMPUTE_CAP is the card that candle's kernels and ours are compiled for. Its code for 80 runs on every later
# card; its code for 90 and up runs on that generation alone.
cat >"$dir/env.sh" <<ENV
export CUDA_HOME=$home CUDA_PATH=$home NVCC=$home/bin/nvcc
export NVCC_LEAN=$dir/nvcc-lean NVCC_CHECK=$dir/nvcc-check
export CUDARC_CUDA_VERSION=13000
export CUDA_STUBS=$home/lib:$home/lib/stubs
case ":\$PATH:" in *":$home/bin:"*) ;; *) export PATH=$home/bin:\$PATH ;; esac
# The oldest card here that has kernels; without a card 80.
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-\$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    awk '/^ *[0-9]+\.[0-9] *\$/ { cap = \$1 * 10; if (cap >= 80 && (!best || cap < best)) best = cap } END { print best ? best : 80 }')}
ENV
echo "$mark" >"$dir/installed"
"$home/bin/nvcc" --version | sed -n 4p
echo "done: source $dir/env.sh"
