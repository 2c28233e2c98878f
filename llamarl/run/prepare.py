"""Everything before the first process of a run starts: checks settings, and prepares model, data and folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llamarl.algorithms.advantages._base import Advantage, GroupAdvantage, TeacherAdvantage
from llamarl.checkpoint.mirroring import find_mirror
from llamarl.cluster.open import check_cluster
from llamarl.config import ConfigError, RunConfig, build, did_you_mean, load_recorded, load_sft_config
from llamarl.config.cluster import lack_of_monarch
from llamarl.config.data import OF_EVAL, SourceConfig
from llamarl.config.hub import hub_name, open_hub
from llamarl.config.ref import NotRun, class_of, part
from llamarl.config.roles import CriticConfig, ReferenceConfig
from llamarl.controller.admission import Problems
from llamarl.controller.evaluation import HeldOutSet
from llamarl.data.prompts import SOURCES, load_prompts, open_tokenizer, resolved_data
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import check_vocabulary, ended_after
from llamarl.kernels.build import pinned as pinned_instructions
from llamarl.models.shape import ModelShape
from llamarl.models.tensors import check_listed_weights, check_weights
from llamarl.observability.spans import stage
from llamarl.run.checks import check_cache, check_layout, check_microbatch
from llamarl.run.disk import disk_need
from llamarl.run.folder import RunFolder, check_run_folder, prepare_run_folder
from llamarl.run.hub_pins import check_folder, named, resolved
from llamarl.run.memory import MachineMemory, check_memory
from llamarl.run.models import with_start_model
from llamarl.run.placement import LocalPlacer, model_paths, models_in_use
from llamarl.run.preview import check_functions, check_reward
from llamarl.run.trust import check_trust, with_trusted
from llamarl.training.base_model import is_made
from llamarl.types import Prompt
from llamarl.weight_sync.select import check_name


def environment_of(config: RunConfig) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns tools that the chat template describes to the policy, and strings that end a turn. Raises ConfigError."""
    if config.rollout.environment is None:
        return [], ()
    environment = part("episodes", "build_environment")(config.rollout.environment)
    return environment.tools(), tuple(environment.stop)


def source_name(label: str) -> str:
    """Returns the text for a source, by `Prompt.source`."""
    return f"data.eval ({label.removeprefix(OF_EVAL)})" if label.startswith(OF_EVAL) else f"source {label!r}"


@contextmanager
def errors_name_source(label: str) -> Iterator[None]:
    """Adds the source of a mixture, or the held-out set, to messages of ConfigErrors. An empty label adds nothing."""
    try:
        yield
    except ConfigError as error:
        if not label:
            raise
        raise ConfigError(f"{source_name(label)}: {error}") from error.__cause__


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSets:
    """All sets of held-out problems of a run."""

    sets: tuple[HeldOutSet, ...]
    stops_of: dict[str, tuple[str, ...]]
    """Strings that end a turn, by `Prompt.source`."""
    warnings: tuple[str, ...]
    """Sentences about dropped rows and columns."""
    first_prompts: tuple[str, ...]
    """Sentence for each set that shows its first prompt as the model sees it."""


def load_held_out(config: RunConfig, context_tokens: int, only: Collection[str] = ()) -> LoadedSets:
    """Loads the prompts of `data.eval`. Returns no sets if it is not set.

    Args:
        config: of a run.
        context_tokens: the model's longest sequence.
        only: names of sets. Empty means all.

    Raises:
        ConfigError: a source or a template is wrong, or no prompt is left.
    """
    sets, stops_of, warnings, first_prompts = [], {}, [], []
    for number, (name, run) in enumerate(config.by_eval_set.items()):
        if only and name not in only:
            continue
        tokenizer, for_agent = open_tokenizer(run.model.path, run.data), run.rollout.agent is not None
        key = OF_EVAL + name if name else ""
        with errors_name_source(key):
            tools, stops_of[key] = environment_of(run)
            found = load_prompts(run.data, tokenizer, context_tokens, "eval", tools, for_agent=for_agent)
        prompts = tuple(replace(one, source=key) for one in found.prompts[: run.eval.max_prompts])
        sets.append(HeldOutSet(name=name, number=number, settings=run.eval, prompts=prompts))
        warnings += [_of_set(key, text) for text in found.warnings]
        first_prompts.append(_of_set(key, found.first_prompt))
    return LoadedSets(sets=tuple(sets), stops_of=stops_of, warnings=tuple(warnings), first_prompts=tuple(first_prompts))


def _of_set(key: str, text: str) -> str:
    """Returns a sentence after the name of its set."""
    return f"{source_name(key)}: {text.removeprefix('data.eval: ')}" if key else text


def overlap_warnings(sets: Sequence[HeldOutSet], train: Sequence[Prompt]) -> list[str]:
    """Returns warnings about held-out sets whose prompts are all in the training data."""
    trained = {prompt.token_ids_T.tobytes() for prompt in train}
    said = "data.eval: all of its prompts are in data.train too, so it cannot tell learning from memorizing"
    return [
        _of_set(one.prompts[0].source, said)
        for one in sets
        if all(prompt.token_ids_T.tobytes() in trained for prompt in one.prompts)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Facts about a run's model and data."""

    shape: ModelShape
    problems: Problems
    placer: LocalPlacer | None
    """None means that several hosts must connect first."""
    warnings: tuple[str, ...]
    """Sentences for the user."""
    first_prompt: str
    """Sentences on the effect of filters, and on the first prompt of each source as the model sees it."""


@stage("importing the modules that the settings name")
def check_parts(config: RunConfig) -> None:
    """Builds all components that the config names, and looks for vLLM, so that mistakes show early. Inside of
    `nothing_run`, checks only components of this package. Raises ConfigError."""
    limit_s = config.cluster.timeout_s
    late = ConfigError(
        f"the components of this run are not imported and built after cluster.timeout_s = {limit_s:g} s; "
        "let their modules do less during import, or raise it"
    )
    with ended_after(limit_s, late):  # a user's module may do anything during import
        _check_parts(config)


def _check_parts(config: RunConfig) -> None:
    with suppress(NotRun):
        build(config.trainer.loss, "llamarl.algorithms.losses", "trainer.loss")
    with suppress(NotRun):
        _check_advantage(config)
    _check_unused(config)
    for which, sources in (("train", config.data.sources), ("eval", config.data.eval_sets)):
        for number, source in enumerate(sources):
            with suppress(NotRun):
                check_entry(source, f"data.{which}.{number}")
    for label, one in config.by_source.items():
        with errors_name_source(label), suppress(NotRun):
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


def _check_unused(config: RunConfig) -> None:
    """Raises ConfigError if settings of a model are set that no executor reads."""
    used = models_in_use(config)
    unused = config.reference.model_dump(include={"path", "dtype", "threads", "device"})
    if "reference" not in used and unused != ReferenceConfig().model_dump(include=set(unused)):
        raise ConfigError("reference is set but not used; set reference.kl_coefficient, or leave it out")
    for number, source in enumerate(config.data.sources if "reference" not in used else ()):
        if source.teacher:
            raise ConfigError(
                f"data.train.{number}.teacher = {source.teacher!r} is not used; set reference.kl_coefficient, or "
                "recipe = 'distillation'"
            )
    if "critic" not in used and config.critic != CriticConfig():
        raise ConfigError(
            f"critic is set but not used, as trainer.advantage = {config.trainer.advantage.name!r} needs no values; "
            "use 'gae', or leave it out"
        )


def _check_advantage(config: RunConfig) -> None:
    """Builds the advantage. Raises ConfigError."""
    advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
    if config.rollout.group_size == 1 and isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            f"rollout.group_size = 1 with trainer.advantage = {config.trainer.advantage.name!r}: it compares the "
            "rollouts of a group, so one rollout teaches nothing; use a group_size of 2 or more"
        )
    if isinstance(advantage, TeacherAdvantage):
        _check_teacher(config, advantage)
    if config.shaping.credit != "episode":
        _check_credit(config, advantage)


def _check_credit(config: RunConfig, advantage: Advantage) -> None:
    """Raises ConfigError if credit by turn has no effect."""
    credit = f"shaping.credit = {config.shaping.credit!r}"
    if not isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            f"{credit} with trainer.advantage = {config.trainer.advantage.name!r}, which does not compare the rollouts "
            "of a group; use 'group_mean' or another group advantage, or leave it out"
        )
    if not any(one.rollout.environment for one in config.by_source.values()):
        raise ConfigError(f"{credit} without rollout.environment, which rewards turns; set one, or leave it out")


def _check_teacher(config: RunConfig, advantage: TeacherAdvantage) -> None:
    """Raises ConfigError if an advantage that learns from a teacher would have none, or would lose groups."""
    name, reference = f"trainer.advantage = {config.trainer.advantage.name!r}", config.reference
    if not reference.kl_coefficient or reference.kl_in != "reward":
        raise ConfigError(
            f"{name} learns from the divergence from a teacher in the reward of each token; set "
            "reference.kl_coefficient = 1 and reference.kl_in = 'reward', as recipe = 'distillation' does"
        )
    taught = [source for source in config.data.sources if source.teacher]
    if not reference.path and (not taught or len(taught) < len(config.data.sources)):
        raise ConfigError(
            f"{name} without a teacher for all prompts: set reference.path to its folder or name, or `teacher` of each "
            "source of data.train"
        )
    if config.rollout.max_attempts > 1:
        raise ConfigError(
            f"rollout.max_attempts = {config.rollout.max_attempts} with {name}: it would replace groups with equal "
            "rewards, which the teacher judges, too; leave it out"
        )
    if config.rollout.group_size == 1 and advantage.compares:
        raise ConfigError(
            f"rollout.group_size = 1 with {name} and a reward_weight: the reward is compared within a group; use a "
            "group_size of 2 or more, or leave reward_weight out"
        )


def resolve(
    config: RunConfig, pinned: RunConfig, *, resume: bool, for_agent: bool = False
) -> tuple[RunConfig, RunConfig]:
    """Returns the settings to record and the settings to use, both with template and date, so that a resumed run makes
    the same prompts. The model must exist.

    Args:
        config: settings as given.
        pinned: the same settings with a commit for each name on the Hub.
        resume: use template and date from the run's record.
        for_agent: True if prompts are tasks of an agent, which writes chats itself.

    Raises:
        ConfigError: the tokenizer or the record cannot be read.
    """
    recorded = Path(config.output, config.name, "config.toml")
    before = load_recorded(recorded).data if resume and recorded.exists() else None
    tokenizer = open_tokenizer(pinned.model.path, pinned.data)
    of_run = resolved_data(pinned.data, tokenizer, before, for_agent=for_agent)
    of_record = resolved_data(config.data, tokenizer, of_run, for_agent=for_agent)
    return config.model_copy(update={"data": of_record}), pinned.model_copy(update={"data": of_run})


def each_source(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[str, RunConfig, list[Prompt]]]:
    """Yields label, settings with this source as the only one, and prompts, for each source with prompts."""
    for label, one in config.by_source.items():
        if own := [prompt for prompt in prompts if prompt.source == label]:
            yield label, one, own


class TrainPrompts(NamedTuple):
    """Prompts of all training sources."""

    prompts: list[Prompt]
    """Source by source."""
    rows: list[ProblemRow]
    """Row of each prompt."""
    stops_of: dict[str, tuple[str, ...]]
    """Strings that end a turn, by label of the source."""
    warnings: list[str]
    notes: list[str]
    """Sentences on what `data.filter` drops."""
    first_prompts: list[str]
    """Sentence for each source that shows its first prompt as the model sees it."""


def check_entry(source: SourceConfig, option: str) -> None:
    """Raises ConfigError if a list entry has a key that is neither a setting nor an option of its source."""
    found = class_of(source.source, SOURCES, option)
    options = {field.name for field in fields(found)} if is_dataclass(found) else source.source.options.keys()
    for name in source.source.options.keys() - options:
        hint = did_you_mean(name, sorted({*options, *type(source).model_fields}))
        raise ConfigError(f"`{option}.{name}` is not a setting, and `{source.source.name}` has none; {hint}")


def train_prompts(config: RunConfig, context_tokens: int, most: int | None = None) -> TrainPrompts:
    """Loads the prompts of `data.train`, with each source's template and limits. `most` limits the rows of each source.
    Raises ConfigError."""
    found, for_agent = TrainPrompts([], [], {}, [], [], []), config.rollout.agent is not None
    for label in [source.label for source in config.data.sources] or [""]:
        one = config.by_source[label]
        with errors_name_source(label):
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
    """Reads model shape, headers of weights, tokenizer and prompts. The model must exist.

    Args:
        weights: True if the weights of models on the Hub are here.
        machine: the machine of the run. None means this one.

    Raises:
        ConfigError: the model, the data or their combination cannot work.
    """
    shape, warnings = check_layout(config)
    if config.cluster.kind == "inline" and (lack := lack_of_monarch()):
        warnings.append(
            f"cluster.kind = 'inline': executors share this process and take turns; {lack}, "
            "or set cluster.kind = 'processes'"
        )
    tokenizer, placer = open_tokenizer(config.model.path, config.data), None
    check_vocabulary(tokenizer, shape.vocab_size)
    if config.cluster.kind != "hosts":  # a controller of several hosts needs neither weights nor devices
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
    warnings += overlap_warnings(problems.eval, problems.train)
    return Prepared(
        shape=shape, problems=problems, placer=placer, warnings=tuple(dict.fromkeys(warnings)),
        first_prompt="\n".join([*train.notes, *train.first_prompts]),
    )  # fmt: skip


def _models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields role and path of each model whose weights are loaded."""
    yield "policy", config.model.path
    for name, _, path in model_paths(config):
        yield name, path
    if "critic" in models_in_use(config) and not config.critic.path:
        yield "critic", config.model.path


def check_here(config: RunConfig) -> None:
    """Raises ConfigError if executors on this machine would lack something."""
    pinned_instructions()
    if config.weight_sync.transport == "nixl":
        part("cuda", "check_nixl")()
    if config.checkpoint.mirror:
        find_mirror()


def check_lengths(config: RunConfig, shape: ModelShape, problems: Problems) -> None:
    """Raises ConfigError if the longest possible sequence of these prompts does not fit into a microbatch or the
    cache."""
    for label, one, own in each_source(config, problems.train):
        with errors_name_source(label):
            longest = max(len(prompt.token_ids_T) for prompt in own)
            check_microbatch(one, shape, longest)
            check_cache(one, shape, longest)
    for held_out in problems.eval:
        with errors_name_source(label := held_out.prompts[0].source):
            check_cache(config.by_source[label], shape, max(len(prompt.token_ids_T) for prompt in held_out.prompts))


Delays = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A run that can start."""

    config: RunConfig
    """Settings with commits in the place of names on the Hub."""
    prepared: Prepared
    folder: RunFolder
    """Locked by this process."""


def begin(
    config: RunConfig, *, resume: bool, overwrite: bool, command: str, tell: Callable[[str], None],
    trust: bool = False, delays: Delays = nullcontext,
) -> Begun:  # fmt: skip
    """Checks settings, makes the base model of a warm start, fetches files from the Hub, and locks the run's folder.

    Args:
        command: prefix of lines about the Hub, on standard error.
        tell: called with text about the first prompt.
        trust: the user trusts the code that the folder of a resumed run makes this process execute.
        delays: context for steps without progress output.

    Raises:
        ConfigError: the run cannot start. Nothing was written but a base model.
    """
    with delays():
        config = trusted(config, trust, resume=resume, keep=True)
        config = with_start_model(config, command=command)
        run = check_start(config, resume=resume, overwrite=overwrite)
    if not has_base_model(config):
        part("sft", "ensure_base_model")(config)
    written, pinned, prepared = looked_ahead(config, run, command=command, delays=delays)
    tell(prepared.first_prompt)
    folder = prepare_run_folder(written, resume=resume, overwrite=overwrite, pinned=pinned)
    return Begun(config=pinned, prepared=prepared, folder=folder)


def trusted(config: RunConfig, trust: bool, *, resume: bool, keep: bool) -> RunConfig:
    """Returns the settings of a run that may execute the code that they name.

    Args:
        trust: whether the user trusts the run's folder.
        keep: keep trusted files of functions below the folder of runs.

    Raises:
        ConfigError: the folder of the resumed run is not trusted.
    """
    if trust and not resume:
        raise ConfigError("--trust is for --resume, which executes code that a run's folder names; leave it out")
    if resume:
        check_trust(Path(config.output, config.name), config, command="--resume", is_trusted=trust)
    return with_trusted(config, Path(config.output) if keep else None) if trust else config


def check_before_folder(config: RunConfig, *, is_here: bool = True) -> None:
    """Runs checks that need neither model, data nor the run's folder. `is_here` means that the run is for this machine.
    Raises ConfigError."""
    check_parts(config)
    if is_here and config.cluster.kind != "hosts":
        check_here(config)
    check_cluster(config.cluster)


def check_start(config: RunConfig, *, resume: bool, overwrite: bool) -> Path | None:
    """Runs checks that need neither model nor data. Returns the folder of a resumed run, else None. Raises
    ConfigError."""
    check_before_folder(config)
    path = check_run_folder(config, resume=resume, overwrite=overwrite)
    return path if resume else None


def looked_ahead(
    config: RunConfig,
    run: Path | None,
    *,
    command: str,
    weights: bool = True,
    machine: MachineMemory | None = None,
    delays: Delays = nullcontext,
) -> tuple[RunConfig, RunConfig, Prepared]:
    """Returns the settings to record, the settings to use, and facts about model and data. The model must exist.

    Args:
        run: folder of the resumed run. None means a new run.
        command: prefix of lines about the Hub, on standard error.
        weights: fetch and check weights, too. Hosts fetch their weights themselves.
        machine: the machine of the run. None means this one.
        delays: context for steps without progress output.

    Raises:
        ConfigError: the run cannot start.
    """
    pinned = resolved(config, weights=weights and config.cluster.kind != "hosts", run=run, command=command)
    for setting in named(pinned):
        if setting.name is None:
            check_folder(setting.path, setting.option)
    with delays():
        written, pinned = resolve(config, pinned, resume=run is not None, for_agent=config.rollout.agent is not None)
        prepared = prepare(pinned, weights=weights, machine=machine)
        for label, one, own in each_source(pinned, prepared.problems.train):
            with errors_name_source(label):
                check_functions(one, own)
    return written, pinned, prepared


def has_base_model(config: RunConfig) -> bool:
    """Returns whether the base model exists, so that no warm start must make it. Raises ConfigError."""
    return not config.model.warm_start or is_made(config.model.path, load_sft_config(config.model.warm_start))
