"""What the trainer's and a generator's process do in the tests. The values of a tensor tell its version."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from llamarl.weight_sync.layout import SegmentAddress, TensorSpec
from llamarl.weight_sync.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber, Superseded

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (50, 30),
    "layer.0": (64, 64),
    "norm": (7,),
    "scale": (),
    "nothing": (0, 3),
}
SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.4e38)


def specs(dtype: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.whole(name, shape, dtype=dtype) for name, shape in shapes.items())


def random_weights(version: int) -> dict[str, Tensor]:
    """Float32, with values on which casts and comparisons go wrong."""
    generator = torch.Generator().manual_seed(version)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    weights["embed"][0, : len(SPECIALS)] = torch.tensor(SPECIALS)
    return weights


def uniform_weights(version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Every element is the version: a mixture of two shows at once."""
    return {name: torch.full(shape, float(version)) for name, shape in shapes.items()}


def buffers(wanted: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    return {spec.name: torch.full(spec.shape, -7.0, dtype=getattr(torch, spec.dtype)) for spec in wanted}


def write_random(connection: Connection, dtype: str) -> None:
    """Publishes each version that it is sent; None ends it."""
    publisher = SharedMemoryPublisher(specs(dtype))
    connection.send(publisher.address)
    while (version := connection.recv()) is not None:
        publisher.publish(version, random_weights(version))
        connection.send(version)


def write_freely(connection: Connection, shapes: dict[str, tuple[int, ...]]) -> None:
    """Publishes 0, 1, 2, ... without waiting for any reader, until it is told to stop or killed."""
    publisher = SharedMemoryPublisher(specs("float32", shapes))
    connection.send(publisher.address)
    connection.recv()
    version = 0
    while not connection.poll():
        publisher.publish(version, uniform_weights(version, shapes))
        version += 1
    connection.send(version)


class Fatal(Mapping[str, Tensor]):
    """Weights whose reader is killed when it asks for the one numbered `last_words`."""

    def __init__(self, weights: dict[str, Tensor], last_words: int) -> None:
        self._weights = weights
        self._left = last_words

    def __getitem__(self, name: str) -> Tensor:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def write_and_die(connection: Connection, last_words: int) -> None:
    """Publishes 0, 1 and 2, and is killed while it publishes 3."""
    publisher = SharedMemoryPublisher(specs("float32"))
    connection.send(publisher.address)
    connection.recv()
    for version in range(3):
        publisher.publish(version, uniform_weights(version))
    publisher.publish(3, Fatal(uniform_weights(3), last_words))


def read_freely(connection: Connection, address: SegmentAddress, count: int) -> None:
    """Fetches `count` times the newest version or the one before, which may be on its way out.

    Sends (refused fetches, descriptions of mixtures).
    """
    subscriber = SharedMemorySubscriber(address)
    into = buffers(address.specs)
    whole, refused, torn = 0, 0, list[str]()
    while whole < count:
        version = max(0, *(int(word[0]) for word in subscriber._slots.versions)) - (whole + refused) % 2
        if version < 0:
            continue
        try:
            subscriber.fetch(version, into)
        except Superseded:
            refused += 1
            continue
        whole += 1
        torn += [f"{name} of {version}" for name, tensor in into.items() if not (tensor == version).all()]
    connection.send((refused, torn))
