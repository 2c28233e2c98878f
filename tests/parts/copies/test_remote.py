"""Copies of checkpoints: whole or not counted, kept as in the run's folder, and good enough to go on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from llamarl.checkpoint.folder import CRITIC, MANIFEST, saved_steps
from llamarl.checkpoint.store import CheckpointStore
from llamarl.config import ConfigError
from llamarl.config.schema import CheckpointConfig
from llamarl.parts.copies.remote import RemoteCopies
from llamarl.run.copies import CopyFailed
from tests.checkpoint import checkpoint_processes as processes


@pytest.fixture(params=["", "file://", "memory:/"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "there").mkdir()
    return f"{request.param}{tmp_path}/there"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def copies(place: str, name: str = "run", **settings: Any) -> RemoteCopies:
    return RemoteCopies(CheckpointConfig(copy_to=place, **settings), name)


def save(run: Path, step: int, keep: int = 9) -> None:
    processes.save(run / "checkpoints", step, keep)


def path_of(place: str, *parts: str) -> tuple[Any, str]:
    files, root = fsspec.core.url_to_fs(place)
    return files, "/".join([root, "run", *parts])


def damage(place: str, step: int) -> None:
    files, path = path_of(place, f"step-{step:08d}", "shard-00001-of-00002.safetensors")
    whole = files.cat_file(path)
    files.pipe_file(path, whole[:-1] + bytes([whole[-1] ^ 1]))


def break_after(monkeypatch: pytest.MonkeyPatch, place: str, num_files: int, act: Callable[[], object]) -> None:
    """Acts before the file with this number, counted from 0, is sent."""
    kind = type(path_of(place)[0])
    send, sent = kind.put_file, list[str]()

    def put_file(self: Any, source: str, target: str, **options: Any) -> None:
        if len(sent) == num_files:
            act()
        sent.append(target)
        send(self, source, target, **options)

    monkeypatch.setattr(kind, "put_file", put_file)


def test_kept_by_the_same_rules(place: str, run: Path) -> None:
    there = copies(place, keep=2, keep_every=10)
    for step in (5, 10, 15, 22, 25, 26):
        save(run, step)
        there.copy(run / "checkpoints", step)
    assert there.steps() == [10, 22, 25, 26]
    assert there.steps(last="") == [10, 22, 25, 26], "and nothing is left of the others"
    assert not list((run / "checkpoints").glob(".*"))


def test_brought_back_with_its_critic_and_its_settings(place: str, run: Path, tmp_path: Path) -> None:
    save(run, 5)
    processes.save(run / "checkpoints" / CRITIC, 5, keep=2)
    (run / "config.toml").write_text("seed = 3\n")
    copies(place).copy(run / "checkpoints", 5)
    other = tmp_path / "other"
    assert copies(place).bring_back(other) == 5
    assert (other / "config.toml").read_text() == "seed = 3\n"
    store = CheckpointStore(other / "checkpoints", keep=2)
    checkpoint, damaged = store.load_newest([store.substore(CRITIC)])
    assert checkpoint is not None and not damaged
    assert checkpoint.state == processes.state(5)
    assert copies(place, name="another").bring_back(other) is None


def test_the_newest_whole_one_is_brought_back(place: str, run: Path, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(run, step)
        copies(place, keep=3).copy(run / "checkpoints", step)
    damage(place, 15)
    assert copies(place).bring_back(tmp_path / "other") == 10
    assert saved_steps(tmp_path / "other" / "checkpoints") == [10]
    damage(place, 10)
    damage(place, 5)
    with pytest.raises(CopyFailed, match=r"no copy is intact.*step-00000015/shard-00001.* differs from its manifest"):
        copies(place).bring_back(tmp_path / "third")


@pytest.mark.parametrize("num_files", [0, 1, 2])
def test_a_copy_that_was_cut_short_does_not_count(
    place: str, run: Path, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And pushes none out; the next try mends it."""
    there = copies(place, keep=1)
    save(run, 5)
    there.copy(run / "checkpoints", 5)
    save(run, 10)

    def refuse() -> None:
        raise PermissionError("read-only now")

    with monkeypatch.context() as broken:
        break_after(broken, place, num_files, refuse)
        with pytest.raises(CopyFailed, match="PermissionError: read-only now"):
            there.copy(run / "checkpoints", 10)
    assert there.steps() == [5]
    there.copy(run / "checkpoints", 10)
    assert there.steps(last="") == [10]


def test_what_is_removed_meanwhile_is_still_copied(place: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 5)
    with monkeypatch.context() as patched:
        break_after(patched, place, 1, lambda: shutil.rmtree(run / "checkpoints" / "step-00000005"))
        copies(place).copy(run / "checkpoints", 5)
    assert copies(place).bring_back(run) == 5


def test_a_step_that_was_reached_again_replaces_the_other_ones_copy(place: str, run: Path) -> None:
    there, store = copies(place), CheckpointStore(run / "checkpoints", keep=2)
    for content in (1, 2, 2):
        processes.save_whole(store, 5, processes.tensors(content), processes.state(content))
        there.copy(run / "checkpoints", 5)
    shutil.rmtree(run)
    assert there.bring_back(run) == 5
    assert store.load(5).state == processes.state(2)


def test_bytes_that_arrive_otherwise_are_noticed(tmp_path: Path, run: Path) -> None:
    """In a folder, where reading them again is cheap."""
    save(run, 5)
    shard = run / "checkpoints" / "step-00000005" / "shard-00000-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CopyFailed, match=r"shard-00000.* differs from the sent file"):
        copies(str(tmp_path)).copy(run / "checkpoints", 5)
    assert not (tmp_path / "run" / "step-00000005" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/not/mounted", "'/not/mounted' is not a folder"),
        ("nfs4://server/x", r"Protocol not known: nfs4; pip install 'llamarl\[remote\]', or name a mounted folder"),
        ("oci://bucket/x", r"cannot be opened: .*ocifs.*; pip install 'llamarl\[remote\]'"),
    ],
)
def test_places_that_cannot_be(place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint\.copy_to = .*{said}"):
        copies(place)
