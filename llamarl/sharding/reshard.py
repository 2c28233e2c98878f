"""Moves of parameters between two layouts, so that every element of the destination is written exactly once.

A plan is made once per pair of layouts. Parameters that are cut alike on both sides share their part of it, so the cost
does not grow with the number of layers. Moves that several replicas share are stored once.

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
"""Receivers are assigned to equal senders in at least this many batches per sender instead of one by one."""


@dataclass(frozen=True, slots=True)
class Move:
    """One copy."""

    name: str
    """Name of the parameter."""
    box: Box
    """Copied part, in coordinates of the whole parameter."""
    dtype: str
    """Transferred type. The sender casts or quantizes. Rows of 8-bit values are sent with a float32 scale each."""
    sender: int
    """Rank of the source."""
    receiver: int
    """Rank of the destination."""

    @property
    def num_bytes(self) -> int:
        """Transferred bytes."""
        rows = math.prod(self.box.shape[:-1]) if self.dtype in QUANTIZED else 0
        return self.box.num_elements * DTYPE_BYTES[self.dtype] + rows * SCALE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyGroup:
    """Parameters that move alike, and their pieces."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """Transferred type."""
    starts_M_N: np.ndarray
    stops_M_N: np.ndarray
    senders_M: np.ndarray
    audiences_M: np.ndarray
    """Receivers of each piece: position in `ReshardPlan.audiences`."""

    def box(self, row: int) -> Box:
        """Returns the box of one piece, in coordinates of the whole parameter."""
        return make_box(self.starts_M_N[row].tolist(), self.stops_M_N[row].tolist(), self.shape)

    @property
    def bytes_M(self) -> np.ndarray:
        """Returns the transferred bytes of each piece, for one parameter."""
        sizes_M_N = self.stops_M_N - self.starts_M_N
        scales_M = sizes_M_N[:, :-1].prod(axis=1) * SCALE_BYTES if self.dtype in QUANTIZED else 0
        return sizes_M_N.prod(axis=1) * DTYPE_BYTES[self.dtype] + scales_M


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReshardPlan:
    """All copies from one layout to another. Any two ranks list the moves between them in the same order."""

    source: ShardLayout
    destination: ShardLayout
    groups: tuple[CopyGroup, ...]
    audiences: tuple[tuple[int, ...], ...]
    """Sets of ranks that need the same pieces."""

    def moves_from(self, rank: int) -> list[Move]:
        """Returns the moves that a source rank sends."""
        return list(self._moves([np.flatnonzero(group.senders_M == rank) for group in self.groups], None))

    def moves_to(self, rank: int) -> list[Move]:
        """Returns the moves that a destination rank receives from the source."""
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
    """Plans the moves from the parts that `source` ranks hold to the parts that `destination` ranks hold.

    If several ranks hold a part, the sender is on the receiver's device if possible, otherwise on its host. Among
    equally near holders, the one with the fewest bytes to send is chosen.

    Raises:
        LayoutError: a parameter is on one side only, has another shape, cannot be converted to the destination's type,
            or has a part that no rank holds.
    """
    assert source.host_size == destination.host_size, "devices are counted through both"
    _require_same_parameters(source, destination)
    kinds = defaultdict[tuple[Held, Held], list[str]](list)
    for name, held in source.parameters.items():
        kinds[held, destination.parameters[name]].append(name)
    planner = _Planner(source=source, destination=destination)
    # The largest first, so that smaller ones even out the load.
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
    """The distinct boxes of each layout of a parameter."""
    places: list[tuple[list[int], list[int]]] = field(init=False)
    """Devices, then hosts, of both sides; empty if they have none in common."""

    def __post_init__(self) -> None:
        self.load_R = np.zeros(self.source.num_ranks)
        ours, theirs = self.source, self.destination
        together = not set(ours.hosts_R.tolist()).isdisjoint(theirs.hosts_R.tolist())
        devices, hosts = (ours.devices_R, theirs.devices_R), (ours.hosts_R, theirs.hosts_R)
        self.places = [(one.tolist(), other.tolist()) for one, other in (devices, hosts)] if together else []

    def plan(self, names: Sequence[str], source: Held, destination: Held) -> CopyGroup:
        """Returns the pieces of parameters that are cut alike."""
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
        """Chooses the senders of pieces that several ranks hold. Returns one line for each sender of a piece."""
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
        """Returns the receivers of each sender. One sender serves a whole team."""
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
        """Returns holders on the receiver's device, otherwise on its host, otherwise all."""
        for ours, theirs in self.places:
            if near := [rank for rank in holders if ours[rank] == theirs[receiver]]:
                return near
        return holders


def _require_same_parameters(source: ShardLayout, destination: ShardLayout) -> None:
    for name, held in destination.parameters.items():
        if name not in source.parameters:
            raise LayoutError(name, "generators need it, but no trainer rank has it")
        if source.parameters[name].shape != held.shape:
            raise LayoutError(name, f"its shape is {source.parameters[name].shape} in trainers, {held.shape} wanted")
    for name in source.parameters:
        if name not in destination.parameters:
            raise LayoutError(name, "trainers have it, but no generator rank needs it")


def _wire_dtype(name: str, source: str, destination: str, whole_rows: bool) -> str:
    """Returns the transferred type. It is quantized only if each row comes from one sender, since its scale needs the
    whole row."""
    if source in QUANTIZED or source not in DTYPE_BYTES or destination not in DTYPE_BYTES:
        raise LayoutError(name, f"trainers hold it as {source}, which cannot be converted to {destination}")
    return source if destination in QUANTIZED and not whole_rows else destination


def _distinct(boxes: RankBoxes) -> tuple[list[int], list[list[int]]]:
    """Returns the first rank of each distinct box that is not empty, and all its ranks."""
    bounds_R = np.concatenate([boxes.starts_R_N, boxes.stops_R_N], axis=1)
    found = defaultdict[bytes, list[int]](list)
    for rank in np.flatnonzero((boxes.starts_R_N < boxes.stops_R_N).all(axis=1)).tolist():
        found[bounds_R[rank].tobytes()].append(rank)
    return [ranks[0] for ranks in found.values()], list(found.values())


def _require_partition(name: str, shape: tuple[int, ...], starts_S_N: np.ndarray, stops_S_N: np.ndarray) -> None:
    """Requires that every element of the parameter is in exactly one part, and so in exactly one piece of each
    destination.

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
    """Returns the bounds of all pieces, and the parts of source and destination of each piece."""
    starts = np.maximum(sources[0][:, None], wanted[0][None])
    stops = np.minimum(sources[1][:, None], wanted[1][None])
    is_piece = (starts < stops).all(axis=-1)
    s_M, d_M = np.nonzero(is_piece)
    return starts[is_piece], stops[is_piece], s_M, d_M
