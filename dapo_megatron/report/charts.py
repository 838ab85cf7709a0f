"""Definitions of the report's charts: metrics, labels and help texts. figures.py draws them."""

from __future__ import annotations

from functools import partial

import pandas as pd

from dapo_megatron.report import groups, phases
from dapo_megatron.report.chart import Chart
from dapo_megatron.report.groups import DECIDED, FORECAST, IN_WORDS, KEPT
from dapo_megatron.report.phases import (
    COLORS,
    ENGINES_WAIT,
    GENERATE,
    IDLE,
    LABELS,
    MOVED,
    PLANNED,
    POLICY_WAITS,
    REST,
)
from dapo_megatron.report.run_data import RunData, frame_of
from dapo_megatron.types import STEP_PHASES

_training = partial(Chart, "dynamics")
_groups = partial(Chart, "groups")
_time = partial(Chart, "time")

_PHASES = {
    {"generate": GENERATE, "rest": REST}.get(phase, f"time/{phase}"): phase for phase in COLORS
}

CHARTS: list[Chart] = [
    _training(
        "evaluation",
        "Accuracy on held-out problems",
        "The metric that counts: accuracy on problems never trained on, each answered several "
        "times. Whiskers are 95% intervals.",
        "mean accuracy",
        {},
        ".0%",
        ("aime_avg",),
        ("avg@",),
    ),
    _training(
        "accuracy",
        "Accuracy while training",
        "Share of right answers over all groups decided in the step, and share of groups in which "
        "every answer is right. Such groups have no gradient.",
        "share",
        {"accuracy/raw": "answers right", "accuracy/perfect_fraction": "groups all right"},
        ".0%",
        ("perfect",),
    ),
    _training(
        "evaluation_best_and_vote",
        "Best of k and majority of k",
        "pass@k: at least one of k answers is right. cons@k: the most frequent of k answers is "
        "right.",
        "share of problems",
        {},
        ".0%",
        ("aime_pass", "aime_cons"),
        ("pass@", "cons@"),
    ),
    _training(
        "reward",
        "Reward",
        "Mean reward of the answers, including length penalties. 1 is right, -1 is wrong.",
        "reward",
        {"reward/mean": "mean reward"},
        "",
        ("reward",),
    ),
    _training(
        "length",
        "Response length",
        "Growth together with accuracy is a good sign. Growth without it, or up to the limit, is "
        "not.",
        "tokens",
        {"response_tokens/mean": "mean", "response_tokens/max": "longest"},
        "",
        ("length",),
    ),
    _training(
        "too_long",
        "Answers too long",
        "Share of answers truncated at the token limit, and of answers with a soft length penalty.",
        "share of answers",
        {
            "response_tokens/clipped_fraction": "cut off",
            "overlong/penalised_fraction": "penalized",
            "overlong/filtered_fraction": "excluded from the loss",
        },
        ".1%",
    ),
    _training(
        "entropy",
        "Entropy",
        "Uncertainty of the policy about its next token. If it falls to nearly 0, the policy no "
        "longer explores. Clip-higher prevents this collapse.",
        "nats per token",
        {"policy/entropy": "entropy", "policy/entropy_bonus": "bonus in the loss"},
        "",
        ("entropy", "entropy_collapse"),
    ),
    _training(
        "probability",
        "Probability of the sampled tokens",
        "Mean probability of the sampled tokens under the policy. It falls when entropy rises.",
        "probability",
        {"policy/mean_prob": "mean"},
        "",
        ("probability",),
    ),
    _training(
        "clipping",
        "Clipped tokens",
        "Share of tokens whose probability ratio left the clip range: up (more likely than when "
        "sampled) and down (less likely). They have no gradient, except with CISPO.",
        "share of tokens",
        {
            "policy/clip_fraction_high": "up",
            "policy/clip_fraction_low": "down",
            "policy/dual_clip_fraction": "dual clip",
        },
        ".2%",
    ),
    _training(
        "gate",
        "Soft gate",
        "Mean of SAPO's gate over the tokens: the share of its gradient that a token keeps. 1 "
        "means that the policy has not moved within the step.",
        "mean gate",
        {"policy/gate": "gate"},
        ".3f",
    ),
    _training(
        "movement",
        "Movement of the policy",
        "Approximate KL divergence between the source of old log-probs (loss.old_logprobs) and the "
        "policy being updated.",
        "nats per token",
        {"policy/approx_kl": "approx. KL"},
    ),
    _training(
        "reference_kl",
        "KL to the reference",
        "Estimated KL to the reference of loss.kl, share of clamped tokens, and mean penalty.",
        "nats, or share, log scale",
        {
            "kl/reference": "KL per token",
            "kl/clamped_fraction": "clamped tokens",
            "policy/kl_penalty": "added to the loss",
            "kl/reward_penalty": "subtracted from the reward",
        },
        log=True,
    ),
    _training(
        "gradient",
        "Gradient norm",
        "Norm before clipping, mean over the step's updates. Check updates with peaks.",
        "norm",
        {"policy/grad_norm": "gradient norm"},
    ),
    _training(
        "loss",
        "Loss",
        "Policy-gradient losses stay near 0 and need not fall. Only jumps matter.",
        "loss",
        {"policy/loss": "loss"},
    ),
    _training(
        "mismatch",
        "Engine against policy",
        "|engine log-prob - policy log-prob| of the same tokens under the same weights. It should "
        "be rounding error. If it grows, the engine samples from a different policy.",
        "nats, log scale",
        {
            "mismatch/gap_mean": "mean gap",
            "mismatch/gap_max": "largest gap",
            "mismatch/kl": "KL",
        },
        ".0e",
        (),
        log=True,
    ),
    _training(
        "router",
        "Experts overridden by router replay",
        "Share of tokens and layers in which the policy's router would have chosen other experts "
        "than the replayed ones.",
        "share",
        {"router/changed": "overridden"},
        ".2%",
    ),
    _training(
        "correction",
        "Correction for stale samples",
        "Mean weight of truncated importance sampling, and the share of tokens at its cap.",
        "weight, or share of tokens",
        {"policy/tis_weight": "mean weight", "policy/tis_capped_fraction": "at the cap"},
    ),
    _training(
        "masked",
        "Masked by corrections",
        "Share of tokens and completions that loss.correction takes out of the loss, the share "
        "outside each of its bounds, and the effective sample size of the weights, masks included.",
        "share",
        {
            "correction/masked_tokens": "masked tokens",
            "correction/masked_sequences": "masked completions",
            "correction/effective_sample_share": "effective sample size",
            "correction/outside/sequence_mean": "outside sequence_mean",
            "correction/outside/sequence_product": "outside sequence_product",
            "correction/outside/worst_token": "outside worst_token",
            "correction/outside/token_band": "tokens outside token_band",
            "correction/outside/sequence_tis_cap": "at sequence_tis_cap",
        },
        ".1%",
    ),
    _training(
        "ratios",
        "Ratios of policy and engine",
        "Probability by the policy / by the engine before the step's updates: the 1% and 99% "
        "quantiles over tokens, over completions (geometric mean of their tokens), and over the "
        "products of whole completions.",
        "ratio, log scale",
        {
            "correction/token_ratio_p01": "token, 1%",
            "correction/token_ratio_p99": "token, 99%",
            "correction/sequence_mean_ratio_p01": "geometric mean, 1%",
            "correction/sequence_mean_ratio_p99": "geometric mean, 99%",
            "correction/sequence_product_ratio_p01": "product, 1%",
            "correction/sequence_product_ratio_p99": "product, 99%",
        },
        ".3g",
        log=True,
    ),
    _training(
        "learning_rate",
        "Learning rate",
        "Learning rate of the step's last update.",
        "learning rate",
        {"policy/lr": "learning rate"},
        ".1e",
    ),
    _groups(
        "groups_fates",
        "What became of the prompts",
        "Groups that ended in each step. Only mixed groups, with right and wrong answers, have a "
        "gradient. The line shows groups carried to the next step.",
        "groups",
        {
            **{f"groups/{outcome}": IN_WORDS[outcome] for outcome in groups.OUTCOMES},
            "groups/carried": "carried on",
        },
        stacked=True,
        lines=("groups/carried",),
    ),
    _groups(
        "groups_keep_rate",
        "Keep rate",
        "Share of decided groups that are mixed: the actual share, and the forecast that decides "
        "how many prompts are issued. At 0.25, a step samples four prompts for each that it trains "
        "on.",
        "share of decided groups",
        {KEPT: "actual", FORECAST: "forecast"},
        ".0%",
    ),
    _groups(
        "groups_open",
        "Prompts in flight",
        "Groups issued in the step, decided in the step, and carried to the next step. Carried "
        "groups that are ready are mixed and only wait for their turn.",
        "groups",
        {
            "groups/issued": "issued",
            DECIDED: "decided",
            "groups/carried": "carried on",
            "groups/carried_ready": "carried on, ready",
        },
    ),
    _groups(
        "groups_age",
        "Age of what is trained on",
        "Weight versions since the groups of a step were started. 0 is on-policy; "
        "rollout.lookahead controls the mean, rollout.max_staleness bounds the oldest.",
        "versions",
        {
            "groups/age_mean": "mean",
            "groups/token_age_mean": "mean of tokens",
            "groups/age_max": "oldest",
        },
    ),
    _groups(
        "groups_fresh",
        "Fresh tokens",
        "Share of the trained response tokens that were sampled by the current weights.",
        "share of tokens",
        {"groups/fresh_token_fraction": "fresh tokens"},
        ".0%",
    ),
    _groups(
        "groups_interrupted",
        "Interrupted completions",
        "Completions that continue in the next step.",
        "completions",
        {"groups/interrupted_completions": "interrupted"},
    ),
    _groups(
        "groups_grading",
        "Completions without a grade, or without an answer",
        "timeout, memory, crash and error: the grader failed, and the group is not trained on. "
        "The line shows completions without an answer in the text; they are graded wrong.",
        "completions",
        {
            "grading/unparsed": "no answer found",
            **{f"grading/{cause}": cause for cause in ("timeout", "crash", "memory", "error")},
        },
        stacked=True,
        lines=("grading/unparsed",),
    ),
    _time(
        "time_phases",
        "Where a step's time goes",
        "Seconds of each phase, stacked. Sampling answers (generate) usually takes the most time. "
        "Time outside all phases is the rest.",
        "seconds",
        {metric: LABELS.get(phase, phase) for metric, phase in _PHASES.items()},
        stacked=True,
        colors={metric: COLORS[phase] for metric, phase in _PHASES.items()},
    ),
    _time(
        "time_tokens",
        "Tokens per second",
        "Prompt and response tokens trained on per second of the whole step.",
        "tokens per second",
        {
            "throughput/tokens_per_second": "all devices",
            "throughput/tokens_per_second_per_device": "per device",
        },
    ),
    _time(
        "time_device",
        "Work per device",
        "Floating-point operations of the model per second of the update phase, without "
        "recomputation. Divide by the device's peak to get its utilization.",
        "TFLOP/s",
        {"throughput/model_tflops_per_device": "model operations"},
    ),
    _time(
        "time_engines",
        "Engines at work",
        "Share of generation in which engines had no request, and mean share of their sequence "
        "slots (engine.max_sequences) that were in use.",
        "share",
        {IDLE: "idle", "throughput/running_mean": "running"},
        ".0%",
    ),
    _time(
        "time_waiting",
        "Waiting of each side",
        "With engines on other GPUs: share of a step in which the policy waits for engines, and in "
        "which engines have no request while others generate or the policy trains.",
        "share",
        {POLICY_WAITS: "policy", ENGINES_WAIT: "engines"},
        ".0%",
    ),
    _time(
        "time_sync",
        "Bringing the weights to the engines",
        "Seconds of each sync: moving weights, verifying them, and switching accelerator memory "
        "between policy and engine.",
        "seconds",
        {MOVED: "move", "time/sync_verify": "verify", "time/sync_turns": "turns in memory"},
        stacked=True,
    ),
    _time(
        "time_sync_bytes",
        "Bytes of a sync",
        "Bytes received from other ranks, by the rank that received most.",
        "bytes",
        {"sync/bytes": "bytes received"},
        ".3s",
    ),
    _time(
        "memory",
        "Memory",
        "Peak memory of each phase, on the rank with the highest peak: device memory or, on CPU, "
        "resident memory of the process. Dashed: the plan made before the run, if there was one.",
        "GiB",
        {f"memory/{phase}_gib": phase for phase in STEP_PHASES}
        | {PLANNED.format(phase): f"{phase}, planned" for phase in STEP_PHASES},
        colors={
            metric.format(phase): COLORS[phase]
            for metric in ("memory/{}_gib", PLANNED)
            for phase in STEP_PHASES
        },
    ),
    _time(
        "memory_tensors",
        "Memory of tensors",
        "Peak memory allocated by torch. The rest of the peak is CUDA, its libraries and memory "
        "that torch caches.",
        "GiB",
        {f"memory/{phase}_torch_gib": f"{phase}, tensors" for phase in STEP_PHASES},
        colors={f"memory/{phase}_torch_gib": COLORS[phase] for phase in STEP_PHASES},
    ),
]


def columns_of(run: RunData) -> pd.DataFrame:
    """Return the metrics of a run by step, including derived series."""
    columns = dict(run.metrics.frame.items()) | groups.derived(run) | phases.derived(run)
    return frame_of(run.metrics.steps, columns)
