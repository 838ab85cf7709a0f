"""`doctor layouts`: check that every layout of a model computes the same gradient.

For the same mini-batch, any layout (tensor, sequence, pipeline, context, expert and data parallel)
and any split into micro-batches, packed or padded, must give the gradient of

    1/N sum over the N loss tokens of the mini-batch.

How this is checked:
1. The model is shrunk to small sizes, with all its features (shrink.py) and random weights.
2. The mini-batch has random tokens, sequences of 3 to 300 tokens, and ratios on both sides of the
   clip (measure.py). The losses are the config's own and those of --losses.
3. The reference is one process in float64 (on a GPU float32, because Megatron's optimizer has no
   float64 there), with one sequence per micro-batch and without packing.
4. Each case (matrix.py) builds the policy as a run does, in a new world (process_groups.py), and
   computes the whole gradient of each loss, then three updates with the config's own (measure.py).
5. Each gradient tensor, the loss, and the weights after the updates must equal those of the
   reference (measure.compare), up to rounding (table.TOLERANCES).

Float32 cases are also compared with the float64 reference, so their differences include the
rounding of the model itself. Largest differences measured on model_configs/tiny_cpu.yaml: 5e-15 in
float64, 2.3e-6 in float32 (2.0e-6 with one process).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dapo_megatron.algo.correction import Correction, correct
from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.config import Config, LossConfig
from dapo_megatron.config.file import load_config
from dapo_megatron.doctor.matrix import LayoutCase, layout_name, matrix, reference, smallest_world
from dapo_megatron.doctor.measure import (
    Measured,
    Objective,
    compare,
    measure,
    random_minibatch,
    with_old_logprobs,
)
from dapo_megatron.doctor.process_groups import Worlds
from dapo_megatron.doctor.quiet_rank import QuietRank, quiet_rank
from dapo_megatron.doctor.shrink import shrink, write_random_model
from dapo_megatron.doctor.table import TOLERANCES, CaseResult, CaseTable
from dapo_megatron.files import check_result, write_result
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

Result = TypeVar("Result")


def check_options(config: Config, precision: str | None, json_file: Path | None) -> str:
    """Check the config and the options before any rank starts. Return the precision of the cases;
    the default is the highest one possible. Raises ConfigError."""
    arch = read_architecture(config)
    check_layout(config, arch, smallest_world(config.policy, arch), has_engine=False)
    check_compatibility(config, arch, has_engine=False)
    check_result(json_file)
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
            proof.run(Path(proof.worlds.tell("model", folder.encode()).decode()))
        if session.rank == 0:
            proof.table.verdict(proof.left_out())
            write_result(json_file, proof.to_json())
        return session.rank > 0 or proof.table.ok


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
        self.config, self.precision, self.session = config, precision, session
        self.arch = shrink(read_architecture(config), config.policy)
        self.worlds = Worlds()
        self.cases = [
            case
            for case in matrix(config, self.arch, self.worlds.num_ranks, precision)
            if only in case.name
        ]
        if not self.cases:
            raise ConfigError(f"--only: no case has {only!r} in its name; use a shorter text")
        compared = replace(self.cases[0], packed=True).config(config, config.model.path)
        arch = read_architecture(config)
        check_compatibility(compared, arch, Machine.here(), has_engine=False)
        self.tolerance = TOLERANCES[precision]
        self.exact = _reference_precision(precision)
        self.table = CaseTable(session.terminal, self.cases)
        session.is_waiting = session.rank > 0

    def run(self, folder: Path) -> None:
        """Compare every case with its reference. `folder` has the model. Collective."""
        logprobs, routes = self._share_logprobs(folder)
        objectives = {
            name: self._objective(loss, logprobs, routes) for name, loss in self.losses.items()
        }

        def work(policy: MegatronPolicy) -> Measured:
            return measure(policy, objectives)

        references = dict.fromkeys(map(self._reference, self.cases))
        expectations = {case: self._run_case(case, folder, work) for case in references}
        for case in self.cases:
            started = time.perf_counter()
            actual = self._run_case(case, folder, work)
            expected = expectations[self._reference(case)]
            if self.worlds.rank == 0:
                assert actual is not None and expected is not None
                differences = compare(actual, expected)
                seconds = time.perf_counter() - started
                failures = self.tolerance.failures(differences)
                self.table.add(CaseResult(case, differences, seconds, failures))

    def to_json(self) -> str:
        """Return the rows, with commit, machine and versions, as JSON."""
        body = {
            **facts(),
            "model_path": self.config.model.path,
            "model": to_hf_config(self.arch),
            "precision": self.precision,
            "reference": f"one process, {self.exact}, one sequence per micro-batch, no packing",
            "tolerance": asdict(self.tolerance),
            "losses": [name for name in self.losses if name],
            **self.table.to_dict(),
        }
        return json.dumps(body, indent=2, allow_nan=False) + "\n"

    def print_header(self) -> None:
        """Print what is compared, and whether the config's own layout is included."""
        arch, tolerance = self.arch, self.tolerance
        experts = f", {arch.num_experts} experts" if arch.num_experts else ""
        self.table.note(
            f"{self.config.model.path} shrunk: {arch.family}, {arch.num_layers} layers of "
            f"{arch.hidden_size}, {arch.num_heads} heads on {arch.num_kv_heads}, vocabulary "
            f"{arch.vocab_size}{experts}"
        )
        self.table.note(
            f"{self.precision} against one process in {self.exact}; allowed: gradient and loss "
            f"{tolerance.gradient:g}, after 3 updates {tolerance.updates:g}"
        )
        if left_out := self.left_out():
            self.table.note(left_out, style="yellow")
        if len(self.losses) > 1:
            self.table.note(f"also the gradients of {', '.join(filter(None, self.losses))}")
        self.table.header()

    def left_out(self) -> str:
        """Return a note on how to include the config's own layout; empty if it is included."""
        policy = self.config.policy
        needed = smallest_world(policy, self.arch)
        if needed <= self.worlds.num_ranks:
            return ""
        return f"not tried: yours ({layout_name(policy, needed)}) needs --ranks {needed}"

    def _reference(self, case: LayoutCase) -> LayoutCase:
        return reference(case, self.exact)

    def _run_case(
        self, case: LayoutCase, folder: Path, work: Callable[[MegatronPolicy], Result]
    ) -> Result | None:
        """Call `work` with the policy of a case, built as a run builds it. Return None on ranks
        that the case leaves out. Collective."""
        from dapo_megatron.policy.policy import MegatronPolicy  # Megatron prints when imported

        with self.worlds.world(case.num_ranks) as ranks:
            if ranks is None:
                return None
            self.session.doing, self.session.is_waiting = f"case {case.name!r}", False
            config = case.config(self.config, str(folder))
            policy = MegatronPolicy(config, ranks, case.planner(config))
            result = work(policy)
            policy.close()
            del policy
            self.session.is_waiting = self.session.rank > 0
            return result

    def _share_logprobs(self, folder: Path) -> tuple[Tensor, Tensor | None]:
        """Return, on every rank, the log-probs [T] of the mini-batch in the first reference, and
        with policy.router_replay also the experts that it chose."""
        mini = random_minibatch(self.arch.vocab_size, "token")
        outputs = self._run_case(
            self._reference(self.cases[0]), folder, lambda policy: policy.logprobs(mini)
        )
        values = encode([] if outputs is None else outputs.logprobs.double().tolist())
        values = self.worlds.tell("log-probs of the mini-batch", values)
        logprobs = torch.tensor(decode(values, list[float], "rank 0"))
        if self.config.policy.router_replay == "off":
            return logprobs, None
        recorded = None if outputs is None else outputs.routes
        values = encode([] if recorded is None else recorded.tolist())
        values = self.worlds.tell("routes of the mini-batch", values)
        routes = decode(values, list[list[int]], "rank 0")
        return logprobs, torch.tensor(routes, dtype=torch.int16)

    def _objective(self, loss: LossConfig, logprobs: Tensor, routes: Tensor | None) -> Objective:
        """Return a loss with its mini-batch, whose old log-probs are near `logprobs`."""
        mini = random_minibatch(
            self.arch.vocab_size,
            loss.aggregation,
            divisor=self.config.rollout.max_response_tokens,
        )
        mini = replace(with_old_logprobs(mini, logprobs), routes=routes)
        if loss.old_logprobs == "engine":
            mini = replace(mini, old_logprobs=mini.engine_logprobs)
        if loss.correction.is_on:
            mini, _ = correct(mini, Correction(**loss.correction_numbers))
        return Objective(loss_function(loss), mini)


def _reference_precision(precision: str) -> str:
    """Return the precision of the reference. bfloat16 is compared with bfloat16, because its
    rounding errors in the model exceed any useful tolerance."""
    if precision == "bfloat16":
        return precision
    return "float32" if has_cuda() else "float64"
