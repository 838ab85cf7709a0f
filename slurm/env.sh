# shellcheck shell=bash
# Settings of NCCL, InfiniBand, torch, CUDA and vLLM for the job scripts, each with its reason.
# A value from outside wins: `NCCL_DEBUG=INFO sbatch slurm/train.sbatch ...`. What a whole cluster
# needs belongs in its /etc/nccl.conf. Nothing is set here that is the default already.
#
# Never in production, though many scripts have them from somebody's debugging: NCCL_IB_DISABLE,
# NCCL_P2P_DISABLE, NCCL_BLOCKING_WAIT, CUDA_LAUNCH_BLOCKING, and NCCL_IB_TIMEOUT of 32 or more
# (infinite: a lost link is never reported). NCCL_IB_GID_INDEX and NCCL_IB_TC are for RoCE alone.

keep() { # NAME VALUE: export NAME, with VALUE if it has none
    [[ -v $1 ]] || printf -v "$1" '%s' "$2"
    export "${1?}"
}

# --- network. DAPO_INTERFACE: the network the compute nodes share (ib0, bond0, ...)
if [[ -n ${DAPO_INTERFACE:-} ]]; then
    keep NCCL_SOCKET_IFNAME "=$DAPO_INTERFACE" # by itself it may start on one that does not route
    keep GLOO_SOCKET_IFNAME "$DAPO_INTERFACE"  # the same for gloo, which knows no "="
fi
if ((${SLURM_JOB_NUM_NODES:-1} > 1)) && compgen -G '/sys/class/infiniband/*' >/dev/null; then
    keep NCCL_NET IB # a broken fabric fails at once, and does not fall back to a network 20 times slower
fi
# NCCL_IB_HCA="=mlx5_0,mlx5_3": set it where a storage adapter must be kept out; "=" makes names exact.
# NCCL_IB_TIMEOUT=22: two minutes, not half a one, for fabrics that take long to find another route.

# --- NCCL and the engine share GPUs
keep NCCL_CUMEM_ENABLE 0 # one value for trainer and engine, or groups of both fail; with 1, syncs into vLLM have hung
keep NCCL_NVLS_ENABLE 0  # its buffers are memory of the GPU, which the engine and the policy take in turns

# --- what a hang leaves behind
keep NCCL_DEBUG WARN                                       # errors with their cause; INFO floods the logs
keep NCCL_DEBUG_FILE "${ATTEMPT_LOGS:-.}/nccl.%h.%p"       # one file per process, not all in one
keep TORCH_FR_BUFFER_SIZE 2000                             # flight recorder: the last collectives of each rank
keep TORCH_NCCL_DUMP_ON_TIMEOUT 1                          # it is written when a collective times out
keep TORCH_FR_DUMP_TEMP_FILE "${ATTEMPT_LOGS:-.}/flight_"  # here, not in /tmp of a node that is given away
keep TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC 3600                 # above the longest legal pause; the run's own watchdog is stricter

# --- processes
keep CUDA_DEVICE_MAX_CONNECTIONS 1 # Megatron overlaps tensor parallelism with its collectives in this order alone
keep OMP_NUM_THREADS $((${DAPO_CPUS_PER_TASK:-1} < 16 ? ${DAPO_CPUS_PER_TASK:-1} : 16)) # else every rank takes all cores
keep TOKENIZERS_PARALLELISM false  # its threads do not survive in the processes that grade
keep PYTHONFAULTHANDLER 1          # a crash in C leaves the Python stack
keep PYTHONUNBUFFERED 1            # the last lines of a killed rank are in its log
keep PYTHONNOUSERSITE 1            # packages in ~/.local shadow those of the environment

# What vLLM must have on a GPU or without one, the program sets (engine/device.py); and the folders of
# compile caches, on each node (cluster/scratch.py). TRITON_CACHE_DIR and the like from outside win there, too.
