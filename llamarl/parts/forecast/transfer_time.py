"""Estimates how long a reshard plan takes on given links, and whether direct or relayed transfer is faster.

Every device has a separate network adapter and a link to the other devices of its host, both bidirectional. The busiest
link determines the duration. Relays begin with the first stripe, so their times overlap.

Shape suffixes: V devices, R source ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llamarl.sharding.parallel_layout import DTYPE_BYTES, ShardLayout
from llamarl.sharding.reshard import ReshardPlan, plan_reshard

RELAY_GAIN = 0.05
"""Relays must save more than this share, because they add a stage and use the generators' adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeeds:
    """Achievable bytes per second of one device in one direction."""

    network: float
    """Between hosts."""
    host: float
    """Between devices of a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that each device sends and receives. Data that stays on a device is free."""

    network_out_V: np.ndarray
    network_in_V: np.ndarray
    host_out_V: np.ndarray
    host_in_V: np.ndarray

    @classmethod
    def zero(cls, num_devices: int) -> Traffic:
        """Returns the traffic of no transfer."""
        return cls(**{name: np.zeros(num_devices) for name in cls.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Estimate of a transfer."""

    seconds: float
    busiest: str
    """The busiest link: direction and device."""
    busiest_bytes: float
    """Bytes that the busiest link carries."""
    network_bytes: float
    """Bytes that all adapters send."""
    host_bytes: float
    """Bytes that all links inside hosts carry."""


def delta_share(dtype: str, changed: float) -> float:
    """Returns the bytes of a delta relative to full values: 2 bytes of offset and the value per change, 4 bytes per
    65,536."""
    size = DTYPE_BYTES[dtype]
    return min(1.0, (changed * (2 + size) + 4 / 65_536) / size)


def traffic(plan: ReshardPlan, changed: Mapping[str, float] | None = None, is_relayed: bool = False) -> Traffic:
    """Returns the bytes of one transfer by device."""
    source, destination = plan.source, plan.destination
    found = Traffic.zero(int(max(source.devices_R.max(), destination.devices_R.max())) + 1)
    shares = {dtype: delta_share(dtype, share) for dtype, share in (changed or {}).items()}
    sent = np.zeros((len(plan.audiences), source.num_ranks))
    for group in plan.groups:
        bytes_M = group.bytes_M * len(group.names) * shares.get(group.dtype, 1.0)
        np.add.at(sent, (group.audiences_M, group.senders_M), bytes_M)
    for ranks, sent_R in zip(plan.audiences, sent, strict=True):
        near = _near(found, plan, np.array(ranks), sent_R)
        (_chained if is_relayed else _direct)(found, plan, np.array(ranks), sent_R, near)
    return found


def _near(found: Traffic, plan: ReshardPlan, takers: np.ndarray, sent_R: np.ndarray) -> np.ndarray:
    """Returns the bytes that each of `takers` receives from source ranks on its host. Adds them to `found`."""
    ours, our_hosts = plan.source.devices_R, plan.source.hosts_R
    theirs, their_hosts = plan.destination.devices_R[takers], plan.destination.hosts_R[takers]
    num_devices = len(found.network_in_V)
    near = np.bincount(our_hosts, sent_R, num_devices)[their_hosts]
    same = np.bincount(ours, sent_R, num_devices)[theirs]
    np.add.at(found.host_in_V, theirs, near - same)
    near_takers = np.bincount(their_hosts, minlength=num_devices)[our_hosts]
    same_takers = np.bincount(theirs, minlength=num_devices)[ours]
    np.add.at(found.host_out_V, ours, sent_R * (near_takers - same_takers))
    return near


def _direct(found: Traffic, plan: ReshardPlan, takers: np.ndarray, sent_R: np.ndarray, near: np.ndarray) -> None:
    """Adds the bytes that each of `takers` receives from source ranks on other hosts."""
    theirs, their_hosts = plan.destination.devices_R[takers], plan.destination.hosts_R[takers]
    near_takers = np.bincount(their_hosts, minlength=len(found.network_in_V))[plan.source.hosts_R]
    np.add.at(found.network_in_V, theirs, sent_R.sum() - near)
    np.add.at(found.network_out_V, plan.source.devices_R, sent_R * (len(takers) - near_takers))


def _chained(found: Traffic, plan: ReshardPlan, takers: np.ndarray, sent_R: np.ndarray, near: np.ndarray) -> None:
    """Adds the bytes of chains: the first of `takers` on each other host receives the data once and forwards it to the
    next host, and within a host each taker forwards it to the next one."""
    order = np.argsort(plan.destination.hosts_R[takers], kind="stable")
    theirs, far = plan.destination.devices_R[takers][order], (sent_R.sum() - near)[order]
    hosts, sizes = np.unique(plan.destination.hosts_R[takers], return_counts=True)
    first = np.cumsum(sizes) - sizes
    np.add.at(found.network_in_V, theirs[first], far[first])
    passed = far[first]
    passed[-1] = 0  # the end of the chain
    if len(hosts) > 1:
        passed[-2] -= near[order][-1]  # the last host already has a part
    np.add.at(found.network_out_V, theirs[first], passed)
    has_others = len(hosts) > np.isin(plan.source.hosts_R, hosts)
    np.add.at(found.network_out_V, plan.source.devices_R, sent_R * has_others)
    is_first, is_last = np.zeros(len(order), bool), np.zeros(len(order), bool)
    is_first[first] = is_last[first + sizes - 1] = True
    np.add.at(found.host_in_V, theirs, far * ~is_first)
    np.add.at(found.host_out_V, theirs, far * ~is_last)


def estimate(
    plan: ReshardPlan, links: LinkSpeeds, changed: Mapping[str, float] | None = None, is_relayed: bool = False
) -> Transfer:
    """Returns the duration of the busiest link.

    Args:
        changed: share of changed values by type (a key of DTYPE_BYTES). Only these are sent, as a delta.
        is_relayed: receivers forward data (`llamarl/weight_sync/relays.py`). Parts that several ranks of a replica need
            (norms, shared heads) count as forwarded among them, although they are sent to each.
    """
    bytes_on = traffic(plan, changed, is_relayed)
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


def fastest(source: ShardLayout, destination: ShardLayout, links: LinkSpeeds) -> tuple[ReshardPlan, Transfer, str]:
    """Returns the plan, the estimate of the faster route, direct or relayed, and the reason.

    Direct copies send R / T of the weights through the adapter of each of T trainers for R replicas. With relays a
    trainer sends each part once, and it enters each host once: ranks that need the same part form a chain. Relays help
    if there are fewer trainers than generators. Otherwise the receivers' adapters are the bottleneck, and one stage is
    simpler.
    """
    plan = plan_reshard(source, destination)
    direct, relayed = (estimate(plan, links, is_relayed=is_relayed) for is_relayed in (False, True))
    if relayed.seconds * (1 + RELAY_GAIN) < direct.seconds:
        return plan, relayed, f"relayed (by p2p): direct takes {direct.seconds:.3g} s, as {direct.busiest} decides"
    return plan, direct, f"direct: relayed takes {relayed.seconds:.3g} s, as {relayed.busiest} decides"
