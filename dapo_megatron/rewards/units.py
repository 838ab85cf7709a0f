"""Units of measurement after a number: `5 m` and `5 km` differ, `5 m` and `5 meters` do not.

The Math-Verify library removes units before it compares, and takes some variables for units. Only
units in the tables below count here; the library decides about everything else.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from dapo_megatron.rewards.answers import without_wrappers

_PREFIXES = {
    "": "", "k": "kilo", "h": "hecto", "d": "deci", "c": "centi", "m": "milli", "u": "micro",
    "n": "nano", "M": "mega", "G": "giga",
}  # fmt: skip
_WITH_PREFIX = {
    "m": "meter", "metre": "meter", "g": "gram", "s": "second", "L": "liter", "l": "liter",
    "litre": "liter", "J": "joule", "W": "watt", "Wh": "watthour", "V": "volt", "A": "ampere",
    "Hz": "hertz", "N": "newton", "Pa": "pascal", "cal": "calorie", "eV": "electronvolt",
    "mol": "mole", "B": "byte",
}  # fmt: skip
"""Symbol or spelling -> name of a unit that may have a prefix."""
_WITHOUT_PREFIX = {
    "h": "hour", "hr": "hour", "min": "minute", "sec": "second", "yr": "year", "in": "inch",
    "ft": "foot", "feet": "foot", "inche": "inch", "yd": "yard", "mi": "mile", "lb": "pound",
    "oz": "ounce", "gal": "gallon", "qt": "quart", "pt": "pint", "deg": "degree", "rad": "radian",
    "usd": "dollar", "amp": "ampere", "gm": "gram", "teaspoon": "tsp", "tablespoon": "tbsp",
}  # fmt: skip
_OTHERS = (
    *("hour", "minute", "day", "week", "month", "year", "inch", "foot", "yard", "mile", "pound"),
    *("ounce", "gallon", "quart", "pint", "degree", "radian", "dollar", "cent", "euro", "acre"),
    *("hectare", "tsp", "tbsp"),
)
_NAMES = {
    prefix + spelling: _PREFIXES.get(prefix, prefix) + name
    for prefix in (*_PREFIXES, *_PREFIXES.values())
    for spelling, name in (*_WITH_PREFIX.items(), *((name, name) for name in _WITH_PREFIX.values()))
} | {**_WITHOUT_PREFIX, **dict(zip(_OTHERS, _OTHERS, strict=True))}
"""Symbol or spelling, in the singular -> name of the unit."""
_MONEY = {r"\$": "dollar", "€": "euro", "£": "pound"}
_FACTOR = re.compile(r"\s*(?:hundred|thousand|million|billion|trillion|dozen)\b")
"""Words that multiply the number: they cannot be left out."""
_ATTACHED = frozenset({"cm", "mm", "km", "kg", "mL", "ml"})
"""Symbols that may stand next to a number. Other letters there may be variables: `5m`, `2mg`."""
MAX_LENGTH = 60
"""Characters of a unit."""

_FRACTION = r"\\[dtc]?frac\s*(?:\{[^{}A-Za-z]*\}\s*\{[^{}A-Za-z]*\}|[0-9]{2})"
_NUMBER = re.compile(
    rf"\s*(?:[A-Za-z]{{1,3}}(?:_\{{?\w\}}?)?\s*=\s*)?(\$?\s*-?\s*(?:(?:[0-9][0-9.,/]*|\.[0-9]+|{_FRACTION}|"
    rf"\\sqrt\s*\{{[0-9]+\}}|\\pi\b|\\times|\\cdot|\^\{{?-?[0-9]+\}}?)\s*)+)"
)
"""A number or product of numbers without letters, as the value of a quantity."""
_DEGREES = re.compile(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})")
_BLANKS = re.compile(r"\\[,; !]|[{}·.\s]+|\\(?:cdot|times)\b")
_PARTS = re.compile(r"[A-Za-z]++|\^ ?-?[0-9]|/| ")
_PAIR = re.compile(r"([0-9][0-9.,/]*)\s*([A-Za-z]++(?:\^[0-9])?)\s*(?:[,;]|and\b)?\s*")


class _Quantity(NamedTuple):
    value: str
    unit: Counter[str]
    """Exponent of each unit; empty if there is none, or not for certain."""
    factor: str


def comparable(text: str, other: str) -> tuple[str, str] | None:
    """Return two cleaned answers without units in the tables, None if their units differ. A unit
    may be missing in one of them."""
    quantity, reference = _quantity(text), _quantity(other)
    if quantity.factor != reference.factor:
        return None
    if quantity.unit and reference.unit and quantity.unit != reference.unit:
        return None
    return quantity.value, reference.value


@lru_cache(maxsize=1024)  # the completions of a prompt share its truth
def _quantity(text: str) -> _Quantity:
    flat = without_wrappers(text, r" \1 ")
    is_wrapped = flat != text
    match = _NUMBER.match(flat) if len(text) <= 300 else None
    money = next((sign for sign in _MONEY if text.lstrip(" $").startswith(sign)), None)
    if match is None and money:
        match = _NUMBER.match(flat, flat.index(money) + len(money))
    if match is None:
        return _Quantity(text, Counter(), "")
    rest = flat[match.end() :].strip(" $")
    if factor := _FACTOR.match(rest):
        unit = {_MONEY[money]: 1} if money else _unit(rest[factor.end() :])
        return _Quantity(match[1], Counter(unit or {}), factor[0].strip())
    if money and not rest:
        return _Quantity(text, Counter({_MONEY[money]: 1}), "")
    if len(rest) <= MAX_LENGTH and (unit := _unit(_DEGREES.sub(" degree ", rest))):
        is_certain = is_wrapped or _is_certain(match[1], rest)
        return _Quantity(match[1] if is_certain else text, Counter(unit if is_certain else {}), "")
    return _pairs(flat) or _Quantity(text, Counter(), "")


def _pairs(flat: str) -> _Quantity | None:
    """Return several quantities as one: `2 h 30 min`, `3 cm, 4 cm`. None if it is something
    else."""
    flat = _BLANKS.sub(" ", flat.replace(", ", " ")).strip()
    pairs = _PAIR.findall(flat)
    units = [_unit(unit) for _, unit in pairs]
    if len(pairs) < 2 or not all(units) or _PAIR.sub("", flat):
        return None
    named = {f"{place} {name}": 1 for place, unit in enumerate(units) for name in unit or ()}
    return _Quantity(", ".join(value for value, _ in pairs), Counter(named), "")


def _unit(text: str) -> dict[str, int] | None:
    """Return the exponents of the units in a text, None if it has anything else."""
    text = re.sub(r"\^\s*\{\s*(-?[0-9])\s*\}", r"^\1", text)
    for words, exponent in (("square|sq", 2), ("cubic|cu", 3)):
        text = re.sub(rf"\b(?:{words})\.?\s+([A-Za-z]++)", rf"\1^{exponent}", text)
    text = re.sub(r"\bmph\b", "mile/hour", re.sub(r"\bk(?:mp|p)h\b", "kilometer/hour", text))
    text = _BLANKS.sub(" ", re.sub(r"\bper\b|\ban?\b(?= hour)", "/", text)).strip()
    if not text or _PARTS.sub("", text):
        return None
    unit: Counter[str] = Counter()
    sign, name = 1, ""
    for part in _PARTS.findall(text):
        if part == "/":
            sign = -1
        elif part[0] == "^":
            unit[name] += sign * (int(part[1:]) - 1)
        elif part != " ":
            name = _name(part)
            if not name:
                return None
            unit[name] += sign
    return dict(unit)


def _is_certain(value: str, unit: str) -> bool:
    """Whether letters without a command are a unit: they stand apart or are long, and the number
    has no other symbols."""
    words = re.findall(r"[A-Za-z]++", unit)
    if not words:
        return True  # a degree sign
    if any(len(word) > 2 for word in words) or words[0] in _ATTACHED:
        return True
    is_product = re.search(r"[A-Za-z]\s+[A-Za-z]", unit)
    return value[-1].isspace() and not is_product and r"\pi" not in value and "sqrt" not in value


def _name(word: str) -> str:
    """Return the name of a unit, "" if it is none."""
    if word in _NAMES or (len(word) <= 2 and word not in ("Kg", "Km")):
        return _NAMES.get(word, "")
    singular = word.lower().removesuffix("s")
    is_known = len(singular) > 2 or singular in (*_WITHOUT_PREFIX, "kg", "km", "cm", "mm")
    return _NAMES.get(singular, "") if is_known else ""
