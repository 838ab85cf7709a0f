# shellcheck shell=bash
# What the job scripts share: where things are, how a step is started, what a job's end means.
# Sourced by a job script from the checkout; calls made in this order:
#   open_job NAME, use_program, then `step ...`; train.sbatch also choose_rendezvous and decide.

# shellcheck disable=SC2034 # the scripts have the use
readonly DONE=0 USER_ERROR=2 BAD_NODES=69 STOPPED=75 FENCED=97 HUNG=98

say() { printf '%(%F %T)T [%s] %s\n' -1 "${DAPO_MEGATRON_ATTEMPT:-}" "$*"; }
refuse() { say "error: $*"; exit $USER_ERROR; }

# Text from a file or a variable is checked before arithmetic: there, Bash runs the command in a text
# such as a[$(command)].
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }
is_node() { [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]]; }

# ------------------------------------------------------------------ the job and its folders

# Logs and run folder are for the job's user only, unless DAPO_UMASK says otherwise.
set_umask() {
    local mask=${DAPO_UMASK:-077}
    [[ $mask =~ ^0?[0-7]{3}$ ]] || refuse "DAPO_UMASK: $mask; write three octal digits, as 027"
    umask "$mask"
    export SLURM_UMASK=$mask # for the tasks: srun passes on that of the shell which ran sbatch
}

check_numbers() {
    local name
    for name in "$@"; do
        [[ -z ${!name:-} ]] || is_number "${!name}" || refuse "$name: ${!name} is not a whole number"
    done
}

# The variables of the job's log. Secrets stay out: it may be sent to others.
public_environment() { # addresses without user:password@, ?query and #fragment
    local name
    for name in $(compgen -e | grep -E '^(SLURM|NCCL|TORCH|CUDA|UCX|GLOO|OMP|VLLM|DAPO)_' | sort); do
        is_secret "$name" || printf '%s=%s\n' "$name" "${!name}"
    done | sed -E -e 's#://[^[:space:]]*@#://#g' -e 's,(://[^?#[:space:]]*)[?#][^[:space:]]*,\1,g'
}

is_secret() { # NAME
    local name=${1^^}
    name=${name//TOKENIZER/}
    [[ $name =~ TOKEN|JWT|KEY|SECRET|PASS|CREDENTIAL|AUTH ]]
}

# Names this start, makes its log folder, reads env.sh.
open_job() {
    set_umask
    check_numbers DAPO_PORT_BASE DAPO_QUICK_SECONDS DAPO_MAX_QUICK_CRASHES SLURM_RESTART_COUNT
    export DAPO_MEGATRON_ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
    cd "$DAPO_HOME" || exit $USER_ERROR # where paths in a config are from
    LOGS=${DAPO_LOGS:-slurm_logs}
    [[ $LOGS == /* ]] || LOGS=$DAPO_HOME/$LOGS
    JOB_LOGS=$LOGS/$SLURM_JOB_NAME
    ATTEMPT_LOGS=$JOB_LOGS/$DAPO_MEGATRON_ATTEMPT
    mkdir -p "$ATTEMPT_LOGS" || refuse "DAPO_LOGS: $LOGS cannot be written"
    [[ -e $LOGS/.gitignore ]] || echo '*' >"$LOGS/.gitignore"
    ln -sfn "$DAPO_MEGATRON_ATTEMPT" "$JOB_LOGS/latest"
    export DAPO_MEGATRON_VERDICT=$ATTEMPT_LOGS/verdict
    TASKS=${SLURM_NTASKS_PER_NODE:-1}
    GPUS=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}} # --exclusive allots all; this was asked for
    GPUS=${GPUS##*:}                                      # of h100:8
    is_number "$GPUS" || refuse "--gpus-per-node: $GPUS; name one kind of GPU, as h100:8"
    unset DAPO_MEGATRON_SECRET DAPO_MEGATRON_SECRET_FILE # each start makes its own; never in env.txt
    export DAPO_CPUS_PER_TASK=$((SLURM_CPUS_ON_NODE / TASKS > 0 ? SLURM_CPUS_ON_NODE / TASKS : 1))
    # shellcheck source=slurm/env.sh
    source "$DAPO_HOME/slurm/env.sh"
    public_environment >"$ATTEMPT_LOGS/env.txt"
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    say "$1 on ${#NODES[@]} nodes (${NODES[*]}), $TASKS tasks each; logs in $ATTEMPT_LOGS"
}

# One task per GPU: fewer would leave GPUs idle, more would share them.
check_tasks() {
    ((GPUS == 0 || GPUS == TASKS)) || refuse "--ntasks-per-node=$TASKS with $GPUS GPUs per node:" \
        "there is one task per GPU; give sbatch --ntasks-per-node=$GPUS (or --gpus-per-node=$TASKS)"
}

# ------------------------------------------------------------------ starting steps

# PROGRAM: how a task runs Python; STEP_OPTIONS: what srun needs for that.
use_program() {
    local mounts=$DAPO_HOME:$DAPO_HOME
    [[ $LOGS == "$DAPO_HOME"/* ]] || mounts+=,$LOGS:$LOGS # for the verdict and the nodes' reports
    mounts+=${DAPO_MOUNTS:+,$DAPO_MOUNTS}
    STEP_OPTIONS=()
    if [[ -n ${DAPO_CONTAINER:-} ]]; then
        # Not in the header: pyxis would put this very script, which needs srun, into the container.
        STEP_OPTIONS=(
            "--container-image=$DAPO_CONTAINER"
            "--container-mounts=$mounts"
            "--container-workdir=$DAPO_HOME"
            --no-container-mount-home # packages in ~/.local would shadow the image's
        )
        PROGRAM=("${DAPO_PYTHON:-python3}")
    elif [[ -n ${DAPO_APPTAINER:-} ]]; then
        [[ -e $DAPO_APPTAINER ]] || refuse "DAPO_APPTAINER: no file $DAPO_APPTAINER"
        PROGRAM=(apptainer exec --no-home --bind "$mounts" --pwd "$DAPO_HOME")
        ((GPUS)) && PROGRAM+=(--nv)
        PROGRAM+=("$DAPO_APPTAINER" "${DAPO_PYTHON:-python3}")
    else
        local venv=${DAPO_VENV:-$DAPO_HOME/.venv}
        [[ $venv == /* ]] || venv=$DAPO_HOME/$venv
        [[ -x $venv/bin/python ]] || refuse "DAPO_VENV: no $venv/bin/python; make it with" \
            "'make env', or name a container (DAPO_CONTAINER, DAPO_APPTAINER)"
        PROGRAM=("$venv/bin/python")
    fi
}

# Variables that must be the job's inside a container too, comma-separated.
env_names() { compgen -e | grep -E '^(NCCL|GLOO|TORCH|UCX|OMP|VLLM|DAPO)_|^MASTER_' | paste -sd, -; }

# step LOG-PATTERN COMMAND...: a task per GPU; the first task that ends gives the others
# DAPO_GRACE_SECONDS (--kill-on-bad-exit would not wait). With STEP_SECONDS, no longer than that.
step() {
    local log=$1 limit=(); shift
    [[ -n ${STEP_SECONDS:-} ]] && limit=(timeout -k 30 "$STEP_SECONDS")
    # Or variables that the image sets win.
    [[ -n ${DAPO_CONTAINER:-} ]] && STEP_OPTIONS+=("--container-env=$(env_names)")
    # Bash before 4.4 takes an empty array for an unset one.
    exec ${limit[@]+"${limit[@]}"} srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$TASKS" \
        --cpus-per-task="$DAPO_CPUS_PER_TASK" --distribution=block --kill-on-bad-exit=0 \
        --wait="${DAPO_GRACE_SECONDS:-20}" --output="$log" \
        ${STEP_OPTIONS[@]+"${STEP_OPTIONS[@]}"} "$@"
}

# Where the ranks meet. Never localhost: each node would wait for itself.
choose_rendezvous() {
    MASTER_ADDR=${NODES[0]}
    if [[ -n ${DAPO_INTERFACE:-} ]]; then
        MASTER_ADDR=$(srun --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" \
            ip -4 -o addr show dev "$DAPO_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
        [[ -n $MASTER_ADDR ]] || refuse "DAPO_INTERFACE: ${NODES[0]} has no address on" \
            "$DAPO_INTERFACE; 'ip -4 addr' on a compute node shows its interfaces"
    fi
    # Below the range the kernel gives to outgoing connections; another one at each start, since
    # what is left of the last may still hold its own. The check before training takes the next.
    local start=$((SLURM_JOB_ID + 1009 * ${SLURM_RESTART_COUNT:-0}))
    MASTER_PORT=$((${DAPO_PORT_BASE:-20000} + 2 * (start % 5000)))
    # Ranks prove to each other that they know it, so that no other process joins. It reaches tasks
    # through the environment, never on a command line, which every user of a node can read.
    DAPO_MEGATRON_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
    export MASTER_ADDR MASTER_PORT DAPO_MEGATRON_SECRET
    say "ranks meet at $MASTER_ADDR:$MASTER_PORT"
}

# ------------------------------------------------------------------ chains and bad nodes

# Jobs that go on after this one: pending, of the same name and command, waiting as singletons.
next_of_chain() {
    local command id dependency theirs
    command=$(squeue -h -j "$SLURM_JOB_ID" -o %o)
    squeue -h -u "$(id -un)" -n "$SLURM_JOB_NAME" -t PD -o '%i|%E|%o' |
        while IFS='|' read -r id dependency theirs; do
            [[ $dependency == *singleton* && $theirs == "$command" ]] && echo "$id"
        done
}

end_chain() {
    local rest; mapfile -t rest < <(next_of_chain)
    ((${#rest[@]})) || return 0
    say "cancelled the rest of the chain: ${rest[*]}"
    scancel "${rest[@]}"
}

# exclude JOB NODES: these as well, beside those that its own --exclude names.
exclude() {
    local theirs
    theirs=$(scontrol show job "$1" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
    [[ $theirs == '(null)' ]] && theirs=
    scontrol update JobId="$1" ExcNodeList="${theirs:+$theirs,}$2"
}

known_bad_nodes() {
    local node
    sort -u "$LOGS/bad_nodes" | while read -r node; do
        if is_node "$node"; then
            echo "$node"
        elif [[ -n $node ]]; then
            say "$LOGS/bad_nodes: $node is no node's name; delete the line" >&2
        fi
    done
}

# leave_out NODES: remember bad nodes; with DAPO_EXCLUDE_BAD=1 the run goes on without them.
leave_out() {
    local list rest id
    printf '%s\n' "$@" >>"$LOGS/bad_nodes"
    list=$(known_bad_nodes | paste -sd, -)
    say "kept in $LOGS/bad_nodes; tell the cluster's administrators, then delete the lines"
    if [[ ${DAPO_EXCLUDE_BAD:-0} != 1 ]]; then
        say "start again without them: sbatch --exclude=$list ... (DAPO_EXCLUDE_BAD=1 does so itself)"
        return
    fi
    mapfile -t rest < <(next_of_chain)
    if ((${#rest[@]})); then
        for id in "${rest[@]}"; do exclude "$id" "$list"; done
        say "the next job of the chain, ${rest[0]}, goes on without $list"
        return
    fi
    # A running job cannot change its own list; one that is requeued can, while this script still
    # has KillWait seconds. A new job would not have all the options of this one.
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" || return
    if exclude "$SLURM_JOB_ID" "$list"; then
        say "requeued without $list"
    else
        say "Slurm does not exclude $list; cancelled, or it would begin there again"
        scancel "$SLURM_JOB_ID"
    fi
}
