"""Loading a model's tokenizer: the one in tokenizer.json, to the bit.

transformers 5 chooses a class by model type and `tokenizer_class`, and builds the tokenizer again
from the vocabulary of tokenizer.json, with the splitter and decoder of that class. Classes that do
not fit the file drop spaces, cut numbers elsewhere, or decode to wrong bytes, without an error.
Here the file is used as it is, whatever class is named. transformers adds only the chat template
and the names of special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dapo_megatron.files import read_json
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FILE = "tokenizer.json"


def load_tokenizer(folder: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a local folder. No program of the folder is run.

    Raises DataError naming `key`, the option or config key that names the folder, if there is none,
    only one that is a program, or one that cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_file = (folder / FILE).exists()
    program = _program(folder)
    if program and not has_file:
        # transformers would ask whether to run it, or read tiktoken.model and cut text elsewhere.
        raise DataError(
            f"{key}: the tokenizer in {folder} is a program ({program}), which is never run. Add a "
            "tokenizer.json to the folder, or name a copy of the model that has one"
        )
    try:
        if not has_file:
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder,
            local_files_only=True,
            # Settings of tokenizer_config.json that change ids and texts.
            split_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        # Without the tokens that transformers adds to the file's.
        tokenizer._tokenizer = read_file(folder)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    # The file is somebody else's: transformers raises any exception for a malformed one, and
    # `tokenizers` a PanicException, which is no Exception.
    except BaseException as error:
        raise DataError(
            f"{key} {folder}: no tokenizer can be read; name a folder with one "
            f"({type(error).__name__}: {error})"
        ) from error


def read_file(folder: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json, without the truncation and padding that it may have
    been saved with. Raises what `tokenizers` raises."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _program(folder: Path) -> str | None:
    """Return the name of the class that defines the tokenizer, if that is not in transformers."""
    file = folder / "tokenizer_config.json"
    classes = read_json(file, error=DataError).get("auto_map") if file.exists() else None
    name = classes.get("AutoTokenizer") if isinstance(classes, dict) else classes
    names = name if isinstance(name, list) else [name]
    return next((str(each) for each in names if each), None)
