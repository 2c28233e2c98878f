"""Generators that serve 8 bits are sent 8 bits: the same that they would make of full-precision weights themselves.

Shape suffixes: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import weight_processes as processes
from in_process import Trainer, faults
from torch import Tensor

from llamarl.generation.model import GeneratorModel
from llamarl.models.hf import new_model
from llamarl.models.quantize import NonFiniteWeights
from llamarl.models.shape import ModelShape
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError
from llamarl.sharding.tensor_parallel import expert_box, tensor_parallel_box
from llamarl.weight_sync.base import BUCKET_BYTES, into_buckets, plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.select import open_subscriber
from tests.nightly import crossed, nightly

TRANSPORTS = ("shared_memory", "p2p", "file", "nixl", "cuda_ipc")
SHAPE = ModelShape(
    family="qwen3",
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    vocab_size=42,
    max_position_embeddings=64,
    tie_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Rank:
    """Of a tensor-parallel generator."""

    size: int
    rank: int


@pytest.mark.parametrize(
    ("transport", "layout"),
    crossed(
        TRANSPORTS,
        [
            ((1, 1, 1), 4, "int8"),
            ((3, 1, 1), 1, "int8"),
            ((2, 1, 2), 2, "int8"),
            ((2, 2, 1), 2, "int8"),
            ((2, 1, 1), 2, "float8_e4m3fn"),
        ],
    ),
    ids=str,
)
def test_what_is_served_is_quantized_from_the_ranks_own_rows(world, transport, layout) -> None:
    trainer, tp, dtype = layout
    made = world(transport, trainer, tp, dtype=dtype)
    for version in range(2):
        answers = made.fetch(version, made.publish(version, in_use=[version - 1]))
        assert made.wrong(version, answers) == []
    assert made.generators and {key for key in answers[0] if key.endswith(".scale")}
    assert answers[0]["received_bytes"] >= sum(spec.num_bytes for spec in made.specs[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_generator_serves_the_same_as_when_it_loads_full_precision(tmp_path, monkeypatch, num_ranks, tp) -> None:
    weights = {name: weight.detach() for name, weight in new_model(SHAPE, seed=3, std=0.2).named_parameters()}
    models = [GeneratorModel(SHAPE, "int8", "cpu", Rank(tp, rank)) for rank in range(tp)]
    trainer = Trainer("file", [model.specs() for model in models], num_ranks, tmp_path)
    address = trainer.publish(0, weights)
    for rank, model in enumerate(models):
        served = open_subscriber(address, model.specs(), rank).fetch(0, address)
        loaded = dict[str, Tensor]()
        monkeypatch.setattr(model, "use", loaded.update)
        model.load(weights)
        assert loaded.keys() == served.keys()
        assert [key for key in loaded if processes.bits(loaded[key]) != processes.bits(served[key])] == []
    trainer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_without_a_scale_are_refused_by_name_and_version(tmp_path, transport) -> None:
    (specs,) = processes.wanted(1, "int8")
    trainer = Trainer(transport, [specs], 2, tmp_path)
    good, bad = processes.whole(0), processes.whole(1)
    bad["layers.1.gate_proj.weight"][17, 3] = float("nan")
    address = trainer.publish(0, good)
    with pytest.raises(NonFiniteWeights, match=r"row 17 of layers.1.gate_proj.weight \(version 1\) is not finite"):
        trainer.publish(1, bad, [0])
    subscriber = open_subscriber(address, specs, 0)
    assert faults(subscriber, 0, address, good) == []
    trainer.close()


def test_rows_that_no_trainer_rank_holds_whole_are_refused_when_the_plan_is_made() -> None:
    layouts: Callable[[str], Any] = lambda dtype: [lay_out(specs) for specs in processes.wanted(1, dtype)]  # noqa: E731
    with pytest.raises(
        LayoutError, match=r"^layers.\d.(experts.down|o|down)_proj\S*: trainer ranks hold parts.*'bfloat16', or"
    ):
        plan_writers(layouts("int8"), processes.held(1, 2, 1))
    plan_writers(layouts("bfloat16"), processes.held(1, 2, 1))


def test_8_bits_without_scales_are_refused() -> None:
    (specs,) = processes.wanted(1, "int8")
    with pytest.raises(LayoutError, match=r"^layers.0.q_proj.weight: int8 needs a matrix .*float32 scales"):
        lay_out([spec for spec in specs if spec.part == "values"])


def test_values_and_scales_are_cut_alike_into_buckets() -> None:
    shape = (3 * BUCKET_BYTES // 1000, 1000)
    values = TensorSpec.whole("w", shape, "int8")
    layout = lay_out([values, replace(TensorSpec.whole("w", shape, "float32"), part="scales")])
    (plan,) = plan_writers([layout], [[TensorSpec.whole("w", shape, "float32")]])
    boxes = [set[Box](), set[Box]()]
    for bucket in into_buckets(layout, plan.parts[0]):
        for part, _ in bucket.parts:
            boxes[part.tensor].add(part.box)
    assert boxes[0] == boxes[1]
    assert len(boxes[0]) == 3


STACKS: dict[str, tuple[int, ...]] = {"mlp.experts.gate_proj": (4, 6, 10), "mlp.experts.down_proj": (4, 10, 6)}


def wanted_experts(dtype: str, by_expert: bool) -> list[tuple[TensorSpec, ...]]:
    """What two ranks of a generator want: columns of each expert, or two experts whole."""
    ranks = []
    for rank in range(2):
        boxes = {
            name: expert_box(shape, 2, rank) if by_expert else tensor_parallel_box(name, shape, 2, rank, 1)
            for name, shape in STACKS.items()
        }
        values = [TensorSpec(name=n, global_shape=STACKS[n], box=box, dtype=dtype) for n, box in boxes.items()]
        ranks.append((*values, *(replace(one, part="scales", dtype="float32") for one in values)))
    return ranks


def by_expert_then_rows(spec: TensorSpec, num: int, rank: int) -> TensorSpec:
    """Expert parallelism of 2, and FSDP over dim 1 of what that leaves."""
    experts, rows = divmod(rank, num // 2)
    size = -(-spec.box.shape[1] // (num // 2))
    box = spec.box.cut(0, 2 * experts, 2 * experts + 2)
    return replace(spec, box=box.cut(1, rows * size, min((rows + 1) * size, box.shape[1])))


@pytest.mark.parametrize(("transport", "by_expert", "num_ranks"), crossed(TRANSPORTS, [True, False], [2, 4]))
def test_experts_are_quantized_row_by_row_wherever_they_were(tmp_path, transport, by_expert, num_ranks) -> None:
    """Rows of several experts are no single piece of a generator rank's tensor, and their scales neither."""
    specs = wanted_experts("int8", by_expert)
    trainer = Trainer(transport, specs, num_ranks, tmp_path, by_expert_then_rows)
    subscribers = list[Any]()
    for version in range(2):
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(shape, generator=generator) for name, shape in STACKS.items()}
        address = trainer.publish(version, weights, [version - 1])
        subscribers = subscribers or [open_subscriber(address, one, rank) for rank, one in enumerate(specs)]
        for subscriber in subscribers:
            assert faults(subscriber, version, address, weights) == []
    weights["mlp.experts.gate_proj"][3, 5, 1] = torch.inf
    with pytest.raises(NonFiniteWeights, match=r"row 5 of mlp.experts.gate_proj\[3\] \(version 2\) is not finite"):
        trainer.publish(2, weights, [1])
    trainer.close()


@nightly("one large expert; by day smaller ones are cut by rows")
def test_an_expert_that_is_larger_than_a_bucket_is_cut_with_its_scales() -> None:
    shape = (3, 2 * BUCKET_BYTES // 1000, 1000)
    values = TensorSpec.whole("mlp.experts.up_proj", shape, "int8")
    layout = lay_out([values, replace(values, dtype="float32", part="scales")])
    (plan,) = plan_writers([layout], [[replace(values, dtype="float32")]])
    buckets = into_buckets(layout, plan.parts[0])
    boxes = [[part.box for bucket in buckets for part, _ in bucket.parts if part.tensor == n] for n in range(2)]
    assert boxes[0] == boxes[1] and sum(box.num_elements for box in boxes[0]) == values.box.num_elements
    assert max(bucket.num_bytes for bucket in buckets) <= BUCKET_BYTES
