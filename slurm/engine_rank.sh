#!/bin/bash
# Runs one rank of an engine as a task of the engines' step, and starts it again after a crash:
#
#   engine_rank.sh COMMAND...
#
# The run goes on meanwhile. It ends after DAPO_ENGINE_STARTS (5) starts in a row that did not last
# DAPO_QUICK_SECONDS (600), with a pause of DAPO_ENGINE_PAUSE (10) seconds between two of them.
# DAPO_RUN_OVER names a file that exists once the policy has ended, DAPO_KILL_LIST one to which rank
# 0 appends processes that hang, as "NODE PID SECONDS". Those on this node are killed after that time.

set -u

kill_hanging() { # NUMBER of lines that are older
    local node=${SLURMD_NODENAME:-$(hostname)} line lines number=$1
    trap '' USR1 # which tells the ranks to stop
    while sleep 1; do
        mapfile -t -s "$number" lines <"$DAPO_KILL_LIST"
        number=$((number + ${#lines[@]}))
        for line in ${lines[@]+"${lines[@]}"}; do
            [[ $line =~ ^([^ ]+)\ ([1-9][0-9]*)\ ([0-9]+)$ ]] || continue
            [[ ${BASH_REMATCH[1]} == "$node" ]] || continue
            (sleep "${BASH_REMATCH[3]}"; kill -KILL "${BASH_REMATCH[2]}" 2>/dev/null) &
        done
    done
}
if [[ -e ${DAPO_KILL_LIST:-} ]]; then
    kill_hanging "$(wc -l <"$DAPO_KILL_LIST")" &
    # shellcheck disable=SC2064 # the process id of now
    trap "kill $!" EXIT
fi

is_stopping=0
trap 'is_stopping=1' USR1 TERM # the command gets the signal, too
count=0
while :; do
    SECONDS=0
    "$@"
    code=$?
    case $code in
        0 | 2 | 75 | 97) exit $code ;; # done, wrong config, stopped, replaced: see slurm/lib.sh
    esac
    ((is_stopping)) || [[ -e ${DAPO_RUN_OVER:-} ]] && exit $code
    ((SECONDS < ${DAPO_QUICK_SECONDS:-600})) && count=$((count + 1)) || count=0
    printf '%(%F %T)T engine rank ended with exit code %s' -1 $code
    if ((count >= ${DAPO_ENGINE_STARTS:-5})); then
        echo ", after $count starts in a row: not started again"
        exit $code
    fi
    echo "; starting it again in ${DAPO_ENGINE_PAUSE:-10} s"
    sleep "${DAPO_ENGINE_PAUSE:-10}"
    ((is_stopping)) || [[ -e ${DAPO_RUN_OVER:-} ]] && exit $code
done
