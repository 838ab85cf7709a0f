r"""Reads answers without a library: where the answer stands, plain numbers, and text.

`math_verify` leaves to its library only what is neither a plain number nor text. Rows are checked
at load with the same functions, which takes microseconds per row.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import NamedTuple

# ------------------------------------------------------------------------ where the answer stands

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_INNER_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINT = re.compile(
    r"[\s$.]*(?:,|;|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b|\\(?:quad|,|;))+[\s$]*"
    r"(?:(?:and|or)\b\s*)?[\s$]*(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?"
)
_SEPARATOR = re.compile(r",|;|\\pm|\b(?:and|or)\b")
_STATED = re.compile(r"answer(?:\s{1,9}is)?\s{0,9}:?\s{0,9}([^\n]+)", re.IGNORECASE)
_INLINE = re.compile(r"\$([^$\n]+)\$|\\\(((?:[^\\\n]|\\[^()\n])*)\\\)")


def final_text(response: str) -> str:
    """Return what follows the last `</think>`: an answer before it is not the final one."""
    return response.rpartition("</think>")[2]


def boxed(text: str, values: int = 1) -> str | None:
    r"""Return the content of the last closed `\boxed` or `\fbox`, None if there is none.

    values: how many values the truth lists. As many boxes that are joined by `,`, `;`, `and` or
    `or` only are one list.
    """
    if "box" not in text:
        return None
    boxes: list[tuple[int, int, int]] = []  # start, start of the content, its end
    opened: list[re.Match[str]] = []
    for token in _BRACES.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append(token)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if len(start[0]) > 1:
                while boxes and boxes[-1][0] > start.start():  # nested boxes
                    boxes.pop()
                boxes.append((start.start(), start.end(), token.start()))
    if not boxes:
        return None
    contents = [_INNER_BOX.sub("{", text[start:end]).strip() for _, start, end in boxes[-values:]]
    between = [
        text[end + 1 : start][:50]
        for (_, _, end), (start, _, _) in zip(boxes[-values:], boxes[1 - values :], strict=False)
    ]
    if len(contents) == values > 1 and all(map(_JOINT.fullmatch, between)):
        return ", ".join(contents)
    return contents[-1]


def listed_values(truth: str) -> int:
    """Return how many values a truth lists outside brackets."""
    if re.search(r"[(\[]|matrix|cases", truth) or plain_number(truth):
        return 1
    return len(_SEPARATOR.split(truth))


def stated(text: str) -> str:
    """Return the text of an answer without a box: after the last "answer is" or "Answer:", else
    the last formula, else the last line."""
    if answers := _STATED.findall(text):
        return str(answers[-1])
    if formulas := _INLINE.findall(text):
        return "".join(formulas[-1])
    return text.strip().rpartition("\n")[2]


# ------------------------------------------------------------------------ notations

_SYMBOLS = {
    "°": r"^\circ ", "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "√": r"\sqrt ",  # noqa: RUF001
    "∞": r"\infty ", "¢": " cents", "“": '"', "”": '"', "‘": "'", "’": "'", "\u200b": "",  # noqa: RUF001
}  # fmt: skip
_NOT_PLAIN = re.compile(r"[^\x00-\x7f\u3040-\u9fff\uac00-\ud7af]")  # nor a CJK letter
_BOLD = re.compile(r"(?<![\w)*])\*\*([^*\n]+)\*\*(?![\w*])")
_SCIENTIFIC = re.compile(
    r"([0-9](?<![\w.^/][0-9])[0-9]*(?:,[0-9]{3})*(?:\.[0-9]+)?)"
    r"(?:[eE]([+-]?[0-9]{1,3})|\s*(?:\\times|\\cdot|[*x])\s*10\s*\^\s*"
    r"(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([+-]?[0-9]{1,3})))(?![\w!^]|\.[0-9])"
)
_INTEGERS = r"\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"
# A digit before each lookbehind lets the search skip to digits, which halves its time.
_MIXED = re.compile(
    r"([0-9](?<![\w.^}\\/,][0-9])[0-9]{0,8})(?:(?:[ ~]|\\[ ,])+([0-9]{1,9})\s*/\s*([0-9]{1,9})"
    rf"(?![\w/^]|[.,][0-9])|\s*\\[dtc]?frac\s*(?:{_INTEGERS}|([0-9])([0-9]))(?!\^))"
)
_LETTER = re.compile(r"\\mathrm\s*\{\s*([ied])\s*\}|\\math(?:bf|it)\s*\{\s*(\w)\s*\}")
"""Constants and vectors, which the library takes for units."""
_FUNCTION = re.compile(
    r"\\(?:mathrm|operatorname)\s*\{\s*(sin|cos|tan|cot|sec|csc|log|ln|lg|exp|gcd|max|min)\s*\}"
    r"(?=\s*[\\({A-Za-z0-9^_])"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\s*\{\s*([0-9]{1,30})\s*\}")
_BASE_TEN = re.compile(r"([0-9])_(?:10|\{10\})(?![0-9])")


def clean(text: str) -> str:
    """Rewrite the notations that LaTeX parsers misread: Unicode digits and signs, bold marks,
    powers of ten as decimals, mixed numbers as fractions."""
    if "~" in text:
        text = text.replace("~", " ")
    if "math" in text or "operatorname" in text:
        text = _LETTER.sub(r"\1\2", _FUNCTION.sub(r"\\\1 ", text))
    if "overline" in text:
        text = _REPEATING.sub(_repeated, text)
    if not text.isascii():
        text = text.replace("，", ",").replace("。", ".")  # noqa: RUF001
        text = _NOT_PLAIN.sub(lambda character: _latex(character[0]), text)
        text = text.replace("}^{", "").replace("}_{", "")
    if "**" in text:
        text = _BOLD.sub(r"\1", text)
    text = _MIXED.sub(_improper, _SCIENTIFIC.sub(_positional, text))
    return _BASE_TEN.sub(r"\1", text) if "_" in text else text


@cache
def _latex(character: str) -> str:
    kind = unicodedata.decomposition(character)
    text = "".join(
        _SYMBOLS.get(part, str(unicodedata.decimal(part, part)))
        for part in unicodedata.normalize("NFKC", character)
    )
    if kind.startswith("<fraction>"):
        return r" \frac{{{}}}{{{}}}".format(*text.split("\u2044")) if text[-1].isdigit() else text
    if kind.startswith(("<super>", "<sub>")):
        return f"{'^' if kind.startswith('<super>') else '_'}{{{text}}}"
    return text


def _repeated(number: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, fixed, period = number.groups()
    nines = 10 ** len(period) - 1
    value = int((whole or "0") + fixed) * nines + int(period)
    return rf"\frac{{{value}}}{{{nines * 10 ** len(fixed)}}}"


def _positional(number: re.Match[str]) -> str:
    exponent = number[2] or number[3] or number[4]
    return format(Decimal(number[1].replace(",", "") + "E" + exponent), "f")


def _improper(number: re.Match[str]) -> str:
    groups = [int(group) for group in number.groups() if group]
    whole, numerator, denominator = groups
    fraction = (whole * denominator + numerator, denominator)
    return (
        r"\frac{{{}}}{{{}}}".format(*fraction) if "frac" in number[0] else "{}/{}".format(*fraction)
    )


# ------------------------------------------------------------------------ plain numbers

_DECIMAL = r"[+-]?(?:(?:[0-9]{1,3}(?:[ ,][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_DEGREE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
_IGNORED = re.compile(
    rf"\\[!,; ]|\\(?:left|right|displaystyle)\b|\\?\$|[€£¥]|{_DEGREE}(?!\s*[CF]\b)"
)
_NUMBER = re.compile(
    rf"([+-]?)\s*(?:({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?"
    rf"|\\[dtc]?frac\s*(?:\{{\s*({_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}|([0-9])([0-9])))"
    r"\s*(\\?%)?(?:\s+([A-Za-z]{4,}[A-Za-z ]*)|\s*([\u3040-\u9fff\uac00-\ud7af]+)"
    rf"|{_DEGREE}\s*([CF]))?"
)
_NO_UNITS = re.compile(
    r"percent|pct|hundred|thousand|million|billion|trillion|dozen|base|\b[a-z]{1,3}\b"
    r"|[十百千万萬亿億兆分]"
)


class PlainNumber(NamedTuple):
    value: Fraction
    places: int | None
    """Decimal places if it is written as a decimal, None if it is exact."""
    percent: bool
    unit: str
    """Things that are counted, by their last word without plural, or a scale of temperature.
    `units` compares units of measurement."""


def plain_number(text: str) -> PlainNumber | None:
    """Return the value of a cleaned text that is one integer, decimal or fraction."""
    if len(text) > 1000:
        return None
    text = _WRAPPER.sub(r" \1", text).replace("{,}", ",")
    match = _NUMBER.fullmatch(_IGNORED.sub("", text).strip().rstrip(_PUNCTUATION))
    if match is None:
        return None
    sign, *numbers, percent, word, cjk, scale = match.groups()
    unit = word or ""
    parts = [number.replace(",", "").replace(" ", "") for number in numbers if number]
    if (unit or cjk) and (_NO_UNITS.search((cjk or unit).lower()) or _MATHEMATICAL.search(unit)):
        return None
    value, denominator = Fraction(parts[0]), Fraction(parts[-1] if parts[1:] else 1)
    if not denominator or (sign and parts[0][0] in "+-"):
        return None
    places = len(parts[0].partition(".")[2]) if "." in parts[0] and not parts[1:] else None
    value = value / denominator * (-1 if sign == "-" else 1)
    thing = as_text(unit.split()[-1]).removesuffix("s").removesuffix("e") if unit else ""
    return PlainNumber(value, places, bool(percent), scale or cjk or thing)


def same_number(number: PlainNumber, other: PlainNumber) -> bool:
    """Whether two numbers are equal. An integer with a percent sign may also stand for itself."""
    if number.percent != other.percent:
        percentage, number = (number, other) if number.percent else (other, number)
        if percentage.value == number.value and percentage.value.denominator == 1:
            return True
        places = percentage.places and percentage.places + 2
        other = percentage._replace(value=percentage.value / 100, places=places)
    return (
        number.value == other.value
        or rounds_to(other.value, number.value, number.places)
        or rounds_to(number.value, other.value, other.places)
    )


def rounds_to(value: Fraction, decimal: Fraction, places: int | None) -> bool:
    """Whether `decimal`, written with `places` decimal places, is `value` rounded to them.

    It needs six places with five significant digits, and `value` must have more. From
    seven places and significant digits on, `value` may also be cut off instead of rounded.
    """
    if not value or places is None or places < 6 or (value * 10**places).denominator == 1:
        return False
    exponent = math.floor(math.log10(abs(value.numerator)) - math.log10(value.denominator))
    significant = places + exponent + 1
    half_units = 2 if min(places, significant) >= 7 else 1
    return significant >= 5 and abs(value - decimal) * 2 * 10**places <= half_units


# ------------------------------------------------------------------------ arithmetic

_OPERATORS: Mapping[type[ast.operator | ast.unaryop], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def value_of(node: ast.expr) -> Fraction:
    """Return the value of a parsed expression of numbers, + - * / and parentheses. Raises
    ValueError for any other, and ZeroDivisionError."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](value_of(operand))
    raise ValueError("only numbers, + - * / and parentheses")


# ------------------------------------------------------------------------ text

_PUNCTUATION = " \t\n.,;:`\"'"
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|emph|underline)"
    r"\s*\{([^{}]*)\}"
)
_LAYOUT = re.compile(
    r"\\(?=_)|\\(?:[()\[\],;! ]|left\b|right\b|quad\b|cdot\b|times\b)|[\s$~{}*\"'`]"
)
_MIXED_CASE = re.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]")
_MATHEMATICAL = re.compile(
    r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|(?<![A-Za-z])(?:log|ln|lg|exp|sqrt|pi|"
    r"inf|infinity|infty|max|min|gcd|lcm|mod|det|and|or)(?![A-Za-z])"
)
_CONSTANTS = frozenset({"pi", "inf", "infinity", "infty"})
_RELATION = re.compile(
    r"\\(?:[pb]?mod|equiv|mid)\b|(?:\\left\s*\\\{\s*\\begin\s*\{array|\\begin\s*\{cases)"
)
"""Marks of what the library compares by one part only, such as residues without modulus."""
_OPERATOR = re.compile(r"\\(?:cdot|times)|[*+]")
_BASES = {
    word: base
    for base, word in enumerate(
        ("two", "three", "four", "five", "six", "seven", "eight", "nine"), start=2
    )
}
_WITH_BASE = re.compile(r"-?\(?(?:[0-9][0-9A-F.]*|[A-F][0-9A-F]+)\)?_\(?(?:[0-9]+|[a-z]{3,})\)?")
_RADIX_PREFIX = re.compile(r"-?0[xXbBoO][0-9a-fA-F]+")
_CODE = re.compile(
    r"[0-9]+(?:-[0-9]+)+|[0-9]+([/.:])[0-9]+(?:\1[0-9]+)+"  # dates, ranges, versions, 1:2:3
    r"|(?:[01]?[0-9]|2[0-4]):[0-5][0-9]|[0-9]{1,2}(?::[0-5][0-9])?[AaPp]\.?[Mm]\.?"  # times
    r"|(?=.*[A-Za-z)]_?[0-9])[0-9]*(?:\(?[A-Z][a-z]?\)?(?:_?[0-9]+)?){2,}(?:\^?[0-9]*[+-])?"  # H2O
    r"|[\w#@:.-]*[A-Za-z][0-9][\w#@:.-]*"  # B12, hashes
    r"|[A-Z](?:-[A-Z]){2,}"  # orders of choices
)
_WORDS = re.compile(
    r"[A-Za-z](?:\s+[A-Za-z])+|[A-Za-z\s'\",;.:!?&()\[\]]*[A-Za-z]{2}[A-Za-z\s'\",;.:!?&()\[\]]*"
    r"|[^0-9\\=<>^|()]*[A-Za-z]{4}[^0-9\\=<>^|()]*"
)


def without_wrappers(text: str, replacement: str = r"\1") -> str:
    r"""Return the text with the contents of commands such as `\text{...}` in their places."""
    for _ in range(3):  # nested
        text = _WRAPPER.sub(replacement, text)
    return text


def as_text(text: str) -> str:
    """Return a cleaned text without LaTeX layout, blanks, quotes, final punctuation, and case.
    Case is kept if it changes within a word."""
    text = _LAYOUT.sub("", without_wrappers(text.replace("\\\\", ";"))).strip(_PUNCTUATION)
    if re.fullmatch(r"\([^()]*\)", text):
        text = text[1:-1]
    text = re.sub(
        r"(?<=_)\(?([a-z]+|[0-9]+)\)?$", lambda base: str(_BASES.get(base[1], base[1])), text
    )
    text = re.sub(r"(?<=[A-Za-z])_(?=[0-9])|^0(?=[0-9]:)", "", text)
    text = re.sub(r"^\(([^()]*)\)(?=_)", r"\1", text)
    text = re.sub(r"(?<=[0-9])([AaPp])\.?[Mm]$", r"\1m", text)
    return text if _MIXED_CASE.search(text) else text.lower()


def has_base(text: str) -> bool:
    """Whether a cleaned text is a number in another base: `21_3`, `0x1F`."""
    text = _LAYOUT.sub("", _WRAPPER.sub(r"\1", text)).strip(_PUNCTUATION)
    return bool(_WITH_BASE.fullmatch(text) or _RADIX_PREFIX.fullmatch(text))


def is_text(text: str) -> bool:
    """Whether a cleaned text is no mathematics: a word, letters in an order, a date, a time, a
    number in another base, a formula of chemistry, a hash."""
    if has_base(text):
        return True
    text = _WRAPPER.sub(r"\1", text)
    foreign = [character for character in text if character > "\x7f" and character.isalpha()]
    if any("GREEK" not in unicodedata.name(letter, "") for letter in foreign):
        return True
    text = text.strip(" $" + _PUNCTUATION)
    if _RELATION.search(text):
        return True
    if _OPERATOR.search(text):
        return False
    if _MATHEMATICAL.fullmatch(text):  # a function of nothing is a word, not a product of letters
        return text not in _CONSTANTS
    formula = _MATHEMATICAL.sub(",", text)
    letters = re.findall(r"[A-Z]", text) if re.fullmatch(r"[A-Z](?:\s*,\s*[A-Z])+", text) else []
    return (
        letters != sorted(letters)  # a list of choices out of order is an order
        or bool(_CODE.fullmatch(_LAYOUT.sub("", formula)))
        or bool(_WORDS.fullmatch(formula))
    )


# ------------------------------------------------------------------------ truths

MAX_WORDS = 12
"""Maximum words of a truth that is compared as text."""


_MISSING = frozenset({"nan", "null", "n/a", "<na>", "nat"})
"""Marks of a missing value in tables, besides Python's None. `none` may be an answer."""
_SIGNS = re.compile(r"[<>+×÷≤≥≠∞∅]|\\[A-Za-z{]")  # noqa: RUF001
_INCOMPLETE = re.compile(
    r"[=/^_]$|\\[dtc]?frac\s*(?:\{[^{}]*\})?$|\\(?:[dtc]?frac|sqrt)\s*(?:\{[^{}]*\})?\s*\{\s*\}"
)
_BY_ZERO = re.compile(
    r"^[^/]*/\s*0+(?:\.0*)?$|\\[dtc]?frac\s*(?:\{[^{}]*\}|[0-9])\s*(?:\{\s*0\s*\}|0)"
)


def refuse_solution(truth: str) -> None:
    """Raise ValueError if a truth is a solution that ends with its answer, as in GSM8K."""
    if "####" in truth:
        raise ValueError("the truth is a solution; keep only the part after ####")


@cache  # data sets repeat truths
def check_truth(truth: str) -> None:
    """Raise ValueError if no answer, or any answer, could equal the truth."""
    refuse_solution(truth)
    if "<think>" in truth or "</think>" in truth:
        raise ValueError(f"the truth {truth!r:.100} has marks of thoughts; keep only the answer")
    text = clean(_INNER_BOX.sub("{", truth))
    plain = as_text(text).strip("\\")
    if not plain and "\\{" not in text:
        raise ValueError(f"nothing is left of the truth {truth!r:.100} to compare; correct the row")
    if plain.lower() in _MISSING or text.strip() == "None":
        raise ValueError(f"the truth {truth!r:.100} stands for a missing value; drop the row")
    if not (any(map(str.isalnum, plain)) or _SIGNS.search(text)):
        raise ValueError(f"the truth {truth!r:.100} has no letter and no digit; correct the row")
    if _INCOMPLETE.search(text.strip().strip("$").strip()):
        raise ValueError(f"the truth {truth!r:.100} is cut off; correct the row")
    if _BY_ZERO.search(text.strip(" $")):
        raise ValueError(f"the truth {truth!r:.100} divides by zero; correct the row")
    if boxed(rf"\boxed{{{truth}}}") != _INNER_BOX.sub("{", truth).strip():
        raise ValueError(f"the braces of the truth {truth!r:.100} do not match; correct the row")
    if is_text(text) and (len(text.split()) > MAX_WORDS or "\n" in text.strip()):
        raise ValueError(
            f"the truth {truth!r:.100} is a text of more than {MAX_WORDS} words or one line, which "
            "no answer repeats exactly; keep the short answer, or write your own grader"
        )
