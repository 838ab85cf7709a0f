#!/usr/bin/env bash
# Compiles packages that have no wheel against an environment's torch, and installs them:
#   tools/build_extensions.sh VENV            Transformer Engine's torch part: 11 minutes on 2 cores
#   tools/build_extensions.sh VENV apex       NVIDIA Apex: optional, see docs/gpu_stack.md
# VENV is an environment of requirements.txt. No GPU is needed. Variables:
#   MAX_JOBS      compilers at once
#   CUDA_HOME     the CUDA to compile with; by default that of the environment's packages
#   APEX_SOURCE   where to clone Apex from
# The wheel stays in build/wheels/, for other environments with the same torch.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: tools/build_extensions.sh VENV [apex]}") what=${2:-transformer-engine}
python=$venv/bin/python

# July 2026, because the last tag, 25.09, is older than this torch.
APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
APEX_ARCHITECTURES="9.0" # H100 and H200

stop() { printf 'build extensions: %s\n' "$*" >&2; exit 1; }

# Prints the version of a package in the lock.
pin() { tools/pins.sh requirements.txt "$1" | sed -n '1s/^[^=]*==\([^ ]*\).*/\1/p'; }

# Sets the paths of nvcc and of the headers of CUDA, cuDNN and NCCL, which both builds need.
use_cuda_of_environment() {
    local packages
    packages=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])') \
        || stop "$venv has no CUDA packages; make it with tools/make_gpu_env.sh"
    if [ -z "${CUDA_HOME:-}" ]; then
        export CUDA_HOME=$packages/cu13
        # The package has libcudart.so.13 only, and a linker looks for libcudart.so.
        ln -sf "$CUDA_HOME/lib/libcudart.so.13" "$work/libcudart.so"
        export LIBRARY_PATH=$work${LIBRARY_PATH:+:$LIBRARY_PATH}
    fi
    [ -x "$CUDA_HOME/bin/nvcc" ] \
        || stop "CUDA_HOME: no $CUDA_HOME/bin/nvcc; unset it to use the environment's CUDA"
    local include
    for include in "$packages"/*/include; do
        export CPLUS_INCLUDE_PATH=$include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
    done
    export PATH=$venv/bin:$CUDA_HOME/bin:$PATH # ninja, nvcc
}

build_transformer_engine() {
    # FORCE_BUILD: else the setup would fetch a binary from NVIDIA's site, without a hash check.
    # USE_NVIDIA_WHEELS: headers of the packages, not of another CUDA on the machine.
    tools/pins.sh requirements.txt transformer-engine-torch > "$work/pins.txt"
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
        "$python" -m pip wheel --no-cache-dir --no-deps --require-hashes --no-build-isolation --wheel-dir "$wheels" \
        -r "$work/pins.txt"
}

build_apex() {
    git clone --quiet --no-checkout "${APEX_SOURCE:-https://github.com/NVIDIA/apex}" "$work/apex"
    git -C "$work/apex" checkout --quiet "$APEX_COMMIT"
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$APEX_ARCHITECTURES} \
        "$python" -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir "$wheels" "$work/apex"
}

case $what in
    transformer-engine) build=build_transformer_engine version=$(pin transformer-engine-torch) ;;
    apex) build=build_apex version=$APEX_COMMIT ;;
    *) stop "$what: neither transformer-engine nor apex; name one of them" ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=$("$python" -c 'import sys, torch; assert torch.version.cuda, f"torch {torch.__version__} is a CPU build"
print(f"torch-{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")') \
    || stop "$venv has no torch for CUDA; make it with tools/make_gpu_env.sh"
wheels=build/wheels/$torch/$what-$version
if ! compgen -G "$wheels/*.whl" >/dev/null; then
    use_cuda_of_environment
    echo "build extensions: compiling $what (minutes) with $CUDA_HOME"
    $build
fi
"$python" -m pip install -qq --no-deps --force-reinstall "$wheels"/*.whl
"$python" tools/check_extensions.py "$what"
