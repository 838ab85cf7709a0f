"""The text of each token, such that the pieces of a completion add up to its text.

A byte-level token may end in the middle of a character. Its piece is then empty (or ends before
that character), and the character stands in the piece of the token that completes it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

_MAX_HELD = 16
"""Tokens without a whole character, after which they are shown as they are: a stream decodes all
that it holds anew with every token."""


class Pieces:
    """The pieces of a tokenizer in the `tokenizers` library's format.

    Example: `Pieces.of_file(path).split([27, 28, 1]) == ["7", "8", "<eos>"]`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._is_byte_level = _is_byte_level(decoder)
        self._bytes: dict[int, bytes] = {}
        self._clean: dict[int, str] = {}
        """Tokens that are whole characters: nearly all that occur."""
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token for token, one in added.items() if one.special}
        """Tokens that steer, such as the end of the sequence."""

    @classmethod
    def of_file(cls, path: Path) -> Pieces | None:
        """None if there is no such file, or the library cannot read it."""
        try:
            if not path.is_file():
                return None
            return cls(Tokenizer.from_file(str(path)))
        except Exception:  # noqa: BLE001 - the library raises nothing more special
            return None

    def split(self, tokens: Sequence[int]) -> list[str]:
        """A piece for each token, special ones included; together they are what the tokenizer
        makes of all of them."""
        if self._is_byte_level:
            return self._split_bytes(tokens)
        return self._split_stream(tokens)

    def _split_bytes(self, tokens: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        clean = self._clean
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        is_between = True
        """Between two characters."""
        for token in tokens:
            piece = clean.get(token) if is_between else None
            if piece is None:
                piece = decoder.decode(self._bytes_of(token))
                is_between = decoder.getstate()[0] == b""
            pieces.append(piece)
        if not is_between and pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def _bytes_of(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            text = self._tokenizer.id_to_token(token) or ""
            try:
                found = bytes(_BYTES[letter] for letter in text)
            except KeyError:  # an added token: it stands for itself
                found = text.encode()
            self._bytes[token] = found
            with suppress(UnicodeDecodeError):
                self._clean[token] = found.decode()
        return found

    def _split_stream(self, tokens: Sequence[int]) -> list[str]:
        decode: Callable[[Sequence[int]], str] = lambda ids: self._tokenizer.decode(  # noqa: E731
            list(ids), skip_special_tokens=False
        )
        pieces: list[str] = []
        stream = decoders.DecodeStream(skip_special_tokens=False)
        held: list[int] = []
        for token in tokens:
            piece = stream.step(self._tokenizer, token)
            held = [*held, token] if piece is None else []
            if len(held) > _MAX_HELD:
                piece, held = decode(held), []
                stream = decoders.DecodeStream(skip_special_tokens=False)
            pieces.append(piece or "")
        if held:
            pieces[-1] += decode(held)
        return pieces


def find_tokenizer(run: Path, model_path: str | None, checkpoints: Iterable[Path]) -> Pieces | None:
    """The run's own tokenizer, else that of its model's folder, else that of the newest of its
    checkpoints that has one. A relative model path is one of this folder, as it was for the run."""
    places = [run / "tokenizer.json"]
    if model_path:
        places.append(Path(model_path) / "tokenizer.json")
    places += [folder / "tokenizer.json" for folder in checkpoints]
    return next((found for place in places if (found := Pieces.of_file(place))), None)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_table() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as: printable ones of Latin-1 as they are,
    the others, in order, from U+0100 on (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_table()
