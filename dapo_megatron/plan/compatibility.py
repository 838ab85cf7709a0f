"""Combinations of features that are refused or warned about before a run starts.

A rule is a row: a condition, and the message with the keys at fault and the way out. A combination
has a rule only if the refusal is ours, if Megatron-core or vLLM refuse it late or without naming
the matter, or if they would silently compute something else. Contradicting values and impossible
layouts are checked in config/consistency.py and layout.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from dapo_megatron.config import Config, Fp8Config, LoraConfig, refuse
from dapo_megatron.config.computing import kernels_for
from dapo_megatron.model import Architecture, shared_inputs

TE = "transformer_engine"
Rule = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software of a rank."""

    capability: tuple[int, int] | None = None
    """The GPU's compute capability; None means no GPU."""
    cuda: tuple[int, ...] = ()
    """CUDA version that torch was built with."""
    packages: frozenset[str] = frozenset()
    """Those of transformer_engine and triton that can be used."""

    @classmethod
    def here(cls) -> Machine:
        """Return the machine of this process."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        cuda = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part.isdigit())
        usable = {"triton"} if capability or os.environ.get("TRITON_INTERPRET") == "1" else set()
        usable |= {TE} if capability else set()
        return cls(capability, cuda, frozenset(name for name in usable if find_spec(name)))


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts that rules examine. `machine` is None if it is not known (`plan`, submitting a
    job); then rules about it do not apply. `has_engine` is false for `doctor layouts` and replays.
    """

    config: Config
    arch: Architecture
    machine: Machine | None = None
    has_engine: bool = True

    @property
    def fused(self) -> bool:
        """Whether Transformer Engine computes the layers. Without a `machine`, a GPU and an
        installed Transformer Engine are assumed."""
        chosen = kernels_for(
            self.config.policy,
            has_gpu=self.machine is None or self.machine.capability is not None,
            is_installed=not self.lacks(TE),
            only_local=self.arch.only_local,
        )
        return chosen == TE

    def lacks(self, package: str) -> bool:
        """Whether the machine is known to lack a package or the GPU that it needs."""
        return self.machine is not None and package not in self.machine.packages


def check(
    config: Config,
    arch: Architecture,
    machine: Machine | None = None,
    *,
    has_engine: bool = True,
) -> list[str]:
    """Return the warnings for a run of this config and model, one line each.

    Raises ConfigError with one line for each refused combination. Without a `machine`, rules about
    the machine are not checked, because `plan` may run on another machine than the run.
    """
    run = RunFacts(config, arch, machine, has_engine)
    refuse(text for applies, text in refusals(run) if applies)
    return [text for applies, text in warnings(run) if applies]


def refusals(run: RunFacts) -> Iterator[Rule]:
    """Yield the rules that refuse a run. Rules about a section that is null are left out."""
    yield from _of_kernels(run)
    if run.config.policy.fp8 is not None:
        yield from _of_fp8(run, run.config.policy.fp8)
    if run.config.policy.logprob_head == "triton":
        yield from _of_triton_head(run)
    if run.config.policy.lora is not None:
        yield from _of_lora(run, run.config.policy.lora)
    yield from _of_optimizer(run)
    yield from _of_engine(run)


def warnings(run: RunFacts) -> Iterator[Rule]:
    """Yield the rules that only warn."""
    config, fp8 = run.config, run.config.policy.fp8
    yield (
        fp8 is not None and fp8.recipe == "delayed",
        "policy.fp8.recipe: warned: delayed scales change with every micro-batch that has "
        "gradients, so the ratios of a step's first update are 1 only in its first micro-batch; "
        "set it to current or blockwise, or watch policy/approx_kl",
    )
    yield (
        run.has_engine
        and config.engine.quantization == "fp8"
        and config.loss.old_logprobs == "policy"
        and config.loss.tis_cap is None
        and not config.loss.correction.corrects,
        "engine.quantization, loss.tis_cap: warned: an FP8 engine samples from a slightly "
        "different distribution than the policy's, and nothing corrects for it; set loss.tis_cap "
        "(2.0) or a key of loss.correction, and watch mismatch/kl",
    )


def _of_kernels(run: RunFacts) -> Iterator[Rule]:
    policy, arch = run.config.policy, run.arch
    asked = policy.kernels == TE
    other = "set policy.kernels auto or local"
    yield (
        asked and policy.precision != "bfloat16",
        "policy.kernels, policy.precision: transformer_engine needs bfloat16, the only precision "
        f"of its fused attention; set policy.precision bfloat16, or {other}",
    )
    yield (
        asked and arch.only_local,
        "policy.kernels: models with latent attention or gated delta nets run only in Megatron's "
        f"own layers; {other}",
    )
    yield (
        asked and run.lacks(TE),
        "policy.kernels: transformer_engine needs an NVIDIA GPU and the package "
        f"(requirements.txt); {other}",
    )
    yield (
        run.fused and policy.context_parallel > 1 and not run.config.train.packing,
        "policy.kernels, policy.context_parallel, train.packing: with context parallelism "
        "Transformer Engine's attention supports only packed rows; set train.packing true, or "
        "policy.kernels local",
    )
    yield (
        policy.fused_rope and (not run.fused or arch.only_local),
        "policy.fused_rope: it is a kernel of Transformer Engine, which this run does not use "
        "(policy.kernels, policy.precision, the model, or no GPU); set it to false",
    )
    yield (
        policy.fused_rope and arch.rope.attention_scaling != 1.0,
        "policy.fused_rope: the fused kernel cannot scale cosines and sines, as this model's yarn "
        "requires; set it to false",
    )
    yield (
        policy.router_replay != "off" and not arch.expert_layers,
        "policy.router_replay: the model has no experts to choose; set it to off",
    )


def _of_fp8(run: RunFacts, fp8: Fp8Config) -> Iterator[Rule]:
    policy, none = run.config.policy, "policy.fp8 null"
    yield (
        policy.kernels == "local" or run.arch.only_local,
        "policy.fp8, policy.kernels: only Transformer Engine's layers compute in FP8, and this run "
        "uses Megatron's own (policy.kernels local, or a model with latent attention or gated "
        f"delta nets); set policy.kernels auto, or {none}",
    )
    yield (
        policy.precision != "bfloat16",
        "policy.fp8, policy.precision: FP8 layers need bfloat16 inputs and outputs; set "
        f"policy.precision bfloat16, or {none}",
    )
    missing = _missing_for_fp8(run.machine, fp8)
    yield (
        bool(missing),
        "policy.fp8: needs Transformer Engine and compute capability 9.0 or higher (blockwise: "
        f"also CUDA 12.9), but {missing}; set {none}",
    )
    multiple = 128 if fp8.recipe == "blockwise" else 16
    uneven = [f"{name} {size}" for name, size in _dimensions(run) if size % multiple]
    yield (
        bool(uneven) and not run.arch.only_local,
        "policy.fp8, policy.tensor_parallel: FP8 matmuls need dimensions of a rank that are "
        f"multiples of {multiple}, unlike {', '.join(uneven)}; lower policy.tensor_parallel, "
        f"use another policy.fp8.recipe, or set {none}",
    )
    yield (
        run.config.loss.old_logprobs == "engine" and fp8.recipe == "delayed",
        "policy.fp8.recipe, loss.old_logprobs: the first delayed scales come from the pass for old "
        "log-probs, which engine does not make; set policy.fp8.recipe current or blockwise, or "
        "loss.old_logprobs policy",
    )
    yield (
        fp8.parameters and fp8.recipe == "delayed",
        "policy.fp8.parameters, policy.fp8.recipe: weights are loaded from the checkpoint before "
        "there is a delayed scale to quantize them with; set policy.fp8.recipe current or "
        "blockwise, or policy.fp8.parameters false",
    )
    yield (
        fp8.parameters and run.config.optimizer.cpu_offload > 0,
        "policy.fp8.parameters, optimizer.cpu_offload: Megatron-core's optimizer in host memory "
        "cannot read weights that exist only in FP8; set policy.fp8.parameters false, or "
        "optimizer.cpu_offload 0",
    )


def _missing_for_fp8(machine: Machine | None, fp8: Fp8Config) -> str:
    """Return what a machine lacks to train in FP8, or an empty text."""
    if machine is None:
        return ""
    if machine.capability is None:
        return "there is no GPU"
    if TE not in machine.packages:
        return "transformer_engine is not installed"
    if machine.capability < (9, 0):
        return "this GPU has {}.{}".format(*machine.capability)
    if fp8.recipe == "blockwise" and machine.cuda < (12, 9):
        return f"torch is built with CUDA {'.'.join(map(str, machine.cuda))}"
    return ""


def _dimensions(run: RunFacts) -> Iterator[tuple[str, int]]:
    """Yield the name and size of each dimension of a rank's matmuls."""
    arch, size = run.arch, run.config.policy.tensor_parallel
    yield "hidden_size", arch.hidden_size
    yield "query columns", arch.query_rows // size
    heads = arch.num_heads + 2 * max(arch.num_kv_heads, size)
    yield "query, key and value rows", heads * arch.head_dim // size
    for name, columns in arch.mlp_columns(whole_experts=True).items():
        yield name, columns // size
    if arch.num_experts:
        yield "moe_intermediate_size", arch.moe_intermediate_size


def _of_triton_head(run: RunFacts) -> Iterator[Rule]:
    other = "set policy.logprob_head torch"
    yield (
        run.config.policy.precision == "float64",
        f"policy.logprob_head, policy.precision: the Triton kernels reduce in float32; {other}",
    )
    yield (
        run.config.loss.entropy_coefficient > 0.0,
        "policy.logprob_head, loss.entropy_coefficient: the Triton kernels do not compute the "
        f"gradient of the entropy; {other}, or loss.entropy_coefficient 0",
    )
    distill = run.config.loss.distill
    yield (
        distill is not None and distill.top_k is not None,
        "policy.logprob_head, loss.distill.top_k: the Triton kernels compute only the log-prob of "
        f"the sampled token; {other}, or top_k null",
    )
    yield (
        run.lacks("triton"),
        "policy.logprob_head: triton needs an NVIDIA GPU and the package (torch for CUDA brings "
        f"it); {other}",
    )


def _of_lora(run: RunFacts, lora: LoraConfig) -> Iterator[Rule]:
    yield (
        run.config.policy.fp8 is not None,
        "policy.lora, policy.fp8: merged weights are rounded to policy.precision, not to FP8; set "
        "one of them to null",
    )
    yield (
        run.arch.latent is not None and "attention" in lora.targets,
        "policy.lora.targets: the projections of latent attention have no adapters; set it to "
        "[mlp, experts]",
    )
    yield (
        not shared_inputs(run.arch, lora.targets),
        "policy.lora.targets: the model has no such layers, so nothing would be trained; add "
        "attention, mlp (dense layers and shared experts) or experts (routed ones)",
    )


def _of_optimizer(run: RunFacts) -> Iterator[Rule]:
    optimizer, precision = run.config.optimizer, run.config.policy.precision
    is_short, is_offloaded = optimizer.moments == "bfloat16", optimizer.cpu_offload > 0
    other = "set optimizer.moments float32"
    yield (
        optimizer.kernels in (TE, "apex") and precision == "float64",
        "optimizer.kernels, policy.precision: fused AdamW computes in float32; set "
        "optimizer.kernels auto or torch",
    )
    yield (
        is_short and (optimizer.kernels in ("apex", "torch") or run.lacks(TE)),
        "optimizer.moments, optimizer.kernels: only Transformer Engine's AdamW, on a GPU, keeps "
        f"its moments in bfloat16; set optimizer.kernels auto or transformer_engine, or {other}",
    )
    yield (
        is_short and precision != "bfloat16",
        "optimizer.moments, policy.precision: bfloat16 moments would be far less precise than the "
        f"weights; {other}",
    )
    yield (
        is_short and is_offloaded,
        "optimizer.moments, optimizer.cpu_offload: optimizer state in host memory is updated by "
        f"torch's AdamW, which needs float32 moments; {other}, or optimizer.cpu_offload 0",
    )
    yield (
        is_offloaded and precision != "bfloat16",
        "optimizer.cpu_offload, policy.precision: for float32 or float64 weights Megatron-core's "
        "distributed optimizer holds views, which torch's AdamW does not accept; set "
        "policy.precision bfloat16, or optimizer.cpu_offload 0",
    )


def _of_engine(run: RunFacts) -> Iterator[Rule]:
    yield (
        run.has_engine and run.config.policy.precision == "float64",
        "policy.precision: float64 is only for `doctor layouts`; engines do not support it; use "
        "float32 or bfloat16",
    )
    yield (
        run.has_engine and run.config.engine.quantization == "fp8" and run.arch.only_local,
        "engine.quantization: vLLM merges the projections of latent attention when it loads them, "
        "and the merged FP8 weights cannot be compared with the policy's; gated delta nets were "
        "not tried in FP8; set it to none",
    )
