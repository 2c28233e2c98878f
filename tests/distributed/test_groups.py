"""Ranks meet, compute together, and notice in time that one is missing."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.distributed.groups import RankGroup, RanksLost
from tests.distributed.ranks import Workers, meeting, results

NOTICE_S = 5.0
"""A loss is an error within so many seconds; much less on an idle machine."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def compute(path: Path, rank: int, size: int) -> dict[str, Any]:
    group = RankGroup(path, rank=rank, size=size, timeout_s=20.0)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    found = {
        "exchanged": group.exchange({"rank": rank}),
        "sum": group.all_reduce(x.clone(), "add"),
        "transposed": group.all_reduce(torch.full((3, 2), float(rank)).T, "add"),
        "gathered": group.all_gather(torch.tensor([[rank, 7]]), "gather"),
        "listens": listening_addresses(),
    }
    group.close()
    group.close()
    return found


def listening_addresses() -> set[str]:
    """IPv4 and IPv6 addresses where this process listens, in the kernel's hexadecimal digits."""
    inodes = {target[8:-1] for fd in os.listdir("/proc/self/fd") if (target := link_of(fd)).startswith("socket:[")}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().split("\n")[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line and line[3] == "0A" and line[9] in inodes}


def link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor of the listing itself
        return ""


def test_three_ranks_compute_together(workers: Workers) -> None:
    with meeting() as path, workers.take(3) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(compute, path, rank, 3)
        found = results(ranks)
    parts = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for one in found:
        assert not isinstance(one, Exception), one
        assert one["exchanged"] == [{"rank": rank} for rank in range(3)]
        torch.testing.assert_close(one["sum"], sum(parts), atol=1e-6, rtol=0)
        assert torch.equal(one["sum"], found[0]["sum"]), "the same bits everywhere"
        assert torch.equal(one["transposed"], torch.full((2, 3), 3.0))
        assert one["gathered"].tolist() == [[[0, 7]], [[1, 7]], [[2, 7]]]
        assert one["listens"] <= {"0100007F"}, "nobody outside this machine can connect"


def lose(path: Path, rank: int, size: int, how: str) -> tuple[str, float]:
    """The last rank leaves the others alone in the second collective; what they notice and when."""
    group = RankGroup(path, rank=rank, size=size, timeout_s=1.5 if how == "hang" else 30.0)
    group.all_reduce(torch.ones(1000), "add once")
    start_s = time.monotonic()
    if rank == size - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            group.leave_collectives()
        group.poll(0, 10.0)  # until rank 0 has closed
        group.close()
        return "", 0.0
    try:
        group.all_reduce(torch.ones(1000), "add twice")
    except RanksLost as error:
        return str(error), time.monotonic() - start_s
    finally:
        group.close()
    return "nothing", 0.0


@pytest.mark.parametrize(("how", "cause"), [("kill", ""), ("leave", ""), ("hang", "Timed out waiting 1500ms")])
def test_a_lost_rank_is_noticed(workers: Workers, how: str, cause: str) -> None:
    with meeting() as path, workers.take(3) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(lose, path, rank, 3, how)
        found = results(ranks[:2])
        if how == "kill":
            with pytest.raises(EOFError):
                ranks[2].result()
            ranks[2].process.join(NOTICE_S)
        else:
            assert ranks[2].result() == ("", 0.0)
    for rank, (message, after_s) in enumerate(found):
        assert message.startswith(f"rank {rank} of 3 could not add twice: ") and cause in message
        assert after_s < NOTICE_S


def join(path: Path, rank: int, size: int, start_timeout_s: float) -> str:
    try:
        RankGroup(path, rank=rank, size=size, start_timeout_s=start_timeout_s).close()
    except RanksLost as error:
        return str(error)
    return "met"


def test_a_rank_that_never_comes(workers: Workers) -> None:
    with meeting() as path, workers.take(2) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(join, path, rank, 3, 2.0)
        found = results(ranks)
    for rank, message in enumerate(found):
        assert message.startswith(f"rank {rank} did not meet all 3 ranks in 2 s: ")


def knock(path: Path) -> str:
    """A process that does not know the secret, before rank 1 comes."""
    while not (path.exists() and b":" in path.read_bytes()):
        time.sleep(0.01)
    port = path.read_bytes().split(b"127.0.0.1:")[1].split(b"\0")[0]
    digits = bytes(digit for digit in port if 48 <= digit < 58)
    with socket.create_connection(("127.0.0.1", int(digits))) as stranger:
        stranger.sendall(b"\0\0\0\x04none")
    return join(path, 1, 2, 30.0)


def test_a_stranger_is_turned_away(workers: Workers) -> None:
    with meeting() as path, workers.take(2) as ranks:
        ranks[0].start(join, path, 0, 2, 30.0)
        ranks[1].start(knock, path)
        assert results(ranks) == ["met", "met"]


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AssertionError, match="others may enter"):
        RankGroup(tmp_path / "meeting", rank=0, size=2)
