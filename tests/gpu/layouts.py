"""Ranks of large layouts, one at a time, with process groups that move nothing. Runs in a process of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.checkpoint.store import writers
from llamarl.config.roles import TrainerConfig
from llamarl.distributed.mesh import AXES, CPU, Axis, RankMesh, _expert_groups
from llamarl.kernels import products
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import Transformer
from llamarl.parts.forecast.layouts import generator_layout, trainer_layout
from llamarl.sharding.parallel_layout import ShardLayout
from llamarl.sharding.reshard import plan_reshard
from llamarl.training import parallel
from llamarl.training.optimization import finished
from llamarl.training.policy import Policy
from llamarl.training.preflight import example_groups
from llamarl.training.trainer import Objective, Trainer
from llamarl.weight_sync.layout import TensorSpec

COMMON: dict[str, Any] = {
    "family": "llama", "vocab_size": 128_256, "head_dim": 128, "num_kv_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = {
    "8B": {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 14_336},
    "70B": {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "intermediate_size": 28_672},
    "405B": {"hidden_size": 16_384, "num_layers": 126, "num_heads": 128, "intermediate_size": 53_248},
    "experts": {
        "family": "qwen3_moe", "hidden_size": 2048, "num_layers": 2, "num_heads": 32, "intermediate_size": 6144,
        "moe": MoeShape(num_experts=128, experts_per_token=8, expert_size=768, sparse_layers=(0, 1)),
    },
}  # fmt: skip
"""Llama 3's, and two layers of Qwen3-30B-A3B."""


def shape_of(model: str) -> ModelShape:
    return ModelShape(**COMMON | MODELS[model], tie_embeddings=False)


@contextmanager
def rank_of(rank: int, sizes: dict[str, int]) -> Iterator[RankMesh]:
    """One rank of a mesh; the others do not exist."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    pp, fsdp, cp, tp = shape
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pp * fsdp * cp * tp)
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
        joined = init_device_mesh("cpu", (pp, fsdp * cp, tp), mesh_dim_names=("pp", "shards", "tp"))
        places = zip(AXES, mesh.get_coordinate() or (), shape, strict=True)
        yield RankMesh(
            **{axis: Axis(place, size, mesh.get_group(axis)) for axis, place, size in places},
            world=Axis(rank, dist.get_world_size(), dist.group.WORLD),
            shards=joined["shards"],
            **_experts(_expert_groups(shape, sizes.get("ep", 1), CPU, 60.0)),
        )
    finally:
        dist.destroy_process_group()


def _experts(groups: DeviceMesh | None) -> dict[str, Any]:
    if groups is None:
        return {}
    axis = Axis(groups.get_local_rank("ep"), groups["ep"].size(), groups.get_group("ep"))
    return {"ep": axis, "expert_shards": groups["shards"]}


def planned(model: str, sizes: dict[str, int]) -> ShardLayout:
    """What the ranks of a trainer should hold."""
    pp, fsdp, cp, tp = (sizes.get(axis, 1) for axis in AXES)
    return trainer_layout(_shapes(model), fsdp=fsdp * cp, tp=tp, pp=pp, ep=sizes.get("ep", 1), dtype="float32")


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Transformer(shape_of(model)).named_parameters()}


def misplaced(
    model: str, sizes: dict[str, int], ranks: Sequence[int], planned_for: dict[str, int] | None = None
) -> list[str]:
    """Weights of which these ranks hold something else than is planned, by default for the same mesh."""
    layout, found = planned(model, planned_for or sizes), list[str]()
    for rank in ranks:
        with rank_of(rank, sizes) as mesh, patch.object(parallel, "_place", lambda *_: None):  # nowhere
            with torch.device("meta"):
                policy = Policy(Transformer(shape_of(model)), mesh)
            sharding = parallel.parallelize(policy, policy.transformer, mesh, CPU)
        boxes = layout.boxes(rank)
        held = {name: spec.box for name, spec in sharding.specs.items() if spec.box.num_elements}
        found += [f"rank {rank}: {name}" for name in boxes.keys() ^ held.keys()]
        for name, box in held.items():
            if boxes.get(name) != box or sharding.weights[name].shape != box.shape:
                found.append(f"rank {rank}: {name} {box}, {tuple(sharding.weights[name].shape)}")
    return found


def planning(model: str, sizes: dict[str, int], generator_tp: int) -> dict[str, float]:
    """Processor seconds of a checkpoint's index and of a sync plan, their sizes, and how much memory they take."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, at what others have left here
    left_bytes = _peak_bytes()
    layout, start_s = planned(model, sizes), time.process_time()
    held = [
        [
            TensorSpec(name=name, global_shape=layout.parameters[name].shape, box=box, dtype="float32")
            for name, box in layout.boxes(rank).items()
        ]
        for rank in range(layout.num_ranks)
    ]
    index = writers(held)
    index_s = time.process_time() - start_s
    to = generator_layout(_shapes(model), num_kv_heads=shape_of(model).num_kv_heads, tp=generator_tp, dtype="float32")
    plan = plan_reshard(layout, to)
    num_moves = sum(len(list(plan.moves_from(rank))) for rank in range(0, layout.num_ranks, 64))
    return {
        "index_s": index_s,
        "plan_s": time.process_time() - start_s - index_s,
        "index_parts": len(index),
        "moves_of_some": num_moves,
        "peak_bytes": _peak_bytes() - left_bytes,
    }


def _peak_bytes() -> float:
    return 1024.0 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


class Made(TorchDispatchMode):
    """Keeps an eye on all tensors with the outlines of weights."""

    def __init__(self, outlines: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._outlines, self._seen = outlines, list[ReferenceType[Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen += [ref(one) for one in tree_leaves(result) if tuple(getattr(one, "shape", ())) in self._outlines]
        return result

    def alive_bytes(self) -> int:
        """Of their memory."""
        living = [one for weak in self._seen if (one := weak()) is not None]
        return sum({one.untyped_storage()._cdata: one.untyped_storage().size() for one in living}.values())


def held(dtype: str, recompute: bool, mixed: bool) -> dict[str, float]:
    """Bytes of whole weights that are alive at the end of a forward and before backward, on 8 ranks, of a layer, and of
    all layers, in two bytes per element.

    Args:
        mixed: as the trainer does it; else only by autocast.
    """
    shape = ModelShape(
        family="llama", hidden_size=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
        vocab_size=208, max_position_embeddings=256, tie_embeddings=False,
    )  # fmt: skip
    model = new_model(shape, 0, 0.05)
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters() if weight.ndim == 2)
    outlines = {tuple(weight.shape) for weight in model.model.layers.parameters() if weight.ndim == 2}
    made, alive, backward = Made(outlines | {one[::-1] for one in outlines}), list[int](), torch.autograd.backward

    def look(*given: Any) -> None:
        alive.append(made.alive_bytes())
        backward(*given)

    model.model.norm.register_forward_hook(lambda *_: alive.append(made.alive_bytes()))
    settings = TrainerConfig(microbatch_tokens=64, dtype=dtype, activation_checkpointing=recompute)
    policy = MixedPrecisionPolicy if mixed else lambda **_: MixedPrecisionPolicy()
    with rank_of(0, {"fsdp": 8}) as mesh, patch.object(torch.distributed.fsdp, "MixedPrecisionPolicy", policy):
        trainer = Trainer(model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), mesh, CPU)
        with patch.object(torch.autograd, "backward", look), made:
            finished(trainer.accumulate(example_groups(1, shape.vocab_size), 1))
    after_forward, before_backward = alive[:2]
    sizes = {"layer": 2.0 * layer, "layers": 2.0 * layer * shape.num_layers}
    return sizes | {"after_forward": float(after_forward), "before_backward": float(before_backward)}


class Traffic(TorchDispatchMode):
    """Counts operations that launch something, and bytes that ranks gather and reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {"gathered": 0, "reduced": 0, "launches": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name()
        if "allgather" in name or ("all_gather" in name and name.startswith("c10d")):
            self.found["gathered"] += max(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
        elif "reduce_scatter" in name:
            self.found["reduced"] += max(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
        aliases = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
        self.found["launches"] += not (aliases and all(aliases)) and not name.startswith(
            ("aten::empty", "aten::detach")
        )
        return result


class Issued(TorchDispatchMode):
    """Keeps the collectives in the order in which the host issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(("c10d::", "_c10d_functional::")):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def issued(sizes: dict[str, int], rank: int) -> list[str]:
    """Collectives of one rank in a whole step, of as many microbatches on each rank."""
    shape = ModelShape(
        family="llama", hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=384, vocab_size=208, max_position_embeddings=256, tie_embeddings=False,
    )  # fmt: skip
    settings, order = TrainerConfig(microbatch_tokens=64, dtype="bfloat16"), Issued()
    with rank_of(rank, sizes) as mesh:
        trainer = Trainer(
            new_model(shape, 0, 0.05),
            settings,
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
            mesh,
            CPU,
        )
        with order:
            finished(trainer.update(example_groups(8, shape.vocab_size), 1))
    return order.found


def traffic(sizes: dict[str, int], recompute: bool | str) -> dict[str, float]:
    """Of a layer, in the gradients of a microbatch in bfloat16 on the first of so many ranks; and its parameters."""
    counts = list[dict[str, int]]()
    for num_layers in (2, 4):
        shape = ModelShape(
            family="llama", hidden_size=128, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=384, vocab_size=208, max_position_embeddings=256, tie_embeddings=False,
        )  # fmt: skip
        settings = TrainerConfig(microbatch_tokens=64, dtype="bfloat16", activation_checkpointing=recompute)
        model, counted = new_model(shape, 0, 0.05), Traffic()
        with rank_of(0, sizes) as mesh:
            trainer = Trainer(
                model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), mesh, CPU
            )
            # As a GPU does, also on a processor that converts the factors of products.
            with patch.object(products, "multiplies_half", lambda: True), counted:
                finished(trainer.accumulate(example_groups(1, shape.vocab_size), 1))
        counts.append(counted.found)
    parameters = sum(weight.numel() for weight in model.model.layers[0].parameters())
    return {name: (counts[1][name] - counts[0][name]) / 2 for name in counts[0]} | {"parameters": float(parameters)}
