"""Calculator: arithmetic as a tool."""

from __future__ import annotations

import ast
import re

from dapo_megatron.rewards.answers import value_of

MAX_LENGTH = 200
"""Length of an expression. As there are no powers, it limits the size of all numbers, too."""
ALLOWED = re.compile(r"[0-9.+\-*/() ]*")


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
            value = value_of(tree.body)
        except ZeroDivisionError as error:
            raise ValueError("division by zero") from error
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
