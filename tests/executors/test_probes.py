"""When versions are probed, which of them by cause, and what a generator that came meanwhile says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamarl.config import RunConfig
from llamarl.controller.causes import by_cause
from llamarl.executors.probes import Probe, Probes
from llamarl.training import routing
from llamarl.training.result import RoutingEffect
from llamarl.types import FinishReason, Prompt, Rollout, RolloutGroup

VLLM = {"backend": "vllm", "vllm": {"python": "python"}}


@dataclass
class Trainer:
    """Says its version of every token, and a half more where it rounds."""

    config: Any
    version: int = 0
    calls: int = 0

    @property
    def policy_version(self) -> int:
        return self.version

    def score(
        self, sequences: list[np.ndarray], temperature: float = 1.0, half: bool = False, cutoffs_N: Any = None
    ) -> list[Any]:
        self.calls += 1
        says = 100 * (cutoffs_N is not None) + self.version + 0.5 * (half and self.config.dtype == "bfloat16")
        return [np.full(len(sequence) - 1, says, np.float32) for sequence in sequences]


def group(version: int, cutoff: float = -np.inf, routes: bool = False) -> RolloutGroup:
    ids_T = np.arange(1, 6, dtype=np.int32)
    rollout = Rollout.empty(0, 0, FinishReason.STOP)
    columns = {name: np.ones(5, one.dtype) for name, one in rollout.columns.items()}
    columns["cutoffs"] = np.full(5, cutoff, np.float32)
    columns["policy_versions"] = np.array([version, version, -1, version, version], np.int32)
    columns |= {"routes": np.zeros((5, 2), np.uint8)} if routes else {}
    prompt = Prompt(prompt_id="p", text="", token_ids_T=ids_T, answer="")
    rollout = replace(rollout, columns=columns)
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=(rollout,), results=(), responses=("",))


def probed(
    age: int,
    steps: int = 40,
    every: int = 1,
    dtype: str = "float32",
    cutoff: float = -np.inf,
    routes: bool = False,
    **generator: Any,
) -> dict[int, Probe]:
    """Of a trainer that learns from rollouts of this age."""
    config = RunConfig.model_validate({
        "model": {"path": "nowhere"}, "data": {"train": "jsonl"}, "trainer": {"dtype": dtype},
        "weight_sync": {"probe_every_steps": every}, "generator": generator,
    })  # fmt: skip
    trainer = Trainer(config.trainer)
    probes = Probes(trainer, config)
    assert probes.of(0) is None, "nothing was learnt from yet"
    found = dict[int, Probe]()
    for version in range(1, steps):
        probes.step([group(version - 1 - age, cutoff, routes)])
        trainer.version = version
        if probe := probes.of(version):
            found[version] = probe
    return found


@pytest.mark.parametrize(
    ("age", "every", "begin", "end"),
    [(0, 1, [4, 20, 36], [4, 20, 36]), (3, 1, [4, 20, 36], [7, 23, 39]), (1, 2, [8], [9])],
)
def test_one_probe_in_sixteen_is_by_cause(age: int, every: int, begin: list[int], end: list[int]) -> None:
    found = probed(age, every=every)
    assert [version for version, probe in found.items() if probe.causes] == begin
    assert [version for version, probe in found.items() if probe.later] == end
    assert sorted(found) == sorted({*range(every, 40, every), *end})
    for first, last in zip(begin, end, strict=True):
        causes, later = found[first].causes, found[last].later
        assert causes is not None and later is not None and later[0] == causes.version == first
        assert set(causes.logprobs_N) == set(causes.exact_logprobs_N) == {first} and set(later[1]) == {last}
        assert causes.is_sampled_N.tolist() == [False] * 4 + [True, True, False, True, True]


def test_versions_that_are_not_probed_cost_nothing() -> None:
    assert probed(1, every=0) == {}
    assert not any(probe.causes or probe.later for probe in probed(1, **VLLM).values())


def test_what_was_left_out_is_scored_without() -> None:
    assert all(probe.later[2] is None for probe in probed(1).values() if probe.later)
    found = probed(1, cutoff=-2.0)
    causes, later = found[4].causes, found[5].later
    assert causes is not None and later is not None and later[2] is not None
    assert set(later[1]) == {5.0} and set(later[2]) == {105.0}
    (cutoffs_T,) = causes.candidates.cutoffs
    assert np.isneginf(cutoffs_T).tolist() == [True] * 4 + [False] * 5


def test_how_steps_round_is_told_apart() -> None:
    causes = probed(0, dtype="bfloat16")[4].causes
    assert causes is not None
    assert set(causes.logprobs_N) == {4.5} and set(causes.exact_logprobs_N) == {4.0}


def test_routers_are_asked_before_the_step_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights that make the importance ratio; of the groups of the versions that are probed by cause alone."""
    asked = list[tuple[int, int]]()

    def routing_of(trainer: Trainer, groups: list[RolloutGroup], half: bool) -> RoutingEffect:
        asked.append((trainer.version, int(groups[0].rollouts[0].columns["policy_versions"][0])))
        return RoutingEffect(agreement=trainer.version / 100, live_kl=0.0, replayed_kl=0.0)

    monkeypatch.setattr(routing, "routing_of", routing_of)
    assert not any(probe.routing for probe in probed(1).values()) and not asked, "nothing was recorded"
    found = probed(1, routes=True)
    assert asked == [(3, 2), (19, 18), (35, 34)]
    assert {version: one.routing.agreement for version, one in found.items() if one.routing} == {
        4: 0.03, 20: 0.19, 36: 0.35
    }  # fmt: skip


def test_a_generator_that_was_not_asked_then_has_no_numbers() -> None:
    found = probed(1)

    async def score(sequences: list[np.ndarray], sampling: object) -> list[np.ndarray]:
        return [np.full((3, len(sequence) - 1), 4.25, np.float32) for sequence in sequences]

    async def names(replica: SimpleNamespace, *versions: int) -> set[str]:
        return set().union(*[await by_cause(replica, found[version]) for version in versions])  # type: ignore[arg-type]

    async def main() -> None:
        asked, new = (SimpleNamespace(port=SimpleNamespace(score=score), causes=None) for _ in range(2))
        assert await names(asked, 3) == set() and await names(asked, 4) == {"causes_s"}
        said = await by_cause(asked, found[5])  # type: ignore[arg-type]
        assert said["ratio_from_staleness"] > 0 > said["ratio_from_quantization"] and said["ratio_from_kernels"] == 0
        assert await names(new, 5) == {"causes_s"}, "it came after version 4"
        assert await names(asked, 21) == {"causes_s"}, "it was gone at version 20"

    asyncio.run(main())
