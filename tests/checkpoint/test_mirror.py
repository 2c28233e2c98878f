"""States in memory: the newest that all ranks have whole, and never a torn or a later one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.checkpoint import mirror
from llamarl.checkpoint.mirror import Mirror, Shards
from llamarl.config import ConfigError
from llamarl.sharding.box import Box
from llamarl.weight_sync.layout import TensorSpec


def shards(value: float, rank: int = 0) -> Shards:
    """A half of a matrix each, and a scalar that all have."""
    box = Box((2 * rank, 0), (2 * rank + 2, 3))
    half = TensorSpec(name="w", global_shape=(4, 3), dtype="F32", box=box)
    count = TensorSpec(name="w:step", global_shape=(), dtype="F32", box=Box.whole(()))
    return {"w": (half, torch.full((2, 3), value)), "w:step": (count, torch.tensor(value))}


def wait(one: Mirror) -> None:
    assert one._written is not None
    one._written.result(timeout=10)


def save(one: Mirror, step: int, rank: int = 0) -> None:
    held = shards(float(step), rank)
    one.save(step, held, {"policy_version": step})
    held["w"][1].zero_()  # what is written are copies
    wait(one)


def test_the_newest_up_to_a_step(tmp_path: Path) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    assert one.load(9) is None
    for step in (1, 2, 3):
        save(one, step)
    for newest, expected in ((9, 3), (3, 3), (2, 2)):
        state = one.load(newest)
        assert state is not None and state.step == expected == state.state["policy_version"]
        assert state.shapes == {"w": (4, 3), "w:step": ()}
        assert torch.equal(state.read("w", Box.whole((4, 3))), torch.full((2, 3), float(expected)))
        assert state.read("w:step", Box.whole(())).shape == ()
    assert one.load(1) is None, "two are kept"
    assert len(list(tmp_path.rglob("*.tensors"))) == 2


@pytest.mark.parametrize("how", ["bit", "truncated", "gone", "unfinished"])
def test_a_torn_state_is_none(tmp_path: Path, how: str) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    save(one, 4)
    save(one, 5)
    path = tmp_path / "0-of-1/step-00000005.tensors"
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "unfinished":  # killed before it counted
        path.with_suffix("").unlink()
    else:
        data[-1] ^= 1
        path.write_bytes(data if how == "bit" else data[:-4])
    state = one.load(5)
    assert state is not None and state.step == 4


def test_ranks_agree(tmp_path: Path) -> None:
    """The second was killed before it had written the last step, and its other state is damaged."""
    ranks = [Mirror(tmp_path, rank, 2, lambda value: [value]) for rank in range(2)]
    for step in (1, 2):
        save(ranks[0], step)
    save(ranks[1], 1, rank=1)

    def loads(newest: int) -> list[int | None]:
        answers = list[list[Any]]()

        def exchange(rank: int):
            calls = iter(range(9))

            def both(value: Any) -> Sequence[Any]:
                n = next(calls)
                if rank == 0:  # what the other will say is found by asking it alone
                    other = [[1], ranks[1]._read(1) is not None][min(n, 1)]
                    answers.append([value, other])
                return answers[n]

            return both

        found = []
        for rank, one in enumerate(ranks):
            one._exchange = exchange(rank)
            state = one.load(newest)
            found.append(state and state.step)
        return found

    assert loads(2) == [1, 1]
    path = tmp_path / "1-of-2/step-00000001.tensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert loads(2) == [None, None]


def test_a_slow_memory_skips_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    writes = list[Any]()
    monkeypatch.setattr(mirror, "aside", lambda work: writes.append(work) or torch.futures.Future())
    held = shards(1.0)
    one.save(1, held, {})
    one.save(2, shards(2.0), {})
    assert len(writes) == 1
    held["w"][1].zero_()  # the next step, before the copy of this one is written
    writes[0]()
    state = one.load(9)
    assert state is not None and state.read("w", Box.whole((4, 3)))[0, 0] == 1.0


def test_without_room_it_is_refused_by_its_option(tmp_path: Path) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    one.check_room(1000)
    with pytest.raises(ConfigError, match=r"checkpoint.mirror = true needs 2.8e\+03 GiB in .* GiB are free; make it"):
        one.check_room(10**12)


def test_what_cannot_be_written_is_said_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    folder = tmp_path / "0-of-1"
    folder.rename(tmp_path / "away")
    one.save(1, shards(1.0), {})
    assert one._written is not None and isinstance(one._written.exception(timeout=10), OSError)
    (tmp_path / "away").rename(folder)
    save(one, 2)
    assert "no mirror of this step: [Errno 2]" in capsys.readouterr().out
    state = one.load(9)
    assert state is not None and state.step == 2
