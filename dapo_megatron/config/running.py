"""Config sections of the runtime: run folder, sync, checkpoints, watchdog, preflight, tracking."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dapo_megatron.config.section import (
    WEEK_SECONDS,
    Count,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    WholeNumber,
)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder is `run.directory/run.name`."""
    directory: str = "runs"
    """Parent folder of run folders."""
    processes: Processes = 1
    """Number of ranks of the policy. `train` starts them on this machine if no launcher has."""
    stop_seconds: Seconds = 240.0
    """Time to finish training on the current step and to save a checkpoint after SIGUSR1 or
    SIGTERM. After it the run exits, saved or not."""


class SyncConfig(Section):
    max_gap: Positive
    """Largest allowed |log-prob by engine - log-prob by policy|. It is checked on all tokens that a
    step sampled with its newest weights, before the first update. A larger gap stops the run and
    names the engine. About 1e-5 in float32; bfloat16 needs more."""
    max_mean_gap: Positive | None = None
    """Largest allowed mean gap over these tokens, of each engine. null: no limit. In a healthy run
    in bfloat16 or FP8 a few of millions of tokens differ by nats; then set this limit, and leave
    max_gap high enough to catch only gross errors."""
    fingerprint_every: Count = 1
    """Syncs from one comparison of all weights of policy and engines to the next. The first sync
    after a start, and after an engine joined or left, always compares them. In bfloat16 small
    faults (one flipped bit, two swapped experts) are seen by no other check."""


class CheckpointConfig(Section):
    every: WholeNumber = 10
    """Rollout steps between checkpoints. A checkpoint is always saved after the last step. 0: only
    then."""
    max_minutes: Annotated[float, Field(gt=0.0, le=WEEK_SECONDS / 60)] | None = None
    """Also save when the last save started this many minutes ago. null: save only by steps."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count | None = None
    """Also keep every checkpoint whose step is a multiple of this. null: keep only the newest."""
    export_hf: bool = False
    """Also write each checkpoint as an HF folder."""


class WatchdogConfig(Section):
    """Timeout without a heartbeat, in seconds, for each phase. At the timeout every rank dumps its
    stacks to its log, ranks that do not respond are named, and the job ends (so that Slurm can
    requeue it). In generation and evaluation there is a heartbeat at every exchange between
    replicas; in other phases at the start and at every mini-batch."""

    start: Seconds = 3600.0
    """Loading data, building engine and policy, the first sync."""
    generate: Seconds = 900.0
    evaluate: Seconds = 900.0
    logprobs: Seconds = 1800.0
    update: Seconds = 1800.0
    """Timeout of one mini-batch."""
    sync: Seconds = 900.0
    checkpoint: Seconds = 3600.0
    """Timeout of waiting for the disk."""
    other: Seconds = 900.0
    """Work between the phases (ledger, metrics, samples, joining of engines), and waiting for a
    rank that does it."""


class PreflightConfig(Section):
    """Requirements of `doctor nodes` on nodes and network. Bandwidths are in GB/s per GPU (bus
    bandwidth as defined by nccl-tests, 1e9 bytes); null: report without a limit. Published values
    for all-reduce on H100 nodes with eight 400 Gb/s ports each are 400 to 450. Set the values
    measured on your own cluster, less 15%."""

    command: str | None = None
    """The cluster's own check, such as `dcgmi diag -r 1`: a bash command that runs once on each
    node before its GPUs are used. A node where it exits with another code than 0 is bad."""
    check_seconds: Seconds = 120.0
    """Timeout of `command` and of nvidia-smi."""
    min_gbps_all_reduce: NonNegative | None = None
    min_gbps_all_to_all: NonNegative | None = None
    max_clock_skew_seconds: NonNegative = 1.0
    min_free_disk_gib: NonNegative = 2.0
    """Free space in run.directory. `slurm/submit.py --dry-run` prints the size of a checkpoint."""


class TrackingConfig(Section):
    mlflow: bool = True
    wait_seconds: Annotated[float, Field(ge=0.0, le=WEEK_SECONDS)] = 30.0
    """Seconds to wait at the end of a run until MLflow has all its data (at most 3 s if the run
    failed or was stopped). Remaining data is sent at the next start, or by `track`."""
    record_routes: bool = False
    """Record in samples/ the experts of each token that policy.router_replay engine uses. A replay
    of the run needs them. They may be larger than everything else that is recorded."""
    experiment: str = "dapo_megatron"
    samples: bool = True
    """Record every rollout in samples/ and log it as an MLflow artifact. A run that is killed then
    trains again on what it recorded after its last checkpoint, instead of sampling it again."""
    inspected_groups: WholeNumber = 4
    """Number of groups per step for which the policy's log-prob and entropy of every token are
    written next to the samples, for the report."""
    timeline_every: WholeNumber = 10
    """Steps from one recorded timeline (the activity of ranks and replicas over time) to the next.
    The first step after a start is always recorded. 0: no timelines."""
    report: bool = True
    """Write report.html at the end of the run and log it as an MLflow artifact."""
