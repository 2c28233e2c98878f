"""Everything about a run that can be checked before a process starts or a file is written."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llamarl.algorithms.advantages._base import GroupAdvantage
from llamarl.config import ConfigError, RunConfig, build, did_you_mean, load_recorded
from llamarl.config.cluster import lack_of_monarch
from llamarl.config.data import SourceConfig
from llamarl.config.hub import hub_name, open_hub
from llamarl.config.ref import NotRun, class_of, part
from llamarl.config.roles import CriticConfig, ReferenceConfig
from llamarl.config.trainer import ParallelismConfig
from llamarl.controller.admission import Problems
from llamarl.data.prompts import SOURCES, load_prompts, open_tokenizer, settled
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import check_vocabulary, ended_after
from llamarl.kernels.build import pinned as pinned_instructions
from llamarl.models.fit import cache_bytes, trainer_load
from llamarl.models.folder import load_shape
from llamarl.models.memory import BLOCK_COLUMNS, trainer_bytes
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.sizes import uneven_parts
from llamarl.models.tensors import check_listed_weights, check_weights
from llamarl.observability.stages import stage
from llamarl.observability.usage import MIN_FILES
from llamarl.run.disk import disk_need
from llamarl.run.held_out import learnt_too, load_held_out
from llamarl.run.memory import MachineMemory, check_memory
from llamarl.run.mixtures import check_mixture, check_mixture_layout
from llamarl.run.placement import LocalPlacer, models_in_use
from llamarl.run.preview import check_reward
from llamarl.run.sources import environment_of, of_source
from llamarl.sharding.tensor_parallel import cuts_by_expert
from llamarl.types import Prompt
from llamarl.weight_sync.select import check_name

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
    first_prompt: str
    """Sentences that show the first prompt of each source as the model sees it, after those on what a filter leaves
    out."""


@stage("importing the modules that the settings name")
def check_parts(config: RunConfig) -> None:
    """Builds what the config names by `Ref`, and looks for vLLM, so that a mistake shows early. Within `nothing_run`,
    checks only what comes with the package. Raises ConfigError."""
    limit_s = config.cluster.start_timeout_s
    late = ConfigError(
        f"the parts that this run names are not imported and built after cluster.start_timeout_s = {limit_s:g} s; "
        "let their modules do less as they are imported, or raise it"
    )
    with ended_after(limit_s, late):  # whatever a user's module does as it is imported
        _check_parts(config)


def _check_parts(config: RunConfig) -> None:
    with suppress(NotRun):
        build(config.trainer.loss, "llamarl.algorithms.losses", "trainer.loss")
    with suppress(NotRun):
        _check_advantage(config)
    used = models_in_use(config)
    unused = config.reference.model_dump(include={"path", "dtype", "threads", "device"})
    if "reference" not in used and unused != ReferenceConfig().model_dump(include=set(unused)):
        raise ConfigError("reference is set and not used; set reference.kl_coefficient, or leave it out")
    if "critic" not in used and config.critic != CriticConfig():
        raise ConfigError(
            f"critic is set and not used, as trainer.advantage = {config.trainer.advantage.name!r} needs no values; "
            "use 'gae', or leave it out"
        )
    for which, sources in (("train", config.data.sources), ("eval", config.data.eval_sets)):
        for number, source in enumerate(sources):
            with suppress(NotRun):
                check_entry(source, f"data.{which}.{number}")
    for label, one in config.by_source.items():
        with of_source(label), suppress(NotRun):
            check_reward(one)
    if config.has_episodes:
        with suppress(NotRun):
            part("episodes", "check")(config)
    if set(config.metrics.sinks) - {"jsonl"}:
        part("page", "check")(config)
    check_name(config.weight_sync.transport)
    if config.generator.backend != "native":
        with suppress(NotRun):
            part(config.generator.backend, "check")(config)


def _check_advantage(config: RunConfig) -> None:
    """Raises ConfigError."""
    advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
    if config.rollout.group_size == 1 and isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            f"rollout.group_size = 1 with trainer.advantage = {config.trainer.advantage.name!r}: it compares the "
            "rollouts of a group, so nothing is learnt from one; use a group_size of 2 or more"
        )


def settle(
    config: RunConfig, pinned: RunConfig, *, resume: bool, for_agent: bool = False
) -> tuple[RunConfig, RunConfig]:
    """The settings as they are recorded, and as they are used, both with what makes the same prompts when the run goes
    on. The model exists.

    Args:
        config: settings as they are given.
        pinned: the same with a commit for each name of the Hub.
        resume: the run goes on, with the template and the date on its record.
        for_agent: prompts are what an agent is told, who then writes chats.

    Raises:
        ConfigError: the tokenizer or the record cannot be read.
    """
    recorded = Path(config.output, config.name, "config.toml")
    before = load_recorded(recorded).data if resume and recorded.exists() else None
    tokenizer = open_tokenizer(pinned.model.path, pinned.data)
    of_run = settled(pinned.data, tokenizer, before, for_agent=for_agent)
    of_record = settled(config.data, tokenizer, of_run, for_agent=for_agent)
    return config.model_copy(update={"data": of_record}), pinned.model_copy(update={"data": of_run})


def each_source(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[str, RunConfig, list[Prompt]]]:
    """Label, the run as if it were the only source, and prompts of each source that has some."""
    for label, one in config.by_source.items():
        if own := [prompt for prompt in prompts if prompt.source == label]:
            yield label, one, own


class TrainPrompts(NamedTuple):
    """Prompts of all sources that are trained on."""

    prompts: list[Prompt]
    """Source by source."""
    rows: list[ProblemRow]
    """Row of each prompt."""
    stops_of: dict[str, tuple[str, ...]]
    """Strings that end a turn, by the label of a source."""
    warnings: list[str]
    notes: list[str]
    """Sentences on what `data.filter` leaves out."""
    first_prompts: list[str]
    """Sentence for each source that shows its first prompt as the model sees it."""


def check_entry(source: SourceConfig, option: str) -> None:
    """Raises ConfigError: an entry of a list has what is neither a setting nor an option of its source."""
    found = class_of(source.source, SOURCES, option)
    options = {field.name for field in fields(found)} if is_dataclass(found) else source.source.options.keys()
    for name in source.source.options.keys() - options:
        hint = did_you_mean(name, sorted({*options, *type(source).model_fields}))
        raise ConfigError(f"`{option}.{name}` is not a setting, and `{source.source.name}` has none; {hint}")


def train_prompts(config: RunConfig, context_tokens: int, most: int | None = None) -> TrainPrompts:
    """Prompts of `data.train`, each source's with its own template and limits; where there is a `most`, of each source
    the first rows alone. Raises ConfigError."""
    found, for_agent = TrainPrompts([], [], {}, [], [], []), config.rollout.agent is not None
    for label in [source.label for source in config.data.sources] or [""]:
        one = config.by_source[label]
        with of_source(label):
            tokenizer, (tools, stops) = open_tokenizer(one.model.path, one.data), environment_of(one)
            loaded = load_prompts(
                one.data, tokenizer, context_tokens, tools=tools, most=most, for_agent=for_agent, label=label
            )
        found.prompts.extend(loaded.prompts)
        found.rows.extend(loaded.rows)
        found.stops_of[label] = stops
        whose = f"source {label!r}: " if label else ""
        found.warnings.extend(f"{whose}{said}" for said in loaded.warnings)
        found.notes.extend(f"{whose}{said}" for said in (loaded.note,) if said)
        found.first_prompts.append(f"{whose}{loaded.first_prompt}")
    return found


def prepare(config: RunConfig, *, weights: bool = True, machine: MachineMemory | None = None) -> Prepared:
    """Reads model shape, headers of weights, tokenizer and prompts; the model exists.

    Args:
        weights: those of models that the Hub has are here.
        machine: that the run is for; None: this one.

    Raises:
        ConfigError: the model, the data or a combination of them cannot work.
    """
    shape, warnings = check_layout(config)
    if config.cluster.kind == "inline" and (lack := lack_of_monarch()):
        warnings.append(f"cluster.kind = 'inline': executors share this process and take turns; {lack}")
    tokenizer, placer = open_tokenizer(config.model.path, config.data), None
    check_vocabulary(tokenizer, shape.vocab_size)
    if config.cluster.kind != "hosts":  # whose controller needs neither weights nor devices
        for role, path in _models(config):
            if weights or (name := hub_name(path)) is None:
                check_weights(path, role)
            else:
                check_listed_weights(path, open_hub().listing(name)[1], role)
        placer = LocalPlacer(config, len(machine.gpus) if machine else None)
        placer.check()
        warnings += placer.crowded()
        check_memory(config, shape, machine)
        if machine is None and (lack := disk_need(config, shape).lack):
            warnings.append(lack)
    compiler = os.environ.get("CXX", "g++")
    if config.trainer.compile and config.trainer.device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"trainer.compile = true needs a C++ compiler, and there is no {compiler} on PATH; leave it out"
        )

    context = shape.max_position_embeddings
    train, held_out = train_prompts(config, context), load_held_out(config, context)
    warnings += (*train.warnings, *held_out.warnings)
    problems = Problems(
        train=tuple(train.prompts),
        eval=held_out.sets,
        stop_token_ids=tokenizer.eos_token_ids,
        stops_of=train.stops_of | held_out.stops_of,
    )
    check_lengths(config, shape, problems)
    warnings += learnt_too(problems.eval, problems.train)
    return Prepared(
        shape=shape, problems=problems, placer=placer, warnings=tuple(dict.fromkeys(warnings)),
        first_prompt="\n".join([*train.notes, *train.first_prompts]),
    )  # fmt: skip


def _models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Role and path of each model whose weights are loaded."""
    yield "policy", config.model.path
    for name, settings in models_in_use(config).items():
        if path := settings.path or (config.model.path if name == "critic" else ""):
            yield name, path


def check_here(config: RunConfig) -> None:
    """Looks for what executors on this machine would lack when they begin. Raises ConfigError."""
    pinned_instructions()
    if config.weight_sync.transport == "nixl":
        part("cuda", "check_nixl")()


def check_layout(config: RunConfig) -> tuple[ModelShape, list[str]]:
    """The shape of the model, which fits the layout of trainer, generators and models, and sentences for the user.

    Reads `config.json` only: neither weights nor data. Raises ConfigError.
    """
    shape = load_shape(config.model.path)
    check_mixture(config, shape)
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
            f"{', '.join(cut)} with generator.backend = {config.generator.backend!r}: rollouts come from a cut "
            "distribution, and the trainer is not told which tokens were left out, so importance "
            "ratios are too small; leave it out, or use generator.backend = 'native'"
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


def check_lengths(config: RunConfig, shape: ModelShape, problems: Problems) -> None:
    """Raises ConfigError when the longest sequence that can come of these prompts does not fit into a microbatch, or
    into the cache."""
    for label, one, own in each_source(config, problems.train):
        with of_source(label):
            longest = max(len(prompt.token_ids_T) for prompt in own)
            check_microbatch(one, shape, longest)
            check_cache(one, shape, longest)
    for held_out in problems.eval:
        with of_source(label := held_out.prompts[0].source):
            check_cache(config.by_source[label], shape, max(len(prompt.token_ids_T) for prompt in held_out.prompts))


def check_microbatch(config: RunConfig, shape: ModelShape, longest_prompt: int) -> None:
    """Raises ConfigError when the longest sequence that can come does not fit into a microbatch."""
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
    """Raises ConfigError when the context, or `generator.kv_cache_bytes`, does not hold the longest sequence that can
    come."""
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
            f"tokens; give at least {needed}, and so much for each that is to be decoded at once, or leave it out"
        )


def check_tensor_parallel(shape: ModelShape, num_ranks: int, path: str) -> None:
    """Raises ConfigError when so many ranks cannot share the model."""

    def uneven(ranks: int) -> list[str]:
        return uneven_parts(shape, ranks, repeats_kv_heads=True) + uneven_experts(shape.moe, ranks)

    _check_even("generator.tensor_parallel", num_ranks, uneven, shape.num_heads, path)


def _check_even(option: str, num_ranks: int, uneven: Callable[[int], list[str]], most: int, path: str) -> None:
    """Raises ConfigError when so many ranks leave something `uneven`; the sentence names those up to `most` that do
    not."""
    if found := uneven(num_ranks):
        possible = ", ".join(str(ranks) for ranks in range(1, most + 1) if not uneven(ranks))
        raise ConfigError(f"{option} = {num_ranks} cannot share the {found[0]} of {path} evenly; use one of {possible}")


def uneven_experts(moe: MoeShape | None, num_ranks: int) -> list[str]:
    """Texts that name what so many ranks of a generator cannot share evenly of a mixture."""
    if moe is None:
        return []
    sizes = {"columns of the shared expert": moe.shared_size}
    if not cuts_by_expert(moe.num_experts, moe.expert_size, num_ranks):
        sizes["columns of each expert"] = moe.expert_size
    return [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]


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
            check_blocks(config, other, settings.parallelism, name)


def check_moments(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError when the trainer's moments cannot be cut as they are to be, or are to lie where they are."""
    trainer = config.trainer
    if trainer.moments_on == "host" and trainer.device == "cpu":
        raise ConfigError("trainer.moments_on = 'host' with trainer.device = 'cpu': they are there; leave it out")
    check_blocks(config, shape, trainer.parallelism, "trainer")


def check_blocks(config: RunConfig, shape: ModelShape, parallelism: ParallelismConfig, executor: str) -> None:
    """Raises ConfigError when blocks that share a scale of the 8-bit moments of trainer or critic would be cut."""
    tp, widths = parallelism.tp, {"attention output": shape.query_size}
    widths["feed-forward output"] = shape.intermediate_size
    if shape.moe is not None:
        widths |= {"experts' output": shape.moe.expert_size, "shared experts' output": shape.moe.shared_size}
    for name, columns in widths.items() if config.trainer.moments == "8bit" and tp > 1 else ():
        if columns // tp % BLOCK_COLUMNS:
            raise ConfigError(
                f"trainer.moments = '8bit' with {executor}.parallelism.tp = {tp}: a rank has {columns // tp} columns "
                f"of the {name}, and each {BLOCK_COLUMNS} share a scale; use {executor}.parallelism.fsdp, or 'float32'"
            )


def check_parallelism(shape: ModelShape, parallelism: ParallelismConfig, path: str, executor: str = "trainer") -> None:
    """Raises ConfigError when the trainer, or the critic, cannot be cut so."""
    check_mixture_layout(shape, parallelism, path, executor)
    uneven = partial(uneven_parts, shape, repeats_kv_heads=False)
    _check_even(f"{executor}.parallelism.tp", parallelism.tp, uneven, shape.num_kv_heads, path)
    if parallelism.pp > shape.num_layers:
        raise ConfigError(
            f"{executor}.parallelism.pp = {parallelism.pp} is more than the {shape.num_layers} layers of {path}; "
            f"use at most {shape.num_layers}"
        )
