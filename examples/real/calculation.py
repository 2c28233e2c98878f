"""A reward for word problems: the response begins with a calculation, and its value must be the answer.

The model only chooses numbers and operations; Python does the arithmetic, which a model of this size cannot. Text
behind an equals sign or the first line does not count.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MOST_CHARACTERS = 100


def value_of(text: str) -> float | None:
    """Returns the value of the sums, differences, products and quotients that a text begins with, or None."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("not a calculation")

    try:
        calculation = text.strip().partition("\n")[0].partition("=")[0].strip()
        parsed = ast.parse(calculation[:MOST_CHARACTERS], mode="eval").body
        return value(parsed) if isinstance(parsed, ast.BinOp) else None  # a bare number is no calculation
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def reward(response: str, answer: float) -> float:
    """Returns 1 for a calculation with the right value, else 0."""
    value = value_of(response)
    return float(value is not None and abs(value - answer) <= 1e-4 * max(1.0, abs(answer)))
