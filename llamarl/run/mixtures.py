"""Refusals of what a mixture of experts cannot do, and of what only a mixture can."""

from __future__ import annotations

from llamarl.config import ConfigError, RunConfig
from llamarl.config.trainer import ATTENTION, ParallelismConfig
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes, uneven_shares


def check_mixture(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError: the run asks of its model what it cannot do with experts, or without."""
    path, trainer, generator = config.model.path, config.trainer, config.generator
    if shape.moe is None:
        for name, is_set in (
            ("generator.router_replay", generator.router_replay), ("trainer.train_router", trainer.train_router)
        ):  # fmt: skip
            if not is_set:
                raise ConfigError(f"{name} = false, but {path} is not a mixture of experts; leave it out")
        return
    if generator.backend != "native":
        raise ConfigError(
            f"generator.backend = {generator.backend!r} does not record which experts of {path} each token went to, "
            "which training needs; use backend = 'native'"
        )
    check_training(config, shape)


def check_training(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError: the trainer's settings are not for a mixture."""
    path, trainer = config.model.path, config.trainer
    if shape.moe is None:
        return
    if trainer.lora and (experts := [one for one in trainer.lora.targets if one not in ATTENTION]):
        raise ConfigError(
            f"trainer.lora.targets has {experts[0]}, of which {path} has one for each expert, and experts get no "
            f"adapters; use targets = {[*ATTENTION]}"
        )
    if trainer.compile:
        raise ConfigError(
            f"trainer.compile = true with {path}: how many rows each of its experts gets is known in the midst of a "
            "layer only, where nothing can be fused; leave it out"
        )


def check_mixture_layout(shape: DecoderSizes, parallelism: ParallelismConfig, path: str, executor: str) -> None:
    """Raises ConfigError: the experts of the model cannot be cut so, or it has none."""
    moe, ep, tp, option = shape.moe, parallelism.ep, parallelism.tp, f"{executor}.parallelism"
    if moe is None:
        if ep > 1:
            raise ConfigError(f"{option}.ep = {ep}, but {path} is not a mixture of experts; leave it out")
        return
    if moe.num_experts % ep:
        raise ConfigError(
            f"{option}.ep = {ep} cannot share the {moe.num_experts} experts of {path} evenly; use a divisor"
        )
    for what, columns in (("experts", moe.expert_size), ("shared experts", moe.shared_size)):
        if columns % tp:
            raise ConfigError(f"{option}.tp = {tp} cannot share the {columns} columns of the {what} of {path} evenly")
    ranks = parallelism.fsdp * parallelism.cp // ep if ep > 1 else 1
    if found := uneven_shares(shape, ranks, tp):
        raise ConfigError(
            f"{option}: {ranks} ranks of fsdp and cp have the same experts of {path} with ep = {ep}, and cannot "
            f"share the {found[0]} of each evenly; raise ep, or change fsdp"
        )
