"""Files of the journal: compressed beside the run, of several lives of it, and of which a record is missing."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.journal import reader as journal_reader
from llamarl.journal import writer as module
from llamarl.journal.reader import segment_path
from llamarl.journal.records import records
from llamarl.observability.files import compress
from llamarl.types import FinishReason, Rollout
from tests.controller.test_journal import PROMPTS, SETTINGS, SIZE, Author, read, same, same_group, written
from tests.journals import journal_of


def replayed(author: Author) -> bool:
    """Whether all steps are read as they were."""
    journal, _, said = read(author.folder)
    assert said == ""
    steps = dict(journal.steps_after(0))
    assert list(steps) == list(range(1, author.version + 1))
    return all(
        [group.group_id for group in groups] == author.consumed[step]
        and all(same_group(group, author.whole[group.group_id]) for group in groups)
        for step, groups in steps.items()
    )


def test_files_are_compressed_while_the_run_goes_on(tmp_path: Path) -> None:
    """Those before the newest checkpoint; whoever reads meanwhile finds what there is."""
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 3, keeps="all")
    for number in range(1, 5):
        for _ in range(24):
            author.act()
        author.checkpoint()
        author.journal._compressing.join()
        names = sorted(path.name for path in (tmp_path / "run/journal").iterdir())
        assert names == [*(f"{n:08}.groups.gz" for n in range(1, number + 1)), f"{number + 1:08}.groups"]
        assert replayed(author)
    ((step, groups),) = author.journal.steps_after(author.version - 1)
    assert step == author.version and [group.group_id for group in groups] == author.consumed[step]
    assert all(same_group(group, author.whole[group.group_id]) for group in groups)
    author.journal.close()


@pytest.fixture
def ended(tmp_path: Path) -> Author:
    return written(tmp_path / "run", 8, 80, num_checkpoints=2, keeps="all")[0]


def test_killed_while_it_compresses(ended: Author) -> None:
    """Half of a file is nobody's; of two whole ones either is read."""
    first, second, *_ = sorted((ended.folder / "journal").iterdir())
    partial = first.with_name(f".{first.name}.gz.partial")
    partial.write_bytes(gzip.compress(first.read_bytes())[:50])
    second.with_name(f"{second.name}.gz").write_bytes(gzip.compress(second.read_bytes()))
    assert replayed(ended)
    journal, _, _ = read(ended.folder, keeps="all")
    journal.begin(ended.version)
    journal.close()
    assert all(path.suffix == ".gz" for path in (ended.folder / "journal").iterdir())
    assert replayed(ended)


def test_a_disk_that_refuses_keeps_files_as_they_are(ended: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, or frozen: nobody waits for it."""
    before = {path: path.read_bytes() for path in (ended.folder / "journal").iterdir()}
    journal, _, _ = read(ended.folder, keeps="all")
    journal.begin(ended.version)
    thawed, fsync = threading.Event(), os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def frozen(descriptor: int) -> None:
        if threading.current_thread().name == "compress":
            thawed.wait(240.0)
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        journal._compress(9)
        journal._compressing.join()
        assert before.items() <= {path: path.read_bytes() for path in (ended.folder / "journal").iterdir()}.items()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", frozen)
        patched.setattr(module, "LAST_PIECE_S", 0.01)
        journal.committed(ended.version)
        journal.committed(ended.version)
        journal.close()
        assert journal._compressing.is_alive() and replayed(ended)
        thawed.set()
        journal._compressing.join()
    assert replayed(ended)


def test_a_compressed_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    author, _ = written(tmp_path / "run", 6, 90, num_checkpoints=2, compresses=True, keeps="all")
    path, draw = sorted((author.folder / "journal").iterdir())[1], random.Random(0)
    whole = path.read_bytes()
    for at in draw.sample(range(10, len(whole) - 12), 30):  # then come the end's sign and a checksum of the whole
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            assert f"{str(path)[:-3]} is missing, or damaged after byte" in read(author.folder)[2]


def test_what_stands_before_a_damaged_byte_is_read(tmp_path: Path) -> None:
    author, _ = written(tmp_path / "run", 6, 900, num_checkpoints=0, compresses=True, keeps="all")
    (path,) = (author.folder / "journal").iterdir()
    compressed, plain = path.read_bytes(), path.with_suffix("")
    all_of_it = [record.end for record in records(plain)]
    assert len(compressed) > 20_000
    for at in range(2_000, len(compressed), 1_700):
        path.write_bytes(compressed[:at] + bytes([compressed[at] ^ 8]) + compressed[at + 1 :])
        ends = [record.end for record in records(plain)]
        least = len(zlib.decompressobj(wbits=31).decompress(compressed[: at - 512]))
        assert ends == all_of_it[: len(ends)] and len(ends) >= sum(end <= least for end in all_of_it) > 5
        _, reached, said = read(author.folder)
        assert 0 < reached["step"] <= author.version and said == "", "as if it had been cut there"


def test_a_compressed_file_that_came_out_damaged_takes_nothings_place(
    ended: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def flips(descriptor: int) -> None:
        fsync(descriptor)
        with open(f"/proc/self/fd/{descriptor}", "r+b") as file:
            byte = file.read(300)[-1]
            file.seek(299)
            file.write(bytes([byte ^ 16]))

    before = {path.name for path in (ended.folder / "journal").iterdir()}
    monkeypatch.setattr(os, "fsync", flips)
    for path in sorted((ended.folder / "journal").iterdir()):
        compress(path)
    assert {path.name for path in (ended.folder / "journal").iterdir()} == before and replayed(ended)


def whole(author: Author, group_id: int) -> None:
    """A group, as far as it takes to score it."""
    author.active[group_id] = {n: author.grown(group_id, n, None, is_final=True) for n in range(SIZE)}
    author.journal.rollouts([(group_id, one) for one in author.active[group_id].values()])
    author.score(group_id)


def lives(folder: Path) -> Author:
    """One that takes two steps, scores a group after them, and goes on, in another process, after the first step."""
    folder.mkdir()
    author = Author(folder, 1, keeps="all")
    for group_id in (1, 2):
        whole(author, group_id)
        author.complete_step([group_id])
    whole(author, 3)
    author.journal.close()
    author.journal = journal_of(folder, prompts=PROMPTS, settings=SETTINGS, keeps="all")
    author.journal.resume(None)
    author.journal.begin(1)
    author.version = 1
    for group_id in (12, 13):
        whole(author, group_id)
        author.complete_step([group_id])
    author.journal.close()
    return author


def test_what_was_taken_back_stays_so(tmp_path: Path) -> None:
    """Steps of the same number, and what was sampled by a version that is another one now."""
    author = lives(tmp_path / "run")
    journal, reached, said = read(author.folder)
    assert said == "" and reached["step"] == 3
    assert [[group.group_id for group in groups] for _, groups in journal.steps_after(0)] == [[1], [12], [13]]
    assert author.whole[3].oldest_version > 1 and journal.pop_generated(3) == (None, {})


def test_where_it_is_not_known_what_was_taken_back_nothing_is_trained_again(tmp_path: Path) -> None:
    """The checkpoint is of the second life, whose file cannot be read: step 2 of the first life must not follow it."""
    author = lives(tmp_path / "run")
    *_, newest = sorted((author.folder / "journal").iterdir())
    newest.unlink()
    number = int(newest.name[:8])
    state = author.state() | {"step": 1, "journal": {"first": 1, "segment": number, "bytes": 400}}
    journal, reached, said = read(author.folder, state)
    assert reached["step"] == 1 and f"{number:08}.groups is missing, or damaged" in said
    assert [*journal.steps_after(1)] == []


def test_a_group_of_which_a_part_is_lost_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    parked = {n: author.grown(5, n, None, is_final=False) for n in range(SIZE)}
    while not all(one.num_tokens for one in parked.values()):
        parked = {n: author.grown(5, n, None, is_final=False) for n in range(SIZE)}
    author.journal.rollouts([(5, one) for one in parked.values()])
    author.journal.next_segment()
    size = author.journal.reader.index.size
    author.active[5] = {n: author.grown(5, n, one, is_final=True) for n, one in parked.items()}
    author.journal.rollouts([(5, one) for one in author.active[5].values()])
    author.journal.next_segment()
    author.score(5)
    author.journal.groups([], lambda group_id: 0)
    author.journal._write_groups()
    assert author.journal.with_position(author.state() | {"unconsumed": [(5, 5)]})["journal"]["first"] == 1
    author.journal._file.close()  # type: ignore[union-attr]
    assert read(author.folder)[0].pop_generated(5)[0] is not None
    with (author.folder / "journal/00000002.groups").open("r+b") as file:
        file.truncate(size)
    group, held = read(author.folder)[0].pop_generated(5)
    assert group is None and [one.num_tokens for one in held.values()] == [one.num_tokens for one in parked.values()]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_checkpoint_after_a_failure_keeps_what_no_step_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Scored or parked before the failure or after it, be it that of one more record or of the way to the disk; the
    first checkpoint after it is refused, too."""
    (tmp_path / "run").mkdir()
    author, full = Author(tmp_path / "run", 2, keeps="all"), OSError(errno.ENOSPC, "No space left on device")

    def parked(group_id: int) -> None:
        grown = (author.grown(group_id, 0, None, is_final=False) for _ in range(99))
        author.active[group_id] = {0: next(one for one in grown if one.num_tokens)}
        author.journal.rollouts([(group_id, author.active[group_id][0])])

    author.next_id = 9
    whole(author, 1)
    author.complete_step([1])
    whole(author, 2)
    author.journal.write_overdue()
    parked(3)
    if is_full:
        file = author.journal._file
        author.journal._file = io.BytesIO(bytes(1))  # it cannot be truncated
        monkeypatch.setattr(author.journal._file, "write", raising(full), raising=False)
        assert file is not None
        file.close()
    else:
        author.journal.fail(full)
    with monkeypatch.context() as still:
        still.setattr(module, "open_own", raising(full))
        whole(author, 4)
        parked(5)
        whole(author, 6)
        author.complete_step([6])
        assert not author.journal.has(2), "it is told"
        author.checkpoint()
    state = author.checkpoint()
    if not is_full:  # what did not come to the disk
        (author.folder / "journal/00000001.groups").unlink()
    author.complete_step([2])
    author.complete_step([4])
    assert author.journal.has(3) and author.journal.has(4) and len(author.said) == 2
    assert "journal continues without steps 2 to 2" in author.said[1]
    author.journal.close()
    journal, reached, said = read(author.folder, state)
    assert reached["step"] == 4 and said == ""
    steps = dict(journal.steps_after(2))
    assert [[group.group_id for group in groups] for groups in steps.values()] == [[2], [4]]
    assert all(same_group(group, author.whole[group.group_id]) for (group,) in steps.values())
    for group_id in (3, 5):
        assert same(journal.pop_generated(group_id)[1][group_id, 0], author.active[group_id][0])


def raising(error: OSError) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def test_a_file_that_cannot_be_begun_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is full, and has all of the step."""
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    whole(author, 1)
    with monkeypatch.context() as refused:
        refused.setattr(module, "SEGMENT_BYTES", 10)
        refused.setattr(module, "open_own", raising(OSError(errno.ENOSPC, "No space left on device")))
        author.complete_step([1])
    assert 1 in author.journal.reader.index.steps and len(author.said) == 1
    author.checkpoint()
    assert author.journal.has(1)
    author.journal.close()


def read_anyhow(path: Path) -> bytes:
    """Compressed or not."""
    return path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())


def test_files_that_cannot_be_read_are_not_written_over(tmp_path: Path) -> None:
    """Somebody may know better; what comes after them is read as ever."""
    author, state = written(tmp_path / "run", 1, 120, num_checkpoints=2, keeps="all")
    paths = sorted((author.folder / "journal").iterdir())
    for path in paths:
        path.write_bytes(b"x" + path.read_bytes()[1:])
    before = [read_anyhow(path) for path in paths]
    author.journal = journal_of(author.folder, author.said.append, prompts=PROMPTS, settings=SETTINGS, keeps="all")
    reached, said = author.journal.resume(state)
    assert reached is state and "is missing, or damaged after byte 0" in said
    author.journal.begin(state["step"])
    author.version, author.next_id = state["step"], 900
    whole(author, 901)
    author.complete_step([901])
    author.journal.close()
    assert before == [read_anyhow(path) for path in paths]
    journal, reached, _ = read(author.folder, state, keeps="all")
    assert reached["step"] == state["step"] + 1
    (((_, (group,))),) = journal.steps_after(state["step"])
    assert same_group(group, author.whole[901])


def test_what_another_version_wrote_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(module, "FORMAT", 1)
        author, state = written(tmp_path / "run", 1, 120, num_checkpoints=3, keep=3)
    journal, reached, said = read(tmp_path / "run", state)
    assert reached is state and ".groups was written by another version of llamarl" in said
    assert all(journal.pop_generated(group_id) == (None, {}) for group_id in author.active)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run/journal").iterdir()}
    journal.begin(state["step"])
    journal.close()
    after = {path.name: path.read_bytes() for path in (tmp_path / "run/journal").iterdir()}
    assert before.items() <= after.items() and len(after) == len(before) + 1, "what was there stays"


def test_groups_that_are_dropped_are_not_kept_in_mind(tmp_path: Path) -> None:
    """As of a run that drops groups in which everybody did equally well."""
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    author.next_id = 4
    for number in (1, 2, 3):
        whole(author, number)
    del author.active[2], author.scored[2]
    author.complete_step([1])
    assert author.journal._open.keys() == {3}
    author.journal.close()
    journal = read(author.folder)[0]
    assert journal.reader.pending.scored.keys() == {3} and not journal.reader.pending.held
    assert [group.group_id for _, groups in journal.steps_after(0) for group in groups] == [1]


def test_a_parked_rollout_that_cannot_go_on_has_no_tokens(tmp_path: Path) -> None:
    """The engine that it comes to has too little memory for it, and says so of an empty one."""
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    parked = next(one for one in (author.grown(5, 0, None, is_final=False) for _ in range(99)) if one.num_tokens)
    failed = Rollout.empty(5, 0, FinishReason.FAILED, "too little memory")
    beside = next(one for one in (author.grown(6, 0, None, is_final=False) for _ in range(99)) if one.num_tokens)
    author.journal.rollouts([(5, parked)])
    author.journal.rollouts([(5, failed), (6, beside)])
    author.journal.close()
    journal = read(author.folder)[0]
    ((_, found),) = journal.pop_generated(5)[1].items()
    assert same(found, failed) and same(journal.pop_generated(6)[1][6, 0], beside)


def test_scores_that_nobody_takes_are_written_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    whole(author, 1)
    for wait_s, is_there in ((1e9, False), (0.0, True)):
        monkeypatch.setattr(module, "UNWRITTEN_S", wait_s)
        author.journal.write_overdue()
        assert (read(author.folder)[0].pop_generated(1)[0] is not None) == is_there
    author.journal.close()


@pytest.mark.parametrize("follows", ["rollouts", "a checkpoint", "the end"])
def test_a_completed_step_is_written_before_what_follows(tmp_path: Path, follows: str) -> None:
    (tmp_path / "run").mkdir()
    author = Author(tmp_path / "run", 2)
    whole(author, 1)
    del author.active[1], author.scored[1]
    author.version, author.consumed[1] = 1, [1]
    author.journal.queue_step([1], author.state(), None)  # type: ignore[arg-type]
    assert not dict(read(author.folder)[0].steps_after(0))
    if follows == "rollouts":
        author.active[2] = {0: next(one for _ in range(99) if (one := author.grown(2, 0, None, False)).num_tokens)}
        author.journal.rollouts([(2, author.active[2][0])])
    elif follows == "a checkpoint":
        author.journal.next_segment()
    else:
        author.journal.close()
    journal, _, said = read(author.folder)
    assert said == "" and [*dict(journal.steps_after(0))] == [1]
    assert bool(journal.pop_generated(2)[1]) == (follows == "rollouts")
    author.journal.close()


def test_going_on_reads_what_came_since_the_oldest_kept_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the run was before; and without the list of steps it reads everything."""
    opened, numbers = list[Path](), list[int]()
    monkeypatch.setattr(journal_reader, "records", lambda path, *of: opened.append(path) or records(path, *of))
    for times in (1, 4):
        author, state = written(tmp_path / f"{times}", 3, 150 * times, num_checkpoints=5 * times, keeps="all")
        saved = json.loads(json.dumps(state))
        opened.clear()
        _, reached, said = read(author.folder, saved, saved=[state["step"]])
        assert said == "" and reached["step"] == author.version
        assert min(opened) == segment_path(author.folder, state["journal"]["first"])
        numbers.append(len(set(opened)))
        (author.folder / "journal.jsonl").unlink()
        opened.clear()
        again = read(author.folder, saved, saved=[state["step"]])
        assert again[1:] == (reached, said) and len(set(opened)) > 5 * times
    assert numbers[1] <= numbers[0] + 1 < 5
