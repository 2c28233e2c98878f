"""One rank of a trainer in some layout, and the same computed by one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.algorithms.advantages.gae import Gae
from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.checkpoint.store import CheckpointStore
from llamarl.config import ConfigError
from llamarl.config.errors import RanksLost
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import ALONE, CPU, RankMesh
from llamarl.models import hf
from llamarl.models.hf import load_model, new_model, open_model
from llamarl.models.lora import B, add_adapters
from llamarl.models.scalar import load_scalar_model, open_scalar_model
from llamarl.models.shape import ModelShape, YarnScaling
from llamarl.models.transformer import Transformer
from llamarl.parts.copies.mirror import Mirror
from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import sharded_dim
from llamarl.training import parallel, policy
from llamarl.training.critic import Critic, ValueObjective
from llamarl.training.optimization import Optimization
from llamarl.training.preflight import check_critic_layout, check_layout
from llamarl.training.result import NonFiniteStep, PolicyStepResult, StepResult
from llamarl.training.state import load_training_state, training_state
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import RolloutGroup
from tests.distributed.ranks import join

SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 42,
    "max_position_embeddings": 128,
}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32)
MISTRAL = SHAPE | {"family": "mistral", "tie_embeddings": False, "rope_scaling": YARN, "dtype": torch.float32}
QWEN3 = SHAPE | {"family": "qwen3", "tie_embeddings": True, "dtype": torch.float32}
QWEN2 = SHAPE | {"family": "qwen2", "tie_embeddings": True, "dtype": torch.float64}
LIMIT_S = 8.0
"""Of one collective, where a rank hangs: much more than ranks are apart on a busy machine."""
SEQUENCES = [np.arange(length, dtype=np.int32) + length for length in (9, 1, 4, 2)]


@dataclass
class Found:
    """What a rank, or all of them, or one process computed."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    """Of the first step; (whole shape, box, part) by name."""
    weights: dict[str, Any] = field(default_factory=dict)
    scores: list[list[np.ndarray]] = field(default_factory=list)
    """Before, and after each step."""
    error: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    """At the end; (whole shape, box, part) of weights and moments by name."""


def train(
    mesh: RankMesh,
    shape: Mapping[str, Any],
    batches: Sequence[list[RolloutGroup]],
    loss: Loss | None = None,
    config: dict[str, Any] | None = None,
    checkpoints: Path | None = None,
) -> Found:
    """
    Args:
        checkpoints: to begin with the newest, and to save one after the last batch.
    """
    trainer = new_trainer(mesh, shape, config, loss)
    if checkpoints is not None:
        load(trainer, checkpoints)
    found, seen = Found(scores=[trainer.score(SEQUENCES)]), dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, weight in trainer.sharding.weights.items():
            assert weight.grad is not None
            seen.setdefault(name, weight.grad.clone())

    trainer.optimizer.register_step_pre_hook(keep)
    for batch in batches:
        try:
            result = trainer.step(batch)
        except NonFiniteStep as error:
            found.error = str(error)
            break
        found.metrics.append(logged(result))
        found.skipped.append(result.skipped)
        found.scores.append(trainer.score(SEQUENCES))
    keep_parts(found, trainer, seen)
    if checkpoints is not None:
        found.state = save(trainer, checkpoints) if batches else parts(trainer)
    return found


def new_trainer(
    mesh: RankMesh, shape: Mapping[str, Any], config: dict[str, Any] | None = None, loss: Loss | None = None
) -> Trainer:
    """The same weights in every layout."""
    settings = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 0.05, "microbatch_tokens": 30} | (config or {}))
    sizes = dict(shape)
    dtype = sizes.pop("dtype")
    model = new_model(ModelShape(**sizes), seed=5, std=0.15).to(dtype)
    if settings.lora:
        learnt_adapters(model, settings.lora, getattr(torch, settings.dtype))
    return Trainer(model, settings, Objective(loss=loss or Aipo(), advantage=GroupMean(), temperature=0.7), mesh)


def logged(result: StepResult) -> dict[str, float]:
    """All that it says, by name."""
    if not isinstance(result, PolicyStepResult):
        return result.metrics
    logprobs = {
        f"logprobs of {group_id}.{index}": float(logprobs_T.mean())
        for group_id, of_group in result.logprobs.items()
        for index, logprobs_T in of_group.items()
    }
    return asdict(result.update) | result.metrics | logprobs


def keep_parts(found: Found, trainer: Optimization[Any], gradients: Mapping[str, Tensor]) -> None:
    """This rank's weights and their first gradients, if there are any."""
    for name, weight in trainer.sharding.weights.items():
        spec, part = trainer.sharding.specs[name], weight.detach()
        assert part.shape == spec.shape, f"{name}: {tuple(part.shape)} is not {spec}"
        found.weights[name] = spec.global_shape, spec.box, part.clone()
        if gradients:
            found.gradients[name] = spec.global_shape, spec.box, gradients[name]


def learnt_adapters(model: Transformer, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Adds adapters that do something: where B is 0, so are the gradients of A."""
    add_adapters(model, lora, seed=6, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if name.endswith(B):
            torch.nn.init.normal_(weight, std=0.1, generator=generator)


def parts(trainer: Trainer | Critic) -> dict[str, Any]:
    """Weights and moments: whole shape, box and part by name."""
    return {name: (spec.global_shape, spec.box, part.clone()) for name, (spec, part) in trainer.shards().items()}


def load(trainer: Trainer | Critic, checkpoints: Path) -> None:
    """The newest, if there is one."""
    world = trainer.mesh.world
    newest, _ = CheckpointStore(checkpoints, 2, world.rank, world.size, trainer.mesh.exchange).load_newest()
    if newest is not None:
        load_training_state(trainer, newest.shapes, newest.read, newest.state)


def save(trainer: Trainer | Critic, checkpoints: Path) -> dict[str, Any]:
    """What was saved."""
    world = trainer.mesh.world
    store = CheckpointStore(checkpoints, 2, world.rank, world.size, trainer.mesh.exchange)
    store.save(trainer.policy_version, trainer.shards(), training_state(trainer)).result(240)
    if committed := store.commit():
        committed.result(240)
    return parts(trainer)


def rank(where: Rendezvous, number: int, sizes: Mapping[str, int], *arguments: Any) -> Found:
    """`train` in a process of its own."""
    mesh = join(where, number, sizes)
    try:
        return train(mesh, *arguments)
    finally:
        mesh.close()


def preflight(
    where: Rendezvous,
    number: int,
    sizes: Mapping[str, int],
    shape: Mapping[str, Any],
    broken: str,
    lora: LoraConfig | None = None,
    of: str = "trainer",
) -> str:
    """What the preflight says, or is refused with, when part of the layout is broken."""
    mesh = join(where, number, sizes)
    names = {"block": "BLOCKS", "norm": "sharded_dim", "tied": "EMBEDDING"}
    others = {
        "block": ("mixer",),
        "norm": lambda name: 0 if name.endswith(("q_norm.weight", "k_norm.weight")) else sharded_dim(name),
        "tied": "no such weight",
    }
    kept = {name: getattr(parallel, name) for name in names.values()}
    if broken:
        setattr(parallel, names[broken], others[broken])
    try:
        tiny = ModelShape(**{key: value for key, value in shape.items() if key != "dtype"})
        return check_layout(tiny, mesh, CPU, lora) if of == "trainer" else check_critic_layout(tiny, mesh, CPU)
    except ConfigError as error:
        return str(error)
    finally:
        for name, value in kept.items():
            setattr(parallel, name, value)
        mesh.close()


def half_of_head(
    where: Rendezvous,
    number: int,
    sizes: Mapping[str, int],
    hidden_R_D: Tensor,
    head_V_D: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, and one of two ranks' gradients of hidden states and of its half of the head, by chunks of 4 rows."""
    mesh, tile_logits = join(where, number, sizes), policy.TILE_LOGITS
    own_V_D = head_V_D.chunk(2)[number].clone().requires_grad_()
    hidden_R_D.requires_grad_()
    policy.TILE_LOGITS = 4 * len(own_V_D)
    try:
        values_R = policy.target_logprobs(hidden_R_D, own_V_D, targets_R, 0.7, mesh.tp)
        (values_R @ weights_R).backward()
        assert hidden_R_D.grad is not None
        assert own_V_D.grad is not None
        return values_R.detach(), hidden_R_D.grad, own_V_D.grad
    finally:
        policy.TILE_LOGITS = tile_logits
        mesh.close()


@dataclass(frozen=True)
class Fragile(Aipo):
    """On the last rank it raises, is killed, is stopped or hangs."""

    how: str = "raise"

    def token_losses(self, positions: Positions) -> TokenLosses:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            if self.how == "raise":
                raise ZeroDivisionError("no luck")
            if self.how in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
            while True:
                time.sleep(0.05)
        return super().token_losses(positions)


def ready() -> None:
    """All is imported."""


def failing(
    where: Rendezvous, number: int, sizes: Mapping[str, int], groups: list[RolloutGroup], how: str
) -> tuple[str, float, bool]:
    """How and when a step ends for which the last rank fails, and whether this one may wait for ever."""
    mesh = join(where, number, sizes, timeout_s=LIMIT_S if how in ("stop", "hang") else 240.0)
    is_lost = False
    try:
        with mesh.together():
            train(mesh, MISTRAL, [groups], Fragile(how=how), {})
    except (RanksLost, ZeroDivisionError) as error:
        said, end_s = f"{type(error).__name__}: {error}", time.monotonic()
        try:
            mesh.check()
        except RanksLost as lost:
            is_lost = lost is error
        return said, end_s, is_lost
    finally:
        mesh.close()
    raise AssertionError("nothing has failed")


@dataclass
class Loaded:
    """What a rank has that reads a checkpoint."""

    num_bytes: int
    """Read."""
    weights: dict[str, Any]
    """Those that are trained: (whole shape, box, part) by name."""
    after: dict[str, Any]
    """The same, with moments, after a step."""
    scores: np.ndarray


def loaded(
    where: Rendezvous,
    number: int,
    sizes: Mapping[str, int],
    folder: Path,
    batch: list[RolloutGroup],
    config: TrainerConfig,
) -> list[Loaded]:
    """When it reads its own parts, and when it reads all and drops the rest."""
    mesh, part_of, found, num_bytes = join(where, number, sizes), hf._part, list[Loaded](), 0

    def counted(path: Path, name: str, box: Box) -> Tensor:
        nonlocal num_bytes
        part = part_of(path, name, box)
        num_bytes += part.numel() * part.itemsize
        return part

    hf._part = counted
    try:
        for reads_all in (False, True):
            num_bytes = 0
            model, weights = open_model(folder)
            if reads_all:
                model = load_model(folder, torch.float32, CPU)
            if config.lora:
                add_adapters(model, config.lora, seed=6, dtype=getattr(torch, config.dtype))
            read = None if reads_all else weights.read
            trainer = Trainer(
                model, config, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7), mesh, CPU, read=read
            )
            before = parts(trainer)
            trainer.step(batch)
            scores = np.concatenate(trainer.score(SEQUENCES))
            found.append(Loaded(num_bytes, before, parts(trainer), scores))
    finally:
        hf._part = part_of
        mesh.close()
    return found


def critic_loaded(where: Rendezvous, number: int, sizes: Mapping[str, int], folder: Path) -> list[dict[str, Any]]:
    """What a critic has that reads its own parts of a policy, and one that reads all; it has a head of zeros."""
    mesh = join(where, number, sizes)
    try:
        whole = load_scalar_model(folder, torch.float32, CPU, new_head=True)
        model, weights = open_scalar_model(folder, new_head=True)
        return [
            parts(
                Critic(
                    one, TrainerConfig(), ValueObjective(clip=0.2, advantage=Gae()), mesh=mesh, device=CPU, read=read
                )
            )
            for one, read in ((model, weights.read), (whole, None))
        ]
    finally:
        mesh.close()


def alone(*arguments: Any) -> Found:
    """The same by one process."""
    return train(ALONE, *arguments)


def assembled(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors of all ranks' parts; every element is held by somebody, and all who hold it agree on its bits."""
    whole, known = dict[str, Tensor](), dict[str, Tensor]()
    for parts in ranks:
        for name, (shape, box, part) in parts.items():
            values = whole.setdefault(name, torch.zeros(shape, dtype=part.dtype))
            there = known.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            where = box.within(Box.whole(shape))
            torch.testing.assert_close(values[where][there[where]], part[there[where]], rtol=0, atol=0, msg=name)
            values[where], there[where] = part, True
    for name, there in known.items():
        assert there.all(), f"nobody holds all of {name}"
    return whole


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference of each tensor over that of the tensor, at worst."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)) for name in one)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The same of all tensors together: AdamW makes rounding errors of tiny gradients as large as other steps."""
    norms = [torch.stack([(one[n] - other[n]).norm(), other[n].norm()]) for n in one]
    apart, size = torch.stack(norms).norm(dim=0).tolist()
    return apart / size


def mirrored(
    where: Rendezvous,
    number: int,
    sizes: Mapping[str, int],
    shape: Mapping[str, Any],
    batches: Sequence[list[RolloutGroup]],
    config: dict[str, Any],
    folder: Path,
) -> list[dict[str, Any]]:
    """Weights and moments after all batches: of a trainer that nothing befalls, and of one that went on from its mirror
    before the last batch."""
    mesh, found = join(where, number, sizes), list[dict[str, Any]]()
    try:
        mirror = Mirror(folder, mesh.world.rank, mesh.world.size, mesh.exchange)
        for is_new in (False, True):
            trainer = new_trainer(mesh, shape, config)
            if is_new:
                state = mirror.load(len(batches) - 1)
                assert state is not None
                load_training_state(trainer, state.shapes, state.read, state.state)
            for batch in batches[trainer.policy_version :]:
                if not is_new and trainer.policy_version == len(batches) - 1:
                    mirror.save(trainer.policy_version, trainer.shards(), training_state(trainer))
                    assert mirror._written is not None
                    mirror._written.result(240)
                trainer.step(batch)
            found.append(parts(trainer))
        return found
    finally:
        mesh.close()


def assert_same(found: list[Found], expected: Found, tolerance: float) -> None:
    for one in found:
        assert one.skipped == expected.skipped
        for step, wanted in zip(one.metrics, expected.metrics, strict=True):
            for name, value in wanted.items():
                if not name.startswith(("num_input_tokens", "expert_load")):  # packing differs with the shares
                    near = value if value is None else pytest.approx(value, rel=2 * tolerance, abs=tolerance / 100)
                    assert step[name] == near, name
        for before, after in zip(one.scores, expected.scores, strict=True):
            one_T, other_T = np.concatenate(before), np.concatenate(after)
            np.testing.assert_allclose(one_T, other_T, rtol=10 * tolerance, atol=tolerance / 10)
    gradients, weights = (
        [
            {name: part for name, (_, _, part) in getattr(expected, kind).items()},
            assembled([getattr(o, kind) for o in found]),
        ]
        for kind in ("gradients", "weights")
    )
    assert difference(*gradients) < tolerance
    assert distance(*weights) < tolerance


def assert_same_bits(one: Loaded, other: Loaded) -> None:
    assert np.array_equal(one.scores, other.scores)
    for ours, theirs in ((one.weights, other.weights), (one.after, other.after)):
        assert ours.keys() == theirs.keys()
        for name, (_, box, part) in ours.items():
            assert box == theirs[name][1]
            assert torch.equal(part, theirs[name][2]), name


def in_mirror(
    where: Rendezvous,
    number: int,
    sizes: Mapping[str, int],
    shape: Mapping[str, Any],
    batches: Sequence[list[RolloutGroup]],
    config: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Weights and moments after all batches, which are mirrored then; without any, of a trainer that went on from
    there."""
    mesh = join(where, number, sizes)
    try:
        mirror, trainer = (
            Mirror(folder, mesh.world.rank, mesh.world.size, mesh.exchange),
            new_trainer(mesh, shape, config),
        )
        if not batches:
            state = mirror.load(99)
            assert state is not None
            load_training_state(trainer, state.shapes, state.read, state.state)
        for batch in batches:
            trainer.step(batch)
        if batches:
            mirror.save(trainer.policy_version, trainer.shards(), training_state(trainer))
            assert mirror._written is not None
            mirror._written.result(240)
        return parts(trainer)
    finally:
        mesh.close()


def scored(mesh: RankMesh, shape: Mapping[str, Any], config: dict[str, Any] | None = None) -> list[list[np.ndarray]]:
    """Scores by the weights as they are, by rounded ones, and by the weights again."""
    trainer = new_trainer(mesh, shape, config)
    return [trainer.score(SEQUENCES, rounded=rounded) for rounded in (False, True, False)]


def scored_rank(where: Rendezvous, number: int, sizes: Mapping[str, int], *arguments: Any) -> list[list[np.ndarray]]:
    """`scored` in a process of its own."""
    mesh = join(where, number, sizes)
    try:
        return scored(mesh, *arguments)
    finally:
        mesh.close()
