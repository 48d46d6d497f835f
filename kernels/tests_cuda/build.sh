#!/usr/bin/env bash
# Builds every kernel as build.rs does, and the check and bench programs, into OUT (default target/kernels).
# Carry that folder to a machine with a GPU and run OUT/check OUT, OUT/bench OUT there: nothing else is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-../target/kernels}
nvcc=${CUDA_HOME:?source the env.sh that install-cuda.sh wrote}/bin/nvcc
mkdir -p "$out"
common=(-O3 -std=c++17 --fatbin)
headers=$(ls -t common/*.cuh attention/*.cuh hyperconn/*.cuh 2>/dev/null | head -1)
for cu in {core,quant,moe,attention,hyperconn,engram,vision}/*.cu; do
    stem=$(basename "$cu" .cu)
    [ "$out/$stem.fatbin" -nt "$cu" ] && [ "$out/$stem.fatbin" -nt "$headers" ] && continue
    case $stem in
        *_sm90) "$nvcc" "${common[@]}" -gencode=arch=compute_90a,code=sm_90a -o "$out/$stem.fatbin" "$cu" ;;
        *) "$nvcc" "${common[@]}" -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_80,code=compute_80 -o "$out/$stem.fatbin" "$cu" ;;
    esac
    echo "$stem"
done
for prog in check bench; do
    "$nvcc" -O2 -std=c++17 -diag-suppress 3357 -gencode=arch=compute_90,code=sm_90 -cudart static -o "$out/$prog" "tests_cuda/$prog.cu"
    strip "$out/$prog"
done
du -sh "$out"
