"""One rank of `doctor layouts`: terminal, logs, the folder of the model, and how errors are told.

Libraries talk while they are imported, so they are once their output goes to a log.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dapo_megatron.config import Config
from dapo_megatron.run.context import redirect_output
from dapo_megatron.types import ConfigError, DapoError

if TYPE_CHECKING:
    from dapo_megatron.doctor.layouts import Proof


def layouts(config: Config, *, precision: str, only: str, json_file: Path | None) -> bool:
    """Prove it, on this rank of a launched job: the table on the terminal of rank 0, the figures in
    `json_file`. Whether all cases agree (on ranks but the first: True).

    Raises ConfigError, and whatever a case raises, both told on the terminal.
    """
    rank = int(os.environ["RANK"])
    log, terminal = _redirect(rank)
    proof: Proof | None = None
    try:
        from dapo_megatron.doctor.layouts import Proof
        from dapo_megatron.doctor.shrink import write_random_model
        from dapo_megatron.policy.device import claim

        claim(int(os.environ.get("LOCAL_RANK", rank)))
        proof = Proof(config, precision, only, terminal)
        with tempfile.TemporaryDirectory(prefix="doctor_layouts_") as folder:
            if rank == 0:
                write_random_model(proof.arch, Path(folder))
                _introduce(proof)
            # Of rank 0, on one machine, or where all of them see the same TMPDIR.
            proof.run(Path(proof.worlds.tell("model", folder.encode()).decode()))
        if rank == 0:
            proof.report.verdict(_left_out(proof))
            if json_file is not None:
                json_file.write_text(proof.to_json(), encoding="utf-8")
    finally:
        _tell(sys.exc_info()[1], proof, terminal, log)
    return rank > 0 or proof.report.ok


def default_ranks() -> int:
    """One process per GPU; without a GPU as many as the matrix has a use for."""
    from torch.cuda import device_count

    return device_count() or 4


def check_options(precision: str | None, json_file: Path | None) -> str:
    """The precision to compare in, by default the sharpest there is. Raises ConfigError naming the
    option, before minutes are spent."""
    from torch.cuda import is_available

    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise ConfigError(f"--json: {json_file.resolve().parent} is not a folder; make it first")
    if is_available() and precision == "float64":
        raise ConfigError(
            "--precision: Megatron's optimizer takes no float64 on a GPU; use float32, or hide the "
            "GPU (CUDA_VISIBLE_DEVICES= in front of the command)"
        )
    return precision or ("float32" if is_available() else "float64")


def _introduce(proof: Proof) -> None:
    """What is about to be proved, and whether the config's own layout is among it."""
    report, arch, config = proof.report, proof.arch, proof.config
    experts = f", {arch.num_experts} experts" if arch.num_experts else ""
    report.note(
        f"{config.model.path} shrunk: {arch.family}, {arch.num_layers} layers of {arch.hidden}, "
        f"{arch.num_heads} heads on {arch.num_groups}, vocabulary {arch.vocab}{experts}"
    )
    tolerance = proof.tolerance
    report.note(
        f"{proof.precision} against one process in {proof.exact}; allowed: gradient and loss "
        f"{tolerance.gradient:g}, after 3 updates {tolerance.updates:g}"
    )
    if left_out := _left_out(proof):
        report.note(left_out, style="yellow")
    report.header()


def _left_out(proof: Proof) -> str:
    """That the config's own layout is not among the cases, and how it would be; or nothing."""
    from dapo_megatron.doctor.matrix import layout_name, smallest_world

    policy, needed = proof.config.policy, smallest_world(proof.config.policy, proof.arch)
    if needed <= proof.worlds.num_ranks:
        return ""
    return f"not tried: yours ({layout_name(policy, needed)}) needs --ranks {needed}"


def _redirect(rank: int) -> tuple[Path, TextIO]:
    """The log that this rank's output goes to, and the terminal it had."""
    handle, name = tempfile.mkstemp(prefix=f"doctor_layouts_rank_{rank}_", suffix=".log")
    os.close(handle)
    return Path(name), redirect_output(Path(name))


def _tell(error: BaseException | None, proof: Proof | None, terminal: TextIO, log: Path) -> None:
    """One line on the terminal, with the case it happened in. Without an error the log goes.
    A rank that was in no case only heard that others are gone."""
    rank = os.environ["RANK"]
    if error is None or isinstance(error, DapoError):
        log.unlink()
    if isinstance(error, DapoError):
        if rank == "0":
            print(f"error: {error}", file=terminal, flush=True)
    elif isinstance(error, Exception) and (proof is None or proof.doing):
        where = f"case {proof.doing!r}, " if proof else ""
        said = f"{type(error).__name__}: {error}"[:300].strip()
        print(f"{where}rank {rank}: {said} (log: {log})", file=terminal, flush=True)
