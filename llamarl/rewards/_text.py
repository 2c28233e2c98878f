"""Finds a final answer in a response, and reads plain numbers. Takes time linear in the tail, for any text."""

from __future__ import annotations

import re
from decimal import Decimal

TAIL_CHARS = 4096
"""Number of last characters in which final answers are searched, which bounds the work for long responses."""

_NUMBER = re.compile(
    r"""(?:(?P<sign>[+-])\s*)?(?:\$\s*)?(?:(?P<inner>[+-])\s*)?  # -72, $72, -$72, $-72; linear: no two \s* can meet
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?  # 1,234.5
        |(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)  # 1234.5, .5, 1.055e+06
        \s*(?:\$\s*)?\.?""",
    re.VERBOSE,
)


def parse_number(text: str) -> Decimal | None:
    """Returns the number that the whole of `text` is, or None.

    Allowed around it: spaces, one sign, `$`, commas between valid groups of three, one trailing full stop. Scientific
    notation may have three digits of exponent.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match["sign"] and match["inner"]):
        return None
    return Decimal((match["sign"] or match["inner"] or "") + match["digits"].replace(",", ""))


def after_hashes(response: str) -> str | None:
    """Returns the stripped text behind the last `####` on its line, or None if the tail has none."""
    _, hashes, after = response[-TAIL_CHARS:].rpartition("####")
    return after.partition("\n")[0].strip() if hashes else None


_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def last_box(response: str) -> str | None:
    r"""Returns the content of the last closed `\boxed{...}` in the tail; of nested boxes the inner one."""
    tail = response[-TAIL_CHARS:]
    opened: list[int | None] = []  # start of the content of a box; None for a plain brace
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(tail):
        if match["box"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return tail[last[0] : last[1]].strip() if last else None
