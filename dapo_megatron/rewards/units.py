"""Units of measurement after a number: `5 m` and `5 cm` differ, `5 m` and `5 meters` do not.

The Math-Verify library removes units before it compares. Names are those of sympy.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sympy.physics import units
from sympy.physics.units.quantities import PhysicalConstant

from dapo_megatron.rewards.answers import without_wrappers

_QUANTITY = re.compile(
    r"(\s*(?:[A-Za-z]\s*=\s*)?(?>\\(?!times|cdot)[A-Za-z]+|\\[^A-Za-z]|[-+0-9.,/(){}\[\]^~\s$])++)"
    r"([A-Za-z][^$]*)\$?\s*"
)
"""A number or a product of numbers and constants, and what follows it."""

_DEGREES = re.compile(r"^([-+0-9.,\s]+)\^\s*(?:\\circ\b|\{\s*\\circ\s*\})")

_REWRITES = [
    (re.compile(r"\b(?:square|sq)\.?\s+([A-Za-z]+)|([A-Za-z]+)\s+squared\b"), r"\1\2^2"),
    (re.compile(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)|([A-Za-z]+)\s+cubed\b"), r"\1\2^3"),
    (re.compile(r"\bmph\b"), "mile/hour"),
    (re.compile(r"\bk(?:m|p)?ph\b"), "kilometer/hour"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"\\(?:cdot|times|[,; !])|[{}~·.\s]+"), " "),
]
_PARTS = re.compile(r"(?: ?(?:[A-Za-z]+|\^ ?-?[0-9]|/))+ ?")
_SYNONYMS = {
    "sec": "second", "min": "minute", "hr": "hour", "wk": "week", "yr": "year", "year": "year",
    "in": "inch", "lb": "pound", "gm": "gram", "dollar": "usd", "metre": "meter",
    "litre": "liter", "kilometre": "kilometer", "centimetre": "centimeter",
}  # fmt: skip


class _Quantity(NamedTuple):
    text: str
    value: str
    unit: list[str]
    """Names and powers, empty if there is none or it may be variables: `5x`, `2ab`."""
    is_letter: bool = False
    """One letter next to the number, which may also be a variable: `5m`."""

    def plain(self) -> str:
        """Return the answer without its unit if it is one for certain."""
        return self.text if self.is_letter else self.value


def comparable(text: str, other: str) -> tuple[str, str] | None:
    """Return two cleaned answers without their units, None if the units differ. If only one has a
    unit, it is ignored, except for a letter that may be a variable."""
    quantity, reference = _quantity(text), _quantity(other)
    if quantity.unit and reference.unit:
        same = quantity.unit == reference.unit
        return (quantity.value, reference.value) if same else None
    return quantity.plain(), reference.plain()


def _quantity(text: str) -> _Quantity:
    quantity = _QUANTITY.fullmatch(_DEGREES.sub(r"\1 degree ", without_wrappers(text, r" \1")))
    if quantity is None:
        return _Quantity(text, text, [])
    unit = quantity[2]
    is_letter = len(unit) == 1 and not quantity[1][-1].isspace()
    for pattern, replacement in _REWRITES:
        unit = pattern.sub(replacement, unit)
    parts = [_name(part) for part in re.findall(r"[A-Za-z]+|\^ ?-?[0-9]|/", unit)]
    if not _PARTS.fullmatch(unit) or "" in parts:
        return _Quantity(text, text, [])
    if any(part.startswith("unit") for part in parts):
        return _Quantity(text, quantity[1], [])
    return _Quantity(text, quantity[1], parts if "/" in parts else sorted(parts), is_letter)


def _name(part: str) -> str:
    """Return the name of a unit or of things that are counted, "" if it may be variables."""
    if not part[0].isalpha():
        return part.replace(" ", "")
    for spelling in (part, part.lower()):
        singular = spelling.removesuffix("s") if len(spelling) > 2 else spelling
        for name in (spelling, singular):
            if name in _SYNONYMS:
                return _SYNONYMS[name]
            unit = getattr(units, name, None)
            if isinstance(unit, units.Quantity) and not isinstance(unit, PhysicalConstant):
                return str(unit)
    return singular if len(part) >= 4 else ""
