"""A controller that is killed and goes on by its journal: nothing is generated or trained twice, or lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.controller.fakes import Run, Strike, config, rows
from tests.controller.test_failures import draws
from tests.executors.ledger import Generator, Model, Reward, Trainer
from tests.journals import journal_of
from tests.nightly import nightly

NUM_STEPS = 7


class Killed(BaseException):
    """The process is gone."""


def killed(at_s: float) -> Strike:
    async def strike(run: Run) -> None:
        await asyncio.sleep(at_s)
        run.supervisor.fail(Killed())

    return strike


def uneven(seed: int, length: int) -> Generator:
    """At its own speed."""
    token_s = random.Random(seed).uniform(0.3, 0.7)
    return Generator(num_tokens=lambda group_id, index: length + (group_id * 7 + index * 3) % 5, token_s=token_s)


def run_of(folder: Path, trainer: Trainer, seed: int, every_steps: int, **rollout: Any) -> Run:
    settings = config(folder, steps=NUM_STEPS, rollout=rollout, checkpoint={"every_steps": every_steps})
    length = 6 if rollout.get("segment_tokens") else 2
    critic = Model(lambda one: np.full(one.num_tokens, one.index, np.float32), learn_s=0.1, first=None)
    return Run(
        settings, folder, [uneven(seed, length), uneven(seed + 1, length)], Reward(score_s=0.3), trainer,
        num_train=23, models={"critic": critic} if seed % 2 else None, keeps_journal=True,
    )  # fmt: skip


def newest(trainer: Trainer) -> tuple[int, Any]:
    return trainer.saved[-1] if trainer.saved else (0, "null")


def on_record(run: Run) -> tuple[int, set[tuple[int, int, int]]]:
    """What a journal says: completed steps, and every token that need not be generated again."""
    version, state = newest(run.trainer)
    journal = journal_of(run.folder, prompts=run.problems.train, saved=[step for step, _ in run.trainer.saved])
    _, said = journal.resume(json.loads(state))
    journal.close()
    assert said == ""
    found = [one for _, groups in journal.steps_after(version) for group in groups for one in group.rollouts]
    for group_id in range(100):
        group, held = journal.pop_generated(group_id)
        found += [*(group.rollouts if group else ()), *held.values()]
    return journal.version, {(one.group_id, one.index, n) for one in found for n in range(one.num_tokens)}


ROLLOUTS = [
    {"max_staleness": 0},
    {"max_staleness": 1, "segment_tokens": 2},
    {"max_staleness": 3, "window": 6, "segment_tokens": 3},
]


@nightly("more seeds; test_restart.py lets everybody die at any moment by day")
@pytest.mark.parametrize("rollout", ROLLOUTS, ids=["S=0", "S=1", "S=3,W=6"])
@pytest.mark.parametrize("every_steps", [0, 2])
def test_killed_twice_at_any_moment(tmp_path: Path, rollout: dict[str, int], every_steps: int) -> None:
    num_kept, num_again = 0, 0
    for moment in range(1, 34, 5):
        folder = tmp_path / f"{moment}"
        folder.mkdir()
        disk, seed = Trainer(), moment
        run = run_of(folder, disk, seed, every_steps, **rollout)
        num_kills = 0
        while True:
            try:
                run.train(
                    json.loads(newest(disk)[1]),
                    strike=killed(moment / 1.9 if not num_kills else moment / 2.9) if num_kills < 2 else None,
                )
                break
            except Killed:
                num_kills += 1
            version, known = on_record(run)
            assert version == disk.version or version == disk.version - 1, "a step may end as the controller does"
            num_kept += len(known)
            num_again += version - newest(disk)[0]
            disk = Trainer(version=newest(disk)[0], saved=disk.saved)
            run = run_of(folder, disk, seed, every_steps, **rollout)
            begun, before = run.generators, known
        assert not run.lost
        if num_kills:
            sampled = [one for generator in begun for one in generator.sampled]
            assert not before.intersection(sampled), "what is on record is generated again"
            assert len(set(sampled)) == len(sampled)
        assert not [text for text in run.warnings if "fingerprint" in text]
        steps, rollouts = run.steps, run.rollouts
        assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
        assert Counter(row["step"] for row in rollouts) == dict.fromkeys(range(1, NUM_STEPS + 1), 4)
        assert Counter(row["prompt_id"] for row in rollouts if not row["index"]) == Counter(draws(2 * NUM_STEPS))
        assert max(row["staleness"] for row in rollouts) <= steps[0]["staleness_limit"]
        if rollout["max_staleness"] < 3:
            ids = [row["group_id"] for row in rollouts if not row["index"]]
            assert ids == sorted(ids), "strictly in the order of admission"
    assert num_kept > 60 and num_again > (10 if not every_steps else 0)


def test_without_staleness_it_is_the_run_that_was_never_killed(tmp_path: Path) -> None:
    """Every record of every rollout; the steps' lines too, but for what time measures."""
    (tmp_path / "whole").mkdir()
    whole = run_of(tmp_path / "whole", Trainer(), 4, 3, max_staleness=0, segment_tokens=2).train()
    for tenth in range(15, 150, 22):
        folder = tmp_path / f"{tenth}"
        folder.mkdir()
        disk = Trainer()
        with pytest.raises(Killed):
            run_of(folder, disk, 4, 3, max_staleness=0, segment_tokens=2).train(strike=killed(tenth / 10))
        again = Trainer(version=newest(disk)[0], saved=disk.saved)
        run = run_of(folder, again, 4, 3, max_staleness=0, segment_tokens=2).train(json.loads(newest(disk)[1]))
        assert run.rollouts == whole.rollouts
        steps = [
            [(row["groups"], row["state"]["sampler"]) for row in rows(path / "journal.jsonl") if "groups" in row]
            for path in (folder, tmp_path / "whole")
        ]
        assert steps[0] == steps[1] and len(steps[0]) == NUM_STEPS


def test_without_its_journal_it_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    """And says why; what metrics and rollouts have of later steps is taken back."""
    disk = Trainer()
    with pytest.raises(Killed):
        run_of(tmp_path, disk, 2, 3, max_staleness=1).train(strike=killed(12.0))
    assert disk.version > newest(disk)[0] >= 3
    (first,) = (tmp_path / "journal").glob("00000001.groups*")
    first.unlink()
    run = run_of(tmp_path, Trainer(version=newest(disk)[0], saved=disk.saved), 2, 3, max_staleness=1)
    run.lacks = (1, 2, 3)
    run.train(json.loads(newest(disk)[1]))
    missing = f"{tmp_path}/journal/00000001.groups is missing, or damaged after byte 0"
    assert run.lost == f"steps 4 to {disk.version} are done again: {missing}"
    assert [row["step"] for row in run.steps] == list(range(1, NUM_STEPS + 1))
    assert Counter(row["prompt_id"] for row in run.rollouts if not row["index"]) == Counter(draws(2 * NUM_STEPS))


def test_weights_that_come_out_otherwise_are_told(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_of(tmp_path, Trainer(), 2, 0, max_staleness=1).train(strike=killed(12.0))

    class Other(Generator):
        def do_adopt(self, version: int, slot: Any) -> tuple[float, Any]:
            """Gets others."""
            seconds, fetched = super().do_adopt(version, slot)
            fetched.add_done_callback(lambda done: object.__setattr__(done.result(), "fingerprint", "otherwise"))
            return seconds, fetched

    run = run_of(tmp_path, Trainer(), 2, 0, max_staleness=1)
    run.generators = [Other()]
    run.train()
    (said,) = (text for text in run.warnings if "fingerprint" in text)
    assert "was trained again and has fingerprint otherwise instead of 0000" in said


def test_rows_of_a_step_that_was_not_yet_on_record_are_written(tmp_path: Path) -> None:
    """Nobody knows how long it took."""
    disk = Trainer()
    run = run_of(tmp_path, disk, 2, 0, max_staleness=1)
    with pytest.raises(Killed):
        run.train(strike=killed(12.0))
    last = run.steps[-1]["step"]
    file = run.metrics_file
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(file)[:-1]))
    taken = [row for row in run.rollouts if row["step"] == last]
    run = run_of(tmp_path, Trainer(), 2, 0, max_staleness=1).train()
    assert [row["step"] for row in run.steps] == list(range(1, NUM_STEPS + 1))
    assert run.steps[last - 1]["step_s"] is None and run.steps[last - 1]["reward_mean"] == 0.5
    again = [row for row in run.rollouts if row["step"] == last]
    assert again == taken


def test_the_share_of_time_that_it_costs_is_measured(tmp_path: Path) -> None:
    run = run_of(tmp_path, Trainer(), 2, 2, max_staleness=1).train()
    assert all(0 < row["extra.record_share"] < 0.05 for row in run.steps)


def test_a_trainer_that_dies_after_the_controller_did(tmp_path: Path) -> None:
    """The new controller has no step before its own in memory; the journal has them."""
    disk = Trainer()
    run = run_of(tmp_path, disk, 3, 0, max_staleness=1)
    run.start_s = 1.0
    with pytest.raises(Killed):
        run.train(strike=killed(9.0))
    done = disk.version
    assert 2 <= done < NUM_STEPS - 2

    async def strike(run: Run) -> None:
        while run.trainer.version < done + 1:
            await asyncio.sleep(0.1)
        run.handles["trainer"].die()
        run.handles["critic"].die()

    run = run_of(tmp_path, Trainer(), 3, 0, max_staleness=1)
    run.start_s = 1.0
    run.train(strike=strike)
    again = [text for text in run.warnings if "trained again" in text]
    assert len(again) == 2 and all("continues from step 0, " in text for text in again)
    assert [row["step"] for row in run.steps] == list(range(1, NUM_STEPS + 1))
    assert Counter(row["prompt_id"] for row in run.rollouts if not row["index"]) == Counter(draws(2 * NUM_STEPS))
