"""A rank's part of a checkpoint while it is only in memory; and the states of its generators."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoints.formats.file import TensorFileWriter, TensorInfo
from dapo_megatron.policy.device import has_cuda

RNG = "rng/"
_TRACKED = f"{RNG}tracked/"


class Snapshot:
    """Copies of tensors in host memory, to be written at any time, by any thread."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        # In the order of the file, wide elements first: so it can be summed from memory.
        order = sorted(tensors, key=lambda key: -tensors[key].element_size())
        self._tensors = {key: _host_copy(tensors[key]) for key in order}
        self._infos = {
            key: TensorInfo(tuple(value.shape), value.dtype) for key, value in self._tensors.items()
        }
        self._name = name
        self._metadata = metadata
        self.num_bytes = self._writer(Path()).nbytes
        """Of the file."""
        self.sums: dict[str, str] = {}
        """SHA-256 by file name, once it is written: of what is in memory, not of the file."""

    def __call__(self, folder: Path) -> None:
        """Write the file, to the disk itself. Other threads run meanwhile: writing and summing let
        go of Python's lock. Raises CheckpointError or OSError."""
        writer = self._writer(folder)
        writer.create()
        for key, value in self._tensors.items():
            writer.write(key, value)
        writer.finish()
        header_bytes = self.num_bytes - sum(info.nbytes for info in self._infos.values())
        with writer.path.open("rb") as file:
            digest = hashlib.sha256(file.read(header_bytes))
        for value in self._tensors.values():
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        self.sums[self._name] = digest.hexdigest()

    def _writer(self, folder: Path) -> TensorFileWriter:
        return TensorFileWriter(folder / self._name, self._infos, self._metadata)


def _host_copy(value: Tensor) -> Tensor:
    """Also of what is in host memory already; row by row."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def rng_tensors() -> dict[str, Tensor]:
    """Of every generator that the policy may draw from: torch's, and on a GPU those that Megatron
    keeps per kind of layer. (Prompts are shuffled and completions sampled from seeds of their own;
    nothing draws from Python's and numpy's global generators.)"""
    tensors = {f"{RNG}cpu": torch.get_rng_state()}
    if has_cuda():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tensors[f"{RNG}cuda"] = torch.cuda.get_rng_state()
        for name, state in get_cuda_rng_tracker().get_states().items():
            tensors[_TRACKED + name] = state
    return tensors


def set_rng(tensors: Mapping[str, Tensor]) -> None:
    """Go on from states that `rng_tensors` gave."""
    torch.set_rng_state(tensors[f"{RNG}cpu"])
    if has_cuda():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(tensors[f"{RNG}cuda"])
        tracked = {key: state for key, state in tensors.items() if key.startswith(_TRACKED)}
        if tracked:  # older versions saved none
            get_cuda_rng_tracker().set_states(
                {key.removeprefix(_TRACKED): state for key, state in tracked.items()}
            )
