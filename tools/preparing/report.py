"""The report that `tools/prepare_data.py` writes next to its output: NAME.report.md for people.

The same facts are in NAME.report.json, for programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

NUM_SHOWN = 10
"""Examples per reason in the Markdown. The JSON file has more."""
LABELS = {
    "conflicting": "prompts with more than one truth, all their rows",
    "exact_duplicate": "the same prompt again",
    "folded_duplicate": "the same except for whitespace",
    "too_long": "longer than --max-prompt-tokens",
    "overlap_exact": "in an evaluation set, exactly",
    "overlap_folded": "in an evaluation set, except for whitespace",
    "overlap_near": "in an evaluation set, nearly",
    "near_duplicate": "nearly the same as an earlier prompt",
}
"""Reasons to drop a row, in the order in which they are checked."""


def markdown(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    output, rows, prompts = report["output"], report["rows"], report["prompts"]
    yield f"# {output['name']}\n"
    yield f"{output['rows']:,} prompts, {output['bytes']:,} bytes, SHA-256 `{output['sha256']}`.\n"
    yield "| rows | | share |\n|---:|---|---:|"
    yield f"| {rows['in']:,} | read | |"
    for reason, count in rows["dropped"].items():
        if count:
            yield f"| -{count:,} | {LABELS[reason]} | {count / rows['in']:.2%} |"
    yield f"| **{rows['out']:,}** | **written** | {rows['out'] / rows['in']:.2%} |\n"
    yield (
        f"Distinct prompts: {prompts['distinct']:,}; {prompts['distinct_folded']:,} with "
        f"whitespace folded; {prompts['conflicting']:,} of these with more than one truth; "
        f"{prompts['clean']:,} without those.\n"
    )
    if any(rows["kept"].values()):
        yield "Found and kept: " + "; ".join(
            f"{count:,} {LABELS[reason]}" for reason, count in rows["kept"].items() if count
        )
        yield ""
    yield "## Files\n\n| file | rows | SHA-256 |\n|---|---:|---|"
    for kind in ("inputs", "evaluation"):
        for file in report[kind]:
            role = " (evaluation)" if kind == "evaluation" else ""
            yield f"| {_cell(file['name'])}{role} | {file['rows']:,} | `{file['sha256']}` |"
    yield "\n## Settings\n\n| | |\n|---|---|"
    for name, value in {**report["settings"], **report["versions"]}.items():
        yield f"| {name} | {_cell(value)} |"
    for title, examples in report["examples"].items():
        if examples:
            yield from _examples(title, examples)


def _examples(title: str, examples: list[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(examples[0])
    yield f"\n## Examples: {title.replace('_', ' ')}\n"
    yield "| " + " | ".join(columns).replace("_", " ") + " |\n|" + "---|" * len(columns)
    for example in examples[:NUM_SHOWN]:
        yield "| " + " | ".join(_cell(example[column]) for column in columns) + " |"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.replace("|", "\\|").split())
