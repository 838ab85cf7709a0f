"""Exports of a run's checkpoints to HF folders. Megatron reads the checkpoints themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import StoreWriter, blocks
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import copy_companions, declare_without_mtp
from dapo_megatron.config import Config
from dapo_megatron.model import hf_tensors, read_architecture
from dapo_megatron.types import torch_dtype, whole


def exports_of(config: Config) -> dict[str, WeightsExport]:
    """Return the exports that a config asks for, by the name of their folder in a checkpoint.

    Raises ConfigError for a model that a format does not have.
    """
    arch, dtype = read_architecture(config), torch_dtype(config.policy.precision)
    infos = {name: TensorInfo(shape, dtype) for name, shape in hf_tensors(arch).items()}
    if not config.checkpoint.export_hf:
        return {}
    return {"hf": WeightsExport(config, lambda folder: HfWriter(folder, infos))}


class WeightsExport:
    """Exports the weights of a training checkpoint. Implements checkpoints.Export."""

    def __init__(self, config: Config, writer: Callable[[Path], StoreWriter]) -> None:
        self._model = Path(config.model.path)
        self._ignore = config.model.ignore_fields
        self._drop_mtp = config.model.drop_mtp
        self._dtype = torch_dtype(config.policy.precision)
        self._writer = writer
        self.num_bytes = writer(Path()).nbytes

    def create(self, target: Path) -> None:
        """See checkpoints.Export."""
        self._writer(target).create()

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        """See checkpoints.Export."""
        store, writer = open_store(source, self._ignore), self._writer(target)
        for name in list(store.tensors)[rank::num_ranks]:
            info = store.info(name)
            for box in blocks(whole(info.shape), info.dtype.itemsize):
                writer.write(name, store.read(name, box), box)

    def finish(self, target: Path) -> None:
        """See checkpoints.Export."""
        self._writer(target).finish()
        copy_companions(self._model, target, self._dtype)
        if self._drop_mtp:
            declare_without_mtp(target)
