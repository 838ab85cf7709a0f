"""`doctor layouts`: does every layout of this model compute the same gradient?

The claim: with one mini-batch, any layout (tensor, sequence, pipeline, context, expert and data
parallel), any split into micro-batches, packed or padded, gives the gradient of

    1/N sum over the N loss tokens of the mini-batch.

The proof:
1. The model is shrunk to small sizes with every feature kept (shrink.py), weights random.
2. A mini-batch of random tokens, sequences of 3 to 300, both sides of the clip (minibatch.py), and
   the config's own loss.
3. The reference: one process, float64 (on a GPU float32: Megatron's optimizer takes no more
   there), one sequence per micro-batch, no packing.
4. Each case (matrix.py) builds the policy as a run does, in a world of its own (groups.py), and
   takes the whole gradient, then three updates (measure.py).
5. Each gradient tensor, the loss, and the weights after the updates must be those of the reference
   (measure.compare), up to rounding (table.TOLERANCES).

Float32 is held against the float64 reference too: its rows show the rounding of the layout and of
the model itself. Measured on model_configs/tiny_cpu.yaml, largest of all cases: 5e-15 in float64;
2.3e-6 in float32, of which one process alone has 2.0e-6.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO, TypeVar

import torch

from dapo_megatron.cluster.collectives import decode, encode
from dapo_megatron.config import Config, read_model_config
from dapo_megatron.doctor.facts import facts
from dapo_megatron.doctor.groups import Worlds
from dapo_megatron.doctor.matrix import Case, matrix, reference
from dapo_megatron.doctor.measure import Measured, compare, measure
from dapo_megatron.doctor.minibatch import random_minibatch, with_old_logprobs
from dapo_megatron.doctor.shrink import shrink
from dapo_megatron.doctor.table import TOLERANCES, Report, Row, to_json
from dapo_megatron.policy.device import has_cuda
from dapo_megatron.policy.policy import MegatronPolicy
from dapo_megatron.run.build import loss_function
from dapo_megatron.types import ConfigError, TokenBatch

Result = TypeVar("Result")


class Proof:
    """The proof on one rank of a launched job; rank 0 compares and reports."""

    def __init__(self, config: Config, precision: str, only: str, terminal: TextIO) -> None:
        self.config, self.precision = config, precision
        self.hf = shrink(read_model_config(config), config.policy)
        self.worlds = Worlds()
        self.cases = [
            case
            for case in matrix(config, self.hf, self.worlds.num_ranks, precision)
            if only in case.name
        ]
        if not self.cases:
            raise ConfigError(f"--only: no case has {only!r} in its name")
        self.tolerance = TOLERANCES[precision]
        self.exact = _reference_precision(precision)
        self.report = Report(terminal, self.cases)
        self.loss = loss_function(config.loss)
        self.doing = ""
        """The case that this rank takes part in, for an error message."""

    def run(self, folder: Path) -> None:
        """Every case against its reference. `folder` is for the model. Collective."""
        mini = self._share_minibatch(folder)

        def work(policy: MegatronPolicy) -> Measured:
            return measure(policy, mini, self.loss)

        references = dict.fromkeys(map(self._reference, self.cases))
        wanted = {case: self._run_case(case, folder, work) for case in references}
        for case in self.cases:
            started = time.perf_counter()
            seen, right = self._run_case(case, folder, work), wanted[self._reference(case)]
            if self.worlds.rank == 0:
                assert seen is not None and right is not None
                found = compare(seen, right)
                seconds = time.perf_counter() - started
                self.report.add(Row(case, found, seconds, self.tolerance.failures(found)))

    def to_json(self) -> str:
        """The figures, with what they were made with."""
        body = {
            **facts(),
            "model_path": self.config.model.path,
            "model": self.hf,
            "precision": self.precision,
            "reference": f"one process, {self.exact}, one sequence per micro-batch, no packing",
            "tolerance": asdict(self.tolerance),
        }
        return to_json(body, self.report)

    def _reference(self, case: Case) -> Case:
        return reference(case, self.exact)

    def _run_case(
        self, case: Case, folder: Path, work: Callable[[MegatronPolicy], Result]
    ) -> Result | None:
        """`work` with the policy of a case, built as a run builds it; None on ranks it leaves out.
        Collective."""
        with self.worlds.world(case.num_ranks) as ranks:
            if ranks is None:
                return None
            self.doing = case.name
            config = case.config(self.config, str(folder))
            policy = MegatronPolicy(config, ranks, case.planner(config))
            result = work(policy)
            policy.close()
            del policy
            self.doing = ""
            return result

    def _share_minibatch(self, folder: Path) -> TokenBatch:
        """The mini-batch, its old log-probs near those of the reference; on every rank."""
        mini = random_minibatch(self.hf["vocab_size"], self.config.loss.aggregation)
        logprobs = self._run_case(
            self._reference(self.cases[0]), folder, lambda policy: policy.logprobs(mini).logprobs
        )
        values = encode([] if logprobs is None else logprobs.double().tolist())
        values = self.worlds.tell("log-probs of the mini-batch", values)
        return with_old_logprobs(mini, torch.tensor(decode(values, list[float], rank=0)))


def _reference_precision(precision: str) -> str:
    """bfloat16 is compared with itself: its rounding in the model alone is far beyond any bound."""
    if precision == "bfloat16":
        return precision
    return "float32" if has_cuda() else "float64"
