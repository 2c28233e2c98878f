"""Two processes that pair up: here, two ends in one."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection

import pytest
import torch

from llamarl.distributed.pair import Pair
from llamarl.distributed.rendezvous import RendezvousStore


def test_tensors_go_both_ways_and_silence_has_an_end() -> None:
    done = threading.Event()

    def serve(connection: Connection, name: str) -> None:
        with closing(Pair(connection, store.rendezvous, name, 0, 1.0)) as pair:
            x = torch.empty(1000)
            pair.receive(x).wait()
            pair.send(2 * x).wait()
            done.wait(10)

    with closing(RendezvousStore(serve=serve)) as store:
        connection = store.rendezvous.connect("doubles")
        with closing(Pair(connection, store.rendezvous, "doubles", 1, 1.0)) as pair:
            x, y = torch.randn(1000), torch.empty(1000)
            pair.send(x).wait()
            pair.receive(y).wait()
            assert torch.equal(y, 2 * x)
            start_s = time.monotonic()
            with pytest.raises(RuntimeError, match="gloo"):
                pair.receive(y).wait()
            assert 0.5 < time.monotonic() - start_s < 5
        done.set()


def test_another_end_that_never_comes_is_missed_in_time() -> None:
    with closing(RendezvousStore(serve=lambda connection, name: None)) as store:
        connection = store.rendezvous.connect("nobody")
        with pytest.raises(RuntimeError, match="no rank has set"):
            Pair(connection, store.rendezvous, "nobody", 1, 0.5)
        connection.close()
