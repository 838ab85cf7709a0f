#!/usr/bin/env bash
# Installs what the tests marked slurm need, on Debian or Ubuntu: Slurm's daemons and clients, munge,
# ip, a compiler and Slurm's headers for the container stand-in. Starts no service.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge iproute2 procps gcc libc6-dev libslurm-dev)

if dpkg-query -W -f='${Status}\n' "${packages[@]}" 2>/dev/null | grep -c '^install ok installed$' |
    grep -qx "${#packages[@]}"; then
    exit 0
fi
exec "$(dirname "$0")/../apt_install.sh" "${packages[@]}"
