"""What each source of a mixture gives to a step, and to all steps together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.admission import Admission, Problems, TooManyInvalid
from llamarl.controller.progress import Progress
from llamarl.controller.telemetry import SourceTallies
from llamarl.observability.sinks import Flow
from llamarl.types import FinishReason, Outcome, Prompt, RolloutGroup
from tests.controller.fakes import config, prompts
from tests.groups import MakeGroup

SCORE, INVALID = Outcome.SCORE, Outcome.INVALID


@pytest.fixture
def of(make_group: MakeGroup) -> Any:
    """A group of a source, with these rewards; its tokens are of versions from 3 on."""

    def make(source: str, *rewards: float | None, **options: Any) -> RolloutGroup:
        outcomes = [INVALID if reward is None else SCORE for reward in rewards]
        group = make_group(3, responses=[[4] * (n + 1) for n in range(len(rewards))], outcomes=outcomes, **options)
        results = tuple(replace(one, value=reward or 0.0) for one, reward in zip(group.results, rewards, strict=True))
        return replace(group, results=results, prompt=replace(group.prompt, source=source))

    return make


def test_metrics_of_a_step(of: Any) -> None:
    cut = {"finish": [FinishReason.STOP, FinishReason.LENGTH]}
    tallies = SourceTallies(["a", "b", "c"], mask_truncated=False)
    found = tallies.step([of("a", 1, 0), of("a", 1, 1, **cut), of("b", None, None), of("a", None, 0.5)], version=5)
    assert {name.removeprefix("source_"): value for name, value in found.items() if name.endswith(".a")} == {
        "share.a": 0.75, "reward.a": pytest.approx(3.5 / 5), "right.a": 4 / 5, "invalid.a": pytest.approx(1 / 6),
        "flat.a": pytest.approx(2 / 3), "tokens.a": 1.5, "truncated.a": pytest.approx(1 / 6), "staleness.a": 2,
    }  # fmt: skip
    assert (found["source_share.b"], found["source_invalid.b"], found["source_share.c"]) == (0.25, 1, 0)
    for name in ("reward", "right"):
        assert math.isnan(found[f"source_{name}.b"]), "nobody judged one"
    assert not any(name.endswith(".c") for name in found if "share" not in name), "nothing is measured of none"


def test_totals_are_means_over_the_groups_of_a_source(of: Any) -> None:
    tallies = SourceTallies(["a", "b"], mask_truncated=False)
    tallies.step([of("a", 1, 1), of("a", 0, 1), of("a", 1, 1), of("b", None, None)], version=3)
    tallies.step([of("a", 0, 0), of("b", 0.5, 0.5)], version=3)
    totals = tallies.totals()
    assert (totals["source_share.a"], totals["source_reward.a"]) == (4 / 6, pytest.approx((1 + 0.5 + 1 + 0) / 4))
    assert (totals["source_reward.b"], totals["source_right.b"]) == (0.5, 1), "of the group that was judged"
    assert totals["source_invalid.b"] == 0.5
    assert SourceTallies([], mask_truncated=False).totals() == {}


def test_a_grader_that_fails_is_named_by_its_source(tmp_path: Path, of: Any) -> None:
    problems = Problems(train=prompts(9), eval=(), stop_token_ids=(2,))
    admission = Admission(config(tmp_path), problems, None, Flow(lambda: 0.0), Progress())
    with pytest.raises(
        TooManyInvalid, match=r"5 of 6 rewards .* are invalid \(reward.max.* = 0.5; 4 of source 'b', 1 of source 'a'\)"
    ):
        admission.check([of("b", None, None), of("a", 1, None), of("b", None, None)], 7)
    with pytest.raises(
        TooManyInvalid, match=r"2 of 2 rewards of step 7 are invalid \(reward\.max_invalid_share = 0\.5\)"
    ):
        admission.check([of("", None, None)], 7)


def test_limits_and_shares_are_those_of_the_sources(tmp_path: Path) -> None:
    sources = [{"name": "running_total", "label": one, "weight": n} for n, one in ((3, "a"), (1, "b"))]
    settings = config(tmp_path, data={"train": [sources[0], sources[1] | {"max_new_tokens": 77}]})
    train = [replace(prompt, source="a" if n < 6 else "b") for n, prompt in enumerate(prompts(9))]
    limits, stops = {"a": settings.rollout.max_new_tokens, "b": 77}, {"a": ("x",), "b": ("y",)}
    problems = Problems(train=train, eval=(), stop_token_ids=(2,), stops_of=stops)
    admission, drawn = Admission(settings, problems, None, Flow(lambda: 0.0), Progress()), list[Prompt]()
    for request, prompt in admission.admit():
        drawn.append(prompt)
        assert request.sampling.max_new_tokens == limits[prompt.source]
        assert request.sampling.stop_strings[-1:] == stops[prompt.source]
    assert {one.source for one in drawn[:4]} == {"a", "b"} and [one.source for one in drawn[:4]].count("a") == 3
