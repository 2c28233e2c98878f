"""Rollouts on their way to executors, cut so that a call carries them: the experts of a mixture make them large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from llamarl.types import GenerationRequest, Rollout

PARCEL_BYTES = 64 << 20
"""Size in bytes from which on a call takes no more: a quarter of what one may carry."""
Item = TypeVar("Item")


def routes_bytes(rollouts: Iterable[Rollout]) -> int:
    """Size of the experts that were recorded of these, those of a prompt that they share counted once."""
    rollouts = list(rollouts)
    prompts = {id(one.prompt_routes): one.prompt_routes.nbytes for one in rollouts if one.prompt_routes is not None}
    return sum(prompts.values()) + sum(one.routes_bytes for one in rollouts)


def parcels(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items for one call each."""
    parcel, size = list[Item](), 0
    for item in items:
        if parcel and size + num_bytes(item) > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(item)
        size += num_bytes(item)
    if parcel:
        yield parcel


def requests_of(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Requests for one call each; one with large partials becomes several, for some of its rollouts each."""
    cut = (part for request in requests for part in _parts(request))
    return parcels(cut, lambda request: routes_bytes(request.partials))


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    if routes_bytes(request.partials) <= PARCEL_BYTES:
        yield request
        return
    for partials in parcels(request.partials, lambda one: routes_bytes([one])):
        yield replace(request, partials=tuple(partials))
