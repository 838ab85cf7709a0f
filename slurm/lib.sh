# shellcheck shell=bash
# Functions of the job scripts: log folders, starting steps, chains of jobs, bad nodes.
# A job script sources it from the checkout and calls, in this order:
#   open_job NAME, check_tasks, use_program, choose_rendezvous, then `step ...`
# convert.sbatch needs neither check_tasks nor choose_rendezvous. Only train.sbatch has engines of
# their own.

# shellcheck disable=SC2034 # the scripts use them
readonly DONE=0 USER_ERROR=2 BAD_NODES=69 STOPPED=75

say() { printf '%(%F %T)T [%s] %s\n' -1 "${DAPO_MEGATRON_ATTEMPT:-}" "$*"; }
refuse() { say "error: $*"; exit $USER_ERROR; }

# Text from a file or a variable is checked before it is used in arithmetic, because there Bash
# would run the command in a text such as a[$(command)].
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }
is_node() { [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]]; }

# ------------------------------------------------------------------ the job and its folders

# By default only the job's user can read logs and run folder. DAPO_UMASK changes that.
set_umask() {
    local mask=${DAPO_UMASK:-077}
    [[ $mask =~ ^0?[0-7]{3}$ ]] || refuse "DAPO_UMASK: $mask; write three octal digits, such as 027"
    umask "$mask"
    export SLURM_UMASK=$mask # otherwise srun uses the umask of the shell that ran sbatch
}

check_numbers() {
    local name
    for name in "$@"; do
        [[ -z ${!name:-} ]] || is_number "${!name}" || refuse "$name: ${!name} is not a whole number"
    done
}

# Prints the variables for env.txt, without secrets, because users send logs to others. Addresses
# are printed without user:password@, ?query and #fragment.
public_environment() {
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

# Names this start, makes its log folder and sources env.sh.
open_job() {
    set_umask
    check_numbers DAPO_PORT_BASE DAPO_QUICK_SECONDS DAPO_MAX_QUICK_CRASHES SLURM_RESTART_COUNT \
        DAPO_ENGINE_STARTS DAPO_ENGINE_PAUSE DAPO_GUARD_SECONDS
    [[ ${DAPO_GUARD_SECONDS:-60} =~ [1-9] ]] ||
        refuse "DAPO_GUARD_SECONDS: 0; it must be a second at least"
    export DAPO_MEGATRON_ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
    cd "$DAPO_HOME" || exit $USER_ERROR # paths in a config are relative to it
    LOGS=${DAPO_LOGS:-slurm_logs}
    [[ $LOGS == /* ]] || LOGS=$DAPO_HOME/$LOGS
    JOB_LOGS=$LOGS/$SLURM_JOB_NAME
    ATTEMPT_LOGS=$JOB_LOGS/$DAPO_MEGATRON_ATTEMPT
    mkdir -p "$ATTEMPT_LOGS" || refuse "DAPO_LOGS: $LOGS cannot be written; name another folder"
    # Job ids are used again, and another user may have made the folder. An old verdict in it would
    # decide what happens after this start.
    [[ -O $ATTEMPT_LOGS && ! -L $ATTEMPT_LOGS ]] || refuse "DAPO_LOGS: $ATTEMPT_LOGS is a link or" \
        "belongs to another user; delete it, or name another folder"
    rm -f "$ATTEMPT_LOGS"/verdict*
    [[ -e $LOGS/.gitignore ]] || echo '*' >"$LOGS/.gitignore"
    ln -sfn "$DAPO_MEGATRON_ATTEMPT" "$JOB_LOGS/latest"
    export DAPO_MEGATRON_VERDICT=$ATTEMPT_LOGS/verdict
    TASKS=${SLURM_NTASKS_PER_NODE:-1}
    # The requested number comes first, because --exclusive allocates all GPUs of a node.
    GPUS=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
    GPUS=${GPUS##*:} # 8 of h100:8
    is_number "$GPUS" || refuse "--gpus-per-node: $GPUS; name one kind of GPU, such as h100:8"
    # Each start makes its own.
    unset DAPO_MEGATRON_SECRET DAPO_MEGATRON_SECRET_FILE DAPO_MEGATRON_ENGINES
    export DAPO_CPUS_PER_TASK=$((SLURM_CPUS_ON_NODE / TASKS > 0 ? SLURM_CPUS_ON_NODE / TASKS : 1))
    # shellcheck source=slurm/env.sh
    source "$DAPO_HOME/slurm/env.sh"
    public_environment >"$ATTEMPT_LOGS/env.txt"
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    say "$1 on ${#NODES[@]} nodes (${NODES[*]}), $TASKS tasks each; logs in $ATTEMPT_LOGS"
}

# Requires one task per GPU: fewer tasks would leave GPUs idle, more would share them.
check_tasks() {
    ((GPUS == 0 || GPUS == TASKS)) || refuse "--ntasks-per-node=$TASKS with $GPUS GPUs per node:" \
        "there is one task per GPU; use --ntasks-per-node=$GPUS or --gpus-per-node=$TASKS"
}

# split_nodes: with DAPO_ENGINES=RxG, for R engines of G GPUs each (or G tasks without GPUs), sets
# ENGINE_NODES to the last nodes, which have the engines, and POLICY_NODES to the others.
split_nodes() {
    POLICY_NODES=("${NODES[@]}") ENGINE_NODES=()
    [[ -n ${DAPO_ENGINES:-} ]] || return 0
    local replicas=${DAPO_ENGINES%%x*} size=${DAPO_ENGINES#*x} num
    { [[ $DAPO_ENGINES == *x* ]] && is_number "$replicas" && is_number "$size"; } ||
        refuse "DAPO_ENGINES: $DAPO_ENGINES; write engine.replicas, x and engine.tensor_parallel," \
            "such as 4x8 (slurm/submit.py sets it)"
    ((replicas > 0 && size > 0 && TASKS % size == 0 && replicas * size % TASKS == 0)) ||
        refuse "DAPO_ENGINES: $DAPO_ENGINES on nodes of $TASKS tasks; a node has trainers or engines," \
            "and an engine is on one node: change engine.replicas or engine.tensor_parallel"
    num=$((replicas * size / TASKS))
    ((num < ${#NODES[@]})) || refuse "DAPO_ENGINES: $DAPO_ENGINES takes $num nodes, and the job has" \
        "only ${#NODES[@]}"
    POLICY_NODES=("${NODES[@]:0:${#NODES[@]}-num}") ENGINE_NODES=("${NODES[@]: -num}")
    ENGINE_TASKS=$((TASKS / size)) # of a node
    export DAPO_RUN_OVER=$ATTEMPT_LOGS/over
    rm -f "$DAPO_RUN_OVER"
    say "policy on ${POLICY_NODES[*]}, engines on ${ENGINE_NODES[*]}"
}

# ------------------------------------------------------------------ starting steps

# Sets PROGRAM, the command with which a task runs Python, and STEP_OPTIONS, options of srun.
use_program() {
    local mounts=$DAPO_HOME:$DAPO_HOME
    [[ $LOGS == "$DAPO_HOME"/* ]] || mounts+=,$LOGS:$LOGS # for the verdict file and the nodes' reports
    mounts+=${DAPO_MOUNTS:+,$DAPO_MOUNTS}
    STEP_OPTIONS=()
    if [[ -n ${DAPO_CONTAINER:-} ]]; then
        # Not in the header, because pyxis would then run this script, which needs srun, inside the
        # container.
        STEP_OPTIONS=(
            "--container-image=$DAPO_CONTAINER"
            "--container-mounts=$mounts"
            "--container-workdir=$DAPO_HOME"
            --no-container-mount-home # packages in ~/.local would shadow those of the image
        )
        PROGRAM=("${DAPO_PYTHON:-python3}")
    elif [[ -n ${DAPO_APPTAINER:-} ]]; then
        [[ -e $DAPO_APPTAINER ]] || refuse "DAPO_APPTAINER: no file $DAPO_APPTAINER;" \
            "'apptainer build' makes one"
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

# Prints the names of variables that must keep the job's values in a container, comma-separated.
env_names() { compgen -e | grep -E '^(NCCL|GLOO|TORCH|UCX|OMP|VLLM|DAPO)_|^MASTER_' | paste -sd, -; }

# step LOG COMMAND...: runs COMMAND as one task per GPU, on all nodes or on STEP_NODES. When
# the first task ends, the others have DAPO_GRACE_SECONDS to end (--kill-on-bad-exit would not wait).
# STEP_SECONDS limits the step. LOG is a file name in which srun replaces %N and %t.
step() {
    local log=$1 limit=() nodes; shift
    [[ -v STEP_NODES ]] || local STEP_NODES=("${NODES[@]}")
    nodes=$(IFS=,; echo "${STEP_NODES[*]}")
    [[ -n ${STEP_SECONDS:-} ]] && limit=(timeout -k 30 "$STEP_SECONDS")
    # Without --overlap, a step that is requested while the one before it still ends sometimes waits
    # for 60 s. Without --container-env, variables of the image would override those of the job.
    [[ -n ${DAPO_CONTAINER:-} ]] && STEP_OPTIONS+=("--container-env=$(env_names)")
    # Slurm does not know which CPUs are near a task's GPU, and by default alternates sockets. Ranks
    # and engines bind themselves (dapo_megatron/cluster/processes.py).
    # Bash before 4.4 treats an empty array as unset.
    exec ${limit[@]+"${limit[@]}"} srun --overlap --nodes="${#STEP_NODES[@]}" --nodelist="$nodes" \
        --ntasks="$((TASKS * ${#STEP_NODES[@]}))" --ntasks-per-node="$TASKS" \
        --cpus-per-task="$DAPO_CPUS_PER_TASK" --cpu-bind=none --distribution=block \
        --kill-on-bad-exit=0 --wait="${DAPO_GRACE_SECONDS:-20}" \
        --output="${ATTEMPT_LOGS//%/%%}/$log" \
        ${STEP_OPTIONS[@]+"${STEP_OPTIONS[@]}"} "$@"
}

# Chooses the address where ranks meet. Never localhost, because each node would wait for itself.
choose_rendezvous() {
    MASTER_ADDR=${NODES[0]}
    if [[ -n ${DAPO_INTERFACE:-} ]]; then
        MASTER_ADDR=$(srun --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" \
            ip -4 -o addr show dev "$DAPO_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
        [[ -n $MASTER_ADDR ]] || refuse "DAPO_INTERFACE: ${NODES[0]} has no address on" \
            "$DAPO_INTERFACE; 'ip -4 addr' on a compute node shows its interfaces"
    fi
    # A port below the range that the kernel uses for outgoing connections. Each start takes another
    # one, because processes of the last start may still hold theirs. The node check uses the next,
    # and after it rank 0, for engines on other nodes.
    local start=$((SLURM_JOB_ID + 1009 * ${SLURM_RESTART_COUNT:-0}))
    MASTER_PORT=$((${DAPO_PORT_BASE:-20000} + 2 * (start % 5000)))
    # Ranks prove to each other that they know the secret, so that no other process can join. Tasks
    # get it in the environment, because every user of a node can read command lines.
    DAPO_MEGATRON_SECRET=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
    export MASTER_ADDR MASTER_PORT DAPO_MEGATRON_SECRET
    say "ranks meet at $MASTER_ADDR:$MASTER_PORT"
}

# ------------------------------------------------------------------ chains and bad nodes

# Prints the next jobs of the chain: pending singletons with the same name and command.
next_of_chain() {
    local command id dependency other_command
    command=$(squeue -h -j "$SLURM_JOB_ID" -o %o)
    squeue -h -u "$(id -un)" -n "$SLURM_JOB_NAME" -t PD -o '%i|%E|%o' |
        while IFS='|' read -r id dependency other_command; do
            [[ $dependency == *singleton* && $other_command == "$command" ]] && echo "$id"
        done
}

end_chain() {
    local rest; mapfile -t rest < <(next_of_chain)
    ((${#rest[@]})) || return 0
    say "cancelling the rest of the chain: ${rest[*]}"
    scancel "${rest[@]}"
}

# exclude JOB NODES: adds NODES to the excluded nodes of JOB.
exclude() {
    local excluded
    excluded=$(scontrol show job "$1" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p')
    [[ $excluded == '(null)' ]] && excluded=
    scontrol update JobId="$1" ExcNodeList="${excluded:+$excluded,}$2"
}

known_bad_nodes() {
    local node
    sort -u "$LOGS/bad_nodes" | while read -r node; do
        if is_node "$node"; then
            echo "$node"
        elif [[ -n $node ]]; then
            say "$LOGS/bad_nodes: $node is not the name of a node; delete the line" >&2
        fi
    done
}

# leave_out NODES: records bad nodes. With DAPO_EXCLUDE_BAD=1 the run continues without them.
leave_out() {
    local list rest id
    printf '%s\n' "$@" >>"$LOGS/bad_nodes"
    list=$(known_bad_nodes | paste -sd, -)
    say "recorded in $LOGS/bad_nodes; report them to the administrators, then delete the lines"
    if [[ ${DAPO_EXCLUDE_BAD:-0} != 1 ]]; then
        say "start again without them: sbatch --exclude=$list ..." \
            "(DAPO_EXCLUDE_BAD=1 does it automatically)"
        return
    fi
    mapfile -t rest < <(next_of_chain)
    if ((${#rest[@]})); then
        for id in "${rest[@]}"; do exclude "$id" "$list"; done
        say "the next job of the chain, ${rest[0]}, continues without $list"
        return
    fi
    # A running job cannot change its excluded nodes. A requeued job can, and this script still has
    # KillWait seconds for it. A new job would not have all options of this one.
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" || return
    if exclude "$SLURM_JOB_ID" "$list"; then
        say "requeued without $list"
    else
        say "Slurm does not exclude $list; cancelling, because the job would start there again"
        scancel "$SLURM_JOB_ID"
    fi
}
