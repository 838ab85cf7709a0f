"""`doctor layouts`: check that every layout of a model computes the same gradient.

For the same mini-batch, any layout (tensor, sequence, pipeline, context, expert and data parallel)
and any split into micro-batches, packed or padded, must give the gradient of

    1/N sum over the N loss tokens of the mini-batch.

How this is checked:
1. The model is shrunk to small sizes, with all its features (shrink.py) and random weights.
2. The mini-batch has random tokens, sequences of 3 to 300 tokens, and ratios on both sides of the
   clip (measure.py). The losses are the config's own, also with the policy's own log-probs as old
   ones (as in a step with one update), and the ones in --losses.
3. The reference is one process in float64 (on a GPU float32, because Megatron's optimizer has no
   float64 there), with one sequence per micro-batch and without packing.
4. Each case (matrix.py) builds the policy as a run does, in a new world (worlds.py), and computes
   the whole gradient of each loss, then three updates with the config's own (measure.py).
5. Each gradient tensor, the loss, and the weights after the updates must equal the values of the
   reference (measure.compare), up to rounding (TOLERANCES).

Float32 cases are also compared with the float64 reference, so their differences include the
rounding of the model itself. Largest differences measured on model_configs/tiny_cpu.yaml: 5e-15 in
float64, 2.3e-6 in float32 (2.0e-6 with one process).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dapo_megatron.algo.correction import Correction, correct
from dapo_megatron.config import Config, LossConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.doctor.matrix import LayoutCase, layout_name, matrix, reference, smallest_world
from dapo_megatron.doctor.measure import (
    NOISE,
    Measured,
    Objective,
    compare,
    distances,
    measure,
    random_minibatch,
    with_old_logprobs,
    with_top_tokens,
)
from dapo_megatron.doctor.shrink import shrink, write_random_model
from dapo_megatron.doctor.worlds import QuietRank, Worlds, quiet_rank
from dapo_megatron.files import write_result
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.model import read_architecture, to_hf_config
from dapo_megatron.plan.compatibility import Machine
from dapo_megatron.plan.compatibility import check as check_compatibility
from dapo_megatron.plan.layout import check_layout
from dapo_megatron.policy.device import claim, has_cuda
from dapo_megatron.run.loss import loss_function
from dapo_megatron.tracking.provenance import facts
from dapo_megatron.types import ConfigError

if TYPE_CHECKING:
    from dapo_megatron.policy.policy import MegatronPolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed differences; see measure.compare.

    `gradient` limits gradient, loss and log-probs. `updates` limits the losses, gradient norms and
    weights of three updates; it is larger because Megatron always computes the norm in float32.
    """

    gradient: float
    updates: float

    def failures(self, differences: Mapping[str, float]) -> list[str]:
        """Return the names of the differences that are too large (or nan)."""
        bounds = dict.fromkeys(("gradient", "logprobs", "loss"), self.gradient)
        bounds |= dict.fromkeys(("losses", "grad_norm", "weights"), self.updates)
        return [name for name, bound in bounds.items() if not differences[name] <= bound]


TOLERANCES = {
    "float64": Tolerance(gradient=1e-9, updates=1e-5),
    "float32": Tolerance(gradient=1e-5, updates=1e-5),
    # Compared with one process in bfloat16. Tensor parallelism 2 rounds partial sums, which gives
    # 0.2 in the worst tensor of a small model, 0.01 elsewhere. A wrong factor of 2 gives at least
    # 0.5.
    "bfloat16": Tolerance(gradient=0.4, updates=5e-2),
}


def check_options(config: Config, precision: str | None) -> str:
    """Check the config and the options before any rank starts. Return the precision of the cases;
    the default is the highest one possible. Raises ConfigError."""
    arch = read_architecture(config)
    world = smallest_world(config.policy, arch)
    check_layout(config, arch, world, has_engine=False, has_teacher=False)
    check_compatibility(config, arch, has_engine=False)
    if has_cuda() and precision == "float64":
        raise ConfigError(
            "--precision: Megatron's optimizer does not support float64 on a GPU; use float32, or "
            "hide the GPU (CUDA_VISIBLE_DEVICES= in front of the command)"
        )
    return precision or ("float32" if has_cuda() else "float64")


def default_ranks() -> int:
    """Return the number of GPUs, or 4 without a GPU: the most ranks that the matrix uses."""
    return torch.cuda.device_count() or 4


def other_losses(
    config: Path, overrides: Sequence[str], overlays: Sequence[Path], folders: Sequence[Path]
) -> dict[str, LossConfig]:
    """Return the loss sections of `config` with each overlay of `folders`, by the overlay's name.
    Raises ConfigError."""
    losses = {}
    for folder in folders:
        files = sorted(folder.glob("*.yaml"))
        if not files:
            raise ConfigError(f"--losses: {folder} has no .yaml files; name a folder of overlays")
        for file in files:
            if file.stem in losses:
                raise ConfigError(f"--losses: two overlays are named {file.stem}; rename {file}")
            losses[file.stem] = load_config(config, overrides, [*overlays, file]).loss
    return losses


def command(
    config: Config,
    losses: Mapping[str, LossConfig],
    *,
    precision: str,
    only: str,
    json_file: Path | None,
) -> bool:
    """Compare all cases, on this rank of a launched job. Rank 0 prints the table and writes
    `json_file`. Return True if all cases agree; always True on other ranks."""
    with quiet_rank("layouts") as session:
        claim(session.local_rank)
        proof = LayoutProof(config, losses, precision, only, session)
        with tempfile.TemporaryDirectory(prefix="doctor_layouts_") as folder:
            if session.rank == 0:
                write_random_model(proof.arch, Path(folder))
                proof.print_header()
            # All ranks read rank 0's folder, so several machines must share TMPDIR.
            proof.run(Path(proof.worlds.tell("model", folder)))
        if session.rank > 0:
            return True
        write_result(json_file, proof.to_json())
        return proof.verdict()


class LayoutProof:
    """Runs the cases on one rank of a launched job. Rank 0 compares and reports."""

    def __init__(
        self,
        config: Config,
        losses: Mapping[str, LossConfig],
        precision: str,
        only: str,
        session: QuietRank,
    ) -> None:
        self.losses = {"": config.loss, **losses}
        if config.policy.router_replay == "engine":  # there is none: replay the reference's experts
            policy = config.policy.model_copy(update={"router_replay": "policy"})
            config = config.model_copy(update={"policy": policy})
        if any(loss.entropy_coefficient for loss in losses.values()):
            # The policy computes the gradient of the entropy only if its config has a coefficient.
            loss = config.loss.model_copy(update={"entropy_coefficient": 1.0})
            config = config.model_copy(update={"loss": loss})
        self.config, self.precision = config, precision
        self.arch = shrink(read_architecture(config), config.policy)
        self.worlds = Worlds(session)
        every = matrix(config, self.arch, self.worlds.num_ranks, precision)
        self.cases = [case for case in every if only in case.name]
        if not self.cases:
            raise ConfigError(f"--only: no case has {only!r} in its name; use a shorter text")
        compared = replace(self.cases[0], packed=True).config(config, config.model.path)
        arch = read_architecture(config)
        check_compatibility(compared, arch, Machine.here(), has_engine=False)
        # bfloat16 is compared with bfloat16, because its rounding errors in the model exceed any
        # useful tolerance.
        highest = "float32" if has_cuda() else "float64"
        self.exact = precision if precision == "bfloat16" else highest
        self.rows: list[dict[str, Any]] = []
        self._width = max(len(case.name) for case in self.cases)
        terminal = session.terminal.isatty()
        self._console = LiteralConsole(
            file=session.terminal,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            highlight=False,
            soft_wrap=True,  # keeps each row on one line, for grep and for narrow windows
        )

    def run(self, folder: Path) -> None:
        """Compare every case with its reference. `folder` has the model. Collective."""
        first = reference(self.cases[0], self.exact)
        outputs = self._with_policy(first, folder, self._logprobs)
        if outputs is not None:
            torch.save(outputs, folder / "logprobs.pt")
        self.worlds.tell("log-probs", "written")
        logprobs, routes = torch.load(folder / "logprobs.pt")
        objectives = {
            name: self._objective(loss, logprobs, routes) for name, loss in self.losses.items()
        }
        if self.config.loss.old_logprobs == "policy":
            own = objectives[""]
            objectives["ratio 1"] = replace(own, mini=replace(own.mini, old_logprobs=None))
        measured = partial(measure, objectives=objectives)
        expected: dict[LayoutCase, Measured | None] = {}
        for case in self.cases:
            exact = reference(case, self.exact)
            if exact not in expected:
                expected[exact] = self._with_policy(exact, folder, measured)
            started = time.perf_counter()
            actual = self._with_policy(case, folder, measured)
            if self.worlds.rank == 0:
                self.add(case, actual, expected[exact], time.perf_counter() - started)

    def _with_policy(
        self, case: LayoutCase, folder: Path, work: Callable[[MegatronPolicy], T]
    ) -> T | None:
        """Return the result of `work` on the policy of a case, built as a run builds it. Return
        None on ranks that the case leaves out. Collective."""
        with self.worlds.world(case.num_ranks, f"case {case.name!r}") as ranks:
            if ranks is None:
                return None
            from dapo_megatron.policy.policy import MegatronPolicy  # Megatron prints when imported

            config = case.config(self.config, str(folder))
            policy = MegatronPolicy(config, ranks, case.planner(config))
            if (
                policy.lora is not None
            ):  # a new adapter, whose lora_b is 0, hides half of its faults
                policy.lora.reset(config.seed, NOISE)
            result = work(policy)
            policy.close()
            del policy
            return result

    def _logprobs(self, policy: MegatronPolicy) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs [T] of the mini-batch, and with policy.router_replay also the
        experts that it chose."""
        outputs = policy.logprobs(random_minibatch(self.arch.vocab_size, "token"))
        routes = None if outputs.routes is None else outputs.routes.short().cpu()
        return outputs.logprobs.cpu(), routes

    def _objective(self, loss: LossConfig, logprobs: Tensor, routes: Tensor | None) -> Objective:
        """Return a loss with its mini-batch, whose old log-probs are near `logprobs`."""
        mini = random_minibatch(
            self.arch.vocab_size,
            loss.aggregation,
            divisor=self.config.rollout.max_response_tokens,
        )
        mini = replace(with_old_logprobs(mini, logprobs), routes=routes)
        if loss.distill is not None and loss.distill.top_k is not None:
            k = min(loss.distill.top_k, self.arch.vocab_size)
            mini = with_top_tokens(mini, k, self.arch.vocab_size)
        if loss.old_logprobs == "engine":
            mini = replace(mini, old_logprobs=mini.engine_logprobs)
        if loss.correction.is_on:
            mini, _ = correct(mini, Correction(**loss.correction_numbers))
        return Objective(loss_function(loss), mini)

    # --------------------------------------------------------------------------- report

    def print_header(self) -> None:
        """Print what is compared, and whether the config's own layout is included."""
        arch, tolerance = self.arch, TOLERANCES[self.precision]
        experts = f", {arch.num_experts} experts" if arch.num_experts else ""
        self._console.print(
            f"{self.config.model.path} shrunk: {arch.family}, {arch.num_layers} layers of "
            f"{arch.hidden_size}, {arch.num_heads} heads on {arch.num_kv_heads}, vocabulary "
            f"{arch.vocab_size}{experts}\n"
            f"{self.precision} against one process in {self.exact}; allowed: gradient and loss "
            f"{tolerance.gradient:g}, after 3 updates {tolerance.updates:g}"
        )
        self._print_left_out()
        if len(self.losses) > 1:
            self._console.print(f"also the gradients of {', '.join(filter(None, self.losses))}")
        columns = f"{'layout, split, rows':<{self._width}}  gradient     loss  updates  seconds"
        self._console.print(columns, style="bold")

    def add(
        self, case: LayoutCase, actual: Measured | None, expected: Measured | None, seconds: float
    ) -> None:
        """Add the row of a case that ran for `seconds`, and print it with what fails."""
        assert actual is not None and expected is not None
        differences = compare(actual, expected)
        failures = TOLERANCES[self.precision].failures(differences)
        gradients = distances(actual.gradients, expected.gradients)
        tensor = max(gradients, key=lambda name: gradients[name])
        texts = [f"{name} {differences[name]:.1e}" for name in failures]
        if "gradient" in failures:
            texts.append(f"in {tensor}")
        numbers = " ".join(f"{differences[name]:8.1e}" for name in ("gradient", "loss", "weights"))
        self._console.print(
            f"{case.name:<{self._width}}  {numbers} {seconds:8.1f}  "
            f"{'FAIL' if failures else 'ok'}  {', '.join(texts)}".rstrip(),
            style="red" if failures else "",
        )
        row = {
            "layout": case.layout,
            "yours": case.yours,
            "num_ranks": case.num_ranks,
            "split": case.split,
            "packed": case.packed,
            "tensor": tensor,
            "seconds": seconds,
            "failures": failures,
            "ok": not failures,
        }
        for name, value in differences.items():
            row[name] = value if math.isfinite(value) else str(value)  # JSON has no inf and no nan
        self.rows.append(row)

    def verdict(self) -> bool:
        """Print the overall result. Return whether all cases agree."""
        failed = sum(not row["ok"] for row in self.rows)
        if failed:
            self._console.print(f"{failed} of {len(self.rows)} cases FAIL", style="bold red")
        else:
            text = f"all {len(self.rows)} cases agree" if len(self.rows) > 1 else "the case agrees"
            self._console.print(text, style="bold green")
        self._print_left_out()
        return not failed

    def _print_left_out(self) -> None:
        """Print how to include the config's own layout, if it is not."""
        policy = self.config.policy
        needed = smallest_world(policy, self.arch)
        if needed > self.worlds.num_ranks:
            name = layout_name(policy, needed)
            self._console.print(f"not tried: yours ({name}) needs --ranks {needed}", style="yellow")

    def to_json(self) -> str:
        """Return the rows, with commit, machine and versions, as JSON."""
        body = {
            **facts(),
            "model_path": self.config.model.path,
            "model": to_hf_config(self.arch),
            "precision": self.precision,
            "reference": f"one process, {self.exact}, one sequence per micro-batch, no packing",
            "tolerance": asdict(TOLERANCES[self.precision]),
            "losses": [name for name in self.losses if name],
            "ok": all(row["ok"] for row in self.rows),
            "yours_tried": any(row["yours"] for row in self.rows),
            "rows": self.rows,
        }
        return json.dumps(body, indent=2, allow_nan=False) + "\n"
