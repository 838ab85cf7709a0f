#!/usr/bin/env bash
# Prints packages of a lock with their hashes, for `pip install --no-deps --require-hashes -r FILE`:
#   tools/pins.sh LOCK NAME...             only these; NAME==VERSION requires that version
#   tools/pins.sh LOCK --without NAME...   all except these
# A package that is not in the lock is an error, so that nothing is installed without a hash.
set -euo pipefail
lock=${1:?usage: tools/pins.sh LOCK [--without] NAME...}
shift
without=0
if [ "${1:-}" = --without ]; then without=1; shift; fi

awk -v names="$*" -v without="$without" '
    BEGIN { count = split(names, list, " "); for (i = 1; i <= count; i++) wanted[list[i]] }
    /^[a-z0-9]/ {
        split($1, pin, "==")
        listed = 0
        if (pin[1] in wanted) { listed = 1; seen[pin[1]] }
        if ($1 in wanted) { listed = 1; seen[$1] }
        selected = listed != without
    }
    selected && /^[a-z0-9]|^ +--hash=/
    END {
        for (name in wanted) if (!(name in seen)) {
            printf "pins: %s is not in %s; add it to the .in file and run tools/lock.sh (docs/gpu_stack.md)\n", \
                name, FILENAME > "/dev/stderr"
            status = 1
        }
        exit status
    }' "$lock"
