"""Calculator: arithmetic as a tool."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
"""Length of an expression. As there are no powers, it limits the size of all numbers, too."""
ALLOWED = re.compile(r"[0-9.+\-*/() ]*")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """Numbers, + - * / and parentheses. Integers are exact, other results have 12 digits."""

    stateless = True

    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example 3 * (4 + 5)
        """
        if len(expression) > MAX_LENGTH:
            raise ValueError(f"more than {MAX_LENGTH} characters")
        if not ALLOWED.fullmatch(expression):
            raise ValueError("only numbers, + - * / and parentheses")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except SyntaxError as error:
            raise ValueError("not an expression") from error
        try:
            value = _value(tree.body)
        except ZeroDivisionError as error:
            raise ValueError("division by zero") from error
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
            return SIGNS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses")
