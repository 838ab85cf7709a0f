#!/usr/bin/env bash
# Creates the environment of the H100 stack from requirements.txt:
#   tools/make_gpu_env.sh PYTHON VENV
# It needs Python 3.12, Linux x86_64, 10 GB of disk and a C++ compiler, but no GPU. VENV/.ready is
# written last. DAPO_OWN_TORCH=1 uses the torch for CUDA that PYTHON already has (docs/gpu_stack.md).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 lock=requirements.txt own_torch=${DAPO_OWN_TORCH:-0}

stop() { printf 'make gpu env: %s\n' "$*" >&2; exit 1; }

[[ $own_torch == [01] ]] || stop "DAPO_OWN_TORCH=$own_torch: set it to 1, or leave it out"

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] \
        || stop "the lock is for Linux x86_64, this is $(uname -sm); use another machine"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
        || stop "$python is not Python 3.12; name one: make env-gpu PYTHON=python3.12"
    "$python" -c 'import sysconfig, os; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
        || stop "no Python.h for $python; on Debian and Ubuntu: apt-get install python3-dev"
    command -v c++ >/dev/null || stop "no C++ compiler; on Debian and Ubuntu: apt-get install build-essential"
}

pin() { tools/pins.sh "$lock" "$1" | sed -n '1s/^[^=]*==\([^ ]*\).*/\1/p'; }

# Fills left_out with the packages that a site with its own torch provides: torch, its libraries,
# and packages that are compiled against torch. Two copies of cuBLAS or NCCL break a process.
leave_out_own_torch() {
    local version
    version=$("$python" -c 'import sys, torch; assert torch.version.cuda and sys.prefix == sys.base_prefix
print(torch.__version__)' 2>/dev/null) || stop "DAPO_OWN_TORCH=1: $python has no torch for CUDA, or is" \
        "a virtual environment; name the Python that has it: make env-gpu PYTHON=..."
    mapfile -t left_out < <(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' "$lock" \
        | grep -E '^(torch|torchvision|torchaudio|torchcodec|triton|cuda-toolkit|nvidia-.*|transformer-engine.*)$' \
        | grep -v -E '^nvidia-(cudnn-frontend|cutlass-dsl.*|ml-py)$')
    if "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))'; then
        left_out+=(vllm)
    elif [ "${version%%+*}" != "$(pin torch)" ]; then
        stop "DAPO_OWN_TORCH=1: $python has torch $version and no vLLM, and the locked vLLM is compiled" \
            "against torch $(pin torch); install that torch there, or a vLLM for torch $version"
    fi
    echo "make gpu env: using torch $version of $python. No hash check for the site's packages:"
    printf '    %s\n' "${left_out[@]}"
}

install_lock() {
    local visible=() again=()
    # Without --ignore-installed, pip would accept the site's other packages without a hash check.
    [ "$own_torch" = 0 ] || visible=(--system-site-packages) again=(--ignore-installed)
    rm -rf "$venv"
    "$python" -m venv "${visible[@]}" "$venv"
    # Transformer Engine's torch part has no wheel; build_extensions.sh compiles it at the end.
    # === selects exactly this build. == would prefer 2.13.0+cpu if an index or a folder of pip's
    # settings has one.
    tools/pins.sh "$lock" --without transformer-engine-torch "${left_out[@]}" > "$venv/pins.txt"
    sed -E 's/^(torch[a-z]*)==/\1===/' "$venv/pins.txt" > "$venv/lock.txt"
    echo "make gpu env: installing the $(grep -c '^[a-z0-9]' "$venv/lock.txt") packages of $lock (5 minutes)"
    # Source packages are built with the locked setuptools, not with one without a hash check.
    tools/pins.sh "$lock" setuptools wheel > "$venv/build.txt"
    "$venv/bin/pip" install -qq --no-deps --require-hashes --only-binary :all: "${again[@]}" -r "$venv/build.txt"
    "$venv/bin/pip" install -qq --no-deps --require-hashes --no-build-isolation "${again[@]}" -r "$venv/lock.txt"
    echo "$wanted" > "$venv/.lock-sha256"
}

wanted=$({ cat "$lock" tools/make_gpu_env.sh tools/pins.sh; echo "$own_torch"; } | sha256sum)
if [ "$(cat "$venv/.lock-sha256" 2>/dev/null)" != "$wanted" ]; then
    left_out=()
    [ "$own_torch" = 0 ] || leave_out_own_torch
    check_machine
    install_lock
fi
if [ "$own_torch" = 1 ]; then
    echo "make gpu env: Transformer Engine and Apex are those of the site, if any. Check with:" \
        "$venv/bin/python -m dapo_megatron doctor env"
else
    tools/build_extensions.sh "$venv"
fi
touch "$venv/.ready"
echo "make gpu env: $venv is ready"
