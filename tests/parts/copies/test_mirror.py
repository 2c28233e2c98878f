"""States in memory: the newest that all ranks have whole, and never a torn or a later one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamarl.checkpoint import keeper
from llamarl.checkpoint.keeper import MirrorKeeper, Place
from llamarl.config import ConfigError
from llamarl.parts.copies import mirror
from llamarl.parts.copies.mirror import Mirror, Shards
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
    one._written.result(timeout=240)


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


class Ranks:
    """Mirrors of ranks, in threads, on hosts with a folder each; `keepers` of some hosts."""

    def __init__(self, folders: Sequence[Path], keepers: Sequence[Place] = ()) -> None:
        self._values: list[Any] = [None] * len(folders)
        self._barrier = threading.Barrier(len(folders), timeout=240)
        self.all = self.each(
            lambda rank: Mirror(folders[rank], rank, len(folders), lambda value: self._exchange(rank, value), keepers)
        )

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """Results of all ranks at once."""
        with ThreadPoolExecutor(len(self._values)) as pool:
            return list(pool.map(call, range(len(self._values))))

    def load(self, newest: int) -> list[Any]:
        return self.each(lambda rank: self.all[rank].load(newest))


def test_ranks_agree(tmp_path: Path) -> None:
    """The second was killed before it had written the last step, and its other state is damaged."""
    ranks = Ranks([tmp_path, tmp_path])
    for step in (1, 2):
        save(ranks.all[0], step)
    save(ranks.all[1], 1, rank=1)
    assert [state.step for state in ranks.load(2)] == [1, 1]
    path = tmp_path / "1-of-2/step-00000001.tensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert ranks.load(2) == [None, None]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], MirrorKeeper]]:
    """Hosts by name, each with a keeper and memory of its own; this thread's is the one that was asked for last."""
    found, now = dict[str, MirrorKeeper](), [""]

    def host(name: str) -> MirrorKeeper:
        now[0] = name
        if name not in found:
            found[name] = MirrorKeeper(tmp_path / name, name)
        return found[name]

    monkeypatch.setattr(mirror, "own_address", lambda: now[0])
    yield host
    for one in found.values():
        one.close()


A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


def test_what_was_on_a_lost_host_comes_from_another(tmp_path: Path, hosts: Any) -> None:
    """In the same layout or another; and from the next one that is asked, if the first is gone."""
    places = [hosts(name).place for name in (A, B, C)]
    hosts(A)
    ranks = Ranks([tmp_path / A / "run/trainer"] * 2, places)
    for step in (1, 2, 3):
        for rank, one in enumerate(ranks.all):
            save(one, step, rank)
    assert {part.name for part in tmp_path.glob("*/run/trainer/*")} == {"0-of-2", "1-of-2"}
    assert len(list(tmp_path.glob("127.0.0.[34]/run/trainer/*/step-0000000[23]"))) == 4, "two, of each, elsewhere"
    hosts(A).close()
    shutil.rmtree(tmp_path / A)

    hosts(B)
    again = Ranks([tmp_path / B / "run/trainer"] * 2, places)
    states = again.load(9)
    assert [state.step for state in states] == [3, 3]
    assert torch.equal(states[1].read("w", Box((2, 0), (4, 3))), torch.full((2, 3), 3.0))

    hosts(C)
    alone = Ranks([tmp_path / C / "run/trainer"], places)
    (state,) = alone.load(2)
    assert (state.step, state.state, state.shapes) == (2, {"policy_version": 2}, {"w": (4, 3), "w:step": ()})
    assert torch.equal(state.read("w", Box.whole((4, 3))), torch.full((4, 3), 2.0))
    assert torch.equal(state.read("w", Box((1, 1), (4, 2))), torch.full((3, 1), 2.0))
    assert state.read("w:step", Box.whole(())).item() == 2.0
    for step in (3, 4, 5):
        alone.all[0].save(step, whole(float(step)), {})
        wait(alone.all[0])
    assert {part.parent.name for part in tmp_path.glob("127.0.0.[34]/run/trainer/*/*")} == {"0-of-1"}, "what was before"


def whole(value: float) -> Shards:
    box = Box.whole((4, 3))
    return {"w": (TensorSpec(name="w", global_shape=(4, 3), dtype="F32", box=box), torch.full((4, 3), value))}


def test_a_part_that_is_nowhere_makes_no_state(tmp_path: Path, hosts: Any) -> None:
    places = [hosts(name).place for name in (A, B)]
    hosts(A)
    ranks = Ranks([tmp_path / A / "run/trainer"] * 2, places)
    save(ranks.all[0], 1)
    save(ranks.all[1], 1, rank=1)
    shutil.rmtree(tmp_path / A)
    shutil.rmtree(tmp_path / B / "run/trainer/0-of-2")
    hosts(B)
    assert Ranks([tmp_path / B / "run/trainer"], places).load(9) == [None]


def test_nobody_elsewhere_keeps_it(tmp_path: Path, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is here, and said; who comes later is asked."""
    places = [hosts(name).place for name in (A, B)]
    hosts(A)
    (one,) = Ranks([tmp_path / A / "run/trainer"], places).all
    one.check_space(1000)
    free = shutil.disk_usage(tmp_path).free
    there = f"{tmp_path}/{B}"
    monkeypatch.setattr(shutil, "disk_usage", lambda at: SimpleNamespace(free=free * (1 if f"{at}" == there else 9)))
    with pytest.raises(ConfigError, match=r"checkpoint.mirror = true needs .* on 127.0.0.3, which keeps the state of"):
        one.check_space(free // 2)
    monkeypatch.undo()
    monkeypatch.setattr(mirror, "own_address", lambda: A)
    hosts(B).close()
    one.save(1, shards(1.0), {})
    assert one._written is not None
    assert str(one._written.exception(timeout=240)).startswith(f"no other host can keep it ({B}: ")
    one.choose_keepers([hosts(C).place])
    save(one, 2)
    assert (tmp_path / C / "run/trainer/0-of-1/step-00000002").exists()


def test_a_keeper_gives_and_takes_states_alone(tmp_path: Path, hosts: Any) -> None:
    place = hosts(A).place
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", "run/trainer/../../secret", "/etc/passwd", "run/0-of-1/step-00000001/../x"):
        with pytest.raises((EOFError, OSError)):
            keeper.ask(place, "give", name)
    assert keeper.ask(place, "held", "..") == {}
    with pytest.raises((EOFError, OSError, AuthenticationError)):
        keeper.ask((place[0], "another"), "free")


def test_states_travel_at_the_pace_of_their_way(tmp_path: Path, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever end sends: over a bad way a state takes the longer, the more steps have to be taken again."""
    paced = list[Any]()
    monkeypatch.setattr(keeper, "keep_pace", paced.append)
    places = [hosts(name).place for name in (A, B)]
    hosts(A)
    save(Ranks([tmp_path / A / "run/trainer"], places).all[0], 1)
    assert len(paced) == 1
    hosts(A).close()

    shutil.move(tmp_path / B / "run", tmp_path / C / "run")
    third = hosts(C).place
    hosts(B)
    assert [one.step for one in Ranks([tmp_path / B / "run/trainer"], [third]).load(9)] == [1]
    assert len(paced) == 2


def test_a_slow_memory_skips_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    writes = list[Any]()
    monkeypatch.setattr(mirror, "run_in_background", lambda work: writes.append(work) or torch.futures.Future())
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
    one.check_space(1000)
    with pytest.raises(ConfigError, match=r"checkpoint.mirror = true needs 2.8e\+03 GiB in .* GiB are free; make it"):
        one.check_space(10**12)


def test_what_cannot_be_written_is_said_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Mirror(tmp_path, 0, 1, lambda value: [value])
    folder = tmp_path / "0-of-1"
    folder.rename(tmp_path / "away")
    one.save(1, shards(1.0), {})
    assert one._written is not None and isinstance(one._written.exception(timeout=240), OSError)
    (tmp_path / "away").rename(folder)
    save(one, 2)
    assert "no mirror of this step: [Errno 2]" in capsys.readouterr().out
    state = one.load(9)
    assert state is not None and state.step == 2
