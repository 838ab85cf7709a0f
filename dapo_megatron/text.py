"""Makes hidden characters of names and texts visible. Names in files of others could otherwise
control the terminal, or make a page show something else than a file contains."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2069\ufeff]"
)
"""Hidden characters: control characters except tab and newline, zero-width characters except
joiners, and direction overrides."""


def visible(text: str) -> str:
    """Replace each hidden character by its code point, as in ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda hidden: f"⟨U+{ord(hidden[0]):04X}⟩", text)
