"""Speed of the policy: updates of whole models, and the log-prob head."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import logprobs as bench
import torch
from torch import Tensor

from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.model.flops import model_flops, peak_flops
from dapo_megatron.policy.device import claim
from dapo_megatron.policy.vocab_parallel import linear_logprobs
from gpu_checks.catalog import Figure, at_most, reported
from gpu_checks.rig import (
    GIB,
    Setting,
    has_gpu,
    is_judged,
    join_alone,
    likelihood,
    make_config,
    make_policy,
    random_batch,
    seconds_of,
)

LENGTH = 2048
FEW, MANY = 4096, 16384  # tokens of a packed row
LAYERS_18 = "4b_18_layers"
"""Half of the 4B model, because an update of the whole one does not fit one GPU."""
TARGET_HEAD = 1.1


def mfu_4b(setting: Setting) -> Iterator[Figure]:
    """Time updates of half the 4B model in bfloat16, with the kernels of `auto`."""
    yield from _updates(setting, join_alone(), rows=(FEW, MANY))


def mfu_fp8(setting: Setting) -> Iterator[Figure]:
    """Time updates of half the 4B model in FP8. MFU is relative to the peak of bfloat16."""
    fp8 = "policy.fp8={recipe: current}"
    yield from _updates(setting, join_alone(), fp8, rows=(MANY,), name="FP8")


def _updates(
    setting: Setting, ranks: Ranks, *overrides: str, rows: tuple[int, ...], name: str = ""
) -> Iterator[Figure]:
    """Time updates with packed rows of these sizes."""
    policy = make_policy(make_config(setting, LAYERS_18, *overrides, row_tokens=max(rows)), ranks)
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
            yield reported(f"{what}, MFU", flops / seconds / peak)
    policy.close()


# ---------------------------------------------------------------------------- the head


def head(setting: Setting) -> Iterator[Figure]:
    """Compare the log-prob head to its four matmuls and to plain torch, and choose its kernels."""
    claim(0)
    heads = [name for name in bench.variants() if name in bench.HEADS]
    seconds: dict[str, float] = {}
    for hidden, num_tokens in ((1024, FEW), (2560, FEW), (2560, MANY)):
        sizes = setting.pick((num_tokens, 151_936, hidden), (64, 1000, 32))
        # Plain torch needs 30 GiB for many tokens.
        plain = [bench.PLAIN] if num_tokens == FEW else []
        seconds = yield from _times(sizes, [bench.MATMULS, *heads, *plain])
    sizes = setting.pick((FEW, 151_936, 1024), (64, 1000, 32))
    figures = list(_agreement(sizes, [*heads, bench.PLAIN]))
    figures += [_main_gradient(bench.Case(name, "bfloat16", *sizes)) for name in heads]
    yield from figures
    if bench.TRITON in heads:
        yield _advice(figures, seconds[bench.TRITON] / seconds[bench.FUSED])


def _times(
    sizes: tuple[int, int, int], names: list[str]
) -> Generator[Figure, None, dict[str, float]]:
    """Time a forward and backward pass of each variant. Return the seconds."""
    num_tokens, num_entries, hidden = sizes
    what, seconds = f"{hidden} x {num_entries:,}, {num_tokens:,} tokens", {}
    for name in names:
        case = bench.Case(name, "bfloat16", *sizes)
        runs = [case.measure() for _ in range(3)]
        seconds[name] = sorted(run[0] for run in runs)[1]
        yield reported(f"{what}: {name}", seconds[name], "s")
        yield reported(f"{what}: {name}, added memory", runs[0][2] / GIB, "GiB")
        if name in bench.HEADS:
            ratio = seconds[name] / seconds[bench.MATMULS]
            # The target is stated for the head of a 4B model. Smaller matmuls hide less.
            binding = hidden == 2560 and is_judged()
            yield at_most(f"{what}: {name} / matmuls", ratio, TARGET_HEAD, binding=binding)
    return seconds


def _advice(figures: list[Figure], share: float) -> Figure:
    """Return a figure whose name says which policy.logprob_head to set. `share`: time of the Triton
    head relative to torch's, in the largest case."""
    keep = "keep policy.logprob_head=torch"
    wrong = [figure.name for figure in figures if figure.verdict == "short"]
    if wrong:
        text = f"{keep}: differs in {', '.join(wrong)}"
    elif share >= 1.0:
        text = f"{keep}, which is not slower"
    else:
        text = "SET policy.logprob_head=triton: values agree and it is faster"
    return reported(f"{text}; Triton / torch, time", share)


def _agreement(sizes: tuple[int, int, int], names: list[str]) -> Iterator[Figure]:
    """Compare values and gradients of the heads to those of the first. Gradients are relative.

    The project's heads have float32 logits. Plain torch rounds them to bfloat16, so its difference
    has no target. Gradients are bfloat16, with a relative precision of 0.008.
    """
    values: dict[str, dict[str, Tensor]] = {}
    for name in names:
        case = bench.Case(name, "bfloat16", *sizes)
        hidden_TH, weight_VH, targets_T = case.inputs()
        logp_T, entropy_T = case.run((hidden_TH, weight_VH, targets_T))
        logp_T.backward(torch.linspace(-1.0, 1.0, case.num_tokens, device=logp_T.device))
        assert entropy_T is not None and hidden_TH.grad is not None and weight_VH.grad is not None
        values[name] = {
            "log-prob": logp_T.detach(),
            "entropy": entropy_T,
            "hidden gradient": hidden_TH.grad,
            "weight gradient": weight_VH.grad,
        }
    first = values[names[0]]
    for name in names[1:]:
        for what, value in values[name].items():
            is_gradient = "gradient" in what
            scale = first[what].abs().max() if is_gradient else 1.0
            gap = float(((value - first[what]).abs().max() / scale).float())
            figure, limit = f"{name} - {names[0]}: {what}", 0.02 if is_gradient else 1e-4
            yield reported(figure, gap) if name == bench.PLAIN else at_most(figure, gap, limit)


def _main_gradient(case: bench.Case) -> Figure:
    """Compare a weight gradient that is added to `main_grad` to one that is returned in bfloat16,
    whose relative rounding error is at most 2**-8 per element."""
    gradients = []
    for is_fused in (True, False):
        hidden_TH, weight_VH, targets_T = case.inputs()
        main_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        weight_VH.main_grad = main_grad_VH  # type: ignore[attr-defined]
        logp_T, _ = linear_logprobs(
            hidden_TH,
            weight_VH,
            targets_T,
            temperature=1.0,
            first_entry=0,
            num_entries=len(weight_VH),
            group=None,
            head=bench.HEADS[case.variant],
            gradient_accumulation_fusion=is_fused,
        )
        logp_T.sum().backward()
        gradients.append(main_grad_VH if is_fused else weight_VH.grad.float())  # type: ignore[union-attr]
    added_VH, returned_VH = gradients
    error = float((added_VH - returned_VH).norm() / added_VH.norm())
    name = f"{case.variant}: weight gradient in main_grad, relative difference"
    return at_most(name, error, 2**-8)
