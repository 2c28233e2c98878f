"""Memory that trainers and generators of full size take of a pretended GPU, whose tensors have no values. Runs where
`guard.begin` has been called; `sharded` in any process where process groups may be made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config import RunConfig
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.distributed.mesh import ALONE, AXES, CPU, Axis, RankMesh
from llamarl.generation.attention import KVCache
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.kernels import gpu, half
from llamarl.models import fit, memory
from llamarl.models.hf import new_model
from llamarl.models.lora import add_adapters
from llamarl.models.memory import GeneratorLoad, Parts, TrainerLoad
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from llamarl.training import policy
from llamarl.training.optimization import finished
from llamarl.training.packing import pack
from llamarl.training.preflight import example_groups
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import SampleGroup, TrainSample

SHAPES = {
    "1B": ModelShape(
        family="llama", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=131_072, tie_embeddings=True,
    ),
    # As wide, and quick to compute by day.
    "1B, 5 layers": ModelShape(
        family="llama", hidden_size=2048, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128_256, max_position_embeddings=131_072, tie_embeddings=True,
    ),
    "8B": ModelShape(
        family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=131_072,
    ),
    "qwen3 8B": ModelShape(
        family="qwen3", hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=12_288, vocab_size=151_936, max_position_embeddings=40_960,
    ),
    "1B with experts": ModelShape(
        family="qwen3_moe", hidden_size=2048, num_layers=2, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, vocab_size=151_936, max_position_embeddings=40_960,
        moe=MoeShape(num_experts=128, experts_per_token=8, expert_size=768, sparse_layers=tuple(range(2))),
    ),
    "3B with experts": ModelShape(
        family="qwen3_moe", hidden_size=2048, num_layers=4, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, vocab_size=151_936, max_position_embeddings=40_960,
        moe=MoeShape(num_experts=128, experts_per_token=8, expert_size=768, sparse_layers=tuple(range(4))),
    ),
}  # fmt: skip
PROMPT, RESPONSES = 512, (512,) * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Bytes of a device, as counted and by the sum."""

    held: float
    """Before and after a step."""
    peak: float
    """More, in a step."""
    parts: Parts


@contextmanager
def _valueless() -> Iterator[Any]:
    from tests.gpu.pretend import MEMORY  # replaces some of torch's functions

    gc.collect()  # what others left
    MEMORY.device = "meta"
    try:
        yield MEMORY
    finally:
        MEMORY.device = "cpu"


class TrainKernels:
    """What `parts/cuda/train.py` takes, without what it computes. Launches count."""

    @staticmethod
    def rms_norm(x: Tensor, _weight: Tensor, _eps: float, dtype: torch.dtype) -> Tensor:
        _launched()
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def rms_norm_backward(_grad: Tensor, x: Tensor, weight: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
        _launched(2)  # and the sum of the parts of the weight's gradient
        return torch.empty_like(x), torch.empty_like(weight)

    @staticmethod
    def silu_mul(gate: Tensor, _up: Tensor) -> Tensor:
        _launched()
        return torch.empty_like(gate)

    @staticmethod
    def silu_mul_backward(_grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        _launched()
        return torch.empty_like(gate), torch.empty_like(up)

    @staticmethod
    def rotated(x: Tensor, _cos: Tensor, _sin: Tensor, back: bool = False) -> Tensor:
        _launched()
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launched(num: int = 1) -> None:
    from tests.gpu.pretend import LEDGER  # replaces some of torch's functions

    LEDGER.run(num)


def group(prompt: int, responses: tuple[int, ...]) -> SampleGroup:
    def sample(length: int) -> TrainSample:
        numbers = {name: np.zeros(length, np.float32) for name in ("behavior_logprobs", "advantages")}
        return TrainSample(columns={"token_ids": np.zeros(length, np.int32)} | numbers)

    return SampleGroup(prompt_token_ids_T=np.zeros(prompt, np.int32), samples=tuple(map(sample, responses)))


def launches(config: dict[str, Any]) -> tuple[float, float]:
    """Launches of a layer of 8B, and of all that is not a layer, in the gradients of packed tokens."""
    from tests.gpu.pretend import LEDGER

    kernels: Any = TrainKernels
    own = patch.object(gpu, "kernel", lambda name, _: kernels if name == "train" else None)
    added, found = patch.object(half, "add_product", lambda *_: _launched()), dict[int, int]()
    with _valueless(), own, added:
        for num_layers in (1, 3):
            shape = replace(SHAPES["8B"], num_layers=num_layers)
            with torch.device("meta"):
                model = Transformer(shape)
            trainer = Trainer(
                model,
                TrainerConfig(dtype="bfloat16", **config),
                Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
                ALONE,
                torch.device("cuda", 0),
                read=_nothing,
            )
            (batch,) = pack([group(PROMPT, RESPONSES)], 1 << 30)
            for _ in range(2):  # the first one casts weights
                LEDGER.take()
                trainer.logprobs(batch).sum().backward()
                found[num_layers] = LEDGER.take().kernels
    of_layer = (found[3] - found[1]) / 2
    return of_layer, found[1] - of_layer


def _nothing(_: str, box: Box) -> Tensor:
    return torch.zeros(1).expand(box.shape)


def trained(name: str, num_groups: int, config: dict[str, Any], tp: int = 1) -> Counted:
    """The second step of a trainer; with `tp` that of the first of so many ranks, the others of which do not exist."""
    rank = int(config.pop("lora_rank", 0))
    settings = TrainerConfig(lora=LoraConfig(rank=rank) if rank else None, **config)
    shape, device = SHAPES[name], torch.device("cuda", 0)
    with torch.device("meta"):
        model = Transformer(shape)
    if settings.lora:
        add_adapters(model, settings.lora, 0, getattr(torch, settings.dtype))
    kernels: Any = TrainKernels
    own = patch.object(gpu, "kernel", lambda name, _: kernels if name == "train" else None)
    added = patch.object(half, "add_product", lambda *_: None)  # in place
    with _valueless() as counted, _mesh(tp) as mesh, own, added:
        before = counted.live_bytes
        trainer = Trainer(
            model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), mesh, device, read=_nothing
        )
        (batch,) = pack([group(PROMPT, RESPONSES)] * num_groups, 1 << 30)
        for _ in range(2):
            held = counted.live_bytes
            counted.peak_bytes = held
            trainer.logprobs(batch).sum().backward()
            peak = counted.peak_bytes - held
            trainer.optimizer.step()
            half.forget(trainer.copying)
    load = TrainerLoad(
        tokens=len(batch.token_ids_N), targets=len(batch.targets_R), keys=0, half=settings.dtype == "bfloat16",
        checkpointing=settings.activation_checkpointing is True, flash=True, on_gpu=True, fused=True,
        selective=settings.activation_checkpointing == "selective", lora=settings.lora, tp=tp,
        weight=memory.WIDTHS[settings.weights], moments=memory.MOMENTS_BYTES[settings.moments],
    )  # fmt: skip
    table = 8 * shape.head_dim * shape.max_position_embeddings  # of the rotation: made once, counted with a step
    return Counted(held=held - before - table, peak=peak + table, parts=memory.trainer_bytes(shape, load))


@contextmanager
def _mesh(tp: int) -> Iterator[RankMesh]:
    if tp == 1:
        yield ALONE
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        sizes = [tp if axis == "tp" else 1 for axis in AXES]
        mesh = init_device_mesh("cuda", tuple(sizes), mesh_dim_names=AXES)
        axes = {axis: Axis(0, size, mesh.get_group(axis)) for axis, size in zip(AXES, sizes, strict=True)}
        yield RankMesh(**axes, world=Axis(0, tp, dist.group.WORLD), shards=None)
    finally:
        dist.destroy_process_group()


def generating(name: str, max_running: int, context: int) -> Counted:
    """A generator in bfloat16 with weights in use and others being written, and its cache."""
    shape, device = SHAPES[name], torch.device("cuda", 0)
    with _valueless() as counted:
        before = counted.live_bytes
        model = GeneratorModel(shape, "bfloat16", device)
        model.load(_nothing)
        spare = model.spare()
        cache = KVCache(
            num_layers=shape.num_layers, num_blocks=max_running * context // 16, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, dtype=model.kv_dtype, device=device,
        )  # fmt: skip
        held = counted.live_bytes - before
        del spare, cache
    load = GeneratorLoad(width=2, kv_width=2, kv_tokens=max_running * context)
    return Counted(held=held, peak=0, parts=memory.generator_bytes(shape, load))


@dataclass(frozen=True, kw_only=True, slots=True)
class InTurns:
    """Bytes of a device that a trainer and a generator share, as counted and by the sum."""

    training: float
    """At the peak of a step, the generator asleep."""
    generating: float
    """With keys and values, the trainer at rest."""
    asleep: float
    """Of the generator, in training."""
    of_training: Parts
    of_generating: Parts


def in_turns(shape: ModelShape, config: RunConfig) -> InTurns:
    """A step of a run's trainer beside a generator that sleeps, and then serves the trainer's own weights."""
    settings, device = config.trainer, torch.device("cuda", 0)
    prompt, response = fit.longest(config, shape)
    size = config.rollout.group_size
    num_groups = settings.microbatch_tokens // (prompt + size * response)
    num_tokens = num_groups * (prompt + size * response)
    with torch.device("meta"):
        model = Transformer(shape)
    with _valueless() as counted:
        before = counted.live_bytes
        trainer = Trainer(
            model,
            settings,
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
            ALONE,
            device,
            read=_nothing,
        )
        (batch,) = pack([group(prompt, (response,) * size)] * num_groups, 1 << 30)
        served = GeneratorModel(shape, config.generator.dtype, device)
        engine = Engine(
            served,
            EngineSettings(
                max_running=config.generator.max_running,
                prefill_tokens=config.generator.prefill_tokens,
                kv_bytes=config.generator.kv_cache_bytes,
                graphs=False,
                asleep=True,
            ),
        )
        for _ in range(2):
            counted.peak_bytes = counted.live_bytes
            trainer.sharding.hold_gradients()
            trainer.logprobs(batch).sum().backward()
            trainer.optimizer.step()
            training = counted.peak_bytes - before
            trainer.rest()
            at_rest = counted.live_bytes
            served.use({spec.key: trainer.sharding.weights[spec.name].detach() for spec in served.specs()})
            engine.wake()
            generating = counted.live_bytes - before
            engine.sleep()
            asleep = counted.live_bytes - at_rest
    load = fit.trainer_load(config, shape, tokens=num_tokens)
    parts = memory.trainer_bytes(shape, load)
    moments = {} if settings.moments_on == "host" else {"moments": parts["moments"]}
    generator = memory.generator_bytes(shape, fit.generator_load(config, shape))
    kept = {kind: size for kind, size in parts.items() if kind != "moments"} | moments
    resting = {"weights": parts["weights"]} | moments | {"keys and values": generator["keys and values"]}
    return InTurns(
        training=training, generating=generating, asleep=asleep, of_training=kept, of_generating=resting,
    )  # fmt: skip


class Living(TorchDispatchMode):
    """Most bytes that are alive at once, beside those of `known`; FSDP2 empties memory that it keeps."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.peak, self._known, self._seen = 0, known, dict[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage)
        self._seen = {key: weak for key, weak in self._seen.items() if weak() is not None}
        living = (weak() for key, weak in self._seen.items() if key not in self._known)
        self.peak = max(self.peak, sum(one.nbytes() for one in living if one is not None))
        return result


def sharded(
    num_ranks: int, config: dict[str, Any], tied: bool, vocab_size: int, moe: MoeShape | None = None, ep: int = 1
) -> Counted:
    """A step of one FSDP2 rank on the CPU, of a small model with few tokens, so that weights are what counts. Of `ep`
    ranks the others send as many rows as they get."""
    from tests.gpu.layouts import rank_of

    shape = ModelShape(
        family="qwen3_moe" if moe else "llama", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64,
        intermediate_size=1536, vocab_size=vocab_size, max_position_embeddings=256, tie_embeddings=tied, moe=moe,
    )  # fmt: skip
    tile, settings, groups = 1 << 15, TrainerConfig(**config), example_groups(1, vocab_size)
    num_tokens = sum(len(one.prompt_token_ids_T) + sum(len(s.token_ids_T) for s in one.samples) for one in groups)
    tiles = patch.object(policy, "TILE_LOGITS", tile), patch.object(memory, "TILE_LOGITS", tile)
    even = patch.object(memory, "UNEVEN_EXPERTS", 1.0), patch.object(Axis, "all_to_all", lambda _, x, *__: x.clone())
    with tiles[0], tiles[1], even[0], even[1], rank_of(0, {"fsdp": num_ranks, "ep": ep}) as mesh:
        trainer = Trainer(
            new_model(shape, 0, 0.05),
            settings,
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
            mesh,
            CPU,
        )
        finished(trainer.update(groups, 1))
        weights = list(trainer.sharding.weights.values())
        kept = [
            *weights,
            *(one.grad for one in weights),
            *(t for s in trainer.optimizer.state.values() for t in s.values()),
        ]
        with Living({one.untyped_storage()._cdata for one in kept}) as living:
            finished(trainer.accumulate(groups, 1))
        load = TrainerLoad(
            tokens=num_tokens, targets=num_tokens, keys=2 * num_tokens, half=settings.dtype == "bfloat16",
            checkpointing=settings.activation_checkpointing, flash=False, on_gpu=False, fused=False,
            shards=num_ranks, ep=ep,
            weight=memory.WIDTHS[settings.weights], moments=memory.MOMENTS_BYTES[settings.moments],
        )  # fmt: skip
        parts = memory.trainer_bytes(shape, load)
    return Counted(held=sum(one.nbytes for one in kept), peak=living.peak, parts=parts)
