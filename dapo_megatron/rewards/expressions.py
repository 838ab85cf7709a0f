"""Parser of mathematical expressions from untrusted text that does not evaluate it as Python.

`sympy.parse_expr` passes its text to `eval`, so an answer like `__import__('os').system(...)` runs.
This parser walks the syntax tree instead. It supports plain decimal numbers, names, arithmetic and
a short list of functions, with the meaning of `parse_expr` and its standard transformations. It
refuses comments, other notations of numbers (`0xf`, `1e3`, `1_000`), factorials (`5!`) and
repeating decimals (`0.2[1]`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

MAX_CHARACTERS = 10_000
MAX_POWER_BITS = 20_000
"""Maximum size of an exact power, in bits. A tower such as 9**9**9 is refused before it is
computed."""
MAX_SHIFT = 10_000
"""Maximum shift of an integer, in bits."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(sympy, name)
    for name in (
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot"),
        *("sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh"),
        *("exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "sign", "Rational", "Integer"),
        *("erf", "Si", "Ci"),
    )
}
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_INTEGER: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


_OTHER_NOTATION = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)[A-Za-z_]")


def parse_arithmetic(text: str) -> Any:
    """Return the value of + - * / // % ** and parentheses on integers, as a sympy number.

    Any other character is refused. Scorers of number games search the text for the numbers that an
    answer uses: they would miss those in `0xf`, `E` or `I*I`, read 1.5 as 1 and 5, and count those
    in a comment. Raises like `parse_expression`.
    """
    if other := re.search(r"[^0-9 \t\r\n+\-*/%()]", text):
        raise ValueError(f"not arithmetic on integers: {text[other.start() :][:20]}")
    return parse_expression(text)


def parse_expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Return `text` as a sympy expression. Unknown names become symbols.

    local_dict: values of names, as for `sympy.parse_expr`.
    Raises ValueError or SyntaxError if the text is not an expression or is too large.
    """
    if match := _OTHER_NOTATION.search(text):
        raise ValueError(f"not a plain decimal number: {text[match.start() :][:20]}")
    names = {**CONSTANTS, **(local_dict or {})}
    return _expression(_syntax_tree(text), names)


def integer_value(text: str) -> int:
    """Return the value of integer arithmetic such as `(0x12 + 3) << 2`. Raises like
    `parse_expression`."""
    return _integer(_syntax_tree(text))


def _syntax_tree(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(text)} characters; at most {MAX_CHARACTERS}")
    if "#" in text:
        raise ValueError("an expression with a comment")
    return ast.parse(text.strip(), mode="eval").body


def _expression(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.Constant(value=float(number)):
            return sympy.Float(repr(number))
        case ast.Name(id=name):
            return names[name] if name in names else sympy.Symbol(name)
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_expression(node.operand, names))
        case ast.BinOp(op=ast.Pow()):
            return _power(_expression(node.left, names), _expression(node.right, names))
        case ast.BinOp() if type(node.op) in _BINARY:
            apply = _BINARY[type(node.op)]
            return apply(_expression(node.left, names), _expression(node.right, names))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_expression(argument, names) for argument in arguments))
    raise ValueError(f"not part of an expression: {ast.unparse(node)[:100]}")


def _power(base: Any, exponent: Any) -> Any:
    """Return base ** exponent. Raises ValueError for an exact power above MAX_POWER_BITS."""
    if base.is_Rational and exponent.is_Rational:
        size = max(abs(base.p), base.q).bit_length()
        if abs(exponent) * size > MAX_POWER_BITS:
            raise ValueError(f"a power of about {int(abs(exponent)) * size:.3g} bits")
    return base**exponent


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.Invert()):
            return ~_integer(node.operand)
        case ast.UnaryOp() if type(node.op) in _UNARY:
            value: int = _UNARY[type(node.op)](_integer(node.operand))
            return value
        case ast.BinOp(op=ast.LShift() | ast.RShift()):
            left, right = _integer(node.left), _integer(node.right)
            if not 0 <= right <= MAX_SHIFT:
                raise ValueError(f"a shift by {right}")
            return left << right if isinstance(node.op, ast.LShift) else left >> right
        case ast.BinOp() if type(node.op) in _INTEGER:
            result: int = _INTEGER[type(node.op)](_integer(node.left), _integer(node.right))
            return result
    raise ValueError(f"not part of integer arithmetic: {ast.unparse(node)[:100]}")
