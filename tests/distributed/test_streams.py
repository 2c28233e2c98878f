"""Bytes through a connection; both ends are in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import numpy as np
import pytest

from llamarl.distributed.links import MAX_PIECES, RendezvousStore, receive, send
from tests.nightly import nightly

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends that know the secret; reads of the first wait for at most 2 s."""
    came, over = list[Connection](), threading.Event()

    def serve(connection: Connection, _: str) -> None:
        came.append(connection)
        over.wait(240)

    with closing(RendezvousStore(serve=serve)) as store, store.rendezvous.connect("bytes", 2.0) as ours:
        while not came:
            time.sleep(0.001)
        yield ours, came[0]
        over.set()


def cut(data: np.ndarray, seed: int) -> list[memoryview]:
    bounds = np.sort(np.random.default_rng(seed).integers(0, len(data), 3 * MAX_PIECES))
    return [piece.data for piece in np.split(data, bounds)]  # some of them empty


def test_pieces_arrive_in_order_however_they_are_cut(ends: Ends) -> None:
    ours, theirs = ends
    data, found = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8), np.zeros(3_000_000, np.uint8)
    sender = threading.Thread(target=send, args=(theirs, cut(data, 1)))
    sender.start()
    receive(ours, cut(found, 2))
    sender.join(240)
    assert np.array_equal(found, data)
    theirs.send("messages go on")
    assert ours.recv() == "messages go on"


@nightly("real time; by day streams carry, refuse and end")
def test_silence_slowness_and_death_have_an_end(ends: Ends) -> None:
    ours, theirs = ends
    room = bytearray(100)
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match="silent"):
        receive(ours, [memoryview(room)])
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            send(theirs, [memoryview(b"x")])

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError, match="slow"):
        receive(ours, [memoryview(room)], time.monotonic() + 0.5)
    over.set()
    dripping.join(240)
    theirs.close()
    with pytest.raises(EOFError, match="gone"):
        receive(ours, [memoryview(bytearray(1000))])
    assert time.monotonic() - started_s < 60
