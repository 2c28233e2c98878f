r"""Mathematical answers as text: decides or refuses them without a computer algebra system.

`quick_verdict` decides most answers in microseconds. It withholds answers that math-verify would accept wrongly
(equations with a wrong side, anagrams of words, unevaluated sums, small numbers that round to the same) or would never
finish (towers of powers, large factorials, deep nesting).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from llamarl.rewards._text import parse_number

RELATIVE_TOLERANCE = Fraction(1, 10**6)
"""Tolerance between a decimal and the exact value that it rounds. Relative, because an absolute one would make
0.0000002 equal 0.0000001."""

_MAX_ANSWER_CHARS = 400
_MAX_DEPTH = 12
_MAX_CHAIN = 4


class TextVerdict(NamedTuple):
    """Verdict from the text only."""

    right: bool | None
    """None means undecided: math-verify decides."""
    reason: str = ""
    pieces: tuple[str, ...] = ()
    """If undecided: expressions that must all equal the gold answer."""


_REPLACED = [
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[!,;:]"), ""),
    (re.compile(r"\s+"), " "),
]
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def tidy(text: str) -> str:
    """Removes spacing, sizes, math delimiters around the whole and a trailing full stop, which do not change the
    value."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = text.strip().removesuffix(".").rstrip()
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        if len(text) > len(opening + closing) and text == opening + inner + closing and "$" not in inner:
            return inner.strip().removesuffix(".").rstrip()
    return text


class Number(NamedTuple):
    """A plain number."""

    value: Fraction
    is_decimal: bool
    """Whether it has a decimal point, so that it may be rounded."""
    is_percent: bool


_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*(?:\\frac\s*(?:\{(?P<a>[^{}]+)\}\s*\{(?P<b>[^{}]+)\}|(?P<c>[0-9])\s*(?P<d>[0-9]))|(?P<e>[^/]+)/(?P<f>[^/]+))"
)


def read_number(text: str) -> Number | None:
    r"""Whole numbers, decimals, `a/b`, `\frac{a}{b}`, with sign, `$`, thousands groups or percent sign; else None."""
    text = text.replace(r"\$", "").strip()
    bare = text.removesuffix("%").removesuffix("\\").rstrip()
    is_percent, text = text.endswith("%"), bare if text.endswith("%") else text
    number = parse_number(text)
    if number is not None:
        return Number(Fraction(number), "." in text, is_percent)
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    top = parse_number(match["a"] or match["c"] or match["e"])
    bottom = parse_number(match["b"] or match["d"] or match["f"])
    if top is None or not bottom:
        return None
    sign = -1 if match["sign"] == "-" else 1
    return Number(sign * Fraction(top) / Fraction(bottom), "." in text, is_percent)


def same_number(gold: Number, answer: Number) -> bool:
    """Compares golds that are whole numbers or fractions exactly, others within RELATIVE_TOLERANCE. `50%` equals 50 and
    0.5."""
    scales = [Fraction(1)]
    if gold.is_percent != answer.is_percent:
        scales.append(Fraction(100) if gold.is_percent else Fraction(1, 100))
    exact = gold.value.denominator == 1 or not (gold.is_decimal or answer.is_decimal)
    tolerance = 0 if exact else RELATIVE_TOLERANCE * abs(gold.value)
    return any(abs(answer.value * scale - gold.value) <= tolerance for scale in scales)


_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_PHRASE = re.compile(r"[A-Za-z][A-Za-z0-9 '.,:-]*")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTION = re.compile("(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|mod|det", re.IGNORECASE)


def plain_text(text: str) -> str:
    r"""`\text{(C)}` -> `C`, `\text{Evelyn}` -> `Evelyn`."""
    text = tidy(_TEXT_COMMAND.sub(r"\1", text))
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def is_phrase(text: str) -> bool:
    """Returns whether this is a name or words. math-verify would read them as products of letters, in any order."""
    return bool(_PHRASE.fullmatch(text)) and any(not _FUNCTION.fullmatch(word) for word in _WORD.findall(text))


_EQUALS = re.compile(r"(?<![<>!:\\=])=(?!=)")
_ASSIGNED = re.compile(r"(?:^|(?<=,))\s*\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\s*\(\s*[A-Za-z]\s*\))?\s*=(?!=)")


def _values(gold: str, answer: str) -> tuple[str, ...]:
    """Returns values that the answer claims to equal the gold: `x = 5` claims 5, and `7 = 5` claims 7 and 5. () means
    that this is unclear."""
    if _EQUALS.search(gold):
        return (answer,)
    answer = _ASSIGNED.sub("", answer)
    pieces = tuple(piece.strip() for piece in _EQUALS.split(answer))
    if len(pieces) == 1:
        return (answer.strip(),)
    return () if "," in answer or len(pieces) > _MAX_CHAIN else pieces


def quick_verdict(gold: str, answer: str) -> TextVerdict:
    """Judges by text. `gold` and `answer` are tidy.

    Order: same string, same plain text, numbers, phrases, then the screen for text that math-verify must not see.
    """
    if gold == answer or plain_text(gold) == plain_text(answer):
        return TextVerdict(True)
    if len(answer) > max(_MAX_ANSWER_CHARS, 2 * len(gold)):
        return TextVerdict(False, f"{len(answer)} characters are too long for an answer")
    phrase = plain_text(gold)
    if is_phrase(phrase):
        same = phrase.casefold() == plain_text(answer).casefold()
        return TextVerdict(same, "" if same else f"{answer[:40]!r} is not {gold[:40]!r}")
    values = _values(gold, answer)
    if not values:
        return TextVerdict(False, "an equation where a value is asked for")
    undecided = []
    for value in values:
        verdict = _judge_value(gold, value)
        if verdict.right is False:
            return verdict
        if verdict.right is None:
            undecided.append(value)
    return TextVerdict(None, pieces=tuple(undecided)) if undecided else TextVerdict(True)


def _judge_value(gold: str, answer: str) -> TextVerdict:
    if gold == answer:
        return TextVerdict(True)
    gold_number, number = read_number(gold), read_number(answer)
    if gold_number and number:
        same = same_number(gold_number, number)
        return TextVerdict(same, "" if same else f"{answer[:40]} is not {gold[:40]}")
    refused = screen(answer)
    if refused and refused != screen(gold):
        return TextVerdict(False, refused)
    return TextVerdict(None)


_SCREENED = [
    (re.compile(r"\\(?:sum|prod|i*nt|oint|lim)(?![a-zA-Z])"), "a sum, product, integral or limit left standing"),
    (re.compile(r"\d{31}"), "a run of over 30 digits"),
    (re.compile(r"\^\s*(?:\d+|[A-Za-z]|[{(]\s*\w+\s*[)}])\s*\^"), "a tower of powers"),  # 9^9^9
    (re.compile(r"\^\s*[{(][^{}()]*\d\s*[)}]?\s*\^"), "a tower of powers"),  # 9^{9^9}, not e^{x^2}
    (re.compile(r"[{(]\s*\d[^{}()]*\^[^()]*[)}]\s*\^"), "a tower of powers"),  # (9^9)^9, not (x^2)^3
    (re.compile(r"\^\s*[{(]?\s*[+-]?\s*\d{4}|\d\s*[eE]\s*[+-]?\d{4}"), "an exponent of over 3 digits"),
    (re.compile(r"\^\s*[{(][^{}()]*\d\s*(?:\\cdot|\\times|\*)\s*\d"), "a product as an exponent"),
    (re.compile(r"\\[dt]?binom\s*(?:\{\s*\d{4}|\{[^{}]*\}\s*\{\s*\d{4})|\\Gamma\s*\(?\s*\d{3}"), "a large factorial"),
    (re.compile(r"!\s*!|\d{3}\s*!|[)}\]]\s*!"), "a large factorial"),
    (re.compile(r"\\boxed|\$|\x00"), "no single expression"),
]


def screen(text: str) -> str:
    """Returns why math-verify must not see this text, or "" if it may."""
    for pattern, reason in _SCREENED:
        if pattern.search(text):
            return reason
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth > _MAX_DEPTH:
            return f"nested over {_MAX_DEPTH} deep"
    return ""
