"""Graders, and the pool of killable processes that runs them.

Graders are resolved by name and imported when used, because their libraries are slow to import.
"""

from dapo_megatron.rewards.pool import GradingPool
from dapo_megatron.rewards.registry import resolve

__all__ = ["GradingPool", "resolve"]
