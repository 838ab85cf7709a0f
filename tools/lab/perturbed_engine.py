"""Train with an engine that samples with perturbed weights, to see what corrections are worth.

    python tools/lab/perturbed_engine.py CONFIG [--noise 0.01] [KEY.PATH=VALUE ...]

After each sync and its checks, every matrix of the engine is multiplied by 1 + noise * N(0, 1) and
rounded to bfloat16. That is about the size of the rounding of FP8. The policy keeps its weights.
The run has one process. Its gap limits are lifted, because the gap is what is studied. Evaluations
sample with the perturbed engine too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dapo_megatron.cluster.launch import is_launched, launch

OVERRIDES = ("run.processes=1", "policy.tensor_parallel=1", "sync.max_gap=1000.0")


def perturb(model: Any, *, noise: float, seed: int) -> None:
    """Multiply all matrices of `model` by random factors near 1, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                factor = 1.0 + noise * torch.randn(parameter.shape, generator=generator)
                perturbed = parameter.float().cpu() * factor
                parameter.copy_(perturbed.bfloat16().to(parameter.dtype))


def perturb_after_sync(noise: float) -> None:
    """Make every sync of this process end with a perturbation of the engine's weights."""
    from dapo_megatron.bridge.sync import WeightSync

    original = WeightSync.__call__

    def sync(self: Any, version: int) -> Any:
        report = original(self, version)
        self._engine._llm.apply_model(lambda model: perturb(model, noise=noise, seed=version))
        return report

    WeightSync.__call__ = sync  # type: ignore[method-assign]


def main(
    config: Annotated[Path, typer.Argument()],
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    overlay: Annotated[list[Path] | None, typer.Option()] = None,
    noise: Annotated[float, typer.Option(min=0.0)] = 0.01,
) -> None:
    """Train with perturbed engines."""
    if not is_launched():
        raise SystemExit(launch([sys.executable, *sys.argv], 1))
    perturb_after_sync(noise)
    from dapo_megatron.__main__ import main as command_line

    overlays = [part for path in overlay or [] for part in ("--overlay", str(path))]
    sys.argv[1:] = ["train", str(config), *overlays, *OVERRIDES, *(overrides or [])]
    command_line()


if __name__ == "__main__":
    typer.run(main)
