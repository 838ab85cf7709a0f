"""Units of measurement after a number: `5 m` and `5 cm` differ, `5 m` and `5 meters` do not.

The Math-Verify library removes units before it compares, and takes some variables for units.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from dapo_megatron.rewards.answers import without_wrappers

_PREFIXES = {
    "k": "kilo", "h": "hecto", "d": "deci", "c": "centi", "m": "milli", "u": "micro", "n": "nano",
    "M": "mega", "G": "giga",
}  # fmt: skip
_SYMBOLS = {
    "m": "meter", "g": "gram", "s": "second", "L": "liter", "l": "liter", "J": "joule", "W": "watt",
    "Wh": "watthour", "V": "volt", "A": "ampere", "Hz": "hertz", "N": "newton", "Pa": "pascal",
    "cal": "calorie", "eV": "electronvolt", "mol": "mole", "B": "byte",
}  # fmt: skip
_NAMES = {
    "h": "hour", "hr": "hour", "min": "minute", "sec": "second", "in": "inch", "ft": "foot",
    "feet": "foot", "yd": "yard", "mi": "mile", "lb": "pound", "oz": "ounce", "gal": "gallon",
    "qt": "quart", "pt": "pint", "deg": "degree", "rad": "radian", "usd": "dollar", "amp": "ampere",
    "metre": "meter", "litre": "liter", "inches": "inch",
}  # fmt: skip
_OTHERS = frozenset(
    {"hour", "minute", "day", "week", "month", "year", "inch", "foot", "yard", "mile", "pound"}
    | {"ounce", "gallon", "quart", "pint", "degree", "radian", "dollar", "cent", "euro", "percent"}
)
_SIGNS = {r"\$": "dollar", "€": "euro", "£": "sterling", "¥": "yen"}
_FACTORS = re.compile(
    r"hundred|thousand|million|billion|trillion|dozen|score|half|halves|thirds|quarters|base|mod|"
    r"plus|minus|times|over|factorial|squared|cubed"
)
"""Words that change the value, so that they cannot be left out."""
_ATTACHED = frozenset({"cm", "mm", "km", "kg", "mL", "ml"})
"""Units of two letters that stand next to a number. Other letters may be variables: `2mg`."""
MAX_LENGTH = 60

_EXPONENT = re.compile(r"\^\s*\{\s*(-?[0-9])\s*\}")
_DEGREES = re.compile(r"^([-+0-9.,\s]+)\^\s*(?:\\circ\b|\{\s*\\circ\s*\})")
_BLANKS = re.compile(r"\\[,; !]|\s+")
_QUANTITY = re.compile(
    r"(\s*(?:[A-Za-z]{1,3}(?:_\{?\w\}?)?\s*=\s*)?"
    r"(?>\\(?!times|cdot)[A-Za-z]+|\\[^A-Za-z]|[-+0-9.,/(){}\[\]^\s$])++)([A-Za-z][^$]*)\$?\s*"
)
"""A number or a product of numbers and constants, and what follows it."""
_PAIR = re.compile(r"([0-9][0-9.,/]*)\s*([A-Za-z][A-Za-z/]*(?:\^[0-9])?)\s*(?:[,;]|and\b)?\s*")
_REWRITES = [
    (re.compile(r"\b(?:square|sq)\.?\s+([A-Za-z]+)"), r"\1^2"),
    (re.compile(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)"), r"\1^3"),
    (re.compile(r"\bmph\b"), "mile/hour"),
    (re.compile(r"\bk(?:m|p)ph\b|\bkph\b"), "kilometer/hour"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"\\(?:cdot|times)\b|[{}·.\s]+"), " "),
]
_PARTS = re.compile(r"(?: ?(?:[A-Za-z]+|\^ ?-?[0-9]|/))+ ?")


class _Quantity(NamedTuple):
    text: str
    value: str
    unit: dict[str, int]
    """Exponent of each unit, empty if there is none or it may be variables: `5x`, `2ab`."""
    is_certain: bool = True
    """Whether the unit cannot be variables, as in `5m` or `2 \\pi m`."""
    is_part: bool = False
    """Whether the unit is part of the value, as in `5 million`."""


def comparable(text: str, other: str) -> tuple[str, str] | None:
    """Return two cleaned answers without their units, None if the units differ. If only one has a
    unit, it is ignored, except for letters that may be variables."""
    quantity, reference = _quantity(text), _quantity(other)
    if quantity.unit and reference.unit:
        if _are_equal(quantity.unit, reference.unit):
            return quantity.value, reference.value
        if quantity.is_certain and reference.is_certain:
            return None
        return text, other
    if quantity.is_part or reference.is_part:
        return None
    return _plain(quantity), _plain(reference)


def _plain(quantity: _Quantity) -> str:
    return quantity.value if quantity.is_certain else quantity.text


def _are_equal(unit: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two units are the same, or things are counted that have the same name: `16 ways` and
    `16 different ways`. `units` without more stands for any unit."""
    if unit == other or ("unit" in unit) != ("unit" in other):
        return True
    names, other_names = list(unit), list(other)
    things = not any(map(_is_measured, (*names, *other_names)))
    return things and names[-1] == other_names[-1] and unit[names[-1]] == other[names[-1]]


def _quantity(text: str) -> _Quantity:
    if sign := next((sign for sign in _SIGNS if text.lstrip("$").startswith(sign)), None):
        return _Quantity(text, text, {_SIGNS[sign]: 1})
    if text.rstrip("$ ").endswith("%"):
        return _Quantity(text, text, {"percent": 1})
    flat = _BLANKS.sub(" ", without_wrappers(_EXPONENT.sub(r"^\1", text), r" \1 "))
    match = _QUANTITY.fullmatch(_DEGREES.sub(r"\1 degree ", flat))
    if match is None or len(match[2]) > MAX_LENGTH:
        return _Quantity(text, text, {})
    is_wrapped = without_wrappers(text) != text
    if (unit := _unit(match[2], is_wrapped)) is not None:
        if any(map(_FACTORS.fullmatch, unit)):
            return _Quantity(text, text, unit, is_part=True)
        is_certain = is_wrapped or _is_certain(match[1], match[2])
        return _Quantity(text, match[1], unit, is_certain)
    if len(flat) <= MAX_LENGTH and re.fullmatch(rf"(?:{_PAIR.pattern}){{2,}}", flat.strip()):
        pairs = _PAIR.findall(flat)
        units = [_unit(name, is_wrapped=True) or {} for _, name in pairs]
        named = {f"{place} {name}": 1 for place, unit in enumerate(units) for name in unit}
        return _Quantity(text, ", ".join(value.rstrip(",") for value, _ in pairs), named)
    return _Quantity(text, text, {})


def _unit(text: str, is_wrapped: bool) -> dict[str, int] | None:
    """Return the exponents of units, None if the text is none, or variables."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if not _PARTS.fullmatch(text):
        return None
    unit: dict[str, int] = {}
    sign, words, name = 1, re.findall(r"[A-Za-z]+|\^ ?-?[0-9]|/", text), ""
    for word in words:
        if word == "/":
            sign = -1
        elif word[0] == "^":
            unit[name] = sign * int(word[1:]) if name else 0
        else:
            name = _name(word) or (word if is_wrapped else "")
            if not name:
                return None
            unit[name] = sign
    has_variables = any(
        (word + following).isalpha() and len(word + following) <= 4
        for word, following in pairwise(words)
    )
    return None if has_variables and not is_wrapped else unit


def _is_certain(value: str, unit: str) -> bool:
    """Whether letters without a command are a unit: they stand apart or are long, and the number
    has no other symbols."""
    words = re.findall(r"[A-Za-z]+", unit)
    if any(len(word) > 2 for word in words) or words[0] in _ATTACHED:
        return True
    return value[-1].isspace() and not re.search(r"\\(?!frac|dfrac|tfrac)[A-Za-z]", value)


def _name(word: str) -> str:
    """Return the name of a unit or of things that are counted, "" if it may be variables."""
    for symbol, name in _SYMBOLS.items():
        if word == symbol:
            return name
        if word.endswith(symbol) and word.removesuffix(symbol) in _PREFIXES:
            return _PREFIXES[word.removesuffix(symbol)] + name
    if word in _NAMES:
        return _NAMES[word]
    if len(word) < 3:
        return ""
    lower = word.lower()
    if lower in _NAMES or _FACTORS.fullmatch(lower):
        return _NAMES.get(lower, lower)
    singular = re.sub(r"(?<=s|x)es$|(?<=ch)es$|(?<=sh)es$|(?<=[^s])s$", "", lower)
    name = _NAMES.get(singular, singular)
    for prefix in _PREFIXES.values():  # kilometre
        base = name.removeprefix(prefix)
        if base in _NAMES:
            return prefix + _NAMES[base]
    return name


def _is_measured(name: str) -> bool:
    base = re.sub(f"^(?:{'|'.join(_PREFIXES.values())})", "", name)
    return name in _OTHERS or base in _SYMBOLS.values() or name.startswith(("0 ", "1 "))
