"""Replace Transformer Engine's FusedAdam (2.20, pytorch/optimizers/fused_adam.py) on a CPU.

It has the same arguments, the same state names and dtypes, and counts updates per parameter group.
It computes in float32 with plain torch operations.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "transformer_engine.pytorch.optimizers"


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the interface of Transformer Engine's FusedAdam."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and not store_param_remainders
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        state = self.state[param]
        for name, dtype in self.dtypes.items():
            state[name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights:
            state["master_param"] = param.detach().clone().to(torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                gradient = param.decoupled_grad if self.use_decoupled_grad else param.grad
                self._update(param, gradient.float(), group)

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        weight = state["master_param"] if self.master_weights else param
        first = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].float().lerp_(gradient**2, 1 - beta2)
        bias1, bias2 = (1 - beta ** group["step"] for beta in (beta1, beta2))
        root = (second / bias2).sqrt_() + group["eps"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] / bias1 * first / root)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        if self.master_weights:
            param.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the empty state. Megatron calls this before the first update."""
        assert not self.state
        return super().state_dict()


def install() -> None:
    """Make Transformer Engine appear installed in this process, with only this class in it.

    Megatron is imported first, so that it finds no Transformer Engine.
    """
    import megatron.core.optimizer.distrib_optimizer  # noqa: F401

    from dapo_megatron.policy import optimizer

    parts = MODULE.split(".")
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__version__ = "2.20.2"  # type: ignore[attr-defined]
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    optimizer._why_not = lambda name: None
