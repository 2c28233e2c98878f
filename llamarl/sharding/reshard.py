"""Who sends which part of each parameter to whom, so that every element of the destination is written exactly once.

A plan is made once per pair of layouts. Parameters that are cut alike on both sides share their part of it, so the cost
does not grow with the number of layers, and what replicas share is stored once.

Shape suffixes: R ranks, N dims of the parameter, S distinct parts of the source, D of the destination, M pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import (
    DTYPE_BYTES,
    QUANTIZED,
    SCALE_BYTES,
    Held,
    LayoutError,
    RankBoxes,
    ShardLayout,
    make_box,
)

BATCHES = 8
"""Receivers are dealt to senders that hold the same in this many batches per sender at least, not one by one."""


@dataclass(frozen=True, slots=True)
class Move:
    """One copy."""

    name: str
    """The parameter."""
    box: Box
    """Part that is copied, in coordinates of the whole parameter."""
    dtype: str
    """Type that travels. The sender casts or quantizes; rows of 8-bit values travel with a float32 scale each."""
    sender: int
    """Rank of the source."""
    receiver: int
    """Rank of the destination."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        rows = math.prod(self.box.shape[:-1]) if self.dtype in QUANTIZED else 0
        return self.box.num_elements * DTYPE_BYTES[self.dtype] + rows * SCALE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyGroup:
    """Parameters that move alike, and their pieces."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """Type that travels."""
    starts_M_N: np.ndarray
    stops_M_N: np.ndarray
    senders_M: np.ndarray
    audiences_M: np.ndarray
    """Who needs the piece: position in `ReshardPlan.audiences`."""

    def box(self, row: int) -> Box:
        """Box of one piece, in coordinates of the whole parameter."""
        return make_box(self.starts_M_N[row].tolist(), self.stops_M_N[row].tolist(), self.shape)

    @property
    def bytes_M(self) -> np.ndarray:
        """Bytes of each piece on the wire, for one parameter."""
        sizes_M_N = self.stops_M_N - self.starts_M_N
        scales_M = sizes_M_N[:, :-1].prod(axis=1) * SCALE_BYTES if self.dtype in QUANTIZED else 0
        return sizes_M_N.prod(axis=1) * DTYPE_BYTES[self.dtype] + scales_M


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReshardPlan:
    """All copies from one layout to another. Any two ranks find the moves between them in the same order."""

    source: ShardLayout
    destination: ShardLayout
    groups: tuple[CopyGroup, ...]
    audiences: tuple[tuple[int, ...], ...]
    """Sets of ranks that need the same."""

    def moves_from(self, rank: int) -> list[Move]:
        """Moves that a source rank sends."""
        return list(self._moves([np.flatnonzero(group.senders_M == rank) for group in self.groups], None))

    def moves_to(self, rank: int) -> list[Move]:
        """Moves that a destination rank receives from the source."""
        needs = np.array([rank in audience for audience in self.audiences], bool)
        return list(self._moves([np.flatnonzero(needs[group.audiences_M]) for group in self.groups], rank))

    def _moves(self, rows: Sequence[np.ndarray], receiver: int | None) -> Iterator[Move]:
        for group, found in zip(self.groups, rows, strict=True):
            made = list[tuple[Box, int, Sequence[int]]]()
            for row in found.tolist():
                everyone = self.audiences[group.audiences_M[row]]
                made.append((group.box(row), int(group.senders_M[row]), everyone if receiver is None else (receiver,)))
            for name in group.names:
                for box, sender, takers in made:
                    yield from (Move(name, box, group.dtype, sender, taker) for taker in takers)


def plan_reshard(source: ShardLayout, destination: ShardLayout) -> ReshardPlan:
    """The moves that turn what `source` ranks hold into what `destination` ranks hold.

    Where several ranks hold the same, the sender is on the receiver's device or else host if one is, and among those
    left the one with the fewest bytes to send.

    Raises:
        LayoutError: a parameter is on one side only, has another shape, cannot be had in the wanted type, or a part of
            it is held by nobody.
    """
    assert source.host_size == destination.host_size, "devices are counted through both"
    _require_same_parameters(source, destination)
    kinds = defaultdict[tuple[Held, Held], list[str]](list)
    for name, held in source.parameters.items():
        kinds[held, destination.parameters[name]].append(name)
    planner = _Planner(source=source, destination=destination)
    # The largest first: what follows evens out the load.
    largest_first = sorted(kinds.items(), key=lambda kind: -np.prod(kind[0][0].shape) * len(kind[1]))
    groups = tuple(planner.plan(names, *held) for held, names in largest_first)
    return ReshardPlan(
        source=source,
        destination=destination,
        groups=groups,
        audiences=tuple(planner.audiences),
    )


@dataclass(kw_only=True, slots=True)
class _Planner:
    source: ShardLayout
    destination: ShardLayout
    audiences: dict[tuple[int, ...], int] = field(default_factory=dict)
    load_R: np.ndarray = field(init=False)
    """Bytes that each source rank sends."""
    parts: dict[RankBoxes, tuple[list[int], list[list[int]]]] = field(default_factory=dict)
    """The distinct boxes of each that came up."""
    places: list[tuple[list[int], list[int]]] = field(init=False)
    """Devices, then hosts, of both sides; empty when they have none in common."""

    def __post_init__(self) -> None:
        self.load_R = np.zeros(self.source.num_ranks)
        ours, theirs = self.source, self.destination
        together = not set(ours.hosts_R.tolist()).isdisjoint(theirs.hosts_R.tolist())
        devices, hosts = (ours.devices_R, theirs.devices_R), (ours.hosts_R, theirs.hosts_R)
        self.places = [(one.tolist(), other.tolist()) for one, other in (devices, hosts)] if together else []

    def plan(self, names: Sequence[str], source: Held, destination: Held) -> CopyGroup:
        """The pieces of parameters that are cut alike."""
        first_S, holders = self._distinct(source.boxes)
        first_D, takers = self._distinct(destination.boxes)
        sources = source.boxes.starts_R_N[first_S], source.boxes.stops_R_N[first_S]
        wanted = destination.boxes.starts_R_N[first_D], destination.boxes.stops_R_N[first_D]
        _require_partition(names[0], source.shape, *sources)
        starts, stops, s_M, d_M = _overlaps(sources, wanted)
        along_rows = slice(max(1, len(source.shape) - 1), None)
        whole_rows = bool((stops - starts == (wanted[1] - wanted[0])[d_M])[:, along_rows].all())
        dtype = _wire_dtype(names[0], source.dtype, destination.dtype, whole_rows)
        audience_D = [self.audiences.setdefault(tuple(ranks), len(self.audiences)) for ranks in takers]
        group = CopyGroup(
            names=tuple(names),
            shape=source.shape,
            dtype=dtype,
            starts_M_N=starts,
            stops_M_N=stops,
            senders_M=np.array([ranks[0] for ranks in holders], np.int64)[s_M],
            audiences_M=np.array(audience_D, np.int64)[d_M],
        )
        bytes_M = group.bytes_M * len(names)
        if max(map(len, holders), default=1) > 1:
            return self._choose(group, [holders[part] for part in s_M.tolist()], bytes_M.tolist())
        copies_M = np.array([len(ranks) for ranks in takers], np.int64)[d_M]
        np.add.at(self.load_R, group.senders_M, bytes_M * copies_M)
        return group

    def _distinct(self, boxes: RankBoxes) -> tuple[list[int], list[list[int]]]:
        if boxes not in self.parts:
            self.parts[boxes] = _distinct(boxes)
        return self.parts[boxes]

    def _choose(self, group: CopyGroup, holders_M: list[list[int]], bytes_M: list[int]) -> CopyGroup:
        """The senders of pieces that several ranks hold: one line for each sender of a piece."""
        lines, ranks_of = list[tuple[int, int, int]](), list(self.audiences)
        for row, holders in enumerate(holders_M):
            everyone = ranks_of[group.audiences_M[row]]
            size = 1 if self.places else max(1, len(everyone) // (BATCHES * len(holders)))
            teams = [everyone[i : i + size] for i in range(0, len(everyone), size)]
            for sender, ranks in self._split(holders, teams, bytes_M[row]).items():
                lines.append((row, sender, self.audiences.setdefault(tuple(ranks), len(self.audiences))))
        rows_M, senders_M, audiences_M = np.array(lines, np.int64).reshape(-1, 3).T
        return replace(
            group,
            starts_M_N=group.starts_M_N[rows_M],
            stops_M_N=group.stops_M_N[rows_M],
            senders_M=senders_M,
            audiences_M=audiences_M,
        )

    def _split(self, holders: list[int], teams: Sequence[tuple[int, ...]], num_bytes: float) -> dict[int, list[int]]:
        """The receivers of each sender; a team is served by one."""
        load = {rank: float(self.load_R[rank]) for rank in holders}
        found = defaultdict[int, list[int]](list)
        for team in teams:
            sender = min(self._nearest(holders, team[0]), key=load.__getitem__)
            load[sender] += num_bytes
            found[sender] += team
        for rank, after in load.items():
            self.load_R[rank] = after
        return found

    def _nearest(self, holders: list[int], receiver: int) -> list[int]:
        """Holders on the receiver's device, else on its host, else all."""
        for ours, theirs in self.places:
            if near := [rank for rank in holders if ours[rank] == theirs[receiver]]:
                return near
        return holders


def _require_same_parameters(source: ShardLayout, destination: ShardLayout) -> None:
    for name, held in destination.parameters.items():
        if name not in source.parameters:
            raise LayoutError(name, "generators need it and no trainer rank has it")
        if source.parameters[name].shape != held.shape:
            raise LayoutError(name, f"its shape is {source.parameters[name].shape} in trainers, {held.shape} wanted")
    for name in source.parameters:
        if name not in destination.parameters:
            raise LayoutError(name, "trainers have it and no generator rank takes it")


def _wire_dtype(name: str, source: str, destination: str, whole_rows: bool) -> str:
    """Quantized only where each row comes from one sender, as its scale needs all of it."""
    if source in QUANTIZED or source not in DTYPE_BYTES or destination not in DTYPE_BYTES:
        raise LayoutError(name, f"trainers hold it as {source}, from which {destination} cannot be made")
    return source if destination in QUANTIZED and not whole_rows else destination


def _distinct(boxes: RankBoxes) -> tuple[list[int], list[list[int]]]:
    """The first rank of each distinct box that is not empty, and all its ranks."""
    bounds_R = np.concatenate([boxes.starts_R_N, boxes.stops_R_N], axis=1)
    found = defaultdict[bytes, list[int]](list)
    for rank in np.flatnonzero((boxes.starts_R_N < boxes.stops_R_N).all(axis=1)).tolist():
        found[bounds_R[rank].tobytes()].append(rank)
    return [ranks[0] for ranks in found.values()], list(found.values())


def _require_partition(name: str, shape: tuple[int, ...], starts_S_N: np.ndarray, stops_S_N: np.ndarray) -> None:
    """Every element of the parameter is in exactly one part. Then it is in exactly one piece of each destination.

    Parts are counted on the grid of all their edges: +1 and -1 at corners, summed along each dim.
    """
    sizes = shape or (1,)
    bounds = np.concatenate([np.zeros_like(starts_S_N[:1]), starts_S_N, stops_S_N, [sizes]])
    edges = [np.unique(bounds[:, dim]) for dim in range(len(sizes))]
    counts = np.zeros([len(one) for one in edges], np.int64)
    low, high = (
        [np.searchsorted(edge, one[:, dim]) for dim, edge in enumerate(edges)] for one in (starts_S_N, stops_S_N)
    )
    for corner in product((0, 1), repeat=len(sizes)):
        where = tuple((low, high)[side][dim] for dim, side in enumerate(corner))
        np.add.at(counts, where, (-1) ** sum(corner))
    for dim in range(len(sizes)):
        counts = counts.cumsum(axis=dim)
    wrong = np.argwhere(counts[tuple(slice(-1) for _ in sizes)] != 1)
    if len(wrong):
        cell = wrong[0].tolist()
        starts, stops = ([int(one[at + after]) for one, at in zip(edges, cell, strict=True)] for after in (0, 1))
        times = int(counts[tuple(cell)])
        cause = "no trainer rank holds" if not times else f"{times} different parts of trainer ranks hold"
        raise LayoutError(name, f"{cause} {make_box(starts, stops, shape)}")


def _overlaps(
    sources: tuple[np.ndarray, np.ndarray], wanted: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of all pieces, and the parts of source and destination that each lies in."""
    starts = np.maximum(sources[0][:, None], wanted[0][None])
    stops = np.minimum(sources[1][:, None], wanted[1][None])
    is_piece = (starts < stops).all(axis=-1)
    s_M, d_M = np.nonzero(is_piece)
    return starts[is_piece], stops[is_piece], s_M, d_M
