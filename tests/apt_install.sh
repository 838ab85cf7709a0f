#!/usr/bin/env bash
# Installs packages on Debian or Ubuntu, as root or by sudo:  tests/apt_install.sh [-n] PACKAGE...
# -n: fail where sudo would ask for a password.
set -euo pipefail
sudo_options=()
[[ ${1:-} == -n ]] && { sudo_options=(-n); shift; }

stop() { echo "apt_install.sh: $*; or have someone install: $packages" >&2; exit 1; }
packages=$*
command -v apt-get >/dev/null || stop "no apt-get here"
root=()
if [[ $EUID != 0 ]]; then
    command -v sudo >/dev/null || stop "needs root, or sudo"
    root=(sudo ${sudo_options[@]+"${sudo_options[@]}"})
fi
echo "apt_install.sh: $packages"
${root[@]+"${root[@]}"} apt-get update -qq
${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "$@"
