"""Only what changed is sent, and whatever goes wrong with that, the weights are those that were published.

Not covered: several hosts, and GPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import weight_processes as processes
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import Trainer, faults
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.weight_sync import base
from llamarl.weight_sync.base import Base, FingerprintMismatch, Subscriber
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import Reader, candidates, open_subscriber, publisher_class
from tests.nightly import crossed, examples

TRANSPORTS = ("p2p", "file")
SHAPE = (90, 700)
SPECS = (
    TensorSpec.whole("a_proj.weight", SHAPE, "int8"),
    TensorSpec.whole("b_proj.weight", SHAPE, "int8"),
    replace(TensorSpec.whole("a_proj.weight", SHAPE, "float32"), part="scales"),
    replace(TensorSpec.whole("b_proj.weight", SHAPE, "float32"), part="scales"),
    TensorSpec.whole("embed.weight", SHAPE, "bfloat16"),
    TensorSpec.whole("norm.weight", (7,), "float32"),
)
DENSE_BYTES = sum(spec.num_bytes for spec in SPECS)


def changed(weights: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Some elements are others, but for the largest of each row, which makes the scale."""
    generator = torch.Generator().manual_seed(seed)
    new = dict[str, Tensor]()
    for name, weight in weights.items():
        differs = torch.rand(weight.shape, generator=generator) < share
        differs &= weight.abs() < 3
        new[name] = torch.where(differs, torch.rand(weight.shape, generator=generator) * 2 - 1, weight)
    return new


def first() -> dict[str, Tensor]:
    shapes = {spec.name: spec.global_shape for spec in SPECS}
    weights = {name: torch.randn(shape, generator=torch.Generator().manual_seed(5)) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.view(len(weight), -1)[:, 0] = 4.0
    return weights


def is_dense(subscriber: Subscriber) -> bool:
    """Everything came once, whole; between parts in a bucket are gaps."""
    return 1 <= subscriber.received_bytes / DENSE_BYTES < 1.005


class Run:
    """A trainer of two ranks and generators that fetch when they are told to."""

    def __init__(self, transport: str, folder: Path, num_generators: int = 2) -> None:
        self.trainer = Trainer(transport, [SPECS], 2, folder, delta=True)
        self.weights = {0: first()}
        self.address = self.trainer.publish(0, self.weights[0])
        self.generators = [self.join(rank) for rank in range(num_generators)]
        self.served = dict[int, tuple[int, dict[str, Tensor]]]()

    def join(self, rank: int) -> Subscriber:
        return open_subscriber(self.address, SPECS, rank, delta=True)

    def publish(self, share: float, in_use: tuple[int, ...] | None = None) -> int:
        version = max(self.weights) + 1
        self.weights[version] = changed(self.weights[version - 1], share, version)
        held = {version for version, _ in self.served.values()} if in_use is None else in_use
        self.trainer.publish(version, self.weights[version], held)
        return version

    def fetch(self, rank: int) -> Subscriber:
        """The newest version is what arrives, and what it served before is as it was."""
        version, subscriber = max(self.weights), self.generators[rank]
        assert faults(subscriber, version, self.address, self.weights[version]) == []
        for old, tensors in self.served.values():
            expected = processes.cut(self.weights[old], SPECS)
            assert all(processes.bits(tensors[key]) == processes.bits(expected[key]) for key in expected)
        self.served[rank] = version, dict(subscriber._base.tensors)
        return subscriber

    def close(self) -> None:
        for subscriber in self.generators:
            subscriber.close()
        self.trainer.close()


@pytest.fixture(params=TRANSPORTS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    made = Run(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(steps=st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.05, 1.0]), st.sets(st.integers(0, 1))), max_size=6))
@settings(deadline=None, max_examples=examples(12))
def test_any_sequence_of_versions_arrives_bit_for_bit(transport, steps) -> None:
    """Each version is fetched by some, none or all."""
    with tempfile.TemporaryDirectory() as folder:
        made = Run(transport, Path(folder))
        for share, ranks in steps:
            made.publish(share)
            for rank in ranks:
                is_first = rank not in made.served
                num_bytes = made.fetch(rank).received_bytes
                assert num_bytes <= 1.01 * DENSE_BYTES
                assert num_bytes >= DENSE_BYTES or not is_first
        made.close()


def test_few_changes_are_few_bytes(run) -> None:
    run.fetch(0)
    run.publish(0.01)
    some = run.fetch(0).received_bytes
    run.publish(0.0)
    assert run.fetch(0).received_bytes < some / 5 < 0.01 * DENSE_BYTES, "hardly more than a count per block"
    assert is_dense(run.fetch(1)), "it has just joined"


def test_where_everything_changed_it_is_sent_whole(run) -> None:
    run.fetch(0)
    run.weights[1] = {name: 1.5 * weight + 0.1 for name, weight in run.weights[0].items()}
    run.trainer.publish(1, run.weights[1], {0})
    assert is_dense(run.fetch(0))


def test_a_base_that_is_another_than_it_says_is_found_out_and_weights_are_sent_whole(run) -> None:
    run.fetch(0)
    run.publish(0.01)
    run.fetch(0)
    subscriber = run.generators[0]
    older = processes.cut(run.weights[0], SPECS)
    subscriber._base = Base(version=1, tensors=older)
    run.served.clear()
    run.publish(0.01, in_use=(1,))
    assert 1.001 * DENSE_BYTES < run.fetch(0).received_bytes < 1.1 * DENSE_BYTES
    assert subscriber.fingerprint == run.fetch(1).fingerprint
    run.publish(0.01)
    assert run.fetch(0).received_bytes < 0.05 * DENSE_BYTES, "the next one is small again"


def test_a_base_that_the_trainer_no_longer_has_is_not_used(run) -> None:
    run.fetch(0)
    for _ in range(5):
        run.publish(0.01, in_use=())
    run.served.clear()
    assert is_dense(run.fetch(0))


def test_versions_of_another_trainer_are_no_base(run, tmp_path) -> None:
    reader = Reader(SPECS, 0, delta=True)
    reader.at(run.address).fetch(0, run.address)
    other = Trainer(run.address.transport, [SPECS], 2, tmp_path / "other", delta=True)
    weights = changed(run.weights[0], 1.0, 7)
    other.publish(0, weights)
    newer = changed(weights, 0.001, 8)
    address = other.publish(1, newer, [0])
    assert faults(reader.at(address), 1, address, newer) == []
    assert is_dense(reader.at(address))
    reader.close()
    other.close()


def test_changes_that_arrive_damaged_are_sent_whole(tmp_path, monkeypatch) -> None:
    run = Run("p2p", tmp_path)
    run.fetch(0)
    run.publish(0.01)
    decode, calls = base.decode, list[int]()

    def damaged(base: Tensor, number: int, message: Tensor) -> Tensor:
        calls.append(number)
        if len(calls) in (1, 2):
            message = message.clone()
            message[0 if len(calls) == 1 else -1] ^= 4  # a count that does not fit, then a value
        return decode(base, number, message)

    monkeypatch.setattr(base, "decode", damaged)
    assert run.fetch(0).received_bytes > 0.01 * DENSE_BYTES
    assert len(calls) > 2
    run.close()


def test_weights_that_stay_damaged_are_refused(tmp_path) -> None:
    run = Run("p2p", tmp_path)
    run.fetch(0)
    run.publish(0.01)
    slot = run.trainer.publishers[0]._slots[1]
    slot.flats[0][5] ^= 1
    with pytest.raises(FingerprintMismatch, match=r"^a_proj.weight of version 1 on generator rank 0"):
        run.generators[0].fetch(1, run.address)
    run.close()


@pytest.mark.parametrize(("transport", "dtype"), crossed(TRANSPORTS, ["bfloat16", "int8"]))
def test_a_generator_that_is_killed_and_one_that_joins(world, transport, dtype) -> None:
    made = world(transport, (2, 1, 1), 2, dtype=dtype, mortal=True, share=0.05)
    assert made.wrong(0, made.fetch(0, made.publish(0))) == []
    address = made.publish(1, in_use=[0])
    process, connection, rank = made.generators.pop(0)
    connection.send((1, address))  # in the middle of it
    process.kill()
    process.join(240)
    made.add_generator(rank)
    answers = made.fetch(1, address)
    assert made.wrong(1, answers) == []
    kept, joined = (answer["received_bytes"] for answer in answers)
    assert kept < joined
    answers = made.fetch(2, made.publish(2, in_use=[1]))
    assert made.wrong(2, answers) == []
    assert all(answer["received_bytes"] < joined for answer in answers)


def test_shared_memory_has_no_use_for_deltas() -> None:
    with pytest.raises(ConfigError, match=r"saves nothing with SharedMemoryPublisher, .* transport = 'p2p' or 'file'"):
        publisher_class("shared_memory")(None, None, delta=True)
    assert candidates(same_host=True, same_process=False, delta=True) == ["p2p", "file"]
