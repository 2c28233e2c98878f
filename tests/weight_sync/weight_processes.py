"""Trainer and generator ranks for the tests, in processes. The values of a tensor tell its version."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from llamarl.models.quantize import quantize_rows
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import QUANTIZED
from llamarl.sharding.tensor_parallel import is_quantizable, tensor_parallel_box
from llamarl.weight_sync.base import WriterPlan
from llamarl.weight_sync.layout import Layout, TensorSpec, lay_out
from llamarl.weight_sync.select import Reader, publisher_class

NUM_KV_HEADS = 2
NUM_LAYERS = 4
PARAMETERS: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (40, 12),
    **{
        f"layers.{layer}.{name}": shape
        for layer in range(NUM_LAYERS)
        for name, shape in {
            "q_proj.weight": (16, 12),
            "k_proj.weight": (8, 12),
            "q_proj.bias": (16,),
            "o_proj.weight": (12, 16),
            "gate_proj.weight": (28, 12),
            "down_proj.weight": (12, 28),
            "norm.weight": (13,),
            "experts.gate_proj": (4, 8, 12),
            "experts.down_proj": (4, 12, 8),
        }.items()
    },
    "nothing": (0, 3),
    "scalar": (),
    "stack": (3, 5, 7),
}
SPECIALS = (float("inf"), -float("inf"), -0.0, 1e-40, 3.4e38)


def held(fsdp: int, tp: int, pp: int) -> list[list[TensorSpec]]:
    """What the ranks of a trainer hold: pipeline stages, cut by tensor parallelism, then by rows (FSDP2's chunks)."""
    ranks = []
    for stage in range(pp):
        names = [name for name in PARAMETERS if _stage(name, pp) == stage]
        for tp_rank in range(tp):
            boxes = {name: tensor_parallel_box(name, PARAMETERS[name], tp, tp_rank, NUM_KV_HEADS) for name in names}
            ranks += [
                [_spec(name, _rows(box, fsdp, row), "float32") for name, box in boxes.items()] for row in range(fsdp)
            ]
    return ranks


def wanted(tp: int, dtype: str) -> list[tuple[TensorSpec, ...]]:
    """What the ranks of a generator replica want; with 8 bits, projections have them and the rest is bfloat16."""
    ranks = []
    for rank in range(tp):
        boxes = {name: tensor_parallel_box(name, PARAMETERS[name], tp, rank, NUM_KV_HEADS) for name in PARAMETERS}
        quantized = [name for name in PARAMETERS if dtype in QUANTIZED and is_quantizable(name)]
        rest = "bfloat16" if dtype in QUANTIZED else dtype
        values = [_spec(name, box, dtype if name in quantized else rest) for name, box in boxes.items()]
        scales = [replace(_spec(name, boxes[name], "float32"), part="scales") for name in quantized]
        ranks.append((*values, *scales))
    return ranks


def _spec(name: str, box: Box, dtype: str) -> TensorSpec:
    return TensorSpec(name=name, global_shape=PARAMETERS[name], box=box, dtype=dtype)


def _stage(name: str, pp: int) -> int:
    return int(name.split(".")[1]) * pp // NUM_LAYERS if name.startswith("layers") else 0


def _rows(box: Box, num: int, rank: int) -> Box:
    if not box.shape:
        return box
    size = -(-box.shape[0] // num)
    return box.cut(0, min(rank * size, box.shape[0]), min((rank + 1) * size, box.shape[0]))


def whole(version: int, share: float = 1.0) -> dict[str, Tensor]:
    """All parameters of a version, with values on which casts go wrong; `share` of them differ from version 0."""
    generator, first = torch.Generator().manual_seed(version), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in PARAMETERS.items()}
    if share < 1:
        for name, weight in weights.items():
            kept = torch.rand(weight.shape, generator=generator) >= share
            weights[name] = torch.where(kept, torch.randn(weight.shape, generator=first), weight)
    weights["embed_tokens.weight"][0, : len(SPECIALS)] = torch.tensor(SPECIALS)
    return weights


def cut(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...] | list[TensorSpec]) -> dict[str, Tensor]:
    """A rank's own tensors, cast or quantized."""
    found = dict[str, Tensor]()
    for spec in specs:
        part = tensors[spec.name][spec.box.within(Box.whole(spec.global_shape))]
        if spec.dtype in QUANTIZED:
            found[spec.key], found[f"{spec.name}.scale"] = quantize_rows(part, spec.dtype)
        elif spec.part == "values":
            found[spec.key] = part.to(getattr(torch, spec.dtype)).clone()
    return found


def uniform(version: int, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """Every element is the version: a mixture of two shows at once."""
    return {name: torch.full(box.shape, float(version)) for name, box in boxes.items()}


def flat_layout(num_tensors: int = 4, shape: tuple[int, int] = (130, 400)) -> Layout:
    return lay_out([TensorSpec.whole(f"w{number}", shape, "float32") for number in range(num_tensors)])


def exchange_over(connection: Connection) -> Callable[[Any], list[Any]]:
    """The test collects the values of all ranks and gives them back."""

    def exchange(value: Any) -> list[Any]:
        connection.send(("exchange", value))
        return connection.recv()

    return exchange


def work(connection: Connection) -> None:
    """Runs one function after the other."""
    while True:
        function, args = connection.recv()
        function(connection, *args)
        connection.send("done")


def trainer(
    connection: Connection, transport: str, plan: WriterPlan, specs: list[TensorSpec], options: Any, share: float
) -> None:
    """Publishes each (version, in_use) that it is sent; None ends it."""
    publisher = publisher_class(transport)(plan, exchange_over(connection), **options)
    connection.send(("ready", None))
    while (order := connection.recv()) is not None:
        version, in_use = order
        weights = cut(whole(version, share), specs)
        address = publisher.publish(version, weights, in_use)
        for weight in weights.values():  # it must not read them any more
            weight.fill_(-7)
        connection.send(address)
    publisher.close()


def generator(connection: Connection, specs: tuple[TensorSpec, ...], rank: int, options: Any) -> None:
    """Fetches each (version, address) that it is sent; answers the bytes of all tensors, or the error."""
    reader = Reader(specs, rank, **options)
    served = {}
    while (order := connection.recv()) is not None:
        version, address = order
        subscriber = reader.at(address)
        try:
            served = subscriber.fetch(version, address)
        except RuntimeError as error:
            connection.send(error)
            continue
        proof = {"fingerprint": subscriber.fingerprint, "received_bytes": subscriber.received_bytes}
        connection.send({key: bits(tensor) for key, tensor in served.items()} | proof)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_freely(connection: Connection, plan: WriterPlan, keep: int) -> None:
    """Publishes 0, 1, 2, ... and keeps the newest `keep` in use, until it is told to stop or killed."""
    publisher = publisher_class("shared_memory")(plan, exchange_over(connection))
    connection.send(("ready", None))
    connection.recv()
    version = 0
    while not connection.poll():
        address = publisher.publish(version, uniform(version, plan.held), range(version - keep, version))
        if version == 0:
            connection.send(address)
        version += 1
    connection.send(version)


class Fatal(dict[str, Tensor]):
    """Weights whose reader is killed when it asks for the one numbered `last_words`."""

    def __init__(self, weights: dict[str, Tensor], last_words: int) -> None:
        super().__init__(weights)
        self._left = last_words

    def __getitem__(self, name: str) -> Tensor:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return super().__getitem__(name)


def write_and_die(connection: Connection, transport: str, plan: WriterPlan, last_words: int, options: Any) -> None:
    """Publishes 0, 1 and 2, and is killed while it publishes 3."""
    publisher = publisher_class(transport)(plan, exchange_over(connection), **options)
    connection.send(("ready", None))
    for version in range(3):
        connection.recv()
        connection.send(publisher.publish(version, uniform(version, plan.held), (version - 1,)))
    connection.recv()
    publisher.publish(3, Fatal(uniform(3, plan.held), last_words), (2,))
    connection.recv()


def publish_uniform(connection: Connection, plan: WriterPlan) -> None:
    """Publishes each (version, in_use) that it is sent, with the version in every element."""
    publisher = publisher_class("shared_memory")(plan, exchange_over(connection))
    connection.send(("ready", None))
    while (order := connection.recv()) is not None:
        connection.send(publisher.publish(order[0], uniform(order[0], plan.held), order[1]))


def serve_freely(connection: Connection, specs: tuple[TensorSpec, ...]) -> None:
    """Looks at what it serves all the time, and adopts each (version, address) that it is sent.

    Answers how often it looked, and what it saw that was not the version served.
    """
    reader, served, version, looks, torn = Reader(specs, 0), dict[str, Tensor](), -1, 0, list[str]()
    while True:
        looks += 1
        torn += [f"{name} of {version}" for name, tensor in served.items() if not (tensor == version).all()]
        if connection.poll():
            order = connection.recv()
            if order is None:
                return
            version, address = order
            served = reader.at(address).fetch(version, address)
            connection.send((looks, torn))
