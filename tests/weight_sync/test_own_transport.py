"""A transport of somebody's own: a publisher and a subscriber in any module, named in the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.config import ConfigError
from llamarl.weight_sync.base import (
    CopyingSubscriber,
    Publisher,
    Superseded,
    VersionRequest,
    part_of,
    plan_writers,
    views,
)
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import open_subscriber, publisher_class

PIGEONS = dict[str, dict[int, tuple[Tensor, np.ndarray]]]()
"""What each publisher has sent: the bytes and the proof of each version."""


class PigeonPublisher(Publisher):
    """Within this process."""

    WITHIN_PROCESS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        PIGEONS["coo"] = {}

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        layout = self._plan.layouts[0]
        flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        proof, tensors = np.zeros((2, len(layout.specs)), np.uint64), views(layout, flat)
        self._plan.write(0, version, weights, ((p, part_of(layout, tensors, p)) for p in self._plan.parts[0]), proof)
        PIGEONS["coo"][version] = flat, proof
        return Address(transport=f"{__name__}:Pigeon", publisher="coo", num_writers=1, places={layout.digest: "loft"})

    def close(self) -> None:
        PIGEONS.clear()


class PigeonSubscriber(CopyingSubscriber):
    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        if request.version not in PIGEONS[address.publisher]:
            raise Superseded(f"version {request.version} has flown")
        flat, proof = PIGEONS[address.publisher][request.version]
        for key, tensor in views(self.layout, flat).items():
            request.tensors[key].copy_(tensor)
        return proof[None], flat.nbytes

    def close(self) -> None:
        return None


SPECS = (TensorSpec.whole("w", (5, 7), "bfloat16"), TensorSpec.whole("b", (7,), "float32"))


def test_it_carries_weights_and_is_proved() -> None:
    weights = {"w": torch.randn(5, 7), "b": torch.randn(7)}
    held = [TensorSpec.whole(spec.name, spec.shape, "float32") for spec in SPECS]
    (plan,) = plan_writers([lay_out(SPECS)], [held])
    publisher = publisher_class(f"{__name__}:Pigeon")(plan, lambda value: [value])
    address = publisher.publish(3, weights, ())
    subscriber = open_subscriber(address, SPECS, 0, delta=True)
    served = subscriber.fetch(3, address)
    assert torch.equal(served["w"], weights["w"].bfloat16()) and torch.equal(served["b"], weights["b"])
    assert subscriber.fingerprint and subscriber.received_bytes == subscriber.layout.num_bytes == 192
    with pytest.raises(Superseded):
        subscriber.fetch(4, address)
    PIGEONS["coo"][3][0][0] ^= 1
    with pytest.raises(RuntimeError, match="w of version 3 on generator rank 0: its fingerprint is"):
        subscriber.fetch(3, address)
    publisher.close()


def test_a_name_that_cannot_be_loaded_says_why() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere:Pigeon'` cannot be loaded: No module named 'nowhere'"):
        publisher_class("nowhere:Pigeon")
