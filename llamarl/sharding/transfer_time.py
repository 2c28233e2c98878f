"""How long a reshard plan takes on given links, and which of the two ways to go is faster.

Every device has a network adapter of its own and a link to the other devices of its host, both with two directions at
once. A transfer takes as long as its busiest link; relays begin with the first stripe, so their time overlaps.

Shape suffixes: V devices, R source ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.sharding.parallel_layout import DTYPE_BYTES, ShardLayout
from llamarl.sharding.reshard import ReshardPlan, plan_reshard

RELAY_GAIN = 0.05
"""Relays must save more than this share: they are a second stage, and take the generators' adapters too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Bytes per second of one device, one way, as software reaches them."""

    network: float
    """Between hosts."""
    host: float
    """Between devices of a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that each device sends and receives; what stays on a device is free."""

    network_out_V: np.ndarray
    network_in_V: np.ndarray
    host_out_V: np.ndarray
    host_in_V: np.ndarray

    @classmethod
    def zero(cls, num_devices: int) -> Traffic:
        """Of no transfer."""
        return cls(**{name: np.zeros(num_devices) for name in cls.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """An estimate."""

    seconds: float
    busiest: str
    """The link that decides: which direction, which device."""
    busiest_bytes: float
    """What that link carries."""
    network_bytes: float
    """That all adapters send."""
    host_bytes: float
    """That all links inside hosts carry."""


def delta_share(dtype: str, changed: float) -> float:
    """Bytes of a delta over those of all values: 2 bytes of place and the value for each change, 4 for each 65,536."""
    size = DTYPE_BYTES[dtype]
    return min(1.0, (changed * (2 + size) + 4 / 65_536) / size)


def traffic(plan: ReshardPlan, changed: Mapping[str, float] | None = None) -> Traffic:
    """Bytes of one transfer by device."""
    source, destination = plan.source, plan.destination
    found = Traffic.zero(int(max(source.devices_R.max(), destination.devices_R.max())) + 1)
    shares = {dtype: delta_share(dtype, share) for dtype, share in (changed or {}).items()}
    bytes_of = [group.bytes_M * len(group.names) * shares.get(group.dtype, 1.0) for group in plan.groups]
    if plan.is_relayed:
        return _relayed(plan, found, bytes_of)
    sent = np.zeros((len(plan.audiences), source.num_ranks))
    for group, bytes_M in zip(plan.groups, bytes_of, strict=True):
        np.add.at(sent, (group.audiences_M, group.senders_M), bytes_M)
    for ranks, sent_R in zip(plan.audiences, sent, strict=True):
        _direct(found, plan, np.array(ranks), sent_R)
    return found


def _direct(found: Traffic, plan: ReshardPlan, takers: np.ndarray, sent_R: np.ndarray) -> None:
    """Each of `takers` receives `sent_R` from the source ranks."""
    ours, our_hosts = plan.source.devices_R, plan.source.hosts_R
    theirs, their_hosts = plan.destination.devices_R[takers], plan.destination.hosts_R[takers]
    num_devices = len(found.network_in_V)
    near = np.bincount(our_hosts, sent_R, num_devices)[their_hosts]
    same = np.bincount(ours, sent_R, num_devices)[theirs]
    np.add.at(found.network_in_V, theirs, sent_R.sum() - near)
    np.add.at(found.host_in_V, theirs, near - same)
    near_takers = np.bincount(their_hosts, minlength=num_devices)[our_hosts]
    same_takers = np.bincount(theirs, minlength=num_devices)[ours]
    np.add.at(found.network_out_V, ours, sent_R * (len(takers) - near_takers))
    np.add.at(found.host_out_V, ours, sent_R * (near_takers - same_takers))


def _relayed(plan: ReshardPlan, found: Traffic, bytes_of: Sequence[np.ndarray]) -> Traffic:
    """Every piece goes to its owner, then once to every other host of the audience, then around inside the hosts."""
    source, destination = plan.source, plan.destination
    our_hosts, their_hosts = source.hosts_R, destination.hosts_R
    owned = np.zeros((len(plan.audiences), destination.num_ranks))
    for group, bytes_M in zip(plan.groups, bytes_of, strict=True):
        assert group.owners_M is not None
        np.add.at(owned, (group.audiences_M, group.owners_M), bytes_M)
        ours, theirs = source.devices_R[group.senders_M], destination.devices_R[group.owners_M]
        near_M = our_hosts[group.senders_M] == their_hosts[group.owners_M]
        for out_V, in_V, is_link in (
            (found.network_out_V, found.network_in_V, ~near_M),
            (found.host_out_V, found.host_in_V, near_M & (ours != theirs)),
        ):
            np.add.at(out_V, ours, bytes_M * is_link)
            np.add.at(in_V, theirs, bytes_M * is_link)
    for audience, owned_R in zip(plan.audiences, owned, strict=True):
        ranks = np.array(audience)
        _pass_on(found, destination.devices_R[ranks], their_hosts[ranks], owned_R[ranks])
    return found


def _pass_on(found: Traffic, devices: np.ndarray, hosts: np.ndarray, owned: np.ndarray) -> None:
    """Relays of one audience. The head of a piece on a host has its owner's position there, modulo the members."""
    order = np.argsort(hosts, kind="stable")
    devices, owned = devices[order], owned[order]
    _, first, sizes = np.unique(hosts[order], return_index=True, return_counts=True)
    positions, members = np.arange(len(order)) - np.repeat(first, sizes), np.repeat(sizes, sizes)
    by_position = np.bincount(positions, owned)
    headed = np.empty(len(order))
    for num in np.unique(sizes).tolist():
        bytes_of_head = np.bincount(np.arange(len(by_position)) % num, by_position, num)
        headed[members == num] = bytes_of_head[positions[members == num]]
    # A device may be that of several ranks.
    np.add.at(found.network_out_V, devices, owned * (len(sizes) - 1))
    np.add.at(found.network_in_V, devices, headed - owned)
    np.add.at(found.host_out_V, devices, headed * (members - 1))
    np.add.at(found.host_in_V, devices, owned.sum() - headed)


def estimate(plan: ReshardPlan, links: Links, changed: Mapping[str, float] | None = None) -> Transfer:
    """Seconds of the busiest link.

    Args:
        changed: of values of a type (a key of DTYPE_BYTES) only this share travels, as a delta.
    """
    bytes_on = traffic(plan, changed)
    ways = {
        "network out of": (bytes_on.network_out_V, links.network),
        "network into": (bytes_on.network_in_V, links.network),
        "host link out of": (bytes_on.host_out_V, links.host),
        "host link into": (bytes_on.host_in_V, links.host),
    }
    way = max(ways, key=lambda name: ways[name][0].max() / ways[name][1])
    on_V, rate = ways[way]
    device = int(on_V.argmax())
    role = "trainer" if device in plan.source.devices_R else "generator"
    return Transfer(
        seconds=float(on_V[device]) / rate,
        busiest=f"{way} {role} device {device}",
        busiest_bytes=float(on_V[device]),
        network_bytes=float(bytes_on.network_out_V.sum()),
        host_bytes=float(bytes_on.host_out_V.sum()),
    )


def _least_s(plan: ReshardPlan, links: Links) -> float:
    """Seconds of the fullest host's adapters if what it needs entered it once, all from other hosts."""
    num_hosts = int(plan.destination.hosts_R.max()) + 1
    needed, adapters = np.zeros(num_hosts), np.bincount(plan.destination.hosts_R, minlength=num_hosts)
    bytes_A = np.zeros(len(plan.audiences))
    for group in plan.groups:
        np.add.at(bytes_A, group.audiences_M, group.bytes_M * len(group.names))
    for num_bytes, ranks in zip(bytes_A, plan.audiences, strict=True):
        needed[np.unique(plan.destination.hosts_R[list(ranks)])] += num_bytes
    return float((needed / np.maximum(adapters, 1)).max()) / links.network


def fastest(source: ShardLayout, destination: ShardLayout, links: Links) -> tuple[ReshardPlan, Transfer, str]:
    """The faster plan, direct or relayed, its estimate, and why. A relayed one is an estimate: no transport relays yet.

    Direct copies put R / T of the weights through each of T trainers' adapters for R replicas, and all of a part into
    every device that needs it. With relays a trainer sends each part once and it enters each host once: a scatter and
    an all-gather (van de Geijn's broadcast) among the ranks that need the same. They gain where trainers are fewer than
    generators or several replicas share a host; elsewhere the receivers' adapters decide, and one stage is simpler.
    """
    plan = plan_reshard(source, destination)
    direct = estimate(plan, links)
    if direct.seconds <= _least_s(plan, links) * (1 + RELAY_GAIN):
        return plan, direct, f"direct: little more than each host needs once; {direct.busiest} decides"
    other = plan_reshard(source, destination, is_relayed=True)
    relayed = estimate(other, links)
    if relayed.seconds * (1 + RELAY_GAIN) < direct.seconds:
        cause = f"direct takes {direct.seconds:.3g} s, as {direct.busiest} decides"
        return other, relayed, f"relayed: {cause} (an estimate; no transport relays yet)"
    return plan, direct, f"direct: relayed takes {relayed.seconds:.3g} s, as {relayed.busiest} decides"
