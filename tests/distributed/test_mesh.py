"""Ranks meet, compute together, and notice in time that one is missing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.distributed import mesh
from llamarl.distributed.links import Note, RanksLost, Rendezvous, RendezvousStore, connect, open_rendezvous
from llamarl.distributed.store import TorchStore
from llamarl.distributed.watch import open_sockets
from tests.distributed.ranks import Workers, join, rendezvous, results
from tests.nightly import crossed, some

PARTS = [*(bytes([number]) * 100_000 for number in range(3)), b"." * 99_997]
NOTICE_S = 60.0
"""A loss is an error within so many seconds; much less on an idle machine, and 240 s where a collective waits."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def compute(where: Rendezvous, rank: int, size: int) -> dict[str, Any]:
    mesh = join(where, rank, {"tp": size}, timeout_s=240.0)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    with mesh.together():
        found = {
            "exchanged": mesh.exchange({"rank": rank}),
            "sum": mesh.tp.sum(x.clone()),
            "gathered": mesh.tp.gather(torch.tensor([[rank, 7]])),
            "whole": bytes(mesh.gathered({rank: PARTS[rank], 3: PARTS[3]}, [0, 1, 2, 1], sum(map(len, PARTS)))),
            "listens": listening_addresses(),
        }
    mesh.close()
    mesh.close()
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


def listening_ports() -> list[int]:
    """Of this process."""
    found = list[int]()
    for descriptor in open_sockets().values():
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(one.getsockname()[1])
    return found


def compute_deaf(where: Rendezvous, rank: int) -> tuple[int, float]:
    """How many of its ports are there and could be reached, once all have met."""
    mesh = join(where, rank, {"tp": 2}, timeout_s=240.0)
    reached = 0
    for port in (ports := listening_ports()):
        with suppress(TimeoutError):
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            reached += 1
    with mesh.together():
        total = mesh.tp.sum(torch.ones(3))
    mesh.close()
    assert ports and total.tolist() == [2.0, 2.0, 2.0]
    return reached, len(ports)


def test_strangers_reach_no_port_of_ranks_that_have_met(workers: Workers) -> None:
    """gloo would accept them, and end the process without a descriptor for the next."""
    with rendezvous() as where, workers.take(2) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(compute_deaf, where, rank)
        assert [reached for reached, _ in results(ranks)] == [0, 0]


def test_three_ranks_compute_together(workers: Workers) -> None:
    with rendezvous() as where, workers.take(3) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(compute, where, rank, 3)
        found = results(ranks)
    parts = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for one in found:
        assert not isinstance(one, Exception), one
        assert one["exchanged"] == [{"rank": rank} for rank in range(3)]
        torch.testing.assert_close(one["sum"], sum(parts), atol=1e-6, rtol=0)
        assert torch.equal(one["sum"], found[0]["sum"]), "the same bits everywhere"
        assert one["gathered"].tolist() == [[0, 7], [1, 7], [2, 7]]
        assert one["whole"] == b"".join(PARTS)
        assert one["listens"] <= {"0100007F"}, "nobody outside this machine can connect"


def lose(where: Rendezvous, rank: int, size: int, how: str, wait: str) -> tuple[str, float]:
    """The last rank leaves the others alone in a second collective or exchange; what they notice and when."""
    mesh = join(where, rank, {"tp": size}, timeout_s=3.0 if how == "hang" else 240.0)
    mesh.tp.sum(torch.ones(1000))
    start_s = time.monotonic()
    try:
        with mesh.together():
            if rank == size - 1:
                lose_one(how)
            elif wait == "collective":
                mesh.tp.sum(torch.ones(1000))
            elif wait == "parts":
                mesh.gathered({rank: b"." * 1000}, list(range(size)), 1000 * size)
            else:
                mesh.exchange(rank)
    except (RanksLost, ArithmeticError) as error:
        return str(error), time.monotonic() - start_s
    finally:
        mesh.close()
    return "nothing", 0.0


def lose_one(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ArithmeticError("no luck")
    time.sleep(9.0)


CAUSES = {
    "kill": "rank 2 is gone",
    "hang": "rank 2 was in lose_one (test_mesh.py:",
    "raise": "rank 2 failed: ArithmeticError: no luck, in lose_one (test_mesh.py:",
}


@pytest.mark.parametrize(("wait", "how"), some(crossed(["collective", "exchange", "parts"], CAUSES), 2))
def test_a_lost_rank_is_noticed(workers: Workers, how: str, wait: str) -> None:
    with rendezvous() as where, workers.take(3) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(lose, where, rank, 3, how, wait)
        found = results(ranks[:2])
        if how == "kill":
            with pytest.raises(EOFError):
                ranks[2].result()
            ranks[2].process.join(NOTICE_S)
        else:
            assert ranks[2].result()[0].startswith("no luck" if how == "raise" else "rank 2 was in ")
    for message, after_s in found:
        assert message.startswith(CAUSES[how])
        assert after_s < NOTICE_S
        if how == "hang":
            assert "; rank 0 waited in " in message


def meet(where: Rendezvous, rank: int, size: int, start_timeout_s: float) -> str:
    try:
        join(where, rank, {"tp": size}, start_timeout_s=start_timeout_s).close()
    except RanksLost as error:
        return str(error)
    return "met"


def test_a_rank_that_never_comes(workers: Workers) -> None:
    with rendezvous() as where, workers.take(2) as ranks:
        for rank, worker in enumerate(ranks):
            worker.start(meet, where, rank, 3, 2.0)
        found = results(ranks)
        for worker in ranks:  # torch does not reset its count of groups
            worker.kill()
    for rank, message in enumerate(found):
        assert message.startswith(f"rank {rank} did not meet all 3 ranks in 2 s: ")


def test_a_stranger_is_turned_away(workers: Workers) -> None:
    """By the store and by rank 0, who go on to wait for those that know the secret."""
    with rendezvous() as where, workers.take(2) as ranks:
        ranks[0].start(meet, where, 0, 2, 240.0)
        store = TorchStore(where, 240.0)
        for address in (where.address, store.get("rank 0").decode()):
            host, port = address.split(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\0\0\0\x04none")
            with pytest.raises(AuthenticationError):
                connect(address, "guessed", 240.0)
        store.close()
        ranks[1].start(meet, where, 1, 2, 240.0)
        assert results(ranks) == ["met", "met"]


def test_ranks_that_are_replaced_leave_nothing_behind() -> None:
    """Where they met, whether they left, died or never all came: no thread, no socket."""
    before = open_sockets().keys()
    for epoch in range(5):
        where = open_rendezvous(2, 60.0)
        assert where is not None
        held = [connection for rank in range(2) for connection in (where.connect(), where.connect(rank))]
        if epoch:
            held[1].send(None)
        for connection in held:
            connection.close()
    assert open_rendezvous(2, 0.05) is not None
    threads = [thread for thread in threading.enumerate() if thread.name == "entrance"]
    for thread in threads:
        thread.join(NOTICE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not open_sockets().keys() - before


def test_who_comes_later_hears_what_was_said() -> None:
    note = Note(0, "failed", "rank 0 failed: no luck", "no luck")
    with closing(RendezvousStore(3)) as store, store.rendezvous.connect(0) as first:
        first.send(note)
        assert first.poll(NOTICE_S) and first.recv() == note
        with store.rendezvous.connect(1) as late:
            assert late.poll(NOTICE_S) and late.recv() == note


@pytest.mark.parametrize("given", [None, "eth7"])
def test_the_environment_stays_as_the_user_has_set_it(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While groups are made they listen at the loopback, or where the user says."""
    name, seen = "GLOO_SOCKET_IFNAME", list[str]()

    def open_groups(*_: Any) -> None:
        seen.append(os.environ[name])
        raise RuntimeError("none today")

    monkeypatch.setattr(mesh, "_open_groups", open_groups)
    monkeypatch.delenv(name, raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", **({name: given} if given else {})}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(mesh.RankLinks, "listen", lambda *_: None)
    with pytest.raises(RanksLost, match="none today"):
        mesh.join_mesh({"fsdp": 2}, open_rendezvous(2, 5.0), mesh.CPU, start_timeout_s=5.0)
    assert seen == [given or "lo"] and os.environ.get(name) == given


def test_nccl_is_bound_to_the_device_and_leaves_failures_to_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()

    def begin(backend: str, **options: Any) -> None:
        asked.update(options, backend=backend, handling=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        raise RuntimeError("no GPU")

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # torch's own default, which ends the process
    monkeypatch.setattr(mesh.dist, "init_process_group", begin)
    store, gpu = Any, torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="no GPU"):
        mesh._open_groups(store, (1, 2, 1, 1), gpu, 0, 2, 60.0)  # pyrefly: ignore[bad-argument-type]
    assert (asked["backend"], asked["device_id"], asked["handling"]) == ("cpu:gloo,cuda:nccl", gpu, "0")


@pytest.mark.parametrize(
    ("shape", "given", "ordered"),
    [((1, 2, 1, 1), None, "1"), ((1, 2, 2, 1), None, "1"), ((1, 1, 1, 2), None, None), ((1, 2, 1, 1), "0", "0")],
)
def test_nccl_starts_groups_of_the_same_ranks_in_one_order(
    shape: tuple[int, ...], given: str | None, ordered: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a trainer. Ranks that share a generator have one group, and the order has a price there."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setattr(mesh.dist, "init_process_group", explode)
    with pytest.raises(RuntimeError, match="no GPU"):
        mesh._open_groups(Any, shape, torch.device("cuda", 0), 0, 2, 60.0)  # pyrefly: ignore[bad-argument-type]
    assert os.environ.get(name) == ordered


def explode(*_: Any, **__: Any) -> None:
    raise RuntimeError("no GPU")
