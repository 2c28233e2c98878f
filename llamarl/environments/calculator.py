"""A calculator: a sum that ends with a question mark is answered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamarl.environments._base import Environment, Task, Turn

ASKED = re.compile(r"(\d{1,18})([+*-])(\d{1,18})\?\s*$")
"""Few digits: a product takes the square of their count."""
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass
class Calculator(Environment):
    """`17+5?` is answered `=22`; a response that ends without a question is over. What is no sum is answered so."""

    stop: list[str] = field(default_factory=lambda: ["?"], kw_only=True)

    def reply(self, task: Task, turns: Sequence[Turn]) -> str | None:
        said = turns[-1].response
        if not said.rstrip().endswith("?"):
            return None
        asked = ASKED.search(said)
        if asked is None:
            return "=error"
        left, sign, right = asked.groups()
        return f"={OPERATIONS[sign](int(left), int(right))}"
