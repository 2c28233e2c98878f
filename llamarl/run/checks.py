"""Checks of a run's settings against the shapes of its models, before any process starts."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import ATTENTION, CriticConfig, ParallelismConfig
from llamarl.models.fit import cache_bytes, trainer_load
from llamarl.models.folder import load_shape
from llamarl.models.memory import BLOCK_COLUMNS, trainer_bytes
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.sizes import DecoderSizes, uneven_parts, uneven_shares
from llamarl.models.vocabulary import tokens_of
from llamarl.observability.spans import MIN_FILES
from llamarl.run.placement import model_paths, models_in_use
from llamarl.sharding.tensor_parallel import cuts_by_expert


def check_mixture(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError for settings that need a mixture of experts, or that a mixture does not support."""
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
            f"generator.backend = {generator.backend!r} does not record the experts of each token in {path}, "
            "which training needs; use backend = 'native'"
        )
    check_training(config, shape)


def check_training(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError for trainer settings that a mixture does not support."""
    path, trainer = config.model.path, config.trainer
    if shape.moe is None:
        return
    if trainer.lora and (experts := [one for one in trainer.lora.targets if one not in ATTENTION]):
        raise ConfigError(
            f"trainer.lora.targets has {experts[0]}, which {path} has in each expert, and experts get no "
            f"adapters; use targets = {[*ATTENTION]}"
        )
    if trainer.compile:
        raise ConfigError(
            f"trainer.compile = true with {path}: the number of rows of each expert is only known inside of a "
            "layer, which prevents fusion; leave it out"
        )


def check_hybrid(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError for settings that a hybrid of attention and delta nets does not support."""
    if shape.delta is None:
        return
    path, trainer, generator = config.model.path, config.trainer, config.generator
    if generator.backend != "native":
        raise ConfigError(
            f"generator.backend = {generator.backend!r} takes no new weights for the delta nets of {path}, whose "
            "projections have other names and orders there; use backend = 'native'"
        )
    if trainer.compile:
        raise ConfigError(
            f"trainer.compile = true with {path}: the chunks of its delta nets differ with every microbatch; "
            "leave it out"
        )


def check_mixture_layout(shape: DecoderSizes, parallelism: ParallelismConfig, path: str, executor: str) -> None:
    """Raises ConfigError if the model has no experts, or its experts cannot be sharded like this."""
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


RANK_FILES, GENERATOR_FILES = 8, 3
"""Open files of a trainer rank for each other trainer rank, and for each generator rank."""


def check_layout(config: RunConfig) -> tuple[ModelShape, list[str]]:
    """Checks the layouts of trainer, generators and models. Returns the model's shape, and warnings.

    Reads only `config.json`, neither weights nor data. Raises ConfigError.
    """
    shape = load_shape(config.model.path)
    check_mixture(config, shape)
    check_hybrid(config, shape)
    check_tensor_parallel(shape, config.generator.tensor_parallel, config.model.path)
    check_parallelism(shape, config.trainer.parallelism, config.model.path)
    check_models(config, shape)
    check_moments(config, shape)
    check_files(config)
    warnings, rollout = list[str](), config.rollout
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cut = [f"rollout.{name} = {found:g}" for name in off if (found := getattr(rollout, name)) != off[name]]
    if cut and config.generator.backend != "native":
        warnings.append(
            f"{', '.join(cut)} with generator.backend = {config.generator.backend!r}: rollouts come from a truncated "
            "distribution, but the trainer counts all tokens, because it does not know the dropped ones. So importance "
            "ratios are too small; leave it out, or use generator.backend = 'native'"
        )
    if (fsdp := config.trainer.parallelism.fsdp) > config.rollout.prompts_per_step:
        warnings.append(
            f"trainer.parallelism.fsdp = {fsdp} shares the {config.rollout.prompts_per_step} groups of a step "
            "(rollout.prompts_per_step), so some ranks have none; raise one or lower the other"
        )
    return shape, warnings


def check_files(config: RunConfig) -> None:
    """Raises ConfigError if a process could not open as many connections as the run needs."""
    ranks, generator = config.trainer.parallelism.num_ranks, config.generator
    of_trainer = RANK_FILES * ranks + GENERATOR_FILES * generator.replicas * generator.tensor_parallel
    needed = MIN_FILES + max(of_trainer, config.cluster.num_hosts)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ConfigError(
            f"a process of this run may have {needed} open files, and this shell allows {allowed}: run ulimit -n "
            f"{needed}, here and on the run's other hosts, or lower generator.replicas"
        )


def check_microbatch(config: RunConfig, shape: ModelShape, longest_prompt: int) -> None:
    """Raises ConfigError if the longest possible sequence does not fit into a microbatch."""
    trainer, longest = config.trainer, longest_prompt + config.rollout.max_new_tokens
    longest = min(longest, shape.max_position_embeddings)
    if longest > trainer.microbatch_tokens:
        gib = trainer_bytes(shape, trainer_load(config, shape, tokens=longest))["activations"] / 2**30
        raise ConfigError(
            f"trainer.microbatch_tokens = {trainer.microbatch_tokens} is less than the {longest} tokens that prompt "
            f"and response (rollout.max_new_tokens = {config.rollout.max_new_tokens}) can have together; raise it to "
            f"{longest}, which takes about {gib:.2g} GiB for activations, or lower rollout.max_new_tokens"
        )


def check_cache(config: RunConfig, shape: ModelShape, longest_prompt: int) -> None:
    """Raises ConfigError if the longest possible sequence exceeds the context or `generator.kv_cache_bytes`."""
    if (most := config.rollout.max_new_tokens) > shape.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_new_tokens = {most}: prompt and response have at most {shape.max_position_embeddings} tokens,"
            " the model's context; lower it"
        )
    generator, longest = config.generator, longest_prompt + config.rollout.max_new_tokens
    needed = cache_bytes(config, shape, min(longest, shape.max_position_embeddings))
    if generator.kv_cache_bytes is not None and generator.kv_cache_bytes < needed and generator.backend == "native":
        raise ConfigError(
            f"generator.kv_cache_bytes = {generator.kv_cache_bytes} does not hold one prompt and response of {longest} "
            f"tokens; give at least {needed} for each rollout to decode at once, or leave it out"
        )


def check_tensor_parallel(shape: ModelShape, num_ranks: int, path: str) -> None:
    """Raises ConfigError if `num_ranks` ranks cannot share the model evenly."""

    def uneven(ranks: int) -> list[str]:
        return uneven_parts(shape, ranks, repeats_kv_heads=True) + uneven_experts(shape.moe, ranks)

    _check_even("generator.tensor_parallel", num_ranks, uneven, shape.num_heads, path)


def _check_even(option: str, num_ranks: int, uneven: Callable[[int], list[str]], most: int, path: str) -> None:
    """Raises ConfigError if `num_ranks` ranks leave something `uneven`. The message lists the possible numbers up to
    `most`."""
    if found := uneven(num_ranks):
        possible = ", ".join(str(ranks) for ranks in range(1, most + 1) if not uneven(ranks))
        raise ConfigError(f"{option} = {num_ranks} cannot share the {found[0]} of {path} evenly; use one of {possible}")


def uneven_experts(moe: MoeShape | None, num_ranks: int) -> list[str]:
    """Returns texts on what `num_ranks` ranks of a generator cannot share evenly in a mixture."""
    if moe is None:
        return []
    sizes = {"columns of the shared expert": moe.shared_size}
    if not cuts_by_expert(moe.num_experts, moe.expert_size, num_ranks):
        sizes["columns of each expert"] = moe.expert_size
    return [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]


def check_models(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError if reference or critic have another vocabulary than the policy, a model has no folder, or the
    critic's layout does not fit."""
    readers = [(option, path) for name, option, path in model_paths(config) if name != "reward-model"]
    own = tokens_of(Path(config.model.path)) if readers else {}
    for option, path in readers:
        _check_tokens(own, shape, option, path)
    for name, settings in models_in_use(config).items():
        other = load_shape(settings.path) if settings.path else shape
        if isinstance(settings, CriticConfig):
            check_parallelism(other, settings.parallelism, settings.path or config.model.path, name)
            check_blocks(config, other, settings.parallelism, name)


def _check_tokens(own: Mapping[int, str], shape: ModelShape, option: str, path: str) -> None:
    """Raises ConfigError if a model reads the policy's token ids as other tokens. Rows beyond the tokenizer's tokens do
    not matter: models of one family pad their embeddings differently. Without tokenizers the sizes must be equal.

    Args:
        own: tokens of the policy by id.
    """
    other, num_rows = tokens_of(Path(path)), load_shape(path).vocab_size
    differs = next((one for one in own if other.get(one) != own[one]), None) if own and other else None
    fix = "name a model with the policy's tokenizer"
    if differs is not None:
        raise ConfigError(
            f"{option} = {path!r} has {other.get(differs, 'no token')!r} as token {differs}, and model.path "
            f"{own[differs]!r}; {fix}"
        )
    if num_rows <= max(own) if own and other else num_rows != shape.vocab_size:
        raise ConfigError(f"{option} = {path!r} has {num_rows} tokens and model.path {shape.vocab_size}; {fix}")


def check_moments(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError if the trainer's moments cannot be sharded, or `moments_on` has no effect."""
    trainer = config.trainer
    if trainer.moments_on == "host" and trainer.device == "cpu":
        raise ConfigError("trainer.moments_on = 'host' with trainer.device = 'cpu' has no effect; leave it out")
    check_blocks(config, shape, trainer.parallelism, "trainer")


def check_blocks(config: RunConfig, shape: ModelShape, parallelism: ParallelismConfig, executor: str) -> None:
    """Raises ConfigError if shards would split blocks that share a scale of the 8-bit moments."""
    tp, widths = parallelism.tp, {"attention output": shape.query_size}
    widths["feed-forward output"] = shape.intermediate_size
    if shape.delta is not None:
        widths["delta nets' output"] = shape.delta.value_size
    if shape.moe is not None:
        widths |= {"experts' output": shape.moe.expert_size, "shared experts' output": shape.moe.shared_size}
    for name, columns in widths.items() if config.trainer.moments == "8bit" and tp > 1 else ():
        if columns // tp % BLOCK_COLUMNS:
            raise ConfigError(
                f"trainer.moments = '8bit' with {executor}.parallelism.tp = {tp}: a rank has {columns // tp} columns "
                f"of the {name}, and each {BLOCK_COLUMNS} share a scale; use {executor}.parallelism.fsdp, or 'float32'"
            )


def check_parallelism(shape: ModelShape, parallelism: ParallelismConfig, path: str, executor: str = "trainer") -> None:
    """Raises ConfigError if the layout of trainer or critic does not fit the model."""
    check_mixture_layout(shape, parallelism, path, executor)
    if shape.delta is not None and parallelism.cp > 1:
        raise ConfigError(
            f"{executor}.parallelism.cp = {parallelism.cp}: the delta nets of {path} pass a state from token to token, "
            "and ranks with parts of a sequence do not pass it on; use tp, pp or fsdp"
        )
    uneven = partial(uneven_parts, shape, repeats_kv_heads=False)
    _check_even(f"{executor}.parallelism.tp", parallelism.tp, uneven, shape.num_kv_heads, path)
    if parallelism.pp > shape.num_layers:
        raise ConfigError(
            f"{executor}.parallelism.pp = {parallelism.pp} is more than the {shape.num_layers} layers of {path}; "
            f"use at most {shape.num_layers}"
        )
