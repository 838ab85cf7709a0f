"""Loading a tokenizer, without running a program from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dapo_megatron.files import read_json
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a local folder.

    Raises DataError naming `key`, the option or config key that names the folder, if there is none,
    or only one that is a program.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    has_file = (folder / "tokenizer.json").exists()
    program = _program(folder)
    if program and not has_file:
        # transformers would ask whether to run it, or read tiktoken.model and cut text elsewhere.
        raise DataError(
            f"{key}: the tokenizer in {folder} is a program ({program}), which is never run. Add a "
            "tokenizer.json to the folder, or name a copy of the model that has one"
        )
    model_type = _fields(folder / "config.json").get("model_type")
    try:
        if has_file and (program or (model_type and model_type not in CONFIG_MAPPING)):
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{key} {folder}: no tokenizer can be read; name a folder with one ({error})"
        ) from error


def _program(folder: Path) -> str | None:
    """Return the name of the class that defines the tokenizer, if that is not in transformers."""
    classes = _fields(folder / "tokenizer_config.json").get("auto_map")
    name = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    names = name if isinstance(name, list) else [name]
    return next((str(each) for each in names if each), None)


def _fields(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}
