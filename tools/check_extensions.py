"""Check that the compiled extensions import together with all other packages, and compute.

    python tools/check_extensions.py                 all extensions of requirements.txt
    python tools/check_extensions.py apex            NVIDIA Apex too

tools/build_extensions.sh runs it, also in the container, where this project is not installed. So
it imports third-party packages only. Without a GPU it runs no module and prints so. Exits with 1
on the first problem.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
TOGETHER = ("torch", "transformer_engine.pytorch", "megatron.core", "vllm")


def main() -> None:
    """Check versions, imports and, on a GPU, results."""
    import torch

    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is a CPU build: run tools/make_gpu_env.sh")
    check_versions()
    if "apex" in sys.argv[1:] or find_spec("apex"):
        check_apex()
    for module in TOGETHER:
        importlib.import_module(module)
    print(f"ok: {', '.join(TOGETHER)} import together (torch {torch.__version__})")
    if not torch.cuda.is_available():
        print("no GPU here: no module was run")
        return
    check_linear()
    check_adam("transformer_engine.pytorch.optimizers")
    if find_spec("apex"):
        check_adam("apex.optimizers")


def check_versions() -> None:
    """Exit unless the three packages of Transformer Engine have the same version."""
    versions = {name: version(name) for name in TRANSFORMER_ENGINE}
    if len(set(versions.values())) != 1:
        sys.exit(f"Transformer Engine: its packages have different versions: {versions}")
    print(f"ok: Transformer Engine {versions['transformer-engine']}")


def check_apex() -> None:
    """Exit unless NVIDIA's Apex is installed with its CUDA kernels.

    The package called apex on PyPI is unrelated: it has neither fused optimizers nor kernels.
    """
    if find_spec("apex") is None:
        sys.exit("apex: not installed; run tools/build_extensions.sh VENV apex")
    if find_spec("apex.optimizers") is None:
        sys.exit("apex: not NVIDIA's, but an unrelated package of that name; pip uninstall apex")
    if find_spec("amp_C") is None:
        sys.exit("apex: built without CUDA kernels; run tools/build_extensions.sh VENV apex")
    importlib.import_module("torch")  # amp_C needs its libraries
    importlib.import_module("amp_C")
    importlib.import_module("apex.optimizers")
    print(f"ok: NVIDIA Apex {version('apex')}")


def check_linear() -> None:
    """Compare Transformer Engine's linear layer with torch's, forward and backward, in bfloat16."""
    import torch
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    linear = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = linear(rows)
    out.float().square().sum().backward()
    grad, rows.grad = rows.grad, None
    expected = torch.nn.functional.linear(rows, linear.weight)
    expected.float().square().sum().backward()
    for name, a, b in (("output", out, expected), ("gradient", grad, rows.grad)):
        error = float((a - b).float().norm() / b.float().norm())
        if not error < 1e-2:
            sys.exit(f"Transformer Engine's Linear: {name} off by {error:.1e}")
    print(f"ok: Transformer Engine's Linear computes on {torch.cuda.get_device_name()}")


def check_adam(module: str) -> None:
    """Compare one step of a fused Adam with torch's AdamW."""
    import torch

    start = torch.randn(1000, device="cuda")
    gradient = torch.randn(1000, device="cuda")

    def step(optimizer_class: Any) -> Any:
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        optimizer_class([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
        return weight.detach()

    fused = step(importlib.import_module(module).FusedAdam)
    error = float((fused - step(torch.optim.AdamW)).abs().max())
    if not error < 1e-6:
        sys.exit(f"{module}: FusedAdam differs from torch's AdamW by {error:.1e}")
    print(f"ok: {module}.FusedAdam")


if __name__ == "__main__":
    main()
