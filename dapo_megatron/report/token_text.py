"""Splits the text of a completion into one piece per token. The pieces join to the full text.

A token may end in the middle of a character. That character then belongs to the piece of the token
that completes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders

from dapo_megatron.files import read_file

_MAX_HELD = 64
"""Maximum number of tokens to hold until a character is complete. A stream decodes all held tokens
again with every token, so its cost is quadratic."""


class TokenPieces:
    """Splits token sequences with a tokenizer of the `tokenizers` library.

    Example: `TokenPieces.of_file(path).split([27, 28, 1]) == ["7", "8", "<eos>"]`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token for token, entry in added.items() if entry.special}
        """Control tokens, such as the end of the sequence."""

    @classmethod
    def of_file(cls, path: Path) -> TokenPieces | None:
        """Load a tokenizer.json; None if it does not exist or cannot be read."""
        try:
            return cls(Tokenizer.from_str(read_file(path).decode())) if path.exists() else None
        except Exception:  # noqa: BLE001 - the library raises plain Exception
            return None

    def split(self, tokens: Sequence[int]) -> list[str]:
        """Return a piece per token, including special tokens. Joined, they equal the decoded text,
        except for bytes that are no text."""
        pieces: list[str] = []
        stream = decoders.DecodeStream(skip_special_tokens=False)
        held: list[int] = []
        for token in tokens:
            piece = stream.step(self._tokenizer, token)
            held = [*held, token] if piece is None else []
            if len(held) > _MAX_HELD:
                piece, held = self._decode(held), []
                stream = decoders.DecodeStream(skip_special_tokens=False)
            pieces.append(piece or "")
        if held:
            pieces[-1] = self._decode(held)
        return pieces

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def find_tokenizer(
    run: Path, model_path: str | None, checkpoints: Iterable[Path]
) -> TokenPieces | None:
    """Return the tokenizer in the run's folder, else in its model's folder, else in the first of
    `checkpoints` that has one. A relative model path is relative to the working directory, as in
    the run."""
    folders = [run, *([Path(model_path)] if model_path else []), *checkpoints]
    tokenizers = (TokenPieces.of_file(folder / "tokenizer.json") for folder in folders)
    return next(filter(None, tokenizers), None)
