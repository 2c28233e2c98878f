"""A tool of your own: an environment that answers what the policy asks. Here `17+58?` is answered `=75`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamarl.parts.episodes.environments import Environment, Task, Turn

ASKED = re.compile(r"(?:(?<!\d)(\d{1,18})\+(\d{1,18}))?\?(=?)$")


@dataclass
class Calculator(Environment):
    """Answers a sum that ends with a question mark. A turn without a question ends the episode."""

    stop: list[str] = field(default_factory=lambda: ["?"], kw_only=True)
    """A turn ends with one of these."""

    def reply(self, task: Task, turns: Sequence[Turn]) -> str | None:
        """Returns the answer to the last turn. None means that the episode is over."""
        asked = ASKED.search(turns[-1].response.rstrip())
        if asked is None:
            return None
        left, right, equals = asked.groups()
        result = int(left) + int(right) if left else "error"
        return f"{result}" if equals else f"={result}"
