"""Characters that are not seen, or that rearrange what is: names and texts of a run may hold them,
and a page that is passed on should not show another name than the file has."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2069\ufeff]"
)
"""Controls, zero widths (but joiners), overrides of direction, as page/viewer.js has them. Tabs and
ends of lines are seen."""


def visible(text: str) -> str:
    """With the number of each hidden character in its place, as in ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
