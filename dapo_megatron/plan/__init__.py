"""Forecast of a run from its config and the model's config.json: layout, compatibility of features,
memory by phase, host memory, disk, and seconds of a step.

Weights, gradients and optimizer are counted exactly (`stage.py`), activations module by module
(`activations.py`). `estimate.py` has the memory of a run, `speed.py` its time, `suggestions.py` the
changes that make it fit, and `forecast.py` the command. docs/plan.md is for users.
"""
