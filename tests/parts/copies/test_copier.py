"""Copies beside a run: the newest wins, a refusal is said once, and the end waits for the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig
from llamarl.parts.copies import copier as copying
from llamarl.parts.copies.copier import CheckpointCopier
from llamarl.parts.copies.remote import RemoteCopies
from llamarl.run.copies import CopyFailed
from llamarl.run.folder import RunFolder, prepare_run_folder

DEADLINE_S = 240.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(copying, "LOOK_S", 0.01)
    (tmp_path / "there").mkdir()
    return RunConfig.model_validate(
        {
            "name": "one",
            "output": str(tmp_path / "runs"),
            "model": {"path": "nowhere"},
            "data": {"train": {"name": "running_total", "count": 4}},
            "checkpoint": {"copy_to": str(tmp_path / "there"), "keep": 1, "keep_every": 10},
        }
    )


def commit(folder: RunFolder, step: int) -> None:
    """An empty one."""
    from llamarl.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder.checkpoints, keep=9)
    store.save(step, {}, {"step": step}).result(DEADLINE_S)
    committed = store.commit()
    assert committed is not None
    committed.result(DEADLINE_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def beside(work: Callable[[], Coroutine[None, None, None]], copies: CheckpointCopier) -> None:
    async def both() -> None:
        loop = asyncio.create_task(copies.loop())
        try:
            await work()
        finally:
            loop.cancel()

    asyncio.run(both())


def test_the_newest_first_then_those_for_good(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said, order = RunFolder(Path(config.output, "one")), list[str](), list[int]()
    copy = RemoteCopies.copy

    def record(self: RemoteCopies, checkpoints: Path, step: int) -> None:
        order.append(step)
        copy(self, checkpoints, step)
        if step == 25:
            commit(folder, 30)

    monkeypatch.setattr(RemoteCopies, "copy", record)
    for step in (10, 15, 20, 25):
        commit(folder, step)
    copies = CheckpointCopier(config, folder, said.append)
    beside(lambda: copies.finish(said.append), copies)
    assert order == [25, 30, 10, 20]
    assert RemoteCopies(config.checkpoint, "one").steps() == [10, 20, 25, 30], "25 came before 20 did"
    assert said == [f"copying the last checkpoint to {config.checkpoint.copy_to}/one, at most 120 s"]
    commit(folder, 40)
    again = CheckpointCopier(config, folder, said.append)
    beside(lambda: again.finish(lambda _: None), again)
    assert RemoteCopies(config.checkpoint, "one").steps() == [10, 20, 30, 40]
    assert len(said) == 1


def test_a_refusal_is_said_once_and_its_end_too(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said, tries = RunFolder(Path(config.output, "one")), list[str](), list[int]()
    copy, refuses = RemoteCopies.copy, True

    def maybe(self: RemoteCopies, checkpoints: Path, step: int) -> None:
        tries.append(step)
        if refuses:
            raise CopyFailed("no route to host")
        copy(self, checkpoints, step)

    monkeypatch.setattr(RemoteCopies, "copy", maybe)
    commit(folder, 5)
    copies = CheckpointCopier(config, folder, said.append)

    async def work() -> None:
        nonlocal refuses
        await until(lambda: len(tries) > 2)
        monkeypatch.setattr(copying, "LAST_COPY_S", 0.2)
        await copies.finish(lambda _: None)
        refuses = False
        await until(lambda: len(said) == 3)

    beside(work, copies)
    place = f"{config.checkpoint.copy_to}/one"
    assert said == [
        f"the checkpoint of step 5 has not been copied to {place} yet: no route to host",
        f"the checkpoint of step 5 is not in {place} after 0.2 s: no route to host",
        f"checkpoints are copied to {place} again",
    ]


def test_a_run_whose_folder_is_gone_comes_back(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        commit(folder, 5)
        RemoteCopies(config.checkpoint, "one").copy(folder.checkpoints, 5)
    folder.path.rename(folder.path.with_name("lost"))
    with pytest.raises(ConfigError, match=r"there/one holds checkpoints of a run; resume it \(--resume\)"):
        prepare_run_folder(config, resume=False, overwrite=False)
    other = config.model_copy(update={"seed": 1})
    with pytest.raises(ConfigError, match="seed was 0 when the run began and is 1 now"):
        prepare_run_folder(other, resume=True, overwrite=False)
    with prepare_run_folder(config, resume=True, overwrite=False) as again:
        assert again.saved_steps() == [5]
    assert capsys.readouterr().err.startswith("--resume: the checkpoint of step 5 was restored from ")
    with prepare_run_folder(config, resume=False, overwrite=True):
        assert not RemoteCopies(config.checkpoint, "one").steps(last=""), "they are not of the run that begins"
