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
exec "$(dirname "$0")/../apt_install.sh" "$@" chromium
