from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observability.report import Accounts, account, role_of, verdict, write_trace
from llamarl.observability.spans import AWAY, Span, SpanLog, covered_s

KINDS = ["generate", "score", "train", "start"]


def spans_of(length: int = 12) -> st.SearchStrategy[list[Span]]:
    span = st.builds(
        lambda name, start, size: Span(name, float(start), float(start + size)),
        st.sampled_from(KINDS),
        st.integers(-5, 25),
        st.integers(0, 8),
    )
    return st.lists(span, max_size=length)


def cells(spans: list[Span], start: int, end: int) -> set[int]:
    """Whole seconds of the window that the spans cover."""
    return {cell for cell in range(start, end) if any(span.start_s <= cell < span.end_s for span in spans)}


@given(spans_of(), st.integers(-3, 10), st.integers(0, 20))
def test_covered_equals_brute_force(spans, start, length):
    assert covered_s(spans, start, start + length) == len(cells(spans, start, start + length))


@given(spans_of(), spans_of(), spans_of())
def test_accounts_equal_brute_force(first, second, trainer):
    accounts = account({"generator-0": first, "generator-1": second, "trainer": trainer}, 0.0, 20.0)
    work = [[span for span in spans if span.name != "start"] for spans in (first, second, trainer)]
    busy = [cells(spans, 0, 20) for spans in work]
    assert list(accounts.busy_share.values()) == pytest.approx([len(part) / 20 for part in busy])
    assert accounts.unaccounted_share == pytest.approx(1 - len(busy[0] | busy[1] | busy[2]) / 20)
    assert accounts.overlap_share == pytest.approx(len((busy[0] | busy[1]) & busy[2]) / 20)
    assert accounts.role_share["generator"] == pytest.approx((len(busy[0]) + len(busy[1])) / 40)
    assert accounts.kind_share["trainer"].get("train", 0.0) == pytest.approx(
        len(cells([span for span in trainer if span.name == "train"], 0, 20)) / 20
    )


def test_an_empty_window_has_no_shares():
    accounts = account({"trainer": [Span("train", 0, 1)]}, 5.0, 5.0)
    assert (accounts.window_s, accounts.busy_share, accounts.unaccounted_share) == (0.0, {"trainer": 0.0}, 0.0)
    assert str(verdict(accounts, 1, 0)) == "unknown over no step, 0ms: no executor has done any work yet"


def test_time_in_which_nobody_works_until_one_is_back_is_not_the_controller_s():
    generator = [Span("generate", 0, 5), Span("generate", 12, 20)]
    trainer = [Span("train", 0, 4), Span("train", 14, 20), Span(AWAY, 3, 10)]
    accounts = account({"generator-0": generator, "trainer": trainer}, 0.0, 20.0)
    assert (accounts.unaccounted_share, accounts.away_share, accounts.away) == (7 / 20, 5 / 20, ("trainer",))
    said = verdict(accounts, 1, 9)
    assert said.bound == "generator-bound"
    assert said.reason.endswith("; not counted: 25% of the time, when all were idle until trainer was back")


def accounts_of(*, overlap: float = 0.5, unaccounted: float = 0.01, away: float = 0.0, **role_share: float) -> Accounts:
    return Accounts(
        window_s=60,
        busy_share=role_share,
        kind_share={},
        role_share=role_share,
        overlap_share=overlap,
        unaccounted_share=unaccounted,
        away_share=away,
        away=("trainer",) if away else (),
    )


@pytest.mark.parametrize(
    ("accounts", "bound", "words"),
    [
        (accounts_of(generator=0.97, reward=0.02, trainer=0.58), "generator-bound", "trainer waits for rollouts 42%"),
        (accounts_of(generator=0.6, reward=0.1, trainer=0.98), "trainer-bound", "generator waits for the trainer 40%"),
        (accounts_of(generator=0.97, reward=0.1, trainer=0.93), "balanced", "equally busy"),
        (accounts_of(generator=0.3, reward=0.99, trainer=0.4), "reward-bound", "wait for the reward"),
        (accounts_of(generator=0.9, reward=0.95, trainer=0.4), "generator-bound", "trainer waits"),
        (accounts_of(generator=0.6, reward=0.01, trainer=0.35, overlap=0.0), "generator-bound", "take turns"),
        (accounts_of(generator=0.4, trainer=0.2, unaccounted=0.4), "controller-bound", "40%"),
        (accounts_of(generator=0.0, trainer=0.0, unaccounted=1.0), "unknown", "yet"),
        (accounts_of(generator=0.5, trainer=0.1, unaccounted=0.5, away=0.4), "generator-bound", "rollouts 83% of the"),
        (accounts_of(generator=0.5, trainer=0.1, unaccounted=0.5, away=0.2), "controller-bound", "idle 38% of the"),
        (
            accounts_of(generator=0.5, trainer=0.1, unaccounted=0.5, away=0.4),
            "generator-bound",
            " when all were idle until ",
        ),
    ],
)
def test_verdicts(accounts, bound, words):
    answer = verdict(accounts, 11, 20)
    assert answer.bound == bound
    assert words in answer.reason
    assert str(answer).startswith(f"{bound} over steps 11 to 20, 1m 00s: ")


@given(st.floats(-0.02, 0.02), st.floats(-0.02, 0.02))
def test_verdict_withstands_noise(first, second):
    noisy = accounts_of(generator=0.95 + first, reward=0.05, trainer=0.6 + second)
    assert verdict(noisy, 1, 9).bound == "generator-bound"


def test_roles():
    assert [role_of(name) for name in ("generator-12", "trainer", "reward_0")] == ["generator", "trainer", "reward"]


def test_trace_rows_never_cross(tmp_path):
    spans = [
        Span("score", 100.0, 104.0),
        Span("score", 102.0, 106.0),
        Span("score", 104.0, 105.0),
        Span("start", 90, 95),
    ]
    write_trace(tmp_path / "trace.json", {"reward": spans, "trainer": [Span("train", 101.0, 101.5)], "idle": []})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["reward", "trainer", "idle"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 5
    train = next(event for event in slices if event["name"] == "train")
    assert (train["ts"], train["dur"], names[train["pid"]]) == (11e6, 0.5e6, "trainer")  # 11 s after the first span
    for lane in (0, 1):
        row = sorted((event["ts"], event["dur"]) for event in slices if event["pid"] == 1 and event["tid"] == lane)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(row))


def test_span_log_joins_what_touches_and_loses_nothing():
    log = SpanLog(join_s=0.5)
    for span in (
        Span("score", 5, 6),
        Span("score", 1, 7),
        Span("score", 7.1, 8),
        Span("score", 9, 10),
        Span("train", 10, 11),
    ):
        log.add(span)
    assert log.drain() == [Span("score", 1, 8), Span("score", 9, 10), Span("train", 10, 11)]
    assert log.drain() == []
