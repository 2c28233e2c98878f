"""Weight sync and partial rollouts under slow, dying, joining and leaving generators.

The executors check by themselves that weights are not overwritten while somebody serves from them (`Trainer.do_publish`
of the ledger), and that a generator has each rollout once at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamarl.cluster.api import CallTimeout, MeshFailed
from llamarl.controller.weights import MAX_HELD_BY_ALL, WeightsWrong, mismatch_of
from llamarl.executors.replies import GeneratorStats, Probe
from tests.controller.fakes import Run, config
from tests.executors.ledger import RIGHT, WRONG, Generator, Reward, Trainer, token
from tests.nightly import examples, nightly

P, NUM_STEPS = 3, 8


def chaotic(dice: random.Random) -> Generator:
    """Responses of any length at any speed; most versions come quickly, some late, some not at the first attempt."""
    key, stuck, token_s = dice.random(), dice.choice([0.0, 0.1, 0.5]), dice.choice([0.02, 0.1, 0.3])

    def keyed(*parts: object) -> random.Random:
        return random.Random(f"{key}/{parts}")

    return Generator(
        token_s=token_s,
        max_running=dice.choice([1, 3, 1 << 16]),
        num_tokens=lambda group_id, index: 2 + random.Random(f"{group_id}/{index}").randrange(30),
        adopt_s=lambda version: keyed(version).choice([5.0, 40.0]) if keyed("?", version).random() < stuck else 0.2,
        outcomes=[end for _ in range(4) for end in (dice.choice(["adopted", "mismatch", "failed"]), "adopted")],
    )


async def happen(run: Run, dice: random.Random, num_events: int) -> None:
    """Generators die, leave, come and stand still; generator-0 stays."""
    for number in range(num_events):
        await asyncio.sleep(dice.uniform(0, 12))
        present = [one.handle.name for one in run.controller.replicas.alive if one.adopting]
        others = [name for name in present if name != "generator-0"]
        match dice.choice(["die", "leave", "join", "freeze"]):
            case "die" if others:
                run.handles[dice.choice([*others, *(name for name in run.handles if len(name) > 11)])].die()
            case "leave" if others:
                name = dice.choice(others)
                await run.controller.recovery.remove(name, timeout_s=5.0)
                assert run.handles[name].is_stopped
            case "freeze" if others:
                run.supervisor.start(freeze(run, dice.choice(others), dice.uniform(1, 60)), "freeze")
            case "join":
                run.supervisor.start(come(run, f"generator-{100 + number}", chaotic(dice)), "join")


async def freeze(run: Run, name: str, seconds: float) -> None:
    run.handles[name].freeze()
    await asyncio.sleep(seconds)
    run.handles[name].thaw()


async def come(run: Run, name: str, generator: Generator) -> None:
    with suppress(MeshFailed):  # it may die before it has weights
        await run.add(name, generator)


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    window_share=st.floats(0, 1),
    segment_tokens=st.sampled_from([0, 3, 17]),
    replicas=st.integers(1, 3),
    max_attempts=st.sampled_from([1, 2, 30]),
)
def test_whatever_happens_nothing_is_lost_doubled_or_too_old(
    tmp_path: Path,
    seed: int,
    max_staleness: int,
    window_share: float,
    segment_tokens: int,
    replicas: int,
    max_attempts: int,
) -> None:
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    dice, window = random.Random(seed), 1 + int(window_share * (P * (max_staleness + 1) - 1))
    wanted = config(
        tmp_path,
        steps=NUM_STEPS,
        rollout={
            "prompts_per_step": P,
            "max_staleness": max_staleness,
            "window": window,
            "segment_tokens": segment_tokens,
            "max_attempts": max_attempts,
        },
        cluster={"on_failure": {"generator": "drop"}},
        weight_sync={"patience_s": dice.choice([0.5, 3.0]), "on_mismatch": "resync"},
    )
    flat = dice.random()
    run = Run(
        wanted, tmp_path, [chaotic(dice) for _ in range(replicas)],
        Reward(lambda rollout: RIGHT if rollout.index or random.Random(rollout.group_id).random() < flat else WRONG),
        Trainer(step_s=dice.uniform(0.1, 2)),
    )  # fmt: skip
    run.train(strike=lambda run: happen(run, dice, num_events=6))
    consumed = run.trainer.consumed
    ids, dropped = [group.group_id for group in consumed], sum(row["extra.dropped_groups"] for row in run.steps)
    assert len(set(ids)) == len(ids) == P * NUM_STEPS
    assert max(ids) < P * NUM_STEPS + dropped and dropped <= (max_attempts - 1) * P * NUM_STEPS
    for position, group in enumerate(consumed):
        for rollout in group.rollouts:
            key = group.group_id, rollout.index
            length = run.generators[0].num_tokens(*key)
            assert rollout.token_ids_T.tolist() == [token(*key, n) for n in range(length)]
            assert rollout.behavior_logprobs_T.tolist() == rollout.token_ids_T.tolist()
            staleness = position // P - rollout.policy_versions_T.min()
            assert 0 <= staleness <= run.steps[0]["staleness_limit"]
    assert [name for name, _ in run.trainer.published] == [steps for _, steps in run.trainer.published]
    assert not run.complaints


def test_a_generator_that_hangs_is_left_behind_until_it_has_the_newest_version(tmp_path: Path) -> None:
    """SIGSTOP for 30 s in the middle of a sync: one wait of `patience_s`, then the run goes on at its own pace."""

    def hangs_at_5(version: int) -> float:
        return 30.0 if version == 5 else 0.1

    steady, hanging = Generator(), Generator(adopt_s=hangs_at_5)
    wanted = config(tmp_path, steps=60, rollout={"max_staleness": 1}, weight_sync={"patience_s": 4.0})
    run = Run(wanted, tmp_path, [steady, hanging]).train()
    versions = [version for _, version in hanging.adopted]
    (gap,) = [n for n in range(len(versions) - 1) if versions[n + 1] > versions[n] + 1]
    assert versions[gap] in (4, 5) and versions[-1] == 60, "it skips what was published meanwhile"
    assert [row["sync_s"] > 3.0 for row in run.steps].count(True) == 2, "only those waited that were under way"
    late = [row["step"] for row in run.steps if row["extra.late_generators"]]
    assert late[0] == 5 and len(late) < 30
    caught_up_s = next(when for when, version in hanging.adopted if version > 5)
    stuck_s = next(when for when, version in hanging.adopted if version == 5) - 30.0
    begun_s = [begin for begin, _ in hanging.spans]
    assert not any(stuck_s + 4.0 < begin < caught_up_s for begin in begun_s), "no requests while it is behind"
    assert any(begin > caught_up_s for begin in begun_s)
    (said,) = run.warnings
    assert "generator-1 has not adopted version 5 in time (weight_sync.patience_s = 4); the run" in said


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_waits_for_no_weights_that_nothing_needs(tmp_path: Path, max_staleness: int) -> None:
    """One of three adopts by a bad cable. The others do what waits for weights there, and the trainer goes on."""

    def seconds(adopt_s: float) -> float:
        late = Generator(adopt_s=lambda version: adopt_s if version > 2 else 0.1)
        rollout = {"max_staleness": max_staleness, "prompts_per_step": 6}
        wanted = config(tmp_path / f"{adopt_s:g}", steps=20, rollout=rollout)
        (tmp_path / f"{adopt_s:g}").mkdir()
        run = Run(wanted, tmp_path / f"{adopt_s:g}", [Generator(), Generator(), late]).train()
        assert max(row["staleness_max"] for row in run.steps) <= max_staleness
        found = {row["step"]: row["fingerprint"] for row in run.steps}
        assert found == {step: f"{step:016x}" for step in range(1, 21)}, "each row has what was adopted, of its version"
        return max(row["step_s"] for row in run.steps)

    assert seconds(9.0) < seconds(0.1) + 2.3, "one response longer: they do theirs first"


@pytest.mark.parametrize("segment_tokens", [0, 3])
def test_others_take_over_the_work_of_one_that_stands_still(tmp_path: Path, segment_tokens: int) -> None:
    """SIGSTOP for 60 s between two adoptions: others generate its rollouts, and what it says later is dropped."""
    generators = [Generator(num_tokens=lambda *_: 8, token_s=0.375) for _ in range(2)]
    rollout = {"max_staleness": 1, "segment_tokens": segment_tokens}
    run = Run(config(tmp_path, steps=40, rollout=rollout), tmp_path, generators)
    frozen_s = list[float]()

    async def strike(run: Run) -> None:
        await asyncio.sleep(20.3)
        generators[1].freeze()
        frozen_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60.0)
        generators[1].thaw()
        frozen_s.append(asyncio.get_running_loop().time())

    run.train(strike=strike)
    ends_s = [end for _, end in run.trainer.spans]
    waits_s = [b - a for a, b in itertools.pairwise(ends_s) if frozen_s[0] < b < frozen_s[1]]
    assert len(waits_s) >= 8 and max(waits_s) < 10 + 2.5 + 5 + 7, "one wait, and then it goes on at the pace of one"
    assert any(begin > frozen_s[1] + 1 for begin, _ in generators[1].spans), "it works again"
    assert any("generator-1 does not answer for 10 s" in text for text in run.warnings)
    keys = [(row["group_id"], row["index"]) for row in run.rollouts]
    assert len(keys) == len(set(keys)) == 40 * 2 * 2
    for group in run.trainer.consumed:
        for one in group.rollouts:
            assert one.token_ids_T.tolist() == [token(group.group_id, one.index, n) for n in range(8)]


def test_the_death_of_one_that_came_later_costs_nothing(tmp_path: Path) -> None:
    late = Generator(duration_s=lambda *_: 1e6)
    run = Run(config(tmp_path, cluster={"on_failure": {"generator": "drop"}}), tmp_path)

    async def strike(run: Run) -> None:
        await asyncio.sleep(2.0)
        await run.add("generator-1", late)
        await run.controller.replicas.alive[1].busy.wait()
        run.handles["generator-1"].die()

    run.train(strike=strike)
    assert run.version == 6
    assert any("generator-1 (rank 0): was killed by SIGKILL" in text for text in run.warnings)


def test_what_a_dead_generator_has_done_still_counts(tmp_path: Path) -> None:
    run = Run(config(tmp_path, cluster={"on_failure": {"generator": "drop"}}), tmp_path, [Generator(), Generator()])
    found, said = list[GeneratorStats](), list[GeneratorStats]()

    async def strike(run: Run) -> None:
        replicas = run.controller.replicas
        while not all(one.stats.generated_tokens and one.stats.num_running for one in replicas.alive):
            await replicas.changed.wait()
        found.append(replicas.stats)
        said.extend(one.calls("collect")[-1].result.stats for one in run.generators)
        run.handles["generator-1"].die()
        while len(replicas.alive) > 1:
            await replicas.changed.wait()
        found.append(replicas.stats)

    run.train(strike=strike)
    (before, after), (stays, dies) = found, said
    assert before.generated_tokens == after.generated_tokens == stays.generated_tokens + dies.generated_tokens
    assert (before.num_running, after.num_running) == (stays.num_running + dies.num_running, stays.num_running)


def test_nobody_begins_to_fetch_while_the_trainer_publishes(tmp_path: Path) -> None:
    """It may write over the newest version just then."""

    class Slow(Trainer):
        def do_publish(self, version: int, in_use: tuple[int, ...]) -> tuple[float, Any]:
            return 3.0, super().do_publish(version, in_use)[1]

    wanted = config(tmp_path, steps=20, rollout={"max_staleness": 2}, weight_sync={"patience_s": 1.0})
    trainer, watched = Slow(), Generator(adopt_s=7.3)
    Run(wanted, tmp_path, [Generator(), watched], trainer=trainer).train()
    begun_s, publishing_s = ([one.begin_s for one in watched.calls("adopt")], trainer.calls("publish"))
    assert len(begun_s) > 5
    assert not any(one.begin_s <= begin_s < one.end_s for begin_s in begun_s for one in publishing_s)


def test_one_that_needs_longer_than_a_step_still_catches_up(tmp_path: Path) -> None:
    """It comes late and is slow, but within the patience: it must not run after the newest version for ever."""
    slow = Generator(adopt_s=3.0)

    async def join(run: Run) -> None:
        await asyncio.sleep(5.0)
        await run.add("generator-1", slow)

    Run(config(tmp_path, steps=30), tmp_path).train(strike=join)
    assert slow.spans, "it came into service"
    assert slow.version >= 29


def test_a_generator_works_on_until_the_new_version_is_released(tmp_path: Path) -> None:
    """While it fetches, one that serves the version before is in service: parked rollouts go on at once."""
    generator = Generator(num_tokens=lambda *_: 9, token_s=0.45, adopt_s=2.0)
    Run(config(tmp_path, rollout={"max_staleness": 1, "segment_tokens": 1}), tmp_path, [generator]).train()
    fetches_s = [(end - 2.0, end) for end, version in generator.adopted if version]
    resumed = [sum(start < begin < end for begin, _ in generator.spans) for start, end in fetches_s]
    assert len(resumed) == 6 and min(resumed[1:-1]) > 0, "but for the first and last one: nothing is left"


def test_nobody_waits_for_weights_of_a_generator_that_dies(tmp_path: Path) -> None:
    """The version is released when the others have it, and not when patience is over, which is 4 s here."""
    dying = Generator(adopt_s=lambda version: 500.0 if version == 2 else 0.1)
    wanted = config(tmp_path, cluster={"on_failure": {"generator": "drop"}}, weight_sync={"patience_s": 900.0})
    run = Run(wanted, tmp_path, [Generator(), dying])

    async def strike(run: Run) -> None:
        while run.controller.replicas.alive[1].fetching != 2:
            await run.controller.replicas.changed.wait()
        await asyncio.sleep(2.0)
        run.handles["generator-1"].die()

    run.train(strike=strike)
    assert run.steps[1]["sync_s"] == pytest.approx(2.0, abs=0.5)


@pytest.mark.parametrize("policy", ["drop", "stop"])
def test_partial_rollouts_go_on_from_their_tokens(tmp_path: Path, policy: str) -> None:
    """After a death from the last parked segment, after a removal from the last token: few tokens are sampled twice."""
    generators = [Generator(num_tokens=lambda *_: 100, token_s=0.2) for _ in range(2)]
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_staleness": 0, "segment_tokens": 10}
    run = Run(
        config(tmp_path, steps=2, rollout=rollout, cluster={"on_failure": {"generator": policy}}), tmp_path, generators
    )

    async def strike(run: Run) -> None:
        await asyncio.sleep(13.1)
        if policy == "drop":
            run.handles["generator-1"].die()
        else:
            await run.controller.recovery.remove("generator-1", timeout_s=5.0)

    run.train(strike=strike)
    sampled = Counter(place for generator in generators for place in generator.sampled)
    assert len(sampled) == 2 * 2 * 2 * 100
    assert sum(sampled.values()) - len(sampled) <= (2 * 10 if policy == "drop" else 0)
    moved = {(group_id, index) for group_id, index, _ in generators[1].sampled}
    assert moved & {(group_id, index) for group_id, index, place in generators[0].sampled if place > 50}
    assert sum(row["extra.resumed_segments"] for row in run.steps) >= 2 * 2 * 2 * 9
    assert generators[1].is_stopped == (policy == "stop")


def test_a_generator_leaves_as_soon_as_it_owes_nothing(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, [Generator(), Generator(duration_s=lambda *_: 50.0)])
    took_s = list[float]()

    async def strike(run: Run) -> None:
        clock, leaving = asyncio.get_running_loop(), run.controller.replicas.alive[1]
        await leaving.busy.wait()
        await asyncio.sleep(0.5)
        start_s, owed = clock.time(), run.controller.replicas.num_owed(leaving)
        await run.controller.recovery.remove("generator-1", timeout_s=5.0)
        assert owed and not run.controller.replicas.num_owed(leaving)
        took_s.append(clock.time() - start_s)

    run.train(strike=strike)
    assert took_s == [0.0], "it is not asked again"


def test_the_last_generator_cannot_be_removed(tmp_path: Path) -> None:
    async def strike(run: Run) -> None:
        await asyncio.sleep(1.0)
        for name, reason in (("generator-0", "the only generator"), ("generator-7", "unknown")):
            with pytest.raises(ValueError, match=f"{name} cannot be removed: it is {reason}"):
                await run.controller.recovery.remove(name, timeout_s=5.0)

    assert Run(config(tmp_path), tmp_path).train(strike=strike).version == 6


def test_a_generator_that_keeps_its_rollouts_is_named(tmp_path: Path) -> None:
    deaf = Generator(duration_s=lambda group_id, index: 1e6 if index else 30.0)
    deaf.do_abort = lambda group_ids: (0.0, None)
    run = Run(config(tmp_path, cluster={"timeout_s": 50.0}), tmp_path, [Generator(), deaf])

    async def strike(run: Run) -> None:
        await asyncio.sleep(1.0)
        await run.controller.recovery.remove("generator-1", timeout_s=5.0)

    with pytest.raises(CallTimeout, match=r"generator-1.abort had no answer after 50 s .*; generator-1 still owes \d+"):
        run.train(strike=strike)


def test_a_mismatch_ends_the_run_or_is_sent_again(tmp_path: Path) -> None:
    def run(policy: str, outcomes: list[str]) -> Run:
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        wanted = config(tmp_path, rollout={"max_staleness": 0}, weight_sync={"on_mismatch": policy})
        return Run(wanted, tmp_path, [Generator(outcomes=["adopted", "adopted", *outcomes]), Generator()])

    with pytest.raises(WeightsWrong, match="generator-0 could not adopt version 2: w of version 2 on rank 0: mismatch"):
        run("stop", ["mismatch"]).train()
    resent = run("resync", ["mismatch", "mismatch"]).train()
    assert [name for name, _ in resent.trainer.published] == [0, 1, 2, 2, 2, 3, 4, 5, 6]
    assert [row["extra.resyncs"] for row in resent.steps] == [0, 2, 0, 0, 0, 0]
    assert [row["fingerprint"] for row in resent.steps] == [f"{version:016x}" for version in range(1, 7)]
    again = run("stop", ["failed", "failed"]).train()
    assert [name for name, _ in again.trainer.published] == list(range(7)), "a failed fetch needs no other version"
    with pytest.raises(WeightsWrong, match="generator-0 could not adopt version 2: w of version 2 on rank 0: failed"):
        run("resync", ["failed"] * 3).train()


@nightly("many generators; by day others of them are slow, hang and are left behind")
def test_many_slow_generators_hold_on_to_few_versions(tmp_path: Path) -> None:
    """Each of them to two; what they hold takes memory of the trainer's, which has 16 slots."""
    held = list[int]()

    class Few(Trainer):
        def do_publish(self, version: int, in_use: tuple[int, ...]) -> tuple[float, Any]:
            held.append(len(in_use))
            return super().do_publish(version, in_use)

    def never_the_same(dice: random.Random) -> Generator:
        return Generator(duration_s=lambda *_: 0.3, adopt_s=lambda version: dice.uniform(3.0, 9.0))

    slow = [never_the_same(random.Random(number)) for number in range(10)]
    quick = [Generator(duration_s=lambda *_: 0.3, adopt_s=0.05) for _ in range(2)]
    wanted = config(tmp_path, steps=200, rollout={"max_staleness": 1})
    run = Run(wanted, tmp_path, [*quick, *slow], trainer=Few(step_s=0.3)).train()
    assert run.version == 200 and 8 < max(held) <= MAX_HELD_BY_ALL + 1


def test_those_that_sleep_fetch_nothing_that_is_published_again(tmp_path: Path) -> None:
    """Not while the trainer works on the next step: they would take the memory that it was to have."""
    begun_s = list[float]()

    class Slow(Trainer):
        def do_publish(self, version: int, in_use: tuple[int, ...]) -> tuple[float, Any]:
            return 2.0, super().do_publish(version, in_use)[1]

    class Sleeper(Generator):
        def do_sleep(self) -> tuple[float, None]:
            return 0.1, None

        def do_adopt(self, version: int, slot: Any) -> Any:
            begun_s.append(self._loop.time())
            return super().do_adopt(version, slot)

    first = Sleeper(outcomes=["adopted", "adopted", "mismatch"], adopt_s=0.5)
    generators = [first, Sleeper(duration_s=lambda *_: 1.0, adopt_s=0.5)]
    more = {"weight_sync": {"on_mismatch": "resync", "patience_s": 0.1}, "cluster": {"placement": "colocated"}}
    run = Run(config(tmp_path, rollout={"max_staleness": 0}, **more), tmp_path, generators, trainer=Slow(step_s=3.0))
    run.train()
    assert run.version == 6 and run.trainer.published.count((2, 2)) == 2, "it was sent again"
    for begin_s, end_s in run.trainer.spans:
        assert not any(begin_s < at_s + 0.5 and at_s < end_s for at_s in begun_s)


def test_what_a_sync_cost_is_on_record(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, [Generator(), Generator(adopt_s=0.3, bias=0.25)]).train()
    for row in run.steps:
        assert row["extra.fetch_s"] == 0.3 and row["extra.stall_s"] == 0.001 and row["extra.sync_bytes"] == 1000
        assert row["extra.mismatch_max"] == row["extra.mismatch_mean"] == 0.25
        assert row["extra.probe_kl"] == pytest.approx(math.exp(-0.25) - 1 + 0.25)
        assert row["sync_s"] == pytest.approx(0.3)


def test_wrong_log_probabilities_end_the_run(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, [Generator(bias=0.6)])
    said = r"generator-0 serves version 0, yet .* 0.6 nats .* on average \(weight_sync.max_mismatch = 0.5\)"
    with pytest.raises(WeightsWrong, match=said):
        run.train()


def test_mismatch_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    generator, trainer = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    tokens = rng.choice(5, 200_000, p=generator)
    is_compared_N = np.arange(len(tokens)) >= 1000
    logprobs_N = np.where(is_compared_N, np.log(trainer)[tokens], -100)
    probe = Probe(sequences=[tokens], logprobs=[logprobs_N], is_compared_N=is_compared_N)
    found = mismatch_of(probe, [np.log(generator)[tokens]])
    assert found.kl == pytest.approx(float(generator @ np.log(generator / trainer)), rel=0.05)
    assert found.largest == pytest.approx(np.abs(np.log(generator / trainer)).max())
    broken = mismatch_of(probe, [np.full(len(tokens), np.nan)])
    assert math.isinf(broken.mean)
