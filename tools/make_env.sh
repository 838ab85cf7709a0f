#!/usr/bin/env bash
# Creates the environment of the CPU stack from requirements-cpu.txt:  tools/make_env.sh PYTHON VENV
# VENV/.ready is written last, so that an incomplete environment never counts as complete.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 lock=requirements-cpu.txt

stop() { printf 'make env: %s\n' "$*" >&2; exit 1; }

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] \
        || stop "the CPU stack has wheels for Linux x86_64 only, this is $(uname -sm); use a container"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        || stop "$python is not Python 3.11, 3.12 or 3.13; name one: make env PYTHON=python3.12"
    "$python" -c 'import ensurepip' 2>/dev/null \
        || stop "$python has no ensurepip; on Debian: apt-get install python3-venv"
    # pycosat, a dependency of reasoning-gym, has no wheel.
    command -v cc >/dev/null || command -v gcc >/dev/null \
        || stop "no C compiler; on Debian: apt-get install build-essential python3-dev"
}

# Installs packages $@ of the lock by their hashes, from wheels only.
install() {
    tools/pins.sh "$lock" "$@" > "$venv/pins.txt" &&
        "$venv/bin/pip" install -qq --no-deps --require-hashes --only-binary :all: -r "$venv/pins.txt"
}

# Installs the +cpu build of torch, because the default build needs gigabytes of CUDA packages. If
# pip does not find it, uv does: it knows PyTorch's CPU index. Both check the hashes of the lock.
install_torch() {
    install torch 2>"$venv/torch.log" && return
    echo "make env: pip did not find the CPU build of torch, trying uv"
    install uv
    tools/pins.sh "$lock" torch > "$venv/pins.txt"
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --require-hashes \
        --only-binary :all: --torch-backend=cpu -r "$venv/pins.txt" && return
    cat "$venv/torch.log" >&2
    stop "no CPU build of torch matches a hash of $lock; the errors of uv and pip are above." \
        "Download the wheel that the lock pins and name its folder: PIP_FIND_LINKS=FOLDER make env"
}

install_lock() {
    rm -rf "$venv"
    "$python" -m venv "$venv"
    echo "make env: installing torch for the CPU"
    install_torch
    echo "make env: installing the $(grep -c '^[a-z0-9]' "$lock") packages of $lock (2 to 4 minutes)"
    # Source packages are built with the locked setuptools, not with one without a hash check.
    install setuptools
    "$venv/bin/pip" install -qq --no-deps --require-hashes --no-build-isolation -r "$lock"
    echo "$wanted" > "$venv/.lock-sha256"
}

wanted=$(cat "$lock" tools/make_env.sh tools/pins.sh | sha256sum)
if [ "$(cat "$venv/.lock-sha256" 2>/dev/null)" != "$wanted" ]; then
    check_machine
    install_lock
fi
"$venv/bin/pip" install -qq --no-deps --no-build-isolation -e .
touch "$venv/.ready"
echo "make env: $venv is ready"
