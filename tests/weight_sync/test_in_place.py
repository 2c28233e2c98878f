"""Weights that generators serve where the trainer keeps them.

Not covered: memory of a GPU in another process (`tests/cuda`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import nn

from llamarl.config import ConfigError
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import FingerprintMismatch, WriterPlan, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import candidates, open_subscriber
from llamarl.weight_sync.transports.in_place import InPlacePublisher, InPlaceSubscriber, is_same_layout
from tests.nightly import nightly

SHAPES = {"embed": (50, 30), "layer.0": (64, 64), "norm": (7,)}
SPECS = tuple(TensorSpec.whole(name, shape, "float32") for name, shape in SHAPES.items())
HELD = {spec.name: spec for spec in SPECS}


def alone(specs: tuple[TensorSpec, ...]) -> WriterPlan:
    return plan_writers([lay_out(specs)], [list(specs)])[0]


def trained() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def train(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """A step that moves all weights."""
    optimizer.zero_grad()
    sum((weight**2).sum() for weight in weights.values()).backward()
    optimizer.step()


@pytest.fixture
def publisher() -> Iterator[InPlacePublisher]:
    with closing(InPlacePublisher(alone(SPECS), lambda value: [value])) as publisher:
        yield publisher


def test_a_step_is_seen_without_a_copy_and_is_the_step_it_would_be_elsewhere(publisher: InPlacePublisher) -> None:
    weights, elsewhere = trained(), trained()
    optimizers = [torch.optim.AdamW(one.values(), lr=0.1) for one in (weights, elsewhere)]
    with closing(InPlaceSubscriber(SPECS, 0, timeout_s=0.2)) as subscriber:
        served = subscriber.fetch(0, publisher.publish(0, weights, ()))
        homes = {name: weight.data_ptr() for name, weight in weights.items()}
        for version in range(1, 4):
            train(weights, optimizers[0])
            train(elsewhere, optimizers[1])
            assert all(torch.equal(served[name], weights[name]) for name in SHAPES), "the same memory"
            assert all(torch.equal(elsewhere[name], weights[name]) for name in SHAPES)
            fetched = subscriber.fetch(version, publisher.publish(version, weights, (version - 1,)))
            assert all(torch.equal(fetched[name], weights[name]) for name in SHAPES)
        assert {name: weight.data_ptr() for name, weight in weights.items()} == homes


def test_weights_that_change_while_they_are_proved_are_found_out(publisher: InPlacePublisher) -> None:
    weights = trained()
    address = publisher.publish(0, weights, ())
    with torch.no_grad():
        weights["layer.0"][3, 5] += 1
    with (
        closing(InPlaceSubscriber(SPECS, 0, timeout_s=0.2)) as subscriber,
        pytest.raises(FingerprintMismatch, match=r"layer\.0 of version 0"),
    ):
        subscriber.fetch(0, address)


def _seen(address: Address, pipe: multiprocessing.connection.Connection) -> None:
    with closing(open_subscriber(address, SPECS, 0)) as subscriber:
        tensors = subscriber.fetch(0, address)
        pipe.send(float(tensors["layer.0"].sum()))
        pipe.recv()
        pipe.send((subscriber.fetch(1, address) is not None, float(tensors["layer.0"].sum())))


@nightly("a process of its own; by day the same memory is seen by another view")
def test_another_process_sees_the_same_memory(publisher: InPlacePublisher) -> None:
    weights = trained()
    address, (here, there) = publisher.publish(0, weights, ()), multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_seen, args=(address, there))
    process.start()
    there.close()
    assert here.recv() == weights["layer.0"].sum().item()
    with torch.no_grad():
        weights["layer.0"].mul_(3)
    publisher.publish(1, weights, (0,))
    here.send("go on")
    assert here.recv() == (True, weights["layer.0"].sum().item())
    process.join(240)
    assert process.exitcode == 0


def test_a_sample_and_then_all_of_it(publisher: InPlacePublisher) -> None:
    """Tried with some weights first; they move again, and the tried memory may go."""
    weights = trained()
    with closing(InPlacePublisher(alone(SPECS[:1]), lambda value: [value])) as tried:
        tried.publish(0, weights, ())
    train(weights, torch.optim.AdamW(weights.values(), lr=0.1))
    with closing(InPlaceSubscriber(SPECS, 0, timeout_s=0.2)) as subscriber:
        served = subscriber.fetch(0, publisher.publish(0, weights, ()))
    assert all(torch.equal(served[name], weights[name]) for name in SHAPES)


class TestWhereItCanBe:
    @pytest.mark.parametrize(
        "other",
        [
            {"dtype": "bfloat16"}, {"part": "scales"}, {"name": "unknown"}, {"box": Box((0, 0), (25, 30))},
        ],
    )  # fmt: skip
    def test_tensors_are_alike(self, other: dict[str, object]) -> None:
        assert is_same_layout(SPECS, HELD)
        assert not is_same_layout((dataclasses.replace(SPECS[0], **other), *SPECS[1:]), HELD)

    def test_several_ranks_are_refused(self) -> None:
        half = [dataclasses.replace(spec, box=spec.box.cut(0, 0, 1)) for spec in SPECS]
        rest = [dataclasses.replace(spec, box=spec.box.cut(0, 1, spec.global_shape[0])) for spec in SPECS]
        with pytest.raises(ConfigError, match="needs one trainer rank"):
            InPlacePublisher(plan_writers([lay_out(SPECS)], [half, rest])[0], lambda value: [value])

    def test_other_types_are_refused_before_the_weights_change(self, publisher: InPlacePublisher) -> None:
        weights = trained()
        weights["norm"] = nn.Parameter(weights["norm"].detach().bfloat16())
        with pytest.raises(ConfigError, match=r"norm in torch.bfloat16 and generators want torch.float32"):
            publisher.publish(0, weights, ())
        assert weights["norm"].dtype == torch.bfloat16

    def test_only_sleeping_generators_are_offered_it(self) -> None:
        assert candidates(True, False, False, in_place=True)[0] == "in_place"
        assert candidates(True, True, False, on_gpu=True, in_place=True)[0] == "in_place"
        assert "in_place" not in candidates(True, True, False)
        assert "in_place" not in candidates(True, False, True, in_place=True)
