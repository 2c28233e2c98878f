"""`llamarl doctor --hosts`: wires are measured as weights take them, and what keeps them away is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.parts.hosts import hosts
from llamarl.parts.hosts.hosting import HostPlacer
from tests.parts.hosts.test_hosting import Machine, config_of, machines

PORT = 40_001


def two(faults: dict[tuple[str, str], str], **weights: str) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The trainer's host b and the generator's c, and who connected to which address of whom.

    Args:
        faults: by who connects and who waits.
        weights: own addresses for weights.
    """
    found, met = machines(b=0, c=0), list[tuple[str, str, str]]()
    addresses = {"b": "10.0.0.1", "c": "10.0.0.2"}
    offered = list[str]()
    for name, host in found.items():
        own = {"address": addresses[name], "weights_address": weights.get(name, addresses[name])}
        host.inventory = host.inventory.model_copy(update=own)

        async def ask(what: str, timeout_s: float = 0.0, name: str = name, **asked: Any) -> dict[str, Any]:
            if what == "offer":
                offered.append(name)
                return {"port": PORT}
            assert (what, asked["port"]) == ("pull", PORT)
            met.append((name, offered[-1], asked["address"]))
            fault = faults.get((name, offered[-1]))
            return {"failed": fault} if fault else {"bytes_per_s": 2e9}

        host.ask = ask
        host.describe = lambda name=name: name
    return found, met


def inspected(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> list[str]:
    told = list[str]()
    config = config_of()
    registry = SimpleNamespace(hosts=found, close=lambda: asyncio.sleep(0))

    async def gathered(*_: object) -> HostPlacer:
        return HostPlacer(config, found)

    monkeypatch.setattr(hosts, "gathered", gathered)
    monkeypatch.setattr(hosts, "check_controller", lambda *_: None)
    monkeypatch.setattr(hosts, "Registry", lambda *_: registry)
    try:
        hosts.inspect(config, told.append)
    except ConfigError as error:
        told.append(f"error: {error}")
    return told


def test_generators_connect_to_the_trainer_where_it_has_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall that only lets c call b does no harm; the other way round it does."""
    found, met = two({("b", "c"): "a wall"}, b="10.1.0.1")
    assert inspected(monkeypatch, found) == ["b to c: 2.00 GB/s by one stream"]
    assert met == [("c", "b", "10.1.0.1")]


@pytest.mark.parametrize(("weights", "is_told"), [({}, False), ({"b": "10.1.0.1"}, False), ({"c": "10.1.0.2"}, True)])
def test_an_address_for_weights_that_the_trainer_s_host_lacks_is_told(weights: dict[str, str], is_told: bool) -> None:
    found, _ = two({}, **weights)
    told = hosts.unused_addresses(HostPlacer(config_of(), found), found)
    said = "--weights-address of c: the trainer's weights do not take it, as generators connect to b, which has none"
    assert told.startswith(said) if is_told else not told
    assert [host.inventory.room.partition(",")[0] for host in found.values()] == [
        f"{own} (weights: {weights[name]})" if name in weights else own
        for name, own in (("b", "10.0.0.1"), ("c", "10.0.0.2"))
    ]


@pytest.mark.parametrize(("weights", "whose"), [({}, "host b"), ({"b": "10.1.0.1"}, "host b's --weights-address")])
def test_who_cannot_reach_whom_is_said_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, str], whose: str
) -> None:
    found, _ = two({("c", "b"): "no process listens there"}, **weights)
    fault = (
        f"host c cannot reach {weights.get('b', '10.0.0.1')}:{PORT} ({whose}), from where its generators get weights: "
        "no process listens there; let it through to ports 32768 to 60999 (net.ipv4.ip_local_port_range) there, or "
        "start `llamarl host` on b with a --weights-address that c reaches"
    )
    assert inspected(monkeypatch, found) == [f"error: {fault}"]


def test_hosts_with_nothing_to_do_are_told_and_so_is_an_address_without_use(tmp_path: Path) -> None:
    found, _ = two({}, c="10.1.0.2")
    found["d"] = Machine("d")
    for name, host in found.items():
        host.ask = lambda *_, **__: asyncio.sleep(0, {"missing": [], "folder": ""})
        host.describe = lambda name=name: f"host {name}"
    told, warned = list[str](), list[str]()

    async def nothing(*_: object) -> None:
        """All of them are here."""

    registry: Any = SimpleNamespace(hosts=found, open=nothing, until=nothing, tell=warned.append)
    config = config_of(generator={"replicas": 1})
    hosting = asyncio.run(hosts.gathered(config, registry, tmp_path, told.append))
    assert hosting.lacks == dict.fromkeys(found.values(), "")
    assert told[-1] == "nothing runs on d until another host is lost or leaves"
    assert len(warned) == 1 and warned[0].startswith("--weights-address of c: ")
