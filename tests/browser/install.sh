#!/usr/bin/env bash
# Installs what the tests in tests/browser need, on Debian or Ubuntu: Chromium. Does nothing where a
# browser of that kind is on the PATH.
set -euo pipefail

for browser in chromium chromium-browser google-chrome; do
    # Ubuntu has a chromium-browser that only tells to install another package.
    if command -v "$browser" >/dev/null && "$browser" --version >/dev/null 2>&1; then
        exit 0
    fi
done
command -v apt-get >/dev/null || {
    echo "install.sh: no apt-get here: have someone install Chromium, so that chromium is on the PATH" >&2
    exit 1
}
root=()
if [[ $EUID != 0 ]]; then
    command -v sudo >/dev/null || {
        echo "install.sh: needs root, or sudo; or have someone install: chromium" >&2
        exit 1
    }
    root=(sudo "$@")
fi
echo "install.sh: chromium"
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
