"""Chart definitions: what is drawn of which metric, and what it tells. The section "dynamics".

A definition is plain JSON, drawn by page/charts.js:
    id, section, title, help (a sentence for a newcomer), y (axis title with unit)
    kind        lines | stacked_area | stacked_bars
    overlay     true: all runs in one chart; false: the chosen run's alone
    series      [{metric, label, dash?, axis?: "y2", color?: slot 0..7, line?: true}]
                line: over what is stacked, not part of it
    evaluations figures by prefix ("avg@"): points with 95% intervals, one trace per set
    ghosts      keys of paper.py, drawn when asked for
    y_range, y_tick_format, y2 (title of the second axis), y2_tick_format, log_y
    from_zero   the axis begins at 0
    smooth      false: never smoothed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Chart = dict[str, Any]


def lines(
    name: str, title: str, explanation: str, y: str, series: Sequence[dict[str, Any]], **more: Any
) -> Chart:
    """A chart of lines over rollout steps, all runs in one."""
    return {
        "id": name,
        "section": "dynamics",
        "title": title,
        "help": explanation,
        "y": y,
        "kind": "lines",
        "overlay": True,
        "series": list(series),
        **more,
    }


def line(metric: str, label: str, **more: Any) -> dict[str, Any]:
    """One series of a chart."""
    return {"metric": metric, "label": label, **more}


CHARTS: list[Chart] = [
    lines(
        "evaluation",
        "Accuracy on held-out problems",
        "The figure that counts: problems never trained on, each answered several times. "
        "Whiskers are 95% intervals.",
        "mean accuracy",
        [],
        evaluations=["avg@"],
        ghosts=["aime_avg"],
        y_tick_format=".0%",
    ),
    lines(
        "accuracy",
        "Accuracy while training",
        "Share of sampled answers that are right, over all groups decided in the step, kept or "
        "not; and of groups where every answer is, which teach nothing.",
        "share",
        [
            line("accuracy/raw", "answers right"),
            line("accuracy/perfect_fraction", "groups all right", dash=True),
        ],
        ghosts=["perfect"],
        y_tick_format=".0%",
    ),
    lines(
        "evaluation_best_and_vote",
        "Best of k and majority of k",
        "pass@k: at least one of k answers is right. cons@k: the answer most often given is. "
        "Above the mean accuracy they show what sampling still finds.",
        "share of problems",
        [],
        evaluations=["pass@", "cons@"],
        ghosts=["aime_pass", "aime_cons"],
        y_tick_format=".0%",
    ),
    lines(
        "reward",
        "Reward",
        "Mean reward of the answers, penalties for length included: 1 is right, -1 is wrong.",
        "reward",
        [line("reward/mean", "mean reward")],
        ghosts=["reward"],
    ),
    lines(
        "length",
        "Response length",
        "How long the answers are. Growth with accuracy is a good sign; growth without it, or up "
        "to the limit, is not.",
        "tokens",
        [
            line("response_tokens/mean", "mean"),
            line("response_tokens/max", "longest", dash=True),
        ],
        ghosts=["length"],
    ),
    lines(
        "too_long",
        "Answers too long",
        "Share of answers cut off at the token limit, and of those that pay the soft penalty "
        "before it.",
        "share of answers",
        [
            line("response_tokens/clipped_fraction", "cut off"),
            line("overlong/penalised_fraction", "penalised", dash=True),
            line("overlong/filtered_fraction", "left out of the loss"),
        ],
        y_tick_format=".1%",
    ),
    lines(
        "entropy",
        "Entropy",
        "How undecided the policy is about its next token. A fall to nearly 0 means it explores no "
        "more: the collapse that clip-higher is there to prevent.",
        "nats per token",
        [line("policy/entropy", "entropy")],
        ghosts=["entropy", "entropy_collapse"],
        from_zero=True,
    ),
    lines(
        "probability",
        "Probability of the sampled tokens",
        "Mean probability that the policy gives to the tokens it sampled; the mirror of entropy.",
        "probability",
        [line("policy/mean_prob", "mean")],
        ghosts=["probability"],
    ),
    lines(
        "clipping",
        "Clipped tokens",
        "Share of tokens whose update was cut off because the policy had moved too far from the "
        "one that sampled them: up (more likely) and down (less likely).",
        "share of tokens",
        [
            line("policy/clip_fraction_high", "up"),
            line("policy/clip_fraction_low", "down", dash=True),
            line("policy/dual_clip_fraction", "dual clip"),
        ],
        y_tick_format=".2%",
    ),
    lines(
        "movement",
        "Movement of the policy",
        "Approximate KL divergence between the policy that sampled and the one being updated, "
        "within a step.",
        "nats per token",
        [line("policy/approx_kl", "approx. KL")],
    ),
    lines(
        "gradient",
        "Gradient norm",
        "Before clipping, mean over the step's updates. Peaks are updates to look at.",
        "norm",
        [line("policy/grad_norm", "gradient norm")],
        from_zero=True,
    ),
    lines(
        "loss",
        "Loss",
        "Of the step's updates. Policy-gradient losses stay near 0 and need not fall; a jump is "
        "what matters.",
        "loss",
        [line("policy/loss", "loss")],
    ),
    lines(
        "mismatch",
        "Engine against policy",
        "|log-probability by the engine - by the policy| of the same tokens under the same "
        "weights. It should be rounding; if it grows, the engine samples from another policy.",
        "nats, log scale",
        [
            line("mismatch/gap_mean", "mean gap"),
            line("mismatch/gap_max", "largest gap", dash=True),
            line("mismatch/kl", "KL"),
        ],
        log_y=True,
        y_tick_format=".0e",
    ),
    lines(
        "correction",
        "Correction for stale samples",
        "Mean weight of truncated importance sampling, and the share of tokens at its cap.",
        "mean weight",
        [
            line("policy/tis_weight", "mean weight"),
            line("policy/tis_capped_fraction", "at the cap", axis="y2", dash=True),
        ],
        y2="share of tokens",
        y2_tick_format=".2%",
    ),
    lines(
        "learning_rate",
        "Learning rate",
        "At the step's last update.",
        "learning rate",
        [line("policy/lr", "learning rate")],
        y_tick_format=".1e",
        smooth=False,
    ),
]


def names_in(charts: Iterable[Chart]) -> set[str]:
    """The metrics that these charts draw."""
    return {one["metric"] for chart in charts for one in chart["series"]}


def recorded(charts: Iterable[Chart], names: set[str], figures: set[str]) -> list[Chart]:
    """The charts without the series that no run has; those with nothing left are left out.

    `names`: metrics that some run has a value of. `figures`: of evaluations, as avg@4.
    """
    found = []
    for chart in charts:
        series = [one for one in chart["series"] if one["metric"] in names]
        prefixes = tuple(chart.get("evaluations", ()))
        if series or (prefixes and any(one.startswith(prefixes) for one in figures)):
            found.append({**chart, "series": series})
    return found


def chart_of(metric: str | None, charts: Iterable[Chart]) -> str | None:
    """The id of the first chart that shows a metric or, by its name, an evaluation."""
    if metric is None:
        return None
    for chart in charts:
        if metric in names_in([chart]):
            return str(chart["id"])
        figure = metric.rpartition("/")[2] if metric.startswith("eval/") else None
        if figure is not None and figure.startswith(tuple(chart.get("evaluations", ()))):
            return str(chart["id"])
    return None
