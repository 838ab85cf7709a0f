"""Graders, and the pool of killable processes that runs them.

Graders are resolved by name and imported on use: their libraries are heavy, this package is not.
"""

from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rewards.registry import resolve

__all__ = ["GradingPool", "resolve"]
