"""Which features go together: one table of rules, that every start is checked against and
docs/compatibility.md is generated from (`python -m dapo_megatron.plan.compatibility`).

`rule.py` says what a rule is, `rules_policy.py` and `rules_engine.py` hold them; a new feature
brings its rules along. What one value of a key alone, or the layout, makes impossible is
config/rules.py and layout.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dapo_megatron.config import Config, refuse
from dapo_megatron.model import Architecture
from dapo_megatron.plan.compatibility.rule import Finding, Machine, Rule, Run, Verdict
from dapo_megatron.plan.compatibility.rules_engine import ENGINE_RULES
from dapo_megatron.plan.compatibility.rules_policy import POLICY_RULES

RULES: tuple[Rule, ...] = (*POLICY_RULES, *ENGINE_RULES)


def find(run: Run, rules: Iterable[Rule] = RULES) -> Iterator[Finding]:
    """The rules that apply, in the order of the table."""
    for rule in rules:
        if run.arch.family in rule.families and (answer := rule.when(run)):
            yield Finding(rule, answer if isinstance(answer, str) else "")


def check(
    config: Config,
    arch: Architecture,
    machine: Machine | None = None,
    *,
    has_engine: bool = True,
) -> list[str]:
    """Return the warnings for a run of this config and model, a line each.

    Raises ConfigError, with a line for each combination that is refused. Without a `machine` rules
    about it are not checked, because a plan is made anywhere.
    """
    findings = list(find(Run(config, arch, machine, has_engine)))
    refuse(str(finding) for finding in findings if finding.rule.verdict is Verdict.REFUSED)
    return [str(finding) for finding in findings]
