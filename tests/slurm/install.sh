#!/usr/bin/env bash
# Installs what the tests marked slurm need, on Debian or Ubuntu: Slurm's daemons and clients, munge,
# ip, a compiler and Slurm's headers for the container stand-in. Starts no service.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge iproute2 procps gcc libc6-dev libslurm-dev)

if dpkg-query -W -f='${Status}\n' "${packages[@]}" 2>/dev/null | grep -c '^install ok installed$' |
    grep -qx "${#packages[@]}"; then
    exit 0
fi
root=()
if [[ $EUID != 0 ]]; then
    command -v sudo >/dev/null || {
        echo "install.sh: needs root, or sudo; or have someone install: ${packages[*]}" >&2
        exit 1
    }
    root=(sudo)
fi
echo "install.sh: ${packages[*]}"
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${packages[@]}"
