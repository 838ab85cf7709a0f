"""Running on real machines: the run's folder, syncs, checkpoints, watchdog, preflight, tracking."""

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
    """Where run folders are made."""
    processes: Processes = 1
    """Ranks that `train` starts on this machine when no launcher has started them."""
    stop_seconds: Seconds = 240.0
    """SIGUSR1 or SIGTERM: save and exit within this time; then exit, saved or not."""


class SyncConfig(Section):
    max_gap: Positive
    """Largest |log-prob by engine - by policy| allowed on a step's fresh tokens, and on fixed
    sequences after each sync; above, the run stops. About 1e-5 in float32; bfloat16 needs more."""
    max_mean_gap: Positive | None = None
    """Largest mean of it allowed over a step's fresh tokens; null: not judged. Among millions of
    tokens in bfloat16 or FP8 a few are off by nats in a healthy run: then this is what to go by,
    and max_gap is for the grossest faults."""
    fingerprint_every: Count | None = None
    """Syncs from one comparison of all weights in policy and engines to the next; null: 1 for
    models of up to 200 million parameters, else 10. The first after a start or resume always."""
    canary_tokens: Annotated[int, Field(ge=2, le=65_536)] = 32
    """Length of each of the fixed sequences."""


class CheckpointConfig(Section):
    every: WholeNumber = 10
    """Rollout steps between checkpoints; 0: only after the last step."""
    max_minutes: Annotated[float, Field(gt=0.0, le=WEEK_SECONDS / 60)] | None = None
    """Save also when the last save began so long ago; null: by steps alone."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    keep_every: Count | None = None
    """Beside them, every checkpoint whose step is a multiple of this is kept; null: none."""
    export_hf: bool = False
    """Also write each checkpoint as an HF folder."""


class WatchdogConfig(Section):
    """Seconds without a sign of life, by phase: then every rank writes down where it is, the ranks
    that do not are named, and the job ends (so that Slurm can requeue it). Generation and
    evaluation give one at every exchange between replicas, the other phases at their begin and at
    every mini-batch."""

    start: Seconds = 3600.0
    """Loading data, building engine and policy, the first sync."""
    generate: Seconds = 900.0
    evaluate: Seconds = 900.0
    logprobs: Seconds = 1800.0
    update: Seconds = 1800.0
    """Of one mini-batch."""
    sync: Seconds = 900.0
    checkpoint: Seconds = 3600.0
    """Waiting for the disk."""
    other: Seconds = 900.0
    """Between these: books, metrics, samples, and waiting for a rank that is at them."""


class PreflightConfig(Section):
    """What `doctor nodes` asks of nodes and network. Floors are GB/s per GPU (nccl-tests' bus
    bandwidth, 1e9 bytes); null: told, not judged. Third parties publish 400 to 450 for all-reduce
    on H100 nodes with eight 400 Gb/s ports each; take your own cluster's figure, less 15%."""

    min_gbps_pair: NonNegative | None = None
    """From each GPU of one node to its counterpart on another; a 400 Gb/s port carries 50."""
    min_gbps_all_reduce: NonNegative | None = None
    min_gbps_all_to_all: NonNegative | None = None
    max_clock_skew_seconds: NonNegative = 1.0
    min_free_disk_gib: NonNegative = 2.0
    """Of run.directory; `slurm/submit.py --dry-run` tells the size of a checkpoint."""
    check_seconds: Seconds = 30.0
    """Time limit of each look at a node: nvidia-smi, a disk, the others' files."""
    max_seconds: Seconds = 240.0
    """Time limit of the whole; then nodes that said nothing are bad."""


class TrackingConfig(Section):
    mlflow: bool = True
    wait_seconds: Annotated[float, Field(ge=0.0, le=WEEK_SECONDS)] = 30.0
    """When a run has finished, wait so long for MLflow to get all of it (3 s at most when it failed
    or was stopped). The rest is sent at the next start, or by `track`."""
    experiment: str = "dapo_megatron"
    samples: bool = True
    """Write every rollout to samples/ and keep it as an artifact."""
    inspected_groups: WholeNumber = 4
    """Groups trained on in a step whose every token's log-prob and entropy by the policy are kept
    beside the samples, for the report."""
    timeline_every: WholeNumber = 10
    """Steps from one recorded timeline (who did what when, over ranks and replicas) to the next;
    the first of a start always; 0: none."""
    report: bool = True
    """Write report.html at the end of the run and keep it as an artifact."""
