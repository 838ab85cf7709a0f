"""Which features go together: one table of rules, that every start is checked against and
docs/compatibility.md is generated from (`python -m dapo_megatron.plan.compatibility`).

`rule.py` says what a rule is, `rules_policy.py` and `rules_engine.py` hold them; a new feature
brings its rules along. What one value of a key alone, or the layout, makes impossible is
config/rules.py and layout.py.
"""

from dapo_megatron.plan.compatibility.check import RULES, check, find
from dapo_megatron.plan.compatibility.rule import Finding, Machine, Rule, Run, Verdict

__all__ = ["RULES", "Finding", "Machine", "Rule", "Run", "Verdict", "check", "find"]
