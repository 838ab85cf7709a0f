"""The formulas of DAPO: functions of tensors and plain numbers; no rank, config tree or backend.

Every file opens with how it differs from the paper (arXiv 2503.14476).
"""

from dapo_megatron.algo.advantage import group_advantage
from dapo_megatron.algo.evaluation import avg_at_k, bootstrap_interval, cons_at_k, pass_at_k
from dapo_megatron.algo.loss import (
    TokenLoss,
    aggregation_weights,
    dapo_loss,
    dapo_token_loss,
    tis_weights,
)
from dapo_megatron.algo.mismatch import GapStatistics, check_gap, gap_statistics
from dapo_megatron.algo.overlong import overlong_penalty
from dapo_megatron.algo.sampling import Verdict, verdict
from dapo_megatron.algo.schedule import warmup_lr

__all__ = [
    "GapStatistics",
    "TokenLoss",
    "Verdict",
    "aggregation_weights",
    "avg_at_k",
    "bootstrap_interval",
    "check_gap",
    "cons_at_k",
    "dapo_loss",
    "dapo_token_loss",
    "gap_statistics",
    "group_advantage",
    "overlong_penalty",
    "pass_at_k",
    "tis_weights",
    "verdict",
    "warmup_lr",
]
