"""Checkpoints: whole or not at all, damage is found and named, and the newest whole one wins."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import checkpoint_processes as processes
import pytest
import torch
from safetensors.torch import load_file

from llamarl.checkpoint.folder import MANIFEST, CheckpointError, run_in_background
from llamarl.checkpoint.store import Checkpoint, CheckpointStore
from tests.nightly import nightly

DEADLINE_S = processes.DEADLINE_S
SHARDS = ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]


def newest(folder: Path) -> Checkpoint:
    checkpoint, _ = CheckpointStore(folder, keep=2).load_newest()
    assert checkpoint is not None
    return checkpoint


def assert_is(checkpoint: Checkpoint, step: int, numel: int = 1000) -> None:
    """All of it is of this step."""
    assert checkpoint.step == step
    assert checkpoint.state == processes.state(step)
    expected = processes.tensors(step, numel)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = checkpoint.read(name)
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)


class TestRoundTrip:
    def test_tensors_and_state(self, tmp_path: Path) -> None:
        folder = processes.save(tmp_path, 7, keep=2)
        assert folder == tmp_path / "step-00000007"
        assert_is(newest(tmp_path), 7)
        assert_is(CheckpointStore(tmp_path, keep=1).load(7), 7)

    def test_any_bits_and_any_layout(self, tmp_path: Path) -> None:
        weight = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
        matrix = torch.arange(6.0).view(2, 3)
        whole = {"special": weight, "transposed": matrix.T, "nothing": torch.empty(0, 4)}
        processes.save_whole(CheckpointStore(tmp_path, 1), 1, whole, {})
        loaded = newest(tmp_path)
        assert torch.equal(loaded.read("special").view(torch.int32), weight.view(torch.int32))
        assert torch.equal(loaded.read("transposed"), matrix.T)
        assert loaded.read("nothing").shape == (0, 4)

    def test_state_keeps_every_digit(self, tmp_path: Path) -> None:
        state = {"rate": 0.1 + 0.2, "seed": 2**63 + 1, "text": 'Grüße\n"{}"', "deep": [[1, None], {"a": True}]}
        processes.save_whole(CheckpointStore(tmp_path, 1), 1, {}, state)
        assert newest(tmp_path).state == state

    def test_no_pickle(self, tmp_path: Path) -> None:
        """Files that safetensors itself reads; what both ranks hold is written by one of them."""
        folder = processes.save(tmp_path, 1, keep=1)
        assert {path.name for path in folder.iterdir()} == {MANIFEST, *SHARDS}
        held = [load_file(folder / name) for name in SHARDS]
        assert sorted(name for found in held for name in found) == sorted(["w", "w:exp_avg"] * 2 + ["b", "w:step"])
        assert all(torch.equal(found["w"], torch.ones(500)) for found in held)

    def test_every_checkpoint_names_its_parent(self, tmp_path: Path) -> None:
        """Also across a resume."""
        store = CheckpointStore(tmp_path, keep=9)
        for step in (1, 2):
            processes.save_whole(store, step, processes.tensors(step), {})
        again = CheckpointStore(tmp_path, keep=9)
        again.load_newest()
        processes.save_whole(again, 3, processes.tensors(3), {})
        first, second, third = (store.load(step) for step in (1, 2, 3))
        assert first.parent is None
        assert [second.parent, third.parent] == [{"step": one.step, "xxh3_128": one.digest} for one in (first, second)]

    def test_what_a_rank_holds_may_change_from_save_to_save(self, tmp_path: Path) -> None:
        """As when the first step makes moments."""
        store, whole = CheckpointStore(tmp_path, keep=3), processes.tensors(1)
        for step, names in enumerate([["w"], ["w", "w:exp_avg"], ["w", "w:exp_avg"], ["b"]]):
            processes.save_whole(store, step, {name: whole[name] + step for name in names}, {})
            checkpoint = store.load(step)
            assert list(checkpoint.tensors) == names
            assert all(torch.equal(checkpoint.read(name), whole[name] + step) for name in names)

    def test_an_empty_or_missing_folder_has_none(self, tmp_path: Path) -> None:
        for folder in (tmp_path, tmp_path / "missing"):
            store = CheckpointStore(folder, keep=1)
            assert store.load_newest() == (None, [])
            assert store.steps() == []


class TestKeep:
    @pytest.mark.parametrize("keep", [1, 2, 3])
    def test_the_newest_are_kept(self, tmp_path: Path, keep: int) -> None:
        for step in (5, 10, 15, 20):
            processes.save(tmp_path, step, keep)
        assert CheckpointStore(tmp_path, keep).steps() == [5, 10, 15, 20][-keep:]

    def test_a_damaged_newer_one_does_not_push_out_the_new_one(self, tmp_path: Path) -> None:
        """A run that went back to an older checkpoint saves steps below the damaged one's."""
        processes.save(tmp_path, 10, keep=2)
        (processes.save(tmp_path, 20, keep=2) / MANIFEST).unlink()
        processes.save(tmp_path, 15, keep=1)
        assert_is(newest(tmp_path), 15)
        processes.save(tmp_path, 16, keep=1)
        assert_is(newest(tmp_path), 16)
        assert CheckpointStore(tmp_path, 1).steps() == [16, 20]

    @pytest.mark.parametrize("damage", ["manifest", "missing", "short", "flipped"])
    def test_damaged_ones_do_not_push_out_the_last_good_one(self, tmp_path: Path, damage: str) -> None:
        """A flipped bit is only found by reading, as a resume does."""
        good = processes.save(tmp_path, 10, keep=2)
        for step in (20, 30):
            file = processes.save(tmp_path, step, keep=9) / (MANIFEST if damage == "manifest" else SHARDS[0])
            whole = file.read_bytes()
            damaged = {"manifest": whole[:-2], "missing": b"", "short": whole[:-1], "flipped": whole[:-1] + b"\x01"}
            file.write_bytes(damaged[damage])
            if damage == "missing":
                file.unlink()
        store = CheckpointStore(tmp_path, keep=2)
        checkpoint, found = store.load_newest()
        assert checkpoint is not None and checkpoint.step == 10 and len(found) == 2
        processes.save_whole(store, 40, processes.tensors(40), processes.state(40))
        assert good.exists(), "of the two to keep, one is this one"
        assert_is(store.load(10), 10)
        processes.save_whole(store, 50, processes.tensors(50), processes.state(50))
        assert store.steps() == [40, 50]

    def test_multiples_stay(self, tmp_path: Path) -> None:
        """The one that was due at 20 came late, none is due at 30, and that of 40 was saved twice."""
        for step in (5, 10, 15, 22, 25, 35, 40, 45, 40, 45, 50, 55):
            store = CheckpointStore(tmp_path, 1, keep_every=10)
            processes.save_whole(store, step, processes.tensors(step), processes.state(step))
        assert store.steps() == [10, 22, 35, 40, 50, 55]
        for step in store.steps():
            assert_is(store.load(step), step)

    def test_a_file_that_another_rank_put_elsewhere(self, tmp_path: Path) -> None:
        """As when a folder is not shared by the ranks' hosts: what was there stays."""
        before = processes.save(tmp_path, 1, keep=1)
        store = CheckpointStore(tmp_path, keep=1)
        store.save(2, processes.shards(processes.tensors(2)), processes.state(2)).result(DEADLINE_S)
        shutil.move(tmp_path / ".writing-00000002" / "shard-00000-of-00001.safetensors", tmp_path.parent / "elsewhere")
        committed = store.commit()
        assert committed is not None
        with pytest.raises(OSError, match="same folder"):
            committed.result(DEADLINE_S)
        assert list(tmp_path.iterdir()) == [before]

    def test_a_step_that_is_reached_again_replaces_the_old(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        processes.save_whole(store, 5, processes.tensors(4), processes.state(4))
        processes.save(tmp_path, 5, keep=2)
        assert_is(newest(tmp_path), 5)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("step-00000001.backup", "step-best", "notes"):
            (tmp_path / name).mkdir()
        processes.save(tmp_path, 3, keep=1)
        assert CheckpointStore(tmp_path, 1).steps() == [3]
        assert {path.name for path in tmp_path.iterdir()} == {
            "step-00000001.backup",
            "step-best",
            "notes",
            "step-00000003",
        }


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints 1 and 2."""
    for step in (1, 2):
        processes.save(tmp_path, step, keep=2, numel=50)
    return tmp_path


class TestDamage:
    def check_found(self, folder: Path, file: str) -> None:
        """The damage is named, and the checkpoint before is taken."""
        checkpoint, damaged = CheckpointStore(folder, keep=2).load_newest()
        assert checkpoint is not None
        assert_is(checkpoint, 1, numel=50)
        assert len(damaged) == 1
        assert "step-00000002" in damaged[0]
        assert file in damaged[0]

    @pytest.mark.parametrize("file", SHARDS)
    def test_any_flipped_bit_of_a_tensor_file(self, two: Path, file: str) -> None:
        path = two / "step-00000002" / file
        whole, rng = path.read_bytes(), random.Random(1)
        for position in [0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(30))]:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            self.check_found(two, file)
        path.write_bytes(whole)
        assert_is(newest(two), 2, numel=50)

    def test_any_flipped_bit_of_the_manifest(self, two: Path) -> None:
        """Numbers of the run's state included. A flip that means the same, as e for E in 1e-05, is none."""
        folder = two / "step-00000002"
        whole = (folder / MANIFEST).read_bytes()
        found, rng = 0, random.Random(2)
        for place in rng.sample(range(8 * len(whole)), 800):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            (folder / MANIFEST).write_bytes(damaged)
            try:
                assert_is(CheckpointStore(two, keep=2).load(2), 2, numel=50)
            except CheckpointError:
                found += 1
        assert found > 0.95 * 800

    @pytest.mark.parametrize("file", [*SHARDS, MANIFEST])
    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_a_truncated_file(self, two: Path, file: str, share: float) -> None:
        path = two / "step-00000002" / file
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        self.check_found(two, "step-00000002" if file == MANIFEST else file)

    @pytest.mark.parametrize("file", [*SHARDS, MANIFEST])
    def test_a_missing_file(self, two: Path, file: str) -> None:
        (two / "step-00000002" / file).unlink()
        self.check_found(two, file)

    def test_a_file_of_another_checkpoint(self, two: Path) -> None:
        shutil.copy(two / "step-00000001" / SHARDS[0], two / "step-00000002" / SHARDS[0])
        self.check_found(two, SHARDS[0])

    def test_a_changed_state(self, two: Path) -> None:
        path = two / "step-00000002" / MANIFEST
        manifest = json.loads(path.read_text())
        manifest["state"]["policy_version"] = 3
        path.write_text(json.dumps(manifest, indent=1))
        self.check_found(two, MANIFEST)

    def test_all_damaged(self, two: Path) -> None:
        for step in (1, 2):
            (two / f"step-0000000{step}" / SHARDS[0]).write_bytes(b"")
        checkpoint, damaged = CheckpointStore(two, keep=2).load_newest()
        assert checkpoint is None
        assert [sentence.count(SHARDS[0]) for sentence in damaged] == [1, 1]
        assert "step-00000002" in damaged[0], "newest first"


class TestKilled:
    """A save that is killed leaves what was there before it, or the new checkpoint: never less, never a mixture."""

    @pytest.fixture(autouse=True)
    def no_waiting_for_the_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)

    def kill_everywhere(self, start, folder: Path, step: int, keep: int, block_bytes: int, allowed: set[int]) -> int:
        """Kills a save of two ranks at each file operation and block in turn, always from the same start; how many."""
        original = folder.with_name("original")
        folder.rename(original)
        for last_event in range(1000):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(original, folder)
            process, connection = start(processes.save_and_die, folder, step, keep, block_bytes, last_event)
            process.join(DEADLINE_S)
            checkpoint = newest(folder)
            assert checkpoint.step in allowed, f"killed at operation {last_event}"
            assert_is(checkpoint, checkpoint.step)
            # The next save finds its way through what was left behind, and leaves nothing of it.
            processes.save(folder, 9, keep=1)
            assert [path.name for path in folder.iterdir()] == ["step-00000009"]
            if process.exitcode == 0:
                assert connection.recv()
                return last_event
        raise AssertionError("the save does not end")

    @nightly("by day a step that is there is written again, and killed at each of its file operations")
    def test_at_every_file_operation_of_a_new_step(self, start, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoints"
        for step in (1, 2):
            processes.save(folder, step, keep=2)
        assert self.kill_everywhere(start, folder, step=3, keep=2, block_bytes=200, allowed={2, 3}) >= 50

    def test_at_every_file_operation_of_a_step_that_is_there(self, start, tmp_path: Path) -> None:
        """As when a run is interrupted right after a periodic save: its only checkpoint must survive."""
        folder = tmp_path / "checkpoints"
        processes.save(folder, 3, keep=1)
        assert self.kill_everywhere(start, folder, step=3, keep=1, block_bytes=4096, allowed={3}) >= 20

    def test_at_any_moment(self, start, tmp_path: Path) -> None:
        """Inside the writing of tensors, too; a later run goes on in the same folder."""
        rng, numel = random.Random(5), 200_000
        for attempt in range(8):
            folder = tmp_path / str(attempt)
            process, connection = start(processes.save_for_ever, folder, numel)
            assert connection.poll(DEADLINE_S)
            connection.poll(0)
            while rng.random() < 0.6 and connection.poll(DEADLINE_S):
                connection.recv()
            for _ in range(rng.randrange(100_000)):
                pass
            process.kill()
            process.join(DEADLINE_S)
            committed = 0
            while connection.poll():
                try:
                    committed = connection.recv()
                except EOFError:
                    break
            checkpoint = newest(folder)
            assert checkpoint.step >= committed, "a checkpoint that had been reported as saved is gone"
            assert_is(checkpoint, checkpoint.step, numel)


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves follows from this order: files and folder are synced, renamed, and the name is synced."""
    done = list[str]()

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(self: Path, target: Path) -> None:
        done.append("rename")
        os.rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    folder = processes.save(tmp_path, 1, keep=1)
    position = done.index("rename")
    assert set(done[:position]) == {*(path.name for path in folder.iterdir()), ".writing-00000001"}
    assert done[position + 1 :] == [tmp_path.name]


class TestDiskFull:
    """A limit on the size of files stands in for the disk: both fail writes, only the number of the error differs."""

    @pytest.fixture
    def full_disk(self) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @pytest.mark.usefixtures("full_disk")
    @pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
    @pytest.mark.parametrize("large", ["tensors", "state"])
    def test_the_old_ones_stay_and_nothing_of_the_new(self, two: Path, large: str, step: int) -> None:
        before = sorted(two.rglob("*"))
        tensors = processes.tensors(step, numel=100_000 if large == "tensors" else 50)
        state = processes.state(step) | {"more": "x" * (100_000 if large == "state" else 0)}
        with pytest.raises(OSError, match=r"cannot be written|too large"):
            processes.save_whole(CheckpointStore(two, keep=1), step, tensors, state)
        assert sorted(two.rglob("*")) == before
        assert_is(newest(two), 2, numel=50)

    def test_a_state_that_is_no_json_leaves_nothing(self, two: Path) -> None:
        before = sorted(two.rglob("*"))
        with pytest.raises(TypeError, match="JSON"):
            CheckpointStore(two, keep=1).save(3, {}, {"model": object()})
        assert sorted(two.rglob("*")) == before


def test_one_thread_does_what_comes_one_after_the_other() -> None:
    """Whatever becomes of it: none is started when memory has run out."""

    def fail() -> None:
        raise MemoryError

    first = run_in_background(threading.get_ident).result(DEADLINE_S)
    for _ in range(2000):
        with pytest.raises(MemoryError):
            run_in_background(fail).result(DEADLINE_S)
        assert run_in_background(threading.get_ident).result(DEADLINE_S) == first
