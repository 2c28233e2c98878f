"""When versions are probed, and what the trainer says of what tells causes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamarl.config import RunConfig
from llamarl.executors.replies import Probe, Probes
from llamarl.training import routing
from llamarl.training.result import CauseScores, RoutingEffect
from llamarl.types import FinishReason, Prompt, Rollout, RolloutGroup


@dataclass
class Trainer:
    """Says its version of every token, and a half more where it rounds."""

    config: Any
    version: int = 0
    calls: int = 0
    model: Any = field(default_factory=lambda: SimpleNamespace(shape=SimpleNamespace(delta=None)))

    def score(
        self,
        sequences: list[np.ndarray],
        temperature: float = 1.0,
        half: bool = False,
        cutoffs_N: Any = None,
        rounded: bool = False,
        contexts: Any = None,
        recurrent: bool = False,
    ) -> list[Any]:
        assert not recurrent, "there are no delta nets"
        self.calls += 1
        says = 100 * (cutoffs_N is not None) + self.version + 0.5 * (half and self.config.dtype == "bfloat16")
        says += 0.25 * rounded
        found = [np.full(len(sequence) - 1, says, np.float32) for sequence in sequences]
        for own_T, num in zip(found, contexts, strict=True):
            own_T[: num - 1] = np.nan
        return found


def group(is_asked: bool, cutoff: float = -np.inf, routes: bool = False) -> RolloutGroup:
    ids_T = np.arange(1, 6, dtype=np.int32)
    rollout = Rollout.empty(0, 0, FinishReason.STOP)
    columns = {name: np.ones(5, one.dtype) for name, one in rollout.columns.items()}
    columns["cutoffs"] = np.full(5, cutoff, np.float32)
    columns["policy_versions"] = np.array([1, 1, -1, 1, 1], np.int32)
    columns |= {"routes": np.zeros((5, 2), np.uint8)} if routes else {}
    columns |= {"fresh_logprobs": np.ones(5, np.float32)} if is_asked else {}
    prompt = Prompt(prompt_id="p", text="", token_ids_T=ids_T, answer="")
    rollout = replace(rollout, columns=columns)
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=(rollout,), results=(), responses=("",))


def probed(
    every: int = 1,
    dtype: str = "float32",
    cutoff: float = -np.inf,
    routes: bool = False,
    first: int = 1,
    served: str = "float32",
) -> tuple[dict[int, Probe], dict[int, CauseScores], int]:
    """Of the steps to the tenth, of which the fourth has groups that tell causes: by version, and how often the trainer
    scored."""
    config = RunConfig.model_validate({
        "model": {"path": "nowhere"}, "data": {"train": "jsonl"}, "trainer": {"dtype": dtype},
        "weight_sync": {"probe_every_steps": every}, "generator": {"dtype": served},
    })  # fmt: skip
    trainer = Trainer(config.trainer)
    probes = Probes(trainer, config)  # type: ignore[arg-type]
    assert probes.of(first - 1) is None, "nothing was learnt from yet"
    found, causes = dict[int, Probe](), dict[int, CauseScores]()
    for version in range(first, 11):
        if said := probes.step([group(version == 4, cutoff, routes)]):
            causes[version] = said
        trainer.version = version
        if probe := probes.of(version):
            found[version] = probe
            assert probes.of(version) is not None, "another transport has it published again"
            trainer.calls -= 1
    return found, causes, trainer.calls


@pytest.mark.parametrize("every", [1, 3])
def test_each_so_many_versions_are_probed(every: int) -> None:
    found, _, _ = probed(every)
    assert sorted(found) == sorted({1, *range(every, 11, every)})
    for version, probe in found.items():
        assert {*np.concatenate(probe.logprobs)[4:]} == {version}, "behind the prompt, which is not scored"
        assert probe.is_compared_N.tolist() == [False] * 4 + [True, True, False, True, True]


def test_the_first_version_of_a_run_that_goes_on_is_probed() -> None:
    """Generators are new, too. It stays the first one where it is published again."""
    found, _, _ = probed(4, first=7)
    assert sorted(found) == [7, 8]


def test_versions_that_are_not_probed_cost_nothing() -> None:
    found, causes, calls = probed(0)
    assert not found and len(causes) == calls == 1


def test_causes_are_told_by_the_weights_with_which_the_step_begins() -> None:
    _, causes, _ = probed()
    assert [*causes] == [4] and causes[4].logprobs_4_N[:, 4:].tolist() == [[3.0] * 5] * 4
    assert causes[4].routing is None


def test_what_was_left_out_is_scored_without() -> None:
    _, causes, _ = probed(cutoff=-2.0)
    assert causes[4].logprobs_4_N[:, 4].tolist() == [3.0, 3.0, 3.0, 103.0]


def test_how_steps_round_is_told_apart() -> None:
    _, causes, _ = probed(dtype="bfloat16")
    assert causes[4].logprobs_4_N[:, 4].tolist() == [3.5, 3.25, 3.25, 3.5] and causes[4].unserved == 0.25
    _, causes, _ = probed(served="bfloat16")
    assert causes[4].logprobs_4_N[:, 4].tolist() == [3.0, 3.0, 3.25, 3.0] and causes[4].unserved == 0.0


def test_the_probe_after_a_sync_is_scored_by_what_is_trained_and_served() -> None:
    found, _, _ = probed(dtype="bfloat16")
    assert {*np.concatenate(found[2].logprobs)[4:]} == {2.5}


def test_routers_are_asked_before_the_step_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights that make the importance ratio."""
    asked = list[int]()

    def routing_of(trainer: Trainer, groups: list[RolloutGroup], half: bool) -> RoutingEffect:
        asked.append(trainer.version)
        return RoutingEffect(agreement=trainer.version / 100, live_kl=0.0, replayed_kl=0.0)

    monkeypatch.setattr(routing, "routing_of", routing_of)
    assert not any(said.routing for said in probed()[1].values()) and not asked, "nothing was recorded"
    (said,) = probed(routes=True)[1].values()
    assert said.routing and said.routing.agreement == 0.03 and asked == [3]
