"""`doctor tokenizer`: compare the tokenizer that a run uses with the model's tokenizer.json.

Before 2026-11-26 runs used the tokenizer that transformers makes of a folder. transformers 5 may
build another one than the file describes (data/tokenizer.py), so it is compared, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_megatron.data.tokenizer import FILE, load_tokenizer, read_file
from dapo_megatron.files import write_result
from dapo_megatron.types import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PROBES = (
    "What is 1+2? Think first.\n\nAnswer: 3",
    "  two  spaces, a\ttab, trailing \n\n\n new lines\r\n",
    "12 + 123 - 1234567890 = 3.14e-5; 1,000.50",
    "def f(x):\n    return {'a': [x, 1]}  # don't, can't\n\tif x != 0: pass",
    "Ça coûte 5 €; naïve café, Straße, Ελληνικά, русский",
    "中文字符和标点。日本語のテキスト、한국어",
    "😀👩‍👩‍👧 e\u0301 \u200b \u00a0 \u3000 \ufb01 ½ ² \uff41\uff11",
    r"$\frac{1}{2} \times \sqrt{x^2}$ <think>\boxed{42}</think>",
)
"""Texts with what tokenizers treat differently."""


def command(folder: Path, json_file: Path | None) -> bool:
    """Print the comparison. Return whether neither differs. Raises DataError without a
    tokenizer.json."""
    if not (folder / FILE).exists():
        raise DataError(f"{folder}: has no {FILE} to compare with")
    used = load_tokenizer(folder, "FOLDER")
    from_file = read_file(folder)
    results = {
        "used by runs": difference(from_file, used),
        "made by transformers (earlier runs)": _made_by_transformers(folder, from_file),
    }
    for name, first in results.items():
        print(f"{name}: {'differs from' if first else 'the same as'} {FILE}")
        for key, value in (first or {}).items():
            print(f"  {key}: {value!r}")
    write_result(json_file, json.dumps(results))
    return not any(results.values())


def difference(from_file: Tokenizer, other: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the first text whose ids, or ids whose text, differ between two tokenizers; None if
    there is none among PROBES and the special tokens."""
    added = [token.content for _, token in sorted(from_file.get_added_tokens_decoder().items())]
    for text in (*PROBES, *(f"a {token} b{token}c\n{token}" for token in added[:64])):
        ids = from_file.encode(text, add_special_tokens=False).ids
        other_ids = other(text, add_special_tokens=False)["input_ids"]
        if ids != other_ids:
            return {"text": text, "ids of the file": ids, "other ids": other_ids}
        for skip in (False, True):
            decoded = from_file.decode(ids, skip_special_tokens=skip)
            other_text = other.decode(ids, skip_special_tokens=skip)
            if decoded != other_text:
                return {"ids": ids, "text of the file": decoded, "other text": other_text}
    return None


def _made_by_transformers(folder: Path, from_file: Tokenizer) -> dict[str, Any] | None:
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - of any class that the folder names
        return {"error": f"{type(error).__name__}: {error}"}
    return difference(from_file, made)
