#!/bin/bash
# Runs an engine server as a task of the engines' step, and starts it again after it has ended:
#
#   engine.sh COMMAND...
#
# Task N is engine N. The run goes on without it meanwhile. The script gives up after
# DAPO_ENGINE_STARTS (5) starts in a row that did not last DAPO_QUICK_SECONDS (600), with a pause of
# DAPO_ENGINE_PAUSE (10) seconds between two. DAPO_RUN_OVER names a file that exists once the policy
# has ended.

set -u

trap '' USR1 TERM # rank 0 stops the run, and saves what engines have
count=0
while :; do
    SECONDS=0
    "$@" ${SLURM_PROCID:+--replica "$SLURM_PROCID"}
    code=$?
    ((code == 0)) && exit 0 # the run is over
    [[ -e ${DAPO_RUN_OVER:-} ]] && exit $code
    ((SECONDS < ${DAPO_QUICK_SECONDS:-600})) && count=$((count + 1)) || count=0
    printf '%(%F %T)T engine ended with exit code %s' -1 $code
    if ((count >= ${DAPO_ENGINE_STARTS:-5})); then
        echo ", after $count starts in a row: not started again"
        exit $code
    fi
    echo "; starting it again in ${DAPO_ENGINE_PAUSE:-10} s"
    sleep "${DAPO_ENGINE_PAUSE:-10}"
    [[ -e ${DAPO_RUN_OVER:-} ]] && exit $code
done
