"""Pass rates of problems, which `llamarl eval --rates` writes and `data.filter` reads.

A file is JSON Lines: a header on the measurement, then a row per problem. A problem is identified by a digest of its
question and answer, so that rates apply to any mixture, order or subset of the data, and to any template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from llamarl.config.data import FilterConfig
from llamarl.config.errors import ConfigError
from llamarl.config.load import read_rows
from llamarl.data.sources import ProblemRow

KIND = "pass rates"
"""`kind` of the first row."""


def digest(row: ProblemRow) -> str:
    """Returns the fingerprint of question (or conversation) and answer, in hexadecimal digits."""
    said = json.dumps([row.question, row.messages, row.answer], sort_keys=True, default=str)
    return xxhash.xxh3_64_hexdigest(said.encode(errors="surrogatepass"))


def rate_rows(header: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of a file of rates. Rows have `id`, `source`, `right`, the number of scored `samples`, and the
    digest `problem`."""
    for row in ({"kind": KIND, **header}, *rows):
        yield json.dumps(row, ensure_ascii=False) + "\n"


def read_rates(path: str) -> dict[str, float]:
    """Returns the pass rate by digest, 0 to 1. Several measurements of a problem are added up. Raises ConfigError."""
    fix = "write one with `llamarl eval --rates FILE`"
    rows = read_rows(path, fix)
    place, first = next(rows)
    if first.get("kind") != KIND:
        raise ConfigError(f"{place}: the file does not contain pass rates; {fix}")
    right, samples = Counter[str](), Counter[str]()
    for place, row in rows:
        try:
            problem, num_right, num_samples = str(row["problem"]), int(row["right"]), int(row["samples"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{place}: a row needs `problem`, `right` and `samples`; {fix}") from None
        if not 0 <= num_right <= num_samples:
            raise ConfigError(f"{place}: {num_right} right of {num_samples} samples; {fix}")
        right[problem] += num_right
        samples[problem] += num_samples
    return {problem: right[problem] / samples[problem] for problem in samples if samples[problem]}


def kept(rows: Sequence[ProblemRow], config: FilterConfig) -> tuple[list[bool], str]:
    """Returns whether each row has a pass rate within the bounds, and a sentence that counts dropped rows.

    Raises:
        ConfigError: the file is invalid, a row was not measured, or no row is left.
    """
    rates = read_rates(config.path)
    digests = [digest(row) for row in rows]
    unmeasured = [row.problem_id for row, one in zip(rows, digests, strict=True) if one not in rates]
    if unmeasured:
        raise ConfigError(
            f"data.filter: {config.path} lacks {len(unmeasured)} of {len(rows)} problems, such as {unmeasured[0]!r}; "
            "measure them with `llamarl eval --rates`"
        )
    known = [rates[one] for one in digests]
    keeps = [config.min <= rate <= config.max for rate in known]
    causes = {
        f"solved less often than {config.min:g}": sum(rate < config.min for rate in known),
        f"more often than {config.max:g}": sum(rate > config.max for rate in known),
    }
    said = ", ".join(f"{number:,} {cause}" for cause, number in causes.items() if number)
    if not any(keeps):
        raise ConfigError(
            f"data.filter leaves none of {len(rows):,} prompts: {said}; widen min and max, or measure again"
        )
    left = f"data.filter = {config.path}: {sum(keeps):,} of {len(rows):,} prompts are kept; left out: {said}"
    return keeps, left if said else ""
