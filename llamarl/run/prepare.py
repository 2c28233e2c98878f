"""Everything about a run that can be checked before a process starts or a file is written."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from llamarl.algorithms.advantages._base import GroupAdvantage
from llamarl.config import ConfigError, RunConfig, build
from llamarl.config.decoder import uneven_parts
from llamarl.config.ref import part
from llamarl.config.roles import CriticConfig
from llamarl.config.trainer import ParallelismConfig
from llamarl.controller.admission import Problems
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer, check_vocabulary, ended_after
from llamarl.models.folder import check_weights, load_shape
from llamarl.models.shape import ModelShape
from llamarl.observability.usage import MIN_FILES, available_bytes
from llamarl.rewards._build import build_reward
from llamarl.run.placement import LocalPlacer, models_in_use
from llamarl.training.cost import activation_bytes
from llamarl.types import Prompt
from llamarl.weight_sync.select import check_name

CACHE_BLOCK_TOKENS = 16
"""Tokens for which keys and values are kept at a time, by all kernels."""

RANK_FILES, GENERATOR_FILES = 8, 3
"""Files that a rank of the trainer has open for each of its other ranks, and for each rank of the generators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Facts that a run needs to know of its model and data."""

    shape: ModelShape
    problems: Problems
    placer: LocalPlacer | None
    """None: several hosts have to call first."""
    warnings: tuple[str, ...]
    """Sentences for the user."""


def check_parts(config: RunConfig) -> None:
    """Builds what the config names by `Ref`, and looks for vLLM, so that a mistake shows early. Raises ConfigError."""
    limit_s = config.cluster.start_timeout_s
    late = ConfigError(
        f"the parts that this run names are not imported and built after cluster.start_timeout_s = {limit_s:g} s; "
        "let their modules do less as they are imported, or raise it"
    )
    with ended_after(limit_s, late):  # whatever a user's module does as it is imported
        _check_parts(config)


def _check_parts(config: RunConfig) -> None:
    build(config.trainer.loss, "llamarl.algorithms.losses", "trainer.loss")
    advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
    if config.rollout.group_size == 1 and isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            f"rollout.group_size = 1 with trainer.advantage = {config.trainer.advantage.name!r}: it compares the "
            "rollouts of a group, so nothing is learnt from one; use a group_size of 2 or more"
        )
    if "critic" not in models_in_use(config) and config.critic != CriticConfig():
        raise ConfigError(
            f"critic is set and not used, as trainer.advantage = {config.trainer.advantage.name!r} needs no values; "
            "use 'gae', or leave it out"
        )
    build_reward(config.reward).close()
    if config.rollout.has_episodes:
        part("episodes", "check")(config)
    if set(config.metrics.sinks) - {"jsonl"}:
        part("page", "check")(config)
    check_name(config.weight_sync.transport)
    if config.generator.backend != "native":
        part(config.generator.backend, "check")(config)


def environment_of(config: RunConfig) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Tools that the chat template tells the policy of, and strings that end a turn. Raises ConfigError."""
    if config.rollout.environment is None:
        return [], ()
    environment = part("episodes", "build_environment")(config.rollout.environment)
    return environment.tools(), tuple(environment.stop)


def prepare(config: RunConfig) -> Prepared:
    """Reads model shape, headers of weights, tokenizer and prompts; the model exists.

    Raises:
        ConfigError: the model, the data or a combination of them cannot work.
    """
    shape, warnings = check_layout(config)
    if config.cluster.kind != "hosts":  # whose controller needs no weights
        for path in {config.model.path, *(one.path for one in models_in_use(config).values() if one.path)}:
            check_weights(path)
    placer = None if config.cluster.kind == "hosts" else LocalPlacer(config)
    if placer is not None:
        placer.check()
        warnings += placer.crowded()
        check_host_memory(config, shape)
    tokenizer = Tokenizer(config.model.path)
    check_vocabulary(tokenizer, shape.vocab_size)
    compiler = os.environ.get("CXX", "g++")
    if config.trainer.compile and config.trainer.device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"trainer.compile = true needs a C++ compiler, and there is no {compiler} on PATH; leave it out"
        )

    tools, stop_strings = environment_of(config)

    def load(which: Literal["train", "eval"]) -> tuple[Prompt, ...]:
        loaded = load_prompts(config.data, tokenizer, shape.max_position_embeddings, which, tools)
        if loaded.num_overlong:
            warnings.append(skipped_prompts(config, which, loaded.num_overlong))
        return loaded.prompts

    problems = Problems(
        train=load("train"),
        eval=load("eval") if config.data.eval else (),
        stop_token_ids=tokenizer.eos_token_ids,
        stop_strings=stop_strings,
    )
    longest = max(len(prompt.token_ids_T) for prompt in (*problems.train, *problems.eval))
    check_microbatch(config, shape, max(len(prompt.token_ids_T) for prompt in problems.train))
    check_cache(config, shape, longest)
    learnt = {prompt.token_ids_T.tobytes() for prompt in problems.train}
    if problems.eval and all(prompt.token_ids_T.tobytes() in learnt for prompt in problems.eval):
        warnings.append("data.eval: all of its prompts are in data.train too, so it does not tell learning from memory")
    return Prepared(shape=shape, problems=problems, placer=placer, warnings=tuple(warnings))


def skipped_prompts(config: RunConfig, which: Literal["train", "eval"], num: int) -> str:
    """Warning for the user about prompts that are too long."""
    limit = config.data.max_prompt_tokens
    return f"data.{which}: {num} prompts are too long and were skipped (data.max_prompt_tokens = {limit})"


def check_layout(config: RunConfig) -> tuple[ModelShape, list[str]]:
    """The shape of the model, which fits the layout of trainer, generators and models, and sentences for the user.

    Reads `config.json` only: neither weights nor data. Raises ConfigError.
    """
    shape = load_shape(config.model.path)
    check_tensor_parallel(shape, config.generator.tensor_parallel, config.model.path)
    check_parallelism(shape, config.trainer.parallelism, config.model.path)
    check_models(config, shape)
    check_files(config)
    warnings, rollout = list[str](), config.rollout
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if cut := [f"rollout.{name} = {found:g}" for name in off if (found := getattr(rollout, name)) != off[name]]:
        warnings.append(
            f"{', '.join(cut)}: rollouts come from a cut distribution and the trainer counts with the whole one, so "
            "importance ratios are too small; leave it out, or follow ratio_from_truncation"
        )
    if (fsdp := config.trainer.parallelism.fsdp) > config.rollout.prompts_per_step:
        warnings.append(
            f"trainer.parallelism.fsdp = {fsdp} shares the {config.rollout.prompts_per_step} groups of a step "
            "(rollout.prompts_per_step), so some ranks have none; raise the one or lower the other"
        )
    return shape, warnings


def check_files(config: RunConfig) -> None:
    """Raises ConfigError when a process could not open as many connections as the run needs."""
    ranks, generator = config.trainer.parallelism.num_ranks, config.generator
    of_trainer = RANK_FILES * ranks + GENERATOR_FILES * generator.replicas * generator.tensor_parallel
    needed = MIN_FILES + max(of_trainer, config.cluster.num_hosts)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ConfigError(
            f"a process of this run may have {needed} files open, and this shell allows {allowed}: run ulimit -n "
            f"{needed}, here and on the run's other hosts, or lower generator.replicas"
        )


def check_microbatch(config: RunConfig, shape: ModelShape, longest_prompt: int) -> None:
    """Raises ConfigError when the longest sequence that can come does not fit into a microbatch."""
    trainer, longest = config.trainer, longest_prompt + config.rollout.max_new_tokens
    longest = min(longest, shape.max_position_embeddings)
    if longest > trainer.microbatch_tokens:
        gib = activation_bytes(shape, trainer, longest, 2 * longest) / 2**30
        raise ConfigError(
            f"trainer.microbatch_tokens = {trainer.microbatch_tokens} is less than the {longest} tokens that prompt "
            f"and response (rollout.max_new_tokens = {config.rollout.max_new_tokens}) can have together; raise it to "
            f"{longest}, which takes about {gib:.2g} GiB for activations, or lower rollout.max_new_tokens"
        )


def least_memory(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes that what computes on this host's processors takes at least: weights, gradients and moments, and caches
    whose size is given. GPUs say it when they start."""
    trainer, generator, sizes = config.trainer, config.generator, {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
    taken = dict[str, float]()
    if trainer.device == "cpu":
        taken["the trainer"] = shape.num_parameters * (4 if trainer.lora else 16)
    if generator.device == "cpu":
        each = shape.num_parameters * sizes[generator.dtype] + (generator.kv_cache_bytes or 0)
        taken[f"{generator.replicas} generator{'s' * (generator.replicas > 1)}"] = generator.replicas * each
    for name, settings in models_in_use(config).items():
        if settings.device == "cpu":
            other = load_shape(settings.path) if settings.path else shape
            taken[f"the {name}"] = other.num_parameters * (16 if isinstance(settings, CriticConfig) else 1)
    return taken


def check_host_memory(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError when there is less than `least_memory`."""
    taken = least_memory(config, shape)
    if sum(taken.values()) > (free := available_bytes()):
        parts = ", ".join(f"{size / 2**30:.1f} for {name}" for name, size in taken.items())
        raise ConfigError(
            f"this run takes at least {sum(taken.values()) / 2**30:.1f} GiB of this host's memory ({parts}) and "
            f"{free / 2**30:.1f} are free; lower generator.replicas, use generator.dtype = 'bfloat16' or trainer.lora, "
            "or a smaller model"
        )


def check_cache(config: RunConfig, shape: ModelShape, longest_prompt: int) -> None:
    """Raises ConfigError when the context, or `generator.kv_cache_bytes`, does not hold the longest sequence that can
    come."""
    if (most := config.rollout.max_new_tokens) > shape.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_new_tokens = {most}: prompt and response have at most {shape.max_position_embeddings} tokens,"
            " the model's context; lower it"
        )
    generator, longest = config.generator, longest_prompt + config.rollout.max_new_tokens
    value_bytes = {"auto": 4 if generator.dtype == "float32" else 2, "bfloat16": 2, "fp8": 1}[generator.kv_dtype]
    heads = -(-shape.num_kv_heads // generator.tensor_parallel)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * value_bytes
    needed = per_token * -(-min(longest, shape.max_position_embeddings) // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS
    if generator.kv_cache_bytes is not None and generator.kv_cache_bytes < needed and generator.backend == "native":
        raise ConfigError(
            f"generator.kv_cache_bytes = {generator.kv_cache_bytes} does not hold one prompt and response of {longest} "
            f"tokens; give at least {needed}, and so much for each that is to be decoded at once, or leave it out"
        )


def check_tensor_parallel(shape: ModelShape, num_ranks: int, path: str) -> None:
    """Raises ConfigError when so many ranks cannot share the model."""
    uneven = partial(uneven_parts, shape, repeats_kv_heads=True)
    if found := uneven(num_ranks):
        possible = ", ".join(str(ranks) for ranks in range(1, shape.num_heads + 1) if not uneven(ranks))
        raise ConfigError(
            f"generator.tensor_parallel = {num_ranks} cannot share the {found[0]} of {path} evenly; "
            f"use one of {possible}"
        )


def check_models(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError when reference or critic have other tokens than the policy, a model has no folder, or the
    critic cannot be cut as it is to be."""
    for name, settings in models_in_use(config).items():
        other = load_shape(settings.path) if settings.path else shape
        if name != "reward-model" and other.vocab_size != shape.vocab_size:
            raise ConfigError(
                f"{name}.path = {settings.path!r} has {other.vocab_size} tokens and model.path {shape.vocab_size}; "
                "name a model with the policy's tokenizer"
            )
        if isinstance(settings, CriticConfig):
            check_parallelism(other, settings.parallelism, settings.path or config.model.path, name)


def check_parallelism(shape: ModelShape, parallelism: ParallelismConfig, path: str, executor: str = "trainer") -> None:
    """Raises ConfigError when the trainer, or the critic, cannot be cut so."""
    uneven = partial(uneven_parts, shape, repeats_kv_heads=False)
    if found := uneven(parallelism.tp):
        possible = ", ".join(str(ranks) for ranks in range(1, shape.num_kv_heads + 1) if not uneven(ranks))
        raise ConfigError(
            f"{executor}.parallelism.tp = {parallelism.tp} cannot share the {found[0]} of {path} evenly; "
            f"use one of {possible}"
        )
    if parallelism.pp > shape.num_layers:
        raise ConfigError(
            f"{executor}.parallelism.pp = {parallelism.pp} is more than the {shape.num_layers} layers of {path}; "
            f"use at most {shape.num_layers}"
        )
