"""Rules about which features can be combined. Every start is checked against this table, and
docs/compatibility.md is generated from it (`python -m dapo_megatron.plan.compatibility`).

`rule.py` defines a rule; the rules are in `rules_policy.py` and `rules_engine.py`. A new feature
adds its rules there. Contradicting values and impossible layouts are checked in
config/consistency.py and layout.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dapo_megatron.config import Config, refuse
from dapo_megatron.model import Architecture
from dapo_megatron.plan.compatibility.rule import (
    Action,
    CompatibilityRule,
    Machine,
    RuleMatch,
    RunFacts,
)
from dapo_megatron.plan.compatibility.rules_engine import ENGINE_RULES
from dapo_megatron.plan.compatibility.rules_policy import POLICY_RULES

RULES: tuple[CompatibilityRule, ...] = (*POLICY_RULES, *ENGINE_RULES)


def find(run: RunFacts, rules: Iterable[CompatibilityRule] = RULES) -> Iterator[RuleMatch]:
    """Yield the rules that apply, in the order of the table."""
    for rule in rules:
        if run.arch.family in rule.families and (answer := rule.when(run)):
            yield RuleMatch(rule, answer if isinstance(answer, str) else "")


def check(
    config: Config,
    arch: Architecture,
    machine: Machine | None = None,
    *,
    has_engine: bool = True,
) -> list[str]:
    """Return the warnings for a run of this config and model, one line each.

    Raises ConfigError with one line for each refused combination. Without a `machine`, rules about
    the machine are not checked, because `plan` may run on another machine than the run.
    """
    findings = list(find(RunFacts(config, arch, machine, has_engine)))
    refuse(str(finding) for finding in findings if finding.rule.action is Action.REFUSED)
    return [str(finding) for finding in findings]
