"""DAPO on Megatron-core, with rollouts from vLLM servers.

Start at `loop.py`; `python -m dapo_megatron --help` runs it."""

__version__ = "0.1.0"
