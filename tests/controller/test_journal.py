"""The journal against a model of what was written: whole, cut at every byte, with flipped bits, over checkpoints."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.journal import writer as module
from llamarl.journal.records import newest_version
from llamarl.journal.writer import Journal, to_disk
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from tests.journals import journal_of
from tests.nightly import examples, nightly

PROMPTS = tuple(
    Prompt(prompt_id=f"p-{n}", text=f"{n}?", token_ids_T=np.array([n], np.int32), answer=str(n)) for n in range(7)
)
SIZE = 2
SETTINGS = {"rollout.group_size": SIZE, "seed": 0}


class Author:
    """A run that does nothing but write its journal, and remembers it."""

    def __init__(self, folder: Path, seed: int, **options: Any) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.said = list[str]()
        options = {"settings": SETTINGS, "keep": 1} | options
        self.journal = journal_of(folder, self.said.append, prompts=PROMPTS, **options)
        self.journal.begin(0)
        self.version = self.next_id = 0
        self.active = dict[int, dict[int, Rollout]]()
        """Groups by number, with their rollouts so far."""
        self.scored = dict[int, RolloutGroup]()
        self.unwritten = set[int]()
        """Of those, the ones that only the run's memory has."""
        self.consumed = dict[int, list[int]]()
        self.whole = dict[int, RolloutGroup]()
        """Every group that was ever scored."""
        self.history = dict[tuple[int, int], tuple[int, dict[int, dict[int, Rollout]], set[int], set[int]]]()
        """By file and size: the version, the rollouts of groups without a record, scored groups, those without one."""
        self.note()

    def note(self) -> None:
        place = self.journal.reader.index.segment, self.journal.reader.index.size
        written = set(self.scored) - self.unwritten
        parts = {one: dict(rollouts) for one, rollouts in self.active.items() if rollouts and one not in written}
        self.history[place] = self.version, parts, written, set(self.unwritten)

    def grown(self, group_id: int, index: int, before: Rollout | None, is_final: bool) -> Rollout:
        draw, count = self.random, self.random.randrange(4)
        start = before.columns if before else Rollout.empty(group_id, index).columns
        more = {
            "token_ids": np.array([draw.randrange(1 << 31) for _ in range(count)], np.int32),
            "behavior_logprobs": np.array([-draw.random() for _ in range(count)], np.float32),
            "policy_versions": np.full(count, self.version, np.int32),
        }
        columns = {name: np.concatenate([start[name], more[name]]) for name in more}
        reasons = (FinishReason.STOP, FinishReason.FAILED) if is_final else (FinishReason.PARKED, FinishReason.ABORTED)
        reason = draw.choice(reasons)
        error = "it broke \ud800" if reason is FinishReason.FAILED else ""
        return Rollout(group_id=group_id, index=index, columns=columns, finish_reason=reason, error=error)

    def act(self) -> None:
        """Something that may happen next."""
        draw = self.random
        open_ids = [one for one in self.active if one not in self.scored]
        if len(self.active) < 4:
            self.active[self.next_id] = {}
            self.next_id += 1
        elif len(self.scored) >= 2 and draw.random() < 0.4:
            self.complete_step(sorted(self.scored)[:2])
        else:
            group_id = draw.choice(open_ids or [min(self.scored)])
            held = self.active[group_id]
            rest = [n for n in range(SIZE) if n not in held or not held[n].finish_reason.is_final]
            if rest:
                new = list[Rollout]()
                for index in rest[: draw.randrange(1, SIZE + 1)]:
                    held[index] = self.grown(group_id, index, held.get(index), draw.random() < 0.5)
                    if len(held[index].columns["token_ids"]) == 0 and not held[index].finish_reason.is_final:
                        del held[index]  # of which there is nothing to know
                    else:
                        new.append(held[index])
                self.journal.rollouts([(group_id, one) for one in new])
            elif group_id not in self.scored:
                self.score(group_id)
        self.note()

    def score(self, group_id: int) -> None:
        rollouts = [self.active[group_id][n] for n in range(SIZE)]
        first = RewardResult(outcome=Outcome.WRONG, value=0.1, reason="é")
        results = [
            RewardResult(outcome=Outcome.SCORE, value=self.random.random(), first_part=first),
            RewardResult(outcome=Outcome.INVALID, value=0.0),
        ]
        values = {"values": 0.5} if group_id % 3 == 1 else {}  # of a critic
        group = RolloutGroup(
            group_id=group_id,
            prompt=PROMPTS[group_id % 7],
            rollouts=tuple(
                replace(one, columns=one.columns | {name: np.full(one.num_tokens, x, np.float32)})
                for one in rollouts
                for name, x in values.items()
            )
            or tuple(rollouts),
            results=tuple(results),
            responses=("\ud800", "b" * self.random.randrange(9)),
            baseline=self.random.choice([None, first]),
        )
        self.scored[group_id] = self.whole[group_id] = group
        self.journal.groups([group], lambda group_id: group_id % 7)
        self.unwritten.add(group_id)

    def state(self) -> Any:
        unconsumed = [(one, one % 7) for one in self.active]
        return {"step": self.version, "sampler": {}, "next_group_id": self.next_id, "unconsumed": unconsumed}

    def complete_step(self, ids: list[int]) -> None:
        self.version += 1
        for one in ids:
            del self.active[one], self.scored[one]
        self.consumed[self.version] = ids
        self.unwritten.clear()
        self.journal.step(ids, self.state())
        self.note()
        assert self.journal.published(self.version, f"f{self.version}") == ""

    def checkpoint(self) -> Any:
        """Its state of the controller, as JSON would keep it."""
        state = self.journal.with_position(self.state())
        self.unwritten.clear()
        to_disk(self.journal.next_segment())
        self.journal.committed(self.version)
        self.note()
        return state


def same(one: Rollout, other: Rollout) -> bool:
    """To whoever goes on with it: why it is not finished makes no difference."""
    names = [(r.group_id, r.index, r.finish_reason.is_final, r.error, list(r.columns)) for r in (one, other)]
    arrays = [(one.columns[name], other.columns[name]) for name in one.columns]
    return names[0] == names[1] and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays)


def same_group(one: RolloutGroup, other: RolloutGroup) -> bool:
    rest = [(g.group_id, g.prompt.prompt_id, g.results, g.responses, g.baseline) for g in (one, other)]
    return rest[0] == rest[1] and all(map(same, one.rollouts, other.rollouts))


def read(folder: Path, state: Any = None, **options: Any) -> tuple[Journal, Any, str]:
    journal = journal_of(folder, prompts=PROMPTS, **({"settings": SETTINGS, "keep": 1} | options))
    reached, said = journal.resume(state)
    journal.close()
    return journal, reached, said


def check(author: Author, folder: Path, place: tuple[int, int], state: Any = None) -> None:
    """What is read is what was on record when the newest file had reached that size, and nothing damaged is said."""
    version, parts, scored, unwritten = author.history[max(one for one in author.history if one <= place)]
    journal, reached, said = read(folder, state)
    assert said == ""
    assert (reached["step"] if reached else 0) == journal.version == version
    start = state["step"] if state else 0
    steps = list(journal.steps_after(start))
    assert [step for step, _ in steps] == list(range(start + 1, version + 1))
    for step, groups in steps:
        assert [group.group_id for group in groups] == author.consumed[step]
        assert all(same_group(group, author.whole[group.group_id]) for group in groups)
    for group_id in range(author.next_id):
        if any(group_id in author.consumed[step] for step in range(1, version + 1)):
            continue
        group, held = journal.pop_generated(group_id)
        assert (group is not None) == (group_id in scored) or group_id in unwritten, "cut before the step's own record"
        assert group is None or same_group(group, author.whole[group_id])
        expected = {} if group else {(group_id, n): one for n, one in parts.get(group_id, {}).items()}
        assert held.keys() == expected.keys()
        assert all(same(held[key], expected[key]) for key in held)


def written(
    folder: Path, seed: int, num_acts: int, num_checkpoints: int = 1, compresses: bool = False, **options: Any
) -> tuple[Author, Any]:
    """A journal, and the state of its newest checkpoint."""
    folder.mkdir()
    author, state = Author(folder, seed, **options), None
    if not compresses:
        author.journal._compress = lambda end: None  # type: ignore[method-assign]
    for n in range(num_acts):
        author.act()
        if num_checkpoints and n % (num_acts // (num_checkpoints + 1)) == num_acts // (num_checkpoints + 1) - 1:
            num_checkpoints -= 1
            state = author.checkpoint()
    author.unwritten.clear()
    author.journal.close()
    author.note()
    return author, state


def newest(folder: Path) -> Path:
    return max((folder / "journal").glob("*.groups"))


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 30), num_checkpoints=st.integers(0, 3), compresses=st.booleans())
def test_what_is_read_is_what_was_written(
    tmp_path_factory: Any, seed: int, num_checkpoints: int, compresses: bool
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "run"
    author, state = written(folder, seed, 90, num_checkpoints, compresses, keeps="all" if compresses else "resume")
    assert {path.suffix for path in (folder / "journal").iterdir()} == {".gz" if compresses else ".groups"}
    assert not author.said
    check(author, folder, (author.journal.reader.index.segment, author.journal.reader.index.size), state)
    oldest = min(int(path.name[:8]) for path in (folder / "journal").iterdir())
    assert oldest == (state["journal"]["first"] if state and not compresses else 1), "files that nobody needs any more"


@nightly("cuts a file at every byte; by day flipped bits are never believed")
def test_a_torn_end_costs_what_is_torn(tmp_path: Path) -> None:
    """The newest file is cut at every byte of its last records, and here and there before."""
    for seed in (1,):
        folder = tmp_path / f"{seed}"
        author, state = written(folder, seed, 44)
        path, cut = newest(folder), tmp_path / f"cut-{seed}"
        whole = path.read_bytes()
        assert len(whole) > 2000
        shutil.copytree(folder, cut)
        for size in (*range(0, len(whole) - 450, 61), *range(len(whole) - 450, len(whole) + 1)):
            (cut / path.relative_to(folder)).write_bytes(whole[:size])
            check(author, cut, (int(path.stem), size), state)


def test_flipped_bits_are_never_believed(tmp_path: Path) -> None:
    """Whatever can be read is right, and damage before the last checkpoint is told."""
    folder = tmp_path / "run"
    author, state = written(folder, 5, 90, num_checkpoints=2, keep=2)
    paths = sorted((folder / "journal").glob("*.groups"))
    assert len(paths) >= 2
    draw = random.Random(0)
    for _ in range(150):
        path = draw.choice(paths)
        whole = path.read_bytes()
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        journal, reached, said = read(folder, state, keep=2)
        assert bool(said) or path == paths[-1]
        assert state["step"] <= reached["step"] <= author.version
        for step, groups in journal.steps_after(state["step"]):
            assert [group.group_id for group in groups] == author.consumed[step]
            assert all(same_group(group, author.whole[group.group_id]) for group in groups)
        for group_id in author.active:
            group, held = journal.pop_generated(group_id)
            assert group is None or same_group(group, author.whole[group_id])
            assert newest_version([*(group.rollouts if group else ()), *held.values()]) <= reached["step"]
            for (_, index), one in held.items():
                now = author.active[group_id][index]
                assert np.array_equal(one.token_ids_T, now.token_ids_T[: one.num_tokens])
        path.write_bytes(whole)


def test_missing_files_and_other_settings_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    author, state = written(folder, 1, 120, num_checkpoints=3, keep=3)
    paths = sorted((folder / "journal").glob("*.groups"))
    assert len(paths) >= 3 and author.version > state["step"] + 1
    _, reached, said = read(folder, state, settings=SETTINGS | {"seed": 1})
    assert reached is state
    assert said == f"steps {state['step'] + 1} to {author.version} are done again: seed is not what it was"
    whole = paths[-2].read_bytes()
    os.truncate(paths[-2], len(whole) - 1)
    _, _, said = read(folder, state)
    assert f"{paths[-2]} is missing, or damaged after byte " in said
    paths[-2].unlink()
    journal, reached, said = read(folder, state)
    assert f"{paths[-2]} is missing, or damaged after byte " in said
    assert all(not journal.pop_generated(group_id)[1] for group_id in author.active) or newest(folder) == paths[-1]
    paths[-2].write_bytes(whole)
    assert read(folder, state)[2] == ""
    paths[-1].unlink()
    assert f"{paths[-1]} is missing" not in read(folder, state)[2], "what came after the checkpoint had not been synced"


def test_a_run_that_goes_back_leaves_nothing_of_what_it_took_back(tmp_path: Path) -> None:
    """The steps are done again, otherwise: what later weights sampled before is not to be mixed with that."""
    author, state = written(tmp_path / "run", 2, 120, num_checkpoints=2)
    assert author.version > state["step"] + 1
    journal = journal_of(tmp_path / "run", prompts=PROMPTS, settings=SETTINGS)
    reached, said = journal.resume(state)
    assert reached and reached["step"] == author.version and said == ""
    journal.begin(state["step"])  # as if they could not be trained again
    journal.close()
    again, reached, _ = read(tmp_path / "run", state)
    assert reached == state and not list(again.steps_after(state["step"]))
    for group_id in range(author.next_id):
        for one in (journal, again):
            group, held = one.pop_generated(group_id)
            assert newest_version([*(group.rollouts if group else ()), *held.values()]) <= state["step"]
    rows = (tmp_path / "run/journal.jsonl").read_text().splitlines()
    assert len([row for row in rows if '"groups"' in row]) == state["step"]


def test_files_are_kept_for_each_checkpoint_and_all_where_asked_for(tmp_path: Path) -> None:
    every = {}
    for keeps in ("resume", "all"):
        author, _ = written(tmp_path / keeps, 4, 200, num_checkpoints=5, keep=2, keeps=keeps)
        every[keeps] = len(list((tmp_path / keeps / "journal").iterdir()))
        oldest = author.journal._saved[0]
        rows = map(json.loads, (tmp_path / keeps / "journal.jsonl").read_text().splitlines())
        state = next(row["state"] for row in rows if row["step"] == oldest and "groups" in row)
        _, reached, said = read(tmp_path / keeps, state, keep=2, saved=author.journal._saved)
        assert reached["step"] == author.version > oldest and said == ""
    assert every == {"resume": every["resume"], "all": 6} and every["resume"] < 5


def test_scored_groups_are_written_with_the_next_rollouts_after_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 6)
    for is_late in (False, True):
        monkeypatch.setattr(module, "UNWRITTEN_S", -1.0 if is_late else 1e9)
        for group_id in (0, 1):
            author.active[group_id] = {n: author.grown(group_id, n, None, is_final=True) for n in range(SIZE)}
            author.journal.rollouts([(group_id, one) for one in author.active[group_id].values()])
            author.score(group_id)
        author.journal.rollouts([(2, author.grown(2, 0, None, is_final=True))])
        kept = [read(tmp_path / "run")[0].pop_generated(group_id) for group_id in (0, 1)]
        assert [group is not None for group, _ in kept] == [is_late, is_late]
        assert [len(held) for _, held in kept] == [0 if is_late else SIZE] * 2, "nothing generated is lost"
    author.journal.close()


def test_a_file_is_ended_when_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 3000)
    author, state = written(tmp_path / "run", 3, 80)
    assert author.journal.reader.index.segment > 4
    check(author, tmp_path / "run", (author.journal.reader.index.segment, author.journal.reader.index.size), state)


def test_a_disk_that_is_full_costs_the_steps_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning says that it is full, and one, with the first step that can be written again, which are missing."""
    folder = tmp_path / "run"
    folder.mkdir()
    author = Author(folder, 7)
    while author.version < 2:
        author.act()
    state, file = author.checkpoint(), author.journal._file
    assert file is not None

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            if len(data) > 40:
                return int(file.write(data[:40]))
            raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    author.journal._file = Full()  # type: ignore[assignment]
    before = author.version
    with monkeypatch.context() as full:
        full.setattr("llamarl.journal.writer.open_own", refuse)
        while author.version < before + 2:
            author.act()
    assert len(author.said) == 1
    assert "keeps nothing until it can be written (No space left on device)" in author.said[0]
    _, reached, said = read(folder, state)
    assert reached["step"] == before and said == ""
    while author.version < before + 4:
        author.act()
    missing = f"{folder}/journal continues without steps {before + 1} to {before + 2}, which could not be written"
    assert len(author.said) == 2 and author.said[1].startswith(missing)
    assert author.journal.has(before + 4) and not author.journal.has(before + 2)
    journal, reached, said = read(folder, state)
    assert reached["step"] == before and f"step {before + 1} is missing in the journal" in said
    assert before + 3 not in journal.reader.index.steps, "it goes on before the first that is missing"
    state = author.checkpoint()
    while author.version < before + 9:
        author.act()
    author.journal.close()
    _, reached, said = read(folder, state)
    assert reached["step"] == author.version > state["step"] and said == ""
    assert len(author.said) == 2
    assert author.journal.seconds > 0


def test_steps_on_a_disk_that_fails_are_not_relied_on(tmp_path: Path) -> None:
    """Whoever holds their groups in memory keeps them until there is a file again."""
    author, _ = written(tmp_path / "run", 2, 60)
    journal, _, _ = read(tmp_path / "run")
    assert author.version > 1 and not journal.has(author.version), "nobody writes"
    journal.begin(author.version)
    assert journal.has(author.version) and not journal.has(author.version + 1)
    journal.fail(OSError(errno.EIO, os.strerror(errno.EIO)))
    assert not journal.has(author.version)
    journal.next_segment()
    assert journal.has(author.version)
    journal.close()


def test_a_disk_that_stays_full_is_told_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the beginning of a file fits on it, and nothing else."""
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 7)
    while author.version < 1:
        author.act()

    def refuse(self: Journal, encoded: Any) -> bool:
        self.fail(OSError(errno.ENOSPC, "No space left on device"))
        return False

    monkeypatch.setattr(Journal, "_append", refuse)
    while author.version < 4:
        author.act()
    author.journal.close()
    assert len(author.said) == 2 and "journal ends without steps 2 to 4, which" in author.said[1]
