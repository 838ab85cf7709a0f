"""Export of a run's checkpoints to HF folders. Megatron reads the checkpoints themselves."""

from __future__ import annotations

from pathlib import Path

from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import Companions
from dapo_megatron.config import Config
from dapo_megatron.model import hf_tensors, read_architecture
from dapo_megatron.types import torch_dtype


class HfExport:
    """Exports the weights of a training checkpoint. Methods raise OSError or DapoError."""

    FOLDER = "hf"
    """Name of the export in the checkpoint."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a model that is not supported."""
        dtype = torch_dtype(config.policy.precision)
        shapes = hf_tensors(read_architecture(config))
        self._infos = {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}
        self._ignore = config.model.ignore_fields
        self._companions = Companions.of(config)
        self.num_bytes = HfWriter(Path(), self._infos).nbytes
        """Total size of the weights."""

    def create(self, target: Path) -> None:
        """Create the folder with its files. Called on one rank."""
        target.mkdir()
        HfWriter(target, self._infos).create()

    def write(self, source: Path, target: Path, rank: int, num_ranks: int) -> None:
        """Write this rank's share of the checkpoint `source`. Called on all ranks concurrently."""
        store = open_store(source, self._ignore)
        share = list(store.tensors)[rank::num_ranks]
        HfWriter(target, self._infos).copy(store, share, lambda _: None)

    def finish(self, target: Path) -> list[str]:
        """Make the files valid after all ranks have written, and return the names of all files.
        Called on one rank."""
        HfWriter(target, self._infos).finish()
        self._companions.copy(target)
        return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
