# shellcheck shell=bash
# Settings of NCCL, InfiniBand, torch, CUDA and vLLM for the job scripts, each with its reason.
# A value from the environment wins: `NCCL_DEBUG=INFO sbatch slurm/train.sbatch ...`. Settings of a
# whole cluster belong in its /etc/nccl.conf. Default values are not set here.
#
# Many scripts set variables that are for debugging only. Never use these in production:
# NCCL_IB_DISABLE, NCCL_P2P_DISABLE, NCCL_BLOCKING_WAIT, CUDA_LAUNCH_BLOCKING, and NCCL_IB_TIMEOUT
# of 32 or more (infinite: a lost link is never reported). NCCL_IB_GID_INDEX and NCCL_IB_TC are for
# RoCE only.

keep() { # NAME VALUE: exports NAME, with VALUE if it is not set
    [[ -v $1 ]] || printf -v "$1" '%s' "$2"
    export "${1?}"
}

# --- network. DAPO_INTERFACE: the network the compute nodes share (ib0, bond0, ...)
if [[ -n ${DAPO_INTERFACE:-} ]]; then
    keep NCCL_SOCKET_IFNAME "=$DAPO_INTERFACE" # NCCL might choose an interface that does not route
    keep GLOO_SOCKET_IFNAME "$DAPO_INTERFACE"  # the same for gloo, which does not know "="
fi
# has_infiniband FOLDER: whether a port in it is of InfiniBand, with NVIDIA's driver. AWS EFA and
# RoCE are in the same folder; EFA needs its plugin, and RoCE settings of the cluster.
has_infiniband() {
    local port
    for port in "$1"/*/ports/*; do
        [[ $(readlink "${port%/ports/*}/device/driver") == */mlx5_core ]] &&
            [[ $(<"$port/link_layer") == InfiniBand ]] && return
    done
    return 1
}
if ((${SLURM_JOB_NUM_NODES:-1} > 1)) && has_infiniband /sys/class/infiniband; then
    keep NCCL_NET IB # a broken fabric fails at once; the fallback network is 20 times slower
fi
# NCCL_IB_HCA="=mlx5_0,mlx5_3": set it to exclude a storage adapter; "=" makes names exact.
# NCCL_IB_TIMEOUT=22: two minutes instead of half a minute, for fabrics that reroute slowly.

# --- NCCL and the engine share GPUs
# Trainer and engine need the same value, or groups of both fail. With 1, syncs into vLLM have hung.
keep NCCL_CUMEM_ENABLE 0
# NVLS buffers would occupy GPU memory, which the engine and the policy use in turns. It is said to
# be worth a tenth of tensor-parallel communication: measure with 1.
keep NCCL_NVLS_ENABLE 0

# --- diagnosis of hangs
keep VLLM_LOGGING_LEVEL INFO                               # kernels that it chose, memory that it measured
keep NCCL_DEBUG WARN                                       # errors with their cause; INFO floods the logs
keep NCCL_DEBUG_FILE "${ATTEMPT_LOGS:-.}/nccl.%h.%p"       # one file per process, not all in one
keep TORCH_FR_BUFFER_SIZE 2000                             # flight recorder: the last collectives of each rank
keep TORCH_NCCL_DUMP_ON_TIMEOUT 1                          # write it when a collective times out
# Not in /tmp of a node, which is lost after the job. Engines append their number.
keep TORCH_FR_DUMP_TEMP_FILE "${ATTEMPT_LOGS:-.}/flight_"
keep TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC 3600                 # above the longest legal pause; the run's own watchdog is stricter

# --- processes
# Only with 1 connection can Megatron overlap tensor-parallel collectives with computation.
keep CUDA_DEVICE_MAX_CONNECTIONS 1
# With context parallelism half of the ranks would compile five small operations, again for new
# shapes, while the others wait.
keep NVTE_TORCH_COMPILE 0
# Otherwise every rank uses all cores.
keep OMP_NUM_THREADS $((${DAPO_CPUS_PER_TASK:-1} < 16 ? ${DAPO_CPUS_PER_TASK:-1} : 16))
keep TOKENIZERS_PARALLELISM false  # its threads do not survive in the processes that grade
keep PYTHONFAULTHANDLER 1          # a crash in C leaves the Python stack
keep PYTHONUNBUFFERED 1            # the last lines of a killed rank are in its log
keep PYTHONNOUSERSITE 1            # packages in ~/.local shadow those of the environment

# The program sets what vLLM needs with or without a GPU (engine/device.py), and the folders of
# compile caches on each node (cluster/scratch.py). There, too, values from the environment such as
# TRITON_CACHE_DIR win.
