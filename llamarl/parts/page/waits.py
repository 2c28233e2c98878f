"""Explains why an executor was idle: which executor it waited for, the one whose output it needs first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llamarl.observability.report import role_of
from llamarl.observability.spans import Span, merged

Intervals = Sequence[tuple[float, float]]

REPLIES = "replies of the environment"
LIMIT = "blocked by the staleness limit"
SUPPLIERS = {
    "trainer": (("generator", "rollouts"), ("environment", REPLIES), ("scores", "scores")),
    "critic": (
        ("generator", "rollouts"), ("environment", REPLIES), ("scores", "scores"), ("trainer", "the trainer's step"),
    ),
    "environment": (("generator", "turns"), ("trainer", LIMIT)),
    "generator": (
        ("environment", REPLIES), ("trainer", LIMIT), ("scores", "scores"),
    ),
    "scores": (
        ("generator", "rollouts to finish"), ("environment", REPLIES), ("trainer", LIMIT),
    ),
}  # fmt: skip
"""For each role, the roles whose work its executors wait for, in order, and the name of the cause. Reward, reference
and reward model have the role `scores`."""
NOBODY = "the controller"


def waits(spans: Mapping[str, Sequence[Span]], start_s: float, end_s: float) -> dict[str, dict[str, float]]:
    """Returns the seconds of [start_s, end_s] that each executor waited, by cause. It worked the rest of the time."""
    work = {name: merged(of_one, start_s, end_s) for name, of_one in spans.items()}
    roles = {name: _role(name) for name in spans}
    of_role = {role: _union(work[name] for name in spans if roles[name] == role) for role in set(roles.values())}
    found = dict[str, dict[str, float]]()
    for name, own in work.items():
        rest, causes = without([(start_s, end_s)], own), dict[str, float]()
        for role, cause in SUPPLIERS.get(roles[name], SUPPLIERS["trainer"]):
            left = without(rest, of_role.get(role, ()))
            causes[cause] = total_s(rest) - total_s(left)
            rest = left
        causes[NOBODY] = total_s(rest)
        found[name] = {cause: seconds for cause, seconds in causes.items() if seconds > 0}
    return found


def _role(name: str) -> str:
    role = role_of(name)
    return role if role in SUPPLIERS else "scores"


def _union(intervals: Iterable[Intervals]) -> Intervals:
    return merged(Span("", begin, end) for one in intervals for begin, end in one)


def total_s(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def without(intervals: Intervals, others: Intervals) -> list[tuple[float, float]]:
    """Returns the parts of `intervals` outside of `others`. Both are disjoint and sorted."""
    found, index = list[tuple[float, float]](), 0
    for begin, end in intervals:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                found.append((begin, others[at][0]))
            begin, at = max(begin, others[at][1]), at + 1  # noqa: PLW2901
        if begin < end:
            found.append((begin, end))
    return found
