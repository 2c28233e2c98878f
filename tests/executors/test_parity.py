"""The log-probabilities that a generator reports are those that the trainer computes, and after a sync still are."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import GeneratorConfig
from llamarl.controller.weights import mismatch_of
from llamarl.distributed.watch import open_sockets
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.replies import Published
from llamarl.executors.trainer import TrainerExecutor
from llamarl.kernels import build, products
from llamarl.training import meter
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.result import StepResult
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
)
from llamarl.weight_sync.select import names

TEMPERATURE, GROUP = 0.7, 3
TOLERANCE = 1e-4


def settings(model: Path, **rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": "running_total"},
            "rollout": {"temperature": TEMPERATURE, "group_size": GROUP, **rollout},
            "trainer": {"learning_rate": 0.02},
            "weight_sync": {"probe_every_steps": 1},
        }
    )


def requests(first: int, max_new_tokens: int = 40) -> list[GenerationRequest]:
    """Prompts of 1 to 60 tokens."""
    random = np.random.default_rng(first)
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=max_new_tokens, stop_token_ids=(0,), seed=5)
    return [
        GenerationRequest(
            group_id=first + number,
            prompt_token_ids_T=random.integers(1, 250, length).astype(np.int32),
            group_size=GROUP,
            sampling=sampling,
        )
        for number, length in enumerate((1, 16, 17, 60))
    ]


def collected(generator: GeneratorExecutor, count: int) -> list[Rollout]:
    rollouts = list[Rollout]()
    while len(rollouts) < count:
        reply = generator.collect(0)
        while not reply.done():
            assert generator.work()
        rollouts += reply.result().rollouts
    return rollouts


def scored(asked: list[GenerationRequest], rollouts: list[Rollout]) -> list[RolloutGroup]:
    groups = []
    for request in asked:
        members = sorted((r for r in rollouts if r.group_id == request.group_id), key=lambda r: r.index)
        prompt = Prompt(prompt_id="p", text="", token_ids_T=request.prompt_token_ids_T, answer="")
        results = tuple(RewardResult(outcome=Outcome.SCORE, value=float(n == 0)) for n in range(GROUP))
        groups.append(
            RolloutGroup(
                group_id=request.group_id, prompt=prompt, rollouts=tuple(members), results=results,
                responses=("",) * GROUP,
            )
        )  # fmt: skip
    return groups


def recomputed(trainer: TrainerExecutor, groups: list[RolloutGroup]) -> tuple[np.ndarray, np.ndarray]:
    """(behavior, trainer's) log-probabilities of all response tokens."""
    samples = [to_sample_group(group, np.ones(GROUP)) for group in groups]
    behavior, own = [], []
    with torch.no_grad():
        for microbatch in pack(samples, 256):
            behavior.append(microbatch.behavior_logprobs_R)
            own.append(trainer._trainer.logprobs(microbatch).numpy())
    return np.concatenate(behavior), np.concatenate(own)


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[TrainerExecutor]:
    with closing(TrainerExecutor(settings(model), str(tmp_path), resume=False)) as trainer:
        yield trainer


@pytest.fixture
def generator(model: Path, trainer: TrainerExecutor) -> GeneratorExecutor:
    generator = GeneratorExecutor(str(model), GeneratorConfig(max_running=8, prefill_tokens=32))
    trainer.set_layout(0, generator.weight_specs())
    trainer.choose("shared_memory")
    return generator


def synced(trainer: TrainerExecutor, generator: GeneratorExecutor, version: int, in_use: tuple[int, ...]) -> Published:
    """The generator serves what the trainer has."""
    published = trainer.publish(version, in_use)
    *_, address = published.addresses.values()  # of the transport that was chosen last
    answer, deadline_s = generator.adopt(version, address), time.monotonic() + 240
    while not answer.done() and time.monotonic() < deadline_s:
        generator.work()
    adoption = answer.result(timeout=0)
    assert (adoption.version, adoption.outcome) == (version, "adopted") and len(adoption.fingerprint) == 16
    assert adoption.num_bytes > 0 and adoption.stall_s < 240
    return published


def stepped(trainer: TrainerExecutor, generator: GeneratorExecutor, version: int) -> StepResult:
    asked = requests(100 * version)
    generator.submit(asked)
    groups = scored(asked, collected(generator, 4 * GROUP))
    trainer.add_groups(groups)
    return trainer.step([group.group_id for group in groups], ())


def test_behavior_logprobs_are_the_trainer_s_before_and_after_syncs(
    trainer: TrainerExecutor, generator: GeneratorExecutor
) -> None:
    seen = list[np.ndarray]()
    for version in range(3):
        published = synced(trainer, generator, version, in_use=(version - 1,) if version else ())
        assert (published.probe is None) == (version == 0), "the probe is made of the last step's rollouts"
        if published.probe is not None:
            scores = generator.score(published.probe.sequences)
            assert sum(map(len, scores)) > 30
            found = mismatch_of(published.probe, scores)
            assert found.largest < TOLERANCE and 0 <= found.kl < TOLERANCE
        asked = requests(1000)
        generator.submit(asked)
        groups = scored(asked, collected(generator, 4 * GROUP))
        assert {int(v) for group in groups for r in group.rollouts for v in r.policy_versions_T} == {version}
        behavior, own = recomputed(trainer, groups)
        assert len(own) > 100
        np.testing.assert_allclose(own, behavior, atol=TOLERANCE, rtol=0)
        seen.append(own)
        result = stepped(trainer, generator, version)
        assert result.policy_version == version + 1
        assert result.update.importance_ratio_mean == pytest.approx(1.0, abs=TOLERANCE)
    assert not any(
        len(a) == len(b) and np.allclose(a, b, atol=100 * TOLERANCE) for a in seen for b in seen if a is not b
    )


def test_memory_that_generators_on_other_hosts_do_not_have_is_refused(trainer: TrainerExecutor) -> None:
    with pytest.raises(ConfigError, match=r"'shared_memory'` needs trainer and generators on one host.* use 'auto'"):
        trainer.choose("shared_memory", same_host=False)


def test_transports_are_tried_with_a_sample_and_one_carries_all(
    trainer: TrainerExecutor, generator: GeneratorExecutor
) -> None:
    """What was tried is closed: of the sockets, those of the one that was chosen are left."""
    before = open_sockets()
    for transport in names():
        for version in (1, 2):
            generator.try_sample(version, trainer.publish_sample(version, transport))
    trainer.choose("file")
    synced(trainer, generator, 0, ())
    for thread in [thread for thread in threading.enumerate() if thread.name == "entrance"]:
        thread.join(240)
    gc.collect()
    assert open_sockets().keys() <= before.keys()  # garbage of earlier tests may go meanwhile
    trainer.close()
    assert not list(Path(trainer._weights_folder).glob("*"))


def test_rates_of_a_step(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    synced(trainer, generator, 0, in_use=())
    metrics = stepped(trainer, generator, 0).metrics
    assert metrics["train_tokens_per_s"] * metrics["train_s"] == pytest.approx(metrics["num_input_tokens"])
    flops_per_s = metrics["num_flops"] / metrics["train_s"]
    assert metrics["mfu"] == pytest.approx(flops_per_s / (metrics["peak_tflops"] * 1e12))
    assert 0 < metrics["mfu"] < 1
    assert 1e7 < metrics["peak_memory_bytes"] < 1e11
    assert 0 <= metrics["padding_share"] < 1


def test_a_microbatch_that_does_not_fit_into_memory_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, max_new_tokens=100)
    monkeypatch.setattr(meter, "free_memory_bytes", lambda _: 30 << 20)
    with pytest.raises(ConfigError, match=r"the trainer needs 0\.1\d GiB \(head .* of cpu, but 3\d\.\d+ MiB"):
        TrainerExecutor(config, str(tmp_path), resume=False)
    monkeypatch.setattr(meter, "free_memory_bytes", lambda _: 8 << 30)
    TrainerExecutor(config, str(tmp_path), resume=False)


@pytest.mark.skipif(products.onednn() is None, reason="this torch has no oneDNN")
def test_what_multiplies_is_kept_in_the_run_s_folder(model: Path, tmp_path: Path) -> None:
    """By the trainer's own process, in which no generator is."""
    build.keep_choices_in(None)
    with closing(TrainerExecutor(settings(model), str(tmp_path / "run/checkpoints"), resume=False)):
        kept = [one.name for one in (tmp_path / "run/kernels").iterdir()]
    build.keep_choices_in(None)
    assert kept and all(name.startswith("products-") for name in kept)


def test_weights_without_a_sync_are_not_the_trainer_s(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    """The test above can fail: one step without adoption is far outside its tolerance."""
    synced(trainer, generator, 0, in_use=())
    stepped(trainer, generator, 0)
    probe = trainer.publish(1, in_use=(0,)).probe
    assert probe is not None and mismatch_of(probe, generator.score(probe.sequences)).mean > 10 * TOLERANCE
    asked = requests(1000)
    generator.submit(asked)
    behavior, own = recomputed(trainer, scored(asked, collected(generator, 4 * GROUP)))
    assert np.abs(own - behavior).max() > 100 * TOLERANCE


def test_weights_arrive_between_two_tokens(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    """Rollouts go on under new weights; each token is stamped with, and was sampled from, the version of its moment."""
    synced(trainer, generator, 0, in_use=())
    stepped(trainer, generator, 0)
    asked = requests(500, max_new_tokens=60)
    generator.submit(asked)
    for _ in range(12):
        generator.work()
    synced(trainer, generator, 1, in_use=(0,))
    rollouts = collected(generator, 4 * GROUP)
    mixed = [r for r in rollouts if set(r.policy_versions_T.tolist()) == {0, 1}]
    assert mixed
    assert all((np.diff(rollout.policy_versions_T) >= 0).all() for rollout in rollouts)
    assert all(rollout.oldest_version == 0 for rollout in mixed)


def test_an_aborted_group_comes_back_with_its_tokens(generator: GeneratorExecutor) -> None:
    asked = requests(0)
    generator.submit(asked)
    for _ in range(8):
        generator.work()
    generator.abort([asked[0].group_id])
    rollouts = collected(generator, 4 * GROUP)
    aborted = [rollout for rollout in rollouts if rollout.finish_reason == "aborted"]
    assert {rollout.group_id for rollout in aborted} == {asked[0].group_id}
    assert all(rollout.num_tokens > 0 for rollout in aborted)


def test_parked_rollouts_go_on_where_they_were(trainer: TrainerExecutor, generator: GeneratorExecutor) -> None:
    """Cut into segments they are the same."""
    synced(trainer, generator, 0, in_use=())
    asked = requests(700)
    generator.submit(asked)
    expected = {(one.group_id, one.index): one for one in collected(generator, 4 * GROUP)}
    whole, lengths = dict[tuple[int, int], Rollout](), dict.fromkeys(expected, 0)
    todo = [replace(request, segment_tokens=7) for request in asked]
    while todo:
        generator.submit(todo)
        parked = dict[int, list[Rollout]]()
        for rollout in collected(generator, sum(len(request.starts()) for request in todo)):
            key = rollout.group_id, rollout.index
            assert lengths[key] < rollout.num_tokens <= lengths[key] + 7
            whole[key], lengths[key] = rollout, rollout.num_tokens
            if rollout.finish_reason is FinishReason.PARKED:
                parked.setdefault(rollout.group_id, []).append(rollout)
        todo = [replace(one, partials=tuple(parked[one.group_id])) for one in todo if one.group_id in parked]
    for key, rollout in expected.items():
        assert whole[key].token_ids_T.tolist() == rollout.token_ids_T.tolist()
        assert whole[key].finish_reason is rollout.finish_reason
        np.testing.assert_allclose(whole[key].behavior_logprobs_T, rollout.behavior_logprobs_T, atol=TOLERANCE)
    assert max(rollout.num_tokens for rollout in expected.values()) > 21


def test_a_request_waits_for_the_version_that_it_carries(
    trainer: TrainerExecutor, generator: GeneratorExecutor
) -> None:
    synced(trainer, generator, 0, ())
    now, later, never = (
        [replace(one, from_version=version) for one in requests(100 * version)] for version in range(3)
    )
    generator.submit([*later, *never])
    assert not generator.work(), "there is nothing to do before the weights come"
    generator.submit(now)
    rollouts = collected(generator, 4 * GROUP)
    assert {one.group_id for one in rollouts} == {one.group_id for one in now}
    assert {one.oldest_version for one in rollouts} == {0}
    synced(trainer, generator, 1, (0,))
    rollouts = collected(generator, 4 * GROUP)
    assert {one.group_id for one in rollouts} == {one.group_id for one in later}
    assert {one.oldest_version for one in rollouts} == {1}
    generator.abort([one.group_id for one in never])
    taken_back = collected(generator, 4 * GROUP)
    assert {one.group_id for one in taken_back} == {one.group_id for one in never}
    assert all(one.finish_reason is FinishReason.ABORTED and not one.num_tokens for one in taken_back)
    assert not generator.work()


def test_a_request_begins_beside_others_once_its_version_serves(
    trainer: TrainerExecutor, generator: GeneratorExecutor
) -> None:
    synced(trainer, generator, 0, ())
    now, later = requests(0, max_new_tokens=200)[0], replace(requests(100)[0], from_version=1)
    generator.submit([replace(now, sampling=replace(now.sampling, stop_token_ids=())), later])
    generator.work()
    synced(trainer, generator, 1, (0,))
    generator.work()
    assert {one.group_id for one in generator.so_far([now.group_id, later.group_id])} == {0, 100}


def handed_over(generator: GeneratorExecutor, wanted: int) -> list[int]:
    """Groups of the rollouts of a reply."""
    reply = generator.collect(wanted)
    assert reply is not None
    while not reply.done():
        assert generator.work()
    return [one.group_id for one in reply.result().rollouts]


@pytest.mark.parametrize(
    ("due", "wanted", "segment_tokens", "num_rollouts"),
    [
        ("REPLY_INTERVAL_S", 0, 0, 8),
        ("REPLY_INTERVAL_S", 2, 9, 8),
        ("LATEST_S", 2, 0, 8),
        ("GROUPS_INTERVAL_S", 2, 0, 9),
    ],
)
def test_what_has_finished_waits_no_longer_than_its_interval(
    generator: GeneratorExecutor, monkeypatch: pytest.MonkeyPatch, due: str, wanted: int, segment_tokens: int,
    num_rollouts: int,
) -> None:  # fmt: skip
    """Rollouts one by one where somebody waits for each, or goes on with what is parked, or nothing is whole for long;
    else whole groups. Of the nine of one group eight are decoded at a time; another one takes longer."""
    for interval in ("REPLY_INTERVAL_S", "GROUPS_INTERVAL_S", "LATEST_S"):
        monkeypatch.setattr(f"llamarl.executors.generator.{interval}", 0.0 if interval == due else math.inf)
    asked = (requests(first, max_new_tokens)[0] for first, max_new_tokens in ((0, 40), (100, 200), (200, 40)))
    first, other, more = (replace(one, sampling=replace(one.sampling, stop_token_ids=())) for one in asked)
    generator.submit([replace(first, group_size=9, segment_tokens=segment_tokens), other])
    assert handed_over(generator, wanted) == [first.group_id] * num_rollouts
    if due == "GROUPS_INTERVAL_S":
        generator.submit([replace(more, group_size=9)])
        assert handed_over(generator, 2) == [more.group_id] * 9, "another one was whole before, and is gone"


def test_rollouts_are_handed_over_as_whole_groups(
    generator: GeneratorExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for interval in ("REPLY_INTERVAL_S", "GROUPS_INTERVAL_S", "LATEST_S"):
        monkeypatch.setattr(f"llamarl.executors.generator.{interval}", math.inf)
    generator.submit(requests(0))
    reply = generator.collect(2)
    assert reply is not None
    while not reply.done():
        assert generator.work()
    whole = Counter(one.group_id for one in reply.result().rollouts)
    assert sum(count == GROUP for count in whole.values()) >= 2
    left = [one.group_id for one in requests(0) if whole[one.group_id] < GROUP]
    generator.submit(requests(100, max_new_tokens=200))
    needing = generator.collect(1, [*left, 10**6])
    assert needing is not None and len(left) > 1
    while not needing.done():
        assert generator.work()
    whole += Counter(one.group_id for one in needing.result().rollouts)
    assert all(whole[group_id] == GROUP for group_id in left) and whole.total() < 8 * GROUP
    rest = generator.collect(1000)
    assert rest is not None
    while not rest.done():
        assert generator.work()
    assert whole.total() + len(rest.result().rollouts) == 8 * GROUP, "the last ones come when there are no others"
