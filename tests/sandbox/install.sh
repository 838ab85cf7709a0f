#!/usr/bin/env bash
# Installs what the sandbox of the grader `code` needs, on Debian or Ubuntu. Does nothing where its
# programs are on the PATH.
set -euo pipefail
command -v bwrap >/dev/null && command -v prlimit >/dev/null && exit 0
exec "$(dirname "$0")/../apt_install.sh" "$@" bubblewrap util-linux
