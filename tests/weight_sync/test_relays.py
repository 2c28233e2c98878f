"""Replicas on several hosts, here addresses of the loopback, pass weights on; what a relay does wrong harms nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import weight_processes as processes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import Trainer, faults

from llamarl.weight_sync import relays
from llamarl.weight_sync.base import Superseded, TransferFailed
from llamarl.weight_sync.relays import TIRED_VERSIONS, Chains, Relay, host_of
from llamarl.weight_sync.transports import p2p
from llamarl.weight_sync.transports.p2p import P2pPublisher, P2pSubscriber
from tests.nightly import NIGHTLY, also, nightly

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SPECS = processes.wanted(2, "float32")
SILENT_S, SILENT = 0.3, relays.SILENT_S


class Replicas:
    """A trainer of two ranks on 127.0.0.1 and replicas of two ranks each, one replica on a host."""

    def __init__(self, folder: Path, hosts: tuple[str, ...] = HOSTS) -> None:
        self.trainer = Trainer("p2p", SPECS, 2, folder, host="127.0.0.1")
        self.weights = dict[int, Any]()
        self.ranks = [P2pSubscriber(specs, rank, host=host) for host in hosts for rank, specs in enumerate(SPECS)]

    def publish(self, version: int, in_use: tuple[int, ...] = ()) -> Any:
        self.weights[version] = processes.whole(version)
        return self.trainer.publish(version, self.weights[version], in_use)

    def fetch(self, version: int, address: Any) -> list[list[str]]:
        """All ranks at once: the tensors of each that are wrong."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            jobs = [pool.submit(faults, one, version, address, self.weights[version]) for one in self.ranks]
            return [job.result(240) for job in jobs]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.trainer.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many buckets, and little patience."""
    monkeypatch.setattr(P2pPublisher, "BUCKET_BYTES", 512)
    monkeypatch.setattr(relays, "SILENT_S", SILENT_S)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path)
    yield made
    made.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that trainer ranks and relays send, from now on."""
    found = Counter[str]()

    def counted(name: str, send: Callable[..., None]) -> Callable[..., None]:
        def send_one(connection: Any, pieces: Any) -> None:
            given = list(pieces)
            found[name] += sum(piece.nbytes for piece in given)
            send(connection, given)

        return send_one

    for module, name in ((p2p, "trainer"), (relays, "relays")):
        monkeypatch.setattr(module, "send", counted(name, module.send))
    return found


def test_the_trainer_sends_each_byte_once_however_many_hosts_there_are(replicas, sent, monkeypatch) -> None:
    monkeypatch.setattr(relays, "SILENT_S", 200.0)  # a busy machine is silent for a while
    for version in range(3):
        sent.clear()
        assert not any(replicas.fetch(version, replicas.publish(version, (version - 1,))))
        assert sent["relays"] == (len(HOSTS) - 1) * sent["trainer"]
        copy = sum(spec.num_bytes for specs in SPECS for spec in specs)
        assert copy <= sent["trainer"] < 1.3 * copy, "between small parts are gaps"


def test_replicas_on_the_trainer_s_host_or_alone_take_no_relay(tmp_path, sent) -> None:
    near = Replicas(tmp_path, ("127.0.0.1", "127.0.0.1", "127.0.0.2"))
    assert not any(near.fetch(0, near.publish(0)))
    assert sent["relays"] == 0
    near.close()


def test_a_single_bucket_takes_no_relay(tmp_path, sent, monkeypatch) -> None:
    monkeypatch.setattr(P2pPublisher, "BUCKET_BYTES", 1 << 20)
    made = Replicas(tmp_path)
    assert not any(made.fetch(0, made.publish(0)))
    made.close()
    assert sent["trainer"] and not sent["relays"]


def test_a_version_takes_one_question_to_each_who_sends_it(replicas, monkeypatch) -> None:
    """Each costs a round trip, however little is sent."""
    monkeypatch.setattr(relays, "SILENT_S", 200.0)  # a busy machine is silent for a while
    said, send_bytes = Counter[str](), Connection._send_bytes

    def counted(connection: Connection, message: Any) -> None:
        said[threading.current_thread().name.rpartition("_")[0]] += 1
        send_bytes(connection, message)

    monkeypatch.setattr(Connection, "_send_bytes", counted)
    num_streams = 2 * 2 * len(replicas.ranks)  # two of two trainer ranks each
    num_relayed = num_streams * (len(HOSTS) - 1) // len(HOSTS)
    for version in range(3):
        address = replicas.publish(version, (version - 1,))
        said.clear()
        for one in replicas.ranks:  # who comes in the same order finds the same relays
            assert not faults(one, version, address, replicas.weights[version])
    assert said["MainThread"] == 0 and said["weight-receiver"] == num_streams + num_relayed


class Fault:
    """What befalls the relay on one host before it passes on its bucket number `point`."""

    def __init__(self, kind: str, host: str, point: int) -> None:
        self._kind, self._host, self._point = kind, host, point
        self._here, self._num, self._lock = threading.local(), 0, threading.Lock()
        self.over = threading.Event()
        self.struck = False

    def is_there(self, relay: Relay, passing: Any, key: Any, wait_s: float, found: Callable[..., bool]) -> bool:
        """In place of `Relay._is_there`."""
        there = found(relay, passing, key, wait_s)
        with self._lock:
            self._num += there and host_of(relay.place) == self._host
            strikes = there and host_of(relay.place) == self._host and self._num > self._point
        self._here.damages = strikes and self._kind == "corrupt"
        self.struck |= strikes
        if strikes and self._kind == "die":
            raise ConnectionResetError("dead")
        if strikes and self._kind == "freeze":
            self.over.wait(240)
            raise ConnectionResetError("thawed")
        if strikes and self._kind == "crawl":
            time.sleep(0.1)
        return there

    def send(self, connection: Any, pieces: Any, send: Callable[..., None]) -> None:
        """In place of `send`, which it damages."""
        given = [memoryview(bytearray(piece)) for piece in pieces]
        if getattr(self._here, "damages", False):
            for piece in given:
                if piece.nbytes:
                    piece[0] ^= 1
        send(connection, given)


@nightly("many moments, real time; by day relays send each byte once and are dropped when they die")
@pytest.mark.parametrize("kind", ["die", "corrupt", *also("freeze", "crawl")])
@given(host=st.sampled_from(HOSTS), point=st.integers(0, 25))
@settings(deadline=None, max_examples=8 if NIGHTLY else 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_relay_that_fails_at_any_moment_harms_nobody(kind, host, point, tmp_path) -> None:
    """What it has not passed on comes from the trainer, in time and bit for bit, and the next version, too."""
    fault, found, send = Fault(kind, host, point), Relay._is_there, relays.send
    made = Replicas(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays, "SLOWER", 1.0)
        assert not any(made.fetch(0, made.publish(0)))
        patch.setattr(Relay, "_is_there", lambda *args: fault.is_there(*args, found))
        patch.setattr(relays, "send", lambda *args: fault.send(*args, send))
        for version in (1, 2):
            started_s = time.monotonic()
            assert not any(made.fetch(version, made.publish(version, (version - 1,))))
            assert time.monotonic() - started_s < 50, "a fetch that waits for it takes 60 s"
        fault.over.set()
    made.close()


@nightly("many moments, real time; by day relays send each byte once and are dropped when they die")
def test_one_that_was_silent_passes_nothing_on_for_a_while(replicas, monkeypatch) -> None:
    """Each trainer rank is told of it by the streams of one version."""
    found, leave, thawed, left = Relay._is_there, Chains.leave, threading.Event(), Counter[tuple[int, str]]()

    def is_there(relay: Relay, *args: Any) -> bool:
        if host_of(relay.place) == HOSTS[0] and not thawed.is_set():
            thawed.wait(240)
        return found(relay, *args)

    def counted(chains: Chains, place: str, *args: int) -> None:
        left[id(chains), place] += 1
        leave(chains, place, *args)

    monkeypatch.setattr(Relay, "_is_there", is_there)
    monkeypatch.setattr(Chains, "leave", counted)
    for version in range(TIRED_VERSIONS):
        assert not any(replicas.fetch(version, replicas.publish(version, (version - 1,))))
    thawed.set()
    assert left and max(left.values()) <= 2 and {host_of(place) for _, place in left} == {HOSTS[0]}


@nightly("many moments, real time; by day relays send each byte once and are dropped when they die")
def test_one_that_is_slow_itself_blames_nobody_for_it_and_holds_up_nobody(replicas, monkeypatch) -> None:
    """Who receives from it leaves it, and it stays at the end."""
    take, leave, left = P2pSubscriber._take, Chains.leave, list[tuple[str, int]]()

    def crawl(rank: P2pSubscriber, *args: Any) -> int:
        if rank._host == HOSTS[1]:
            time.sleep(0.1)
        return take(rank, *args)

    def noted(chains: Chains, place: str, version: int, num_versions: int) -> None:
        left.append((host_of(place), num_versions))
        leave(chains, place, version, num_versions)

    monkeypatch.setattr(relays, "SLOWER", 1.0)
    monkeypatch.setattr(relays, "SILENT_S", 4 * SILENT_S)  # a busy machine makes anybody slow for a moment
    for version in range(4):
        if version == 1:  # when the trainer knows its pace
            monkeypatch.setattr(P2pSubscriber, "_take", crawl)
            monkeypatch.setattr(Chains, "leave", noted)
            for rank in replicas.ranks[2:4]:
                for stream in rank._streams.values():
                    stream.pace_s = None
        assert not any(replicas.fetch(version, replicas.publish(version, (version - 1,))))
    assert {host for host, num in left if num} <= {HOSTS[1]}


@nightly("many moments, real time; by day relays send each byte once and are dropped when they die")
def test_versions_stay_pure_while_the_trainer_publishes_on(replicas) -> None:
    """Every rank fetches whatever is the newest, at its own pace, and gets that or learns that it is gone."""
    newest, over, num = [0, replicas.publish(0)], threading.Event(), Counter[str]()

    def follow(rank: P2pSubscriber) -> None:
        while not over.is_set():
            version, address = newest
            try:
                assert faults(rank, version, address, replicas.weights[version]) == []
                num["fetched"] += 1
            except Superseded:
                num["superseded"] += 1

    with ThreadPoolExecutor(len(replicas.ranks)) as pool:
        jobs = [pool.submit(follow, rank) for rank in replicas.ranks]
        for version in range(1, 12):
            time.sleep(0.05)
            newest[:] = version, replicas.publish(version, tuple(range(version - 4, version)))
        over.set()
        for job in jobs:
            job.result(240)
    assert num["fetched"] >= len(replicas.ranks)


@nightly("real time; by day relays send each byte once")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_are_killed_or_stopped_pass_nothing_on(world, blow) -> None:
    """Who would have received from them gets its weights from the trainer; a stopped one catches up."""
    made = world("p2p", (2, 1, 1), 2, replicas=0, mortal=True)
    for host in HOSTS[:2]:
        for rank in range(2):
            made.add_generator(rank, host=host)
    first, second = made.generators[:2], made.generators[2:]
    address = made.publish(0)
    assert made.wrong(0, made.fetch(0, address)) == []
    address, made.generators = made.publish(1, [0]), first
    assert made.wrong(1, made.fetch(1, address)) == []
    for process, _, _ in first:
        os.kill(process.pid, blow)
    made.generators, started_s = second, time.monotonic()
    assert made.wrong(1, made.fetch(1, address)) == []
    assert time.monotonic() - started_s < 60, "a fetch that waits for them takes 240 s"
    if blow == signal.SIGSTOP:
        for process, _, _ in first:
            os.kill(process.pid, signal.SIGCONT)
        made.generators = [*first, *second]
        assert made.wrong(2, made.fetch(2, made.publish(2, [1]))) == []


def test_a_trainer_that_is_gone_is_missed_by_all_in_time(tmp_path) -> None:
    made = Replicas(tmp_path)
    address = made.publish(0)
    assert not any(made.fetch(0, address))
    made.trainer.close()
    for rank in made.ranks:
        with pytest.raises((TransferFailed, Superseded)):
            rank.fetch(1, address)
    made.close()


class TestChains:
    def test_each_reader_has_one_before_it_and_hosts_receive_once(self) -> None:
        chains, key = Chains(), (3, 0, 0)
        places = ["b:1", "c:1", "b:2", "d:1", "c:2", "b:3"]
        assert [chains.relay_for(key, place) for place in places] == ["", "b:1", "b:1", "c:1", "c:1", "b:2"]

    def test_who_asks_again_gets_it_from_the_trainer(self) -> None:
        """Its relay may by now be waiting for it."""
        chains, key = Chains(), (3, 0, 0)
        assert [chains.relay_for(key, place) for place in ("b:1", "c:1", "b:1", "c:1")] == ["", "b:1", "", ""]

    def test_one_that_was_left_comes_last_for_some_versions(self) -> None:
        chains = Chains()
        assert [chains.relay_for((3, 0, 0), place) for place in ("b:1", "c:1")] == ["", "b:1"]
        chains.leave("c:1", 3, TIRED_VERSIONS)
        assert chains.relay_for((3, 0, 0), "d:1") == ""
        assert [chains.relay_for((4, 0, 0), place) for place in ("b:1", "c:1", "d:1")] == ["", "b:1", "b:1"]
        later = 3 + TIRED_VERSIONS
        chains.forget(range(4, later))
        assert [chains.relay_for((later, 0, 0), place) for place in ("b:1", "c:1", "d:1")] == ["", "b:1", "c:1"]

    def test_a_version_that_is_published_anew_has_new_readers(self) -> None:
        chains = Chains()
        chains.relay_for((3, 0, 0), "b:1")
        chains.forget({2})
        assert chains.relay_for((3, 0, 0), "c:1") == ""

    def test_the_fastest_of_the_last_sends_is_the_pace(self) -> None:
        chains = Chains()
        assert chains.pace_s(0, 0) is None
        for seconds in (4.0, 2.0, 6.0):
            chains.sent(0, 0, seconds, 2)
        assert chains.pace_s(0, 0) == 1.0 and chains.pace_s(1, 0) is None


@pytest.mark.parametrize("times", [4, 8, 100])
def test_a_slow_relay_is_left_within_two_seconds(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """However large the weights are, and the same where it waits for one itself that it does not leave."""
    now_s, bucket_s = [100.0], 0.01
    monkeypatch.setattr(relays.time, "monotonic", lambda: now_s[0])
    slow, waits = (relays._Pace(bucket_s / (1 << 20), None, 60.0) for _ in range(2))

    def crawl() -> None:
        slow.begin(1 << 20)
        now_s[0] += times * bucket_s
        slow.end()

    def wait() -> None:
        now_s[0] += 0.1
        waits.waits()

    with pytest.raises(relays.TooSlow):
        deque(iter(crawl, 0), 0)
    assert now_s[0] - 100.0 < 2.0 + times * bucket_s
    start_s = waits._start_s = now_s[0]
    waits.begin(1 << 20)
    with pytest.raises(relays.TooSlow):
        deque(iter(wait, 0), 0)
    assert now_s[0] - start_s < 2.0 and not waits.is_to_blame and SILENT < 2.0


def test_one_at_a_bad_wire_is_left_by_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights take milliseconds elsewhere: a second and a half is enough to know."""
    now_s = [100.0]
    monkeypatch.setattr(relays.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(relays, "SILENT_S", 2.0)
    pace = relays._Pace(1e-9, 1e-9, 60.0)
    pace.begin(1 << 20)
    now_s[0] += 0.5
    pace.end()
    pace.begin(1 << 20)
    now_s[0] += 1.0
    with pytest.raises(relays.TooSlow):
        pace.end()
    assert pace.is_to_blame
