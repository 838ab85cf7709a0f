"""What a run will take, from its config and the model's config.json alone: memory of each GPU by
phase, host memory, disk, and seconds of a step.

Weights, gradients and optimizer are counted exactly (`stage.py`), activations module by module
(`activations.py`); what is assumed says so. `knobs.py` tries which settings would free how much,
`fitting.py` which layouts and how many nodes would do; `speed.py` has the assumptions of the
estimate of time. docs/plan.md is for users.
"""

from dapo_megatron.plan.fitting import Machines, check_layout_and_memory, way_out
from dapo_megatron.plan.keep import keep_plan
from dapo_megatron.plan.plan import Plan, make_plan
from dapo_megatron.plan.render import render, to_json
from dapo_megatron.plan.speed import Assumptions, Speed, estimate_speed

__all__ = [
    "Assumptions",
    "Machines",
    "Plan",
    "Speed",
    "check_layout_and_memory",
    "estimate_speed",
    "keep_plan",
    "make_plan",
    "render",
    "to_json",
    "way_out",
]
