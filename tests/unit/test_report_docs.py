"""docs/report.md explains every chart, state and option."""

from __future__ import annotations

import re

import pytest

from dapo_megatron.report import charts
from dapo_megatron.report.chart import Chart
from dapo_megatron.report.run_data import StateWord
from tests.helpers.configs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "report.md").read_text(encoding="utf-8")
FIRST_CELLS = set(re.findall(r"^\| ([^|]+?) \|", PAGE, re.MULTILINE))


@pytest.mark.parametrize("chart", charts.CHARTS)
def test_every_chart_is_explained(chart: Chart) -> None:
    assert chart.title in FIRST_CELLS


def test_every_state_is_explained() -> None:
    assert {word.value for word in StateWord} <= FIRST_CELLS


def test_every_option_is_explained() -> None:
    source = (REPOSITORY / "dapo_megatron" / "__main__.py").read_text(encoding="utf-8")
    command = source.split("def report(")[1].split("\ndef ")[0]
    options = {f"--{name}" for name in re.findall(r"^    (\w+): Annotated", command, re.MULTILINE)}
    arguments = {"--run_folders"}
    assert {"--output", "--watch"} <= options - arguments
    assert not [option for option in options - arguments if f"`{option}" not in PAGE]
