"""DAPO on Megatron-core with vLLM rollouts in the same processes.

Start at `loop.py`; `python -m dapo_megatron --help` runs it."""

__version__ = "0.1.0"
