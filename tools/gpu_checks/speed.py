"""Speed of the policy: updates of whole models, and the log-prob head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.model.flops import model_flops, peak_flops
from dapo_megatron.plan.estimate import NodeSpec, estimate_memory
from dapo_megatron.policy import vocab_parallel
from dapo_megatron.policy.device import claim
from gpu_checks.figures import Figure, at_least, at_most, reported
from gpu_checks.rig import (
    GIB,
    Setting,
    has_gpu,
    is_judged,
    join_ranks,
    likelihood,
    make_config,
    make_policy,
    memory_gib,
    random_batch,
    seconds_of,
    wait,
)
from gpu_checks.shapes import LAYERS_OF_4B, config_folder
from tools.bench import logprobs as bench

LENGTH = 2048
FEW, MANY = 4096, 16384  # tokens of a packed row
TARGET_MFU = 0.45
TARGET_HEAD = 1.1
FREE_SHARE = 0.93
"""Share of a GPU's memory that a forecast may fill: it does not know about fragmentation."""


def fitting_layers(setting: Setting, total_gib: float, *overrides: str) -> int:
    """Return how many of the 4B model's 36 layers the setting's GPUs of `total_gib` can update in
    one row of MANY tokens, by the forecast of `plan`."""
    for count in LAYERS_OF_4B:
        folder = config_folder(f"4b_{count}_layers", setting.workspace)
        config = make_config(
            setting, "tiny", *overrides, f"model.path={folder}", "policy.precision=bfloat16",
            row_tokens=MANY,
        )  # fmt: skip
        num_gpus = setting.tensor_parallel
        estimate = estimate_memory(config, num_gpus, NodeSpec(num_gpus, total_gib))
        if estimate.num_bytes("update") <= FREE_SHARE * total_gib * GIB:
            return count
    return LAYERS_OF_4B[-1]


def _layers_of_4b(setting: Setting, *overrides: str) -> int:
    return fitting_layers(setting, memory_gib(), *overrides) if has_gpu() else LAYERS_OF_4B[0]


def mfu_4b(setting: Setting) -> Iterator[Figure]:
    """Time updates of the 4B model in bfloat16, with the kernels of `auto`."""
    ranks, layers = join_ranks(setting), _layers_of_4b(setting)
    yield reported("layers of 36", layers)
    # The target is stated for the whole model on one GPU. With fewer layers the head's share is
    # larger.
    binding = layers == LAYERS_OF_4B[0] and is_judged() and setting.tensor_parallel == 1
    model = f"4b_{layers}_layers"
    yield from _updates(setting, ranks, model, rows=(FEW, MANY), target=MANY, binding=binding)


def mfu_06b(setting: Setting) -> Iterator[Figure]:
    """Time updates of the 0.6B model in bfloat16, with the kernels of `auto` and local ones."""
    ranks = join_ranks(setting)
    for kernels in ("auto", "local"):
        overrides = f"policy.kernels={kernels}"
        yield from _updates(setting, ranks, "0.6b", overrides, rows=(FEW, MANY), name=kernels)


def mfu_fp8(setting: Setting) -> Iterator[Figure]:
    """Time updates of the 4B model in FP8. MFU is relative to the peak of bfloat16."""
    fp8 = "policy.fp8={recipe: current}"
    ranks, layers = join_ranks(setting), _layers_of_4b(setting, fp8)
    yield reported("layers of 36", layers)
    model = f"4b_{layers}_layers"
    yield from _updates(setting, ranks, model, fp8, rows=(MANY,), name="FP8")


def mfu_triton(setting: Setting) -> Iterator[Figure]:
    """Time updates of the 0.6B model with the Triton head."""
    ranks, head = join_ranks(setting), "policy.logprob_head=triton"
    yield from _updates(setting, ranks, "0.6b", head, rows=(MANY,), name="triton head")


def _updates(
    setting: Setting,
    ranks: Ranks,
    model: str,
    *overrides: str,
    rows: tuple[int, ...],
    name: str = "",
    target: int = 0,
    binding: bool = False,
) -> Iterator[Figure]:
    """Time updates with packed rows of these sizes. The MFU with rows of `target` tokens has a
    target, which is judged if `binding`."""
    policy = make_policy(make_config(setting, model, *overrides, row_tokens=max(rows)), ranks)
    for num_tokens in rows:
        length = setting.pick(LENGTH, 64)
        lengths = [length] * (setting.pick(num_tokens, 256) // length)
        batch = random_batch(lengths, policy.architecture.vocab_size)
        what = f"{name} {num_tokens:,} tokens".strip()
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(lambda: policy.update(batch, likelihood, 1e-6))  # noqa: B023
        yield reported(f"{what}, update", seconds, "s")
        yield reported(f"{what}, speed", sum(lengths) / seconds, "tokens/s")
        forward = seconds_of(lambda: policy.logprobs(batch))  # noqa: B023
        yield reported(f"{what}, old log-probs", forward, "s")
        if not has_gpu():
            continue
        yield reported(f"{what}, peak of tensors", torch.cuda.max_memory_allocated() / GIB, "GiB")
        peak = peak_flops(torch.cuda.get_device_name())
        if peak:
            scored = batch.num_loss_tokens
            flops = model_flops(policy.architecture, lengths, backward=True, num_scored=scored)
            share = flops / seconds / peak / ranks.world_size
            if num_tokens == target:
                yield at_least(f"{what}, MFU", share, TARGET_MFU, binding=binding)
            else:
                yield reported(f"{what}, MFU", share)
    policy.close()


# ---------------------------------------------------------------------------- the head


def head(setting: Setting) -> Iterator[Figure]:
    """Compare the log-prob head to its four matmuls and to plain torch, and choose its kernels."""
    claim(0)
    variants = [variant for variant in bench.variants() if variant != bench.NO_ENTROPY]
    if not has_gpu():
        variants.append(bench.MATMULS)
    seconds: dict[str, float] = {}
    for hidden in (2560, 1024):
        for num_tokens in (FEW, MANY):
            yield from _head(setting, hidden, num_tokens, variants, seconds)
    figures = list(_agreement(setting, [name for name in variants if name in HEADS]))
    for name in variants:
        if name in (bench.FUSED, bench.TRITON):
            figures += _main_gradient(setting, name)
    yield from figures
    if bench.TRITON in variants:
        yield _advice(figures, seconds[bench.TRITON] / seconds[bench.FUSED])
    yield from _tile_shapes(setting)


HEADS = (bench.FUSED, bench.TRITON, bench.PLAIN)


def _advice(figures: list[Figure], share: float) -> Figure:
    """Return a figure whose name says which policy.logprob_head to set. `share`: time of the Triton
    head relative to torch's, in the largest case."""
    wrong = [figure.name for figure in figures if figure.verdict == "short"]
    if wrong:
        text = (
            f"keep policy.logprob_head=torch: differs in {', '.join(wrong)}; Triton / torch, time"
        )
    elif share >= 1.0:
        text = "keep policy.logprob_head=torch, which is not slower; Triton / torch, time"
    else:
        text = "SET policy.logprob_head=triton: values agree and it is faster; Triton / torch, time"
    return reported(text, share)


def _main_gradient(setting: Setting, name: str) -> Iterator[Figure]:
    """Compare a weight gradient that is added to `main_grad` to one that is returned in bfloat16,
    whose relative rounding error is at most 2**-8 per element."""
    sizes = setting.pick((FEW, 151_936, 1024), (64, 1000, 32))
    case = bench.Case(name, "bfloat16", *sizes)
    gradients = []
    for is_fused in (True, False):
        hidden_TH, weight_VH, targets_T = bench.make_inputs(case, case.num_tokens)
        main_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        weight_VH.main_grad = main_grad_VH  # type: ignore[attr-defined]
        logp_T, _ = vocab_parallel.linear_logprobs(
            hidden_TH,
            weight_VH,
            targets_T,
            temperature=1.0,
            first_entry=0,
            num_entries=len(weight_VH),
            group=None,
            head=bench.HEADS[name],
            gradient_accumulation_fusion=is_fused,
        )
        logp_T.sum().backward()
        assert weight_VH.grad is not None
        gradients.append(main_grad_VH if is_fused else weight_VH.grad.float())
    added_VH, returned_VH = gradients
    error = float((added_VH - returned_VH).norm() / added_VH.norm())
    yield at_most(f"{name}: weight gradient in main_grad, relative difference", error, 2**-8)


def _agreement(setting: Setting, names: list[str]) -> Iterator[Figure]:
    """Compare the values of the heads to those of the first. The project's heads have float32
    logits. Plain torch rounds them to bfloat16, so its difference has no target. Gradients are
    bfloat16, with a relative precision of 0.008."""
    sizes = setting.pick((FEW, 151_936, 1024), (64, 1000, 32))
    values = {}
    for name in names:
        case = bench.Case(name, "bfloat16", *sizes)
        inputs = bench.make_inputs(case, case.num_tokens)
        logp_T, entropy_T = bench.run_head(case, inputs)
        logp_T.backward(torch.linspace(-1.0, 1.0, case.num_tokens, device=logp_T.device))
        values[name] = bench._values(inputs, logp_T, entropy_T)
    for name in names[1:]:
        for what, value in bench.difference(values[name], values[names[0]]).items():
            figure = f"{name} - {names[0]}: {what}"
            limit = 0.02 if "gradient" in what else 1e-4
            yield reported(figure, value) if name == bench.PLAIN else at_most(figure, value, limit)


def _head(
    setting: Setting, hidden: int, num_tokens: int, names: list[str], largest: dict[str, float]
) -> Iterator[Figure]:
    """Time the heads. Times of the largest case are added to `largest`."""
    sizes = setting.pick((num_tokens, 151_936, hidden), (64, 1000, 32))
    seconds, gib = {}, {}
    for name in names:
        if name in (bench.PLAIN,) and num_tokens == MANY:
            continue  # 30 GiB
        seconds[name], gib[name] = _time_head(bench.Case(name, "bfloat16", *sizes))
    if hidden == 2560 and num_tokens == MANY:
        largest |= seconds
    what = f"{sizes[2]} x {sizes[1]:,}, {sizes[0]:,} tokens"
    alone = seconds[bench.MATMULS]
    yield reported(f"{what}: matmuls alone", alone, "s")
    for name in (bench.FUSED, bench.TRITON):
        if name in seconds:
            ratio = seconds[name] / alone
            # The target is stated for the head of a 4B model. Smaller matmuls hide less.
            binding = hidden == 2560 and is_judged()
            yield at_most(f"{what}: {name} / matmuls", ratio, TARGET_HEAD, binding=binding)
            yield reported(f"{what}: {name}, memory on top", gib[name], "GiB")
    if bench.TILES in seconds:
        yield reported(f"{what}: the tiles' matmuls / matmuls", seconds[bench.TILES] / alone)
    if bench.PLAIN in seconds:
        yield reported(f"{what}: plain / matmuls", seconds[bench.PLAIN] / alone)
        yield reported(f"{what}: plain, memory on top", gib[bench.PLAIN], "GiB")


def _time_head(case: Any) -> tuple[float, float]:
    """Return the seconds of a forward and backward pass, and their memory in GiB without inputs."""
    inputs = bench.make_inputs(case, case.num_tokens)

    def once() -> None:
        bench.run_head(case, inputs)[0].sum().backward()
        for value in inputs[:2]:
            value.grad = None

    once()
    wait()
    before = bench._start_peak()
    once()
    wait()
    extra = (bench._peak() - before) / GIB
    return seconds_of(once, repeats=5), extra


def _tile_shapes(setting: Setting) -> Iterator[Figure]:
    """Time the faster head with tiles of other shapes. The default should be the best."""
    name = bench.TRITON if bench.TRITON in bench.variants() else bench.FUSED
    sizes = setting.pick((MANY, 151_936, 2560), (64, 1000, 32))
    case, default = bench.Case(name, "bfloat16", *sizes), vocab_parallel._tile_shape
    try:
        for shape in setting.pick(
            ((1024, 4096), (2048, 4096), (4096, 4096), (2048, 8192), (16384, 2048)), ((32, 256),)
        ):
            vocab_parallel._tile_shape = lambda _, shape=shape: shape
            seconds, _ = _time_head(case)
            yield reported(f"{name}, tiles of {shape[0]:,} x {shape[1]:,}", seconds, "s")
    finally:
        vocab_parallel._tile_shape = default
