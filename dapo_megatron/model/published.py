"""Dimensions of published models (`published.json`), for plans on machines without the checkpoint.

An entry of the JSON file has a hub name, the number of parameters (a tied head is counted once) and
the fields of config.json. `like` names another entry whose fields are inherited. Layers for
multi-token prediction and FP8 scales are not counted. Of models for images and text, only the text
model is described.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dapo_megatron.types import ConfigError


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model on the Hugging Face hub."""

    name: str
    """OWNER/NAME."""
    num_parameters: int
    hf: Mapping[str, Any]
    """Fields of its config.json."""


@cache
def published_models() -> Mapping[str, PublishedModel]:
    """Return the published models by NAME, without the owner."""
    text = resources.files(__package__).joinpath("published.json").read_text("utf-8")
    entries = json.loads(text)

    def fields(entry: Mapping[str, Any]) -> dict[str, Any]:
        inherited = fields(entries[entry["like"]]) if "like" in entry else {}
        return {**inherited, **entry.get("config", {})}

    return {
        name.rpartition("/")[2]: PublishedModel(name, entry["parameters"], fields(entry))
        for name, entry in entries.items()
    }


def find_published(path: str) -> PublishedModel | None:
    """Return the published model with the name of a model.path, or None.

    Only the last component is compared, ignoring case: `Qwen/Qwen3-8B`, `models/qwen3-8b`.
    """
    models = {name.casefold(): model for name, model in published_models().items()}
    return models.get(Path(path).name.casefold())


def published_or_refuse(path: str) -> PublishedModel:
    """Return the published model with the name of a model.path. Raises ConfigError listing the
    known names, closest first."""
    model = find_published(path)
    if model is not None:
        return model
    wanted = Path(path).name.casefold()

    def similarity(name: str) -> float:
        return difflib.SequenceMatcher(None, wanted, name.casefold()).ratio()

    names = sorted(published_models(), key=similarity, reverse=True)
    raise ConfigError(
        f"model.path: there is no folder {path}, and the dimensions of {Path(path).name!r} are not "
        f"known. `hf download OWNER/NAME config.json --local-dir {path}` downloads all that a plan "
        f"needs. Known, closest first: {', '.join(names)}"
    )
