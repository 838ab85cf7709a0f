"""What a run will take, from its config and the model's config.json alone: memory of each GPU by
phase, host memory, disk, and seconds of a step.

Weights, gradients and optimizer are counted exactly (`stage.py`), activations module by module
(`activations.py`); what is assumed says so. `suggestions.py` tries which settings would free how
much, `fitting.py` which layouts and how many nodes would do; `speed.py` has the assumptions of the
estimate of time. docs/plan.md is for users.
"""
