"""Numbers, times and foreign text as short strings for people."""

from __future__ import annotations

import math
import re
import unicodedata

ABSENT = "–"
_OF_USER = re.compile(
    r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|<start_of_turn>)\s*user\b\s*(?:<[|｜][^<>|｜\s]{1,40}[|｜]>)?\s*"
    r"|<[|｜][Uu]ser[|｜]>\s*|\[INST\]\s*"
)
"""Begins a user's message in the chat templates of common models: ChatML, Llama 3, Gemma, GLM, DeepSeek, Mistral."""
_MARK = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<end_of_turn>|</s>|\[/INST\]")
"""Ends a message."""


def megabytes(num_bytes: float) -> str:
    """Text such as `269 MB` and `2.4 MB`."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2g} MB"


def duration(seconds: float | None) -> str:
    """`43ms`, `8.2s`, `1m 42s`, `2h 05m`, `3d 04h`; a dash for what is not known."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 59.5:
        return _short_duration(max(seconds, 0.0))
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _short_duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


def remaining_s(steps_left: float, step_s: float) -> float | None:
    """Seconds until the last step ends, or None before the first step has told how long one takes."""
    return max(steps_left, 0.0) * step_s if math.isfinite(step_s) else None


def percent(share: float | None, digits: int = 0) -> str:
    """`58%`; `nan` stays visible."""
    if share is None:
        return ABSENT
    return f"{share:.{digits}%}" if math.isfinite(share) else str(share)


def last_question(prompt: str) -> str:
    """Returns the user's last message in a prompt that a chat template has written, and another prompt as it is."""
    begins = [found.end() for found in _OF_USER.finditer(prompt)]
    text = _MARK.split(prompt[begins[-1] :], maxsplit=1)[0].strip() if begins else ""
    return text or prompt


def counted(many: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{many:,} {noun}{'s' * (many != 1)}"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, all whole ones, no exponent in the usual range; `nan` stays visible."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.{digits - 1}e}"
    first_digit = math.floor(math.log10(size)) if size else digits - 1
    return f"{value:,.{max(digits - 1 - first_digit, 0)}f}"


def plain(text: str) -> str:
    """One printable line: what a model wrote can neither move the cursor nor break the layout."""
    text = text.strip().replace("\r\n", "\n").replace("\n", " ↵ ").replace("\t", " ")
    return "".join("·" if unicodedata.category(letter)[0] == "C" else letter for letter in text)
