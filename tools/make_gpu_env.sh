#!/usr/bin/env bash
# Creates the environment of the H100 stack from requirements.txt:  tools/make_gpu_env.sh PYTHON VENV
# Python 3.12, Linux x86_64, 10 GB; needs a C++ compiler, and no GPU. VENV/.ready is written last.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 lock=requirements.txt

stop() { printf 'make gpu env: %s\n' "$*" >&2; exit 1; }

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] || stop "the lock is for Linux x86_64, this is $(uname -sm)"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
        || stop "$python is not Python 3.12; name one: make env-gpu PYTHON=python3.12"
    "$python" -c 'import sysconfig, os; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
        || stop "no Python.h for $python; on Debian and Ubuntu: apt-get install python3-dev"
    command -v c++ >/dev/null || stop "no C++ compiler; on Debian and Ubuntu: apt-get install build-essential"
}

install_lock() {
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # === takes this very build; == would take, and prefer, 2.13.0+cpu, where an index or a folder of
    # pip's settings has one. Transformer Engine's torch part is compiled, last of all.
    sed -E -e '/^transformer-engine-torch==/d' -e 's/^(torch[a-z]*)==/\1===/' "$lock" > "$venv/lock.txt"
    echo "make gpu env: installing the $(grep -c '^[a-z0-9]' "$venv/lock.txt") packages of $lock (5 minutes)"
    # What must be built is built with the locked setuptools, not with one fetched unchecked.
    grep -E '^(setuptools|wheel)==' "$venv/lock.txt" > "$venv/build.txt"
    "$venv/bin/pip" install -qq --no-deps -r "$venv/build.txt"
    "$venv/bin/pip" install -qq --no-deps --no-build-isolation -r "$venv/lock.txt"
    echo "$wanted" > "$venv/.lock-sha256"
}

wanted=$(sha256sum < "$lock")
if [ "$(cat "$venv/.lock-sha256" 2>/dev/null)" != "$wanted" ]; then
    check_machine
    install_lock
fi
tools/build_extensions.sh "$venv"
touch "$venv/.ready"
echo "make gpu env: $venv is ready"
