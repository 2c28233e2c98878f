"""A calculator that answers sums ending with a question mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamarl.parts.episodes.environments._base import Environment, Task, Turn

ASKED = re.compile(r"(?:(?<!\d)(\d{1,18})([+*-])(\d{1,18}))?\?(=?)$")
"""Few digits, because a product takes quadratic time. One token may contain both signs at the end."""
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass
class Calculator(Environment):
    """Replies to `17+5?` with `=22`, and to anything else that ends with a question mark with an error. A response
    without a question ends the episode."""

    stop: list[str] = field(default_factory=lambda: ["?"], kw_only=True)

    def reply(self, task: Task, turns: Sequence[Turn]) -> str | None:
        asked = ASKED.search(turns[-1].response.rstrip())
        if asked is None:
            return None
        left, sign, right, equals = asked.groups()
        result = OPERATIONS[sign](int(left), int(right)) if sign else "error"
        return f"{result}" if equals else f"={result}"
