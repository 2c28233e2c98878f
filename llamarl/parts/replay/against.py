"""`first_divergence`: finds where two runs with the same settings diverge, by their records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from llamarl.config import load_recorded
from llamarl.config.load import flat_settings
from llamarl.parts.replay.recorded import first_difference, versions_of
from llamarl.run.folder import RunFolder
from llamarl.run.rollouts import rollout_rows

_WHY = {"outcome": "reward", "reward": "reward", "advantage": "advantages or shaping: the rewards are equal",
        "trainer_logprobs": "weights: the trainer began the step with different ones"}  # fmt: skip
_FREE = ("name", "output", "cluster", "screen", "metrics", "record", "checkpoint", "launch", "eval", "steps")
"""Settings that do not affect the compared values."""


_ORDER = "order: another version had been adopted when it was sampled"


class Divergence(NamedTuple):
    """The first difference."""

    step: int
    place: str
    one: object
    other: object
    why: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.place}: {self.one} and {self.other}. Why: {self.why}"


def first_divergence(one: RunFolder, other: RunFolder) -> tuple[list[int], Divergence | None]:
    """Returns the equal steps for which both runs have rollouts, and the first difference. None means no difference.
    Raises ConfigError."""
    settings = [dict(flat_settings(load_recorded(run.config).model_dump(mode="json"))) for run in (one, other)]
    names = [name for name in settings[0] | settings[1] if name.split(".")[0] not in _FREE]
    others = [name for name in names if settings[0].get(name) != settings[1].get(name)]
    weights, steps = (_fingerprints(one), _fingerprints(other)), list[int]()
    for step, of_both in groupby(merge(_steps(one), _steps(other), key=itemgetter(0)), key=itemgetter(0)):
        (_, rows), *theirs = of_both
        if theirs and (found := _of_weights(step - 1, *weights) or _of_rows(step, rows, theirs[0][1], *weights)):
            settings_differ = f"; also, settings differ: {', '.join(others)}" if others else ""
            return steps, found._replace(why=found.why + settings_differ)
        steps += [step] * len(theirs)
    return steps, _of_weights(steps[-1] if steps else 0, *weights)


def _steps(run: RunFolder) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for step, found in groupby(rollout_rows(run.path), key=lambda row: int(row["step"])):
        yield step, list(found)


def _fingerprints(run: RunFolder) -> dict[int, str]:
    rows = (json.loads(line) for line in run.journal.read_text("utf-8").splitlines()) if run.journal.exists() else ()
    return {int(row["step"]): row["fingerprint"] for row in rows if "fingerprint" in row}


def _of_weights(version: int, one: dict[int, str], other: dict[int, str]) -> Divergence | None:
    if version in one and version in other and one[version] != other[version]:
        why = "weights: equal groups gave others" if version else "weights: the runs began with others"
        return Divergence(version, f"weights of version {version}", one[version], other[version], why)
    return None


def _of_rows(
    step: int, rows: list[dict[str, Any]], others: list[dict[str, Any]], one: dict[int, str], other: dict[int, str]
) -> Divergence | None:
    mine, theirs = ([[row["group_id"], row["index"]] for row in found] for found in (rows, others))
    if found := first_difference(mine, theirs):
        return Divergence(step, f"rollout {found[0]} of the step", *found[1:], "order: other groups were ready")
    for row, now in zip(rows, others, strict=True):
        place = f"rollout {row['index']} of group {row['group_id']}"
        if row["prompt"] != now["prompt"]:
            return Divergence(step, place, row["prompt"], now["prompt"], "data: another prompt")
        for token, (version, its) in enumerate(zip(versions_of(row), versions_of(now), strict=False)):
            at = f"{place}, token {token}"
            if version != its:
                return Divergence(step, f"{at}, its version", version, its, _ORDER)
            for name in ("token_ids", "behavior_logprobs"):
                if row[name][token] != now[name][token]:
                    return Divergence(
                        step, f"{at}, {name}", row[name][token], now[name][token], _why(version, one, other)
                    )
        for name in ("token_ids", "outcome", "reward", "advantage", "trainer_logprobs"):
            if found := first_difference(row.get(name), now.get(name)):
                return Divergence(step, f"{place}, {name}{found[0]}", *found[1:], _WHY.get(name, "order"))
    return None


def _why(version: int, one: dict[int, str], other: dict[int, str]) -> str:
    """Returns the likely cause of a difference in a token that the same version sampled."""
    same = "noise, or keys and values: another seed or processor, or those of earlier tokens are of another version"
    return same if one.get(version) == other.get(version) else f"weights: version {version} is another one"
