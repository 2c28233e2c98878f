"""`replay`: repeats a recorded run with the executors of the run, and compares every result.

The trainer starts from the newest suitable checkpoint or the base model, and trains again on the recorded groups in
order. Published weights must have the recorded fingerprints. A generator adopts each version and samples its tokens
again, and the reward scores all responses again. The replay stops at the first difference. It only reads the run
folder.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, Protocol, cast

from llamarl.cluster.api import ExecutorHandle, ExecutorSpec, port
from llamarl.cluster.open import open_cluster
from llamarl.config import ConfigError, RunConfig, load_recorded
from llamarl.config.schema import staleness_limit
from llamarl.controller.admission import Problems, sampling_by_source
from llamarl.controller.collector import Scorers
from llamarl.controller.flight import InFlightRollout, PendingGroup
from llamarl.controller.ports import CriticPort, GeneratorPort, TrainerPort
from llamarl.controller.supervision import run_pausable
from llamarl.controller.train_loop import train_again
from llamarl.executors.replies import ControllerState, Partnership
from llamarl.journal.reader import JournalReader
from llamarl.parts.replay.recorded import Diverged, first_difference, first_tensor, other_machine
from llamarl.parts.replay.replayed import Difference, Replayed
from llamarl.run.executors import GeneratorSpecs, RunSpecs, spawn_all, supervised
from llamarl.run.folder import RunFolder
from llamarl.run.journal import open_journal
from llamarl.run.placement import LocalPlacer, models_in_use
from llamarl.training.result import PolicyStepResult
from llamarl.types import GenerationRequest, Rollout, RolloutGroup

Part = Literal["train", "generate", "reward"]
PARTS: tuple[Part, ...] = ("train", "generate", "reward")
_MARGIN = 3
"""Steps to read ahead beyond the staleness bound, because a prompt may be prefilled under an older version."""
CLOSE, CLOSE_NARROW = 1e-3, 0.1
"""Maximum difference of log-probabilities in nats on another machine, in float32 and in narrower types."""
_FLIPS = 0.01
"""Maximum share of tokens that may differ on another machine, because their noise is close to a boundary."""


class ReplayPort(GeneratorPort, Protocol):
    """Samples recorded rollouts again."""

    async def add(self, items: Sequence[tuple[GenerationRequest, Rollout]]) -> list[Difference]: ...
    async def replay(self, version: int) -> Replayed: ...


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of compared values, and notes."""

    steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    judged: int = 0
    flips: int = 0
    """Tokens that differ because of other arithmetic."""
    notes: list[str] = field(default_factory=list)
    """Sentences about values that were not compared, and why."""
    rewards: list[str] = field(default_factory=list)
    """Rollouts whose reward differs."""

    def add(self, other: Tally) -> None:
        """Adds the counts of another process."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class ReplayRequest(NamedTuple):
    """Steps to replay, with settings, files and callbacks."""

    config: RunConfig
    """Settings of the replay."""
    journal: RunConfig
    """Settings of the recorded run, for its journal."""
    problems: Problems
    folder: RunFolder
    first: int
    last: int
    """Last step, inclusive."""
    tally: Tally
    parts: Sequence[Part] = PARTS
    close: float = 0.0
    """Maximum difference of log-probabilities under other arithmetic. 0 means the same arithmetic."""
    cause: str = ""
    """Cause of other arithmetic or other code. Empty means that both are those of the run."""
    read: Callable[[int, Sequence[RolloutGroup]], None] = lambda step, groups: None
    """Called with each step of the journal before it is trained. Raises Diverged."""
    trained: Callable[[int, Sequence[RolloutGroup], PolicyStepResult], None] | None = None
    """Called with each step that was trained again. Raises Diverged."""
    on_step: Callable[[int], None] = lambda step: None
    """Called with each completed step."""
    is_same: bool = True
    """Requires that weights have the recorded fingerprints."""


def replayable(config: RunConfig, parts: Sequence[Part], tally: Tally) -> tuple[RunConfig, list[Part]]:
    """Returns the settings of a replay, and the subset of `parts` that it can compare. Raises ConfigError."""
    generator, wanted, cannot = config.generator, list(parts), ""
    if generator.backend == "vllm":
        cannot = "vLLM cannot repeat its rollouts"
    elif generator.tensor_parallel > 1:
        cannot = "the ranks of generator.tensor_parallel are not replayed"
    elif config.rollout.agent:
        cannot = "rollouts of agents are sequences of several prompts, which are not on record one by one"
    if cannot and "generate" in wanted:
        wanted.remove("generate")
        tally.notes.append(f"{cannot}: only training and rewards are compared")
    data = config.data.model_copy(update={"eval": None})  # evaluations are not replayed
    if config.model_copy(update={"data": data}).has_episodes and "reward" in wanted:
        wanted.remove("reward")
        tally.notes.append("episodes are judged with their environment or agent: rewards are not judged again")
    if not wanted:
        raise ConfigError(f"--only {parts[0]}: {tally.notes[-1]}; leave --only out")
    alone = max(config.trainer.parallelism.num_ranks, config.critic.parallelism.num_ranks) == 1
    several = "processes" if config.cluster.kind == "processes" else "monarch"
    cluster = {"kind": "inline" if alone else several, "placement": "disaggregated"}
    native = {"replicas": 1, "backend": "native", "tensor_parallel": 1, "kv_cache_bytes": None, "cuda_graphs": "off"}
    running = {"max_running": min(generator.max_running * max(generator.replicas, 1) + 1, 1 << 16)}
    sync = {"transport": "auto", "delta": False, "probe_every_steps": 0}
    update = {
        "cluster": config.cluster.model_copy(update=cluster),
        "generator": generator.model_copy(update=native | running),
        "weight_sync": config.weight_sync.model_copy(update=sync),
        "checkpoint": config.checkpoint.model_copy(update={"mirror": False, "copy_to": ""}),
    }
    return config.model_copy(update=update), wanted


def arithmetic(config: RunConfig, folder: RunFolder, tally: Tally) -> tuple[float, str]:
    """Returns the maximum difference of log-probabilities on this machine in nats, and its cause. 0 means the same
    arithmetic."""
    if not (other := other_machine(folder)):
        return 0.0, ""
    close = CLOSE if config.generator.dtype == config.trainer.dtype == "float32" else CLOSE_NARROW
    tally.notes.append(f"{other}: numbers are compared within {close:g}, fingerprints of weights not at all")
    return close, other


def replay(request: ReplayRequest) -> None:
    """Runs the replay. Raises Diverged, ConfigError, ExecutorError."""
    run_pausable(_Replay(request).run())


class _Replay:
    def __init__(self, request: ReplayRequest) -> None:
        self._request, self._config, self._tally = request, request.config, request.tally
        rollout = self._config.rollout
        self._reach = _MARGIN + staleness_limit(rollout.max_staleness, 1, rollout.window)
        self._sampling = sampling_by_source(self._config, request.problems)
        self._journal: JournalReader
        self._trainer: TrainerPort
        self._critic: CriticPort | None = None
        self._generator: ReplayPort | None = None
        self._scoring: Scorers | None = None
        self._trains, self._transport = list(request.parts) != ["reward"], ""
        self._tensors, self._tokens, self._begin = list[str](), 0, 0
        self._ahead = deque[tuple[int, list[RolloutGroup]]]()
        """Steps that have been read and not yet trained."""

    async def run(self) -> None:
        limits, tally, specs = self._config.cluster, self._tally, self._specs()
        with TemporaryDirectory() as logs:
            cluster = open_cluster(limits, Path(logs))
            spawned = supervised(
                lambda: spawn_all(cluster, list(specs.values()), limits.timeout_s), cluster.shutdown,
                limits.shutdown_timeout_s, handles_signals=False,
            )  # fmt: skip
            async with spawned as (handles, supervisor):
                for handle in handles:
                    supervisor.watch(handle)
                await supervisor.run(self._replayed(dict(zip(specs, handles, strict=True))))
        if self._tokens != tally.tokens:
            raise Diverged(
                self._request.last, "tokens in all", self._tokens, tally.tokens, "a record that is not whole"
            )
        if tally.flips > _FLIPS * tally.tokens:
            raise Diverged(self._request.last, "tokens", tally.tokens, f"{tally.flips} others", self._request.cause)

    def _specs(self) -> dict[str, ExecutorSpec]:
        """Returns the specifications of the executors that the parts need, by name."""
        config, folder = self._config, self._request.folder
        places, names = LocalPlacer(config), list[str]()
        if "reward" in self._request.parts:
            names += ["reward", *(name for name in models_in_use(config) if name != "critic")]
        if self._trains:
            names += ["trainer", *(name for name in models_in_use(config) if name == "critic")]
        specs = RunSpecs(config, folder, places, resume=False)
        found = {name: specs.spec(name, places.place(name)) for name in names}
        run = self._request.journal.generator
        if self._trains and self._request.is_same and run.backend == "native" and run.tensor_parallel == 1:
            of_generators = GeneratorSpecs(
                config=config, choices=folder.kernels,
                partnership=Partnership(lora=config.trainer.lora, sleeps=config.generators_sleep),
            )  # fmt: skip
            spec = of_generators(0, places.place("generator-0"))
            found[spec.name] = replace(spec, target="llamarl.parts.replay.executor:ReplayingExecutor")
        return found

    async def _replayed(self, handles: Mapping[str, ExecutorHandle]) -> None:
        request, timeout_s = self._request, self._config.cluster.timeout_s
        if "reward" in request.parts:
            models = {name: one for name, one in handles.items() if name in ("reward-model", "reference")}
            self._scoring = Scorers(handles["reward"], models, self._config.reward.model, timeout_s)
        begin = request.first - 1
        if trainer := handles.get("trainer"):
            self._trainer = port(TrainerPort, trainer, timeout_s)
            if generator := handles.get("generator-0"):
                await self._connect(port(ReplayPort, generator, timeout_s))
            begin = max(0, begin - self._reach) if "generate" in request.parts else begin
            begin = await self._trainer.restore(begin)
            if not request.is_same and begin != request.first - 1:
                saved = ", ".join(str(one + 1) for one in (0, *request.folder.saved_steps()))
                raise ConfigError(f"--steps {request.first}: others can begin where there is a checkpoint: {saved}")
            if critic := handles.get("critic"):
                self._critic = port(CriticPort, critic, timeout_s)
                if await self._critic.restore(begin) != begin:
                    raise ConfigError(f"the critic's checkpoint of step {begin} is missing, and the trainer's exists")
        self._begin, steps = begin, self._steps_after(begin)
        for version in range(begin, request.last + 1):
            await self._read(steps, version)
            if self._generator:
                await self._serve(version, self._generator)
            if version < request.last:
                await self._step(version + 1)

    async def _connect(self, generator: ReplayPort) -> None:
        self._generator, layouts = generator, await generator.weight_specs()
        for rank, specs in enumerate(layouts):
            await self._trainer.set_layout(rank, specs)
        self._tensors = [spec.key for specs in layouts for spec in specs]
        self._transport, *_ = await self._trainer.transports(True, self._config.cluster.kind == "inline")
        await self._trainer.choose(self._transport, True)

    def _steps_after(self, begin: int) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """Yields steps of the journal. Raises Diverged if one is missing."""
        request, said = self._request, list[str]()
        self._journal = open_journal(request.journal, request.problems, request.folder, said.append).reader
        try:
            state, _ = self._journal.resume(cast("ControllerState | None", {"step": begin} if begin else None))
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
        since, name = self._journal.settings_since
        if begin < since:
            raise ConfigError(
                f"--steps {request.first}:{request.last}: the run went on after step {since} with another {name}, and "
                f"what came before is not part of it any more; give --steps {since + 1}:{request.last} --only train"
            )
        if (reached := state["step"] if state else 0) < request.last:
            if other := self._journal.changed_setting:
                cause = "config.toml, or what data.train reads, was changed after the run"
                raise Diverged(request.first, f"setting {other[0]}", *other[1:], request.cause or cause)
            kept = "; record.kind = 'resume' keeps what --resume needs" * (request.journal.record.kind == "resume")
            sides = f"steps to {request.last}", f"steps to {reached}"
            raise Diverged(reached + 1, "the journal", *sides, self._journal.missing + kept)
        return self._journal.steps_after(begin)

    async def _read(self, steps: Iterator[tuple[int, list[RolloutGroup]]], version: int) -> None:
        """Reads ahead to the last step that can have trained on rollouts of `version`."""
        request = self._request
        read = self._ahead[-1][0] if self._ahead else version
        while read < min(version + 1 + self._reach, request.last):
            read, groups = next(steps)
            self._ahead.append((read, groups))
            if request.first <= read:
                request.read(read, groups)
            if self._generator and "generate" in request.parts and request.first <= read:
                items = [(self._asked(group), one) for group in groups for one in group.rollouts]
                self._tokens += sum(int(one.is_sampled_T.sum()) for _, one in items)
                for fault in await self._generator.add(items):
                    self._differ(read, fault)

    def _asked(self, group: RolloutGroup) -> GenerationRequest:
        prompt_T, size = group.prompt.token_ids_T, len(group.rollouts)
        ids = {"group_id": group.group_id, "prompt_token_ids_T": prompt_T, "group_size": size}
        return GenerationRequest(**ids, sampling=self._sampling[group.prompt.source])

    async def _serve(self, version: int, generator: ReplayPort) -> None:
        """Lets the generator adopt the trainer's weights, which match the record, and sample their tokens again."""
        request = self._request
        published = await self._trainer.publish(version, (version - 1, version))
        adoption = await generator.adopt(version, published.addresses[self._transport])
        assert adoption.outcome == "adopted", adoption.reason
        fingerprint, tensors = self._journal.weights(version)
        if fingerprint not in ("", adoption.fingerprint) and not request.close:
            what = f"weights of version {version}{first_tensor(tensors, adoption.tensors, self._tensors)}"
            cause = "the run's trainer had other weights, or took its groups in another order, than recorded"
            if version == self._begin:
                file = request.folder.other_file(load_recorded(request.folder.config), request.journal)
                cause = f"{file or 'generator.* in config.toml, or a checkpoint,'} was changed after the run"
            raise Diverged(version, what, fingerprint, adoption.fingerprint, request.cause or cause)
        if "generate" in request.parts:
            replayed = await generator.replay(version)
            self._tally.tokens += replayed.num_tokens
            for one in replayed.differences:
                self._differ(version, one)
        if self._config.generators_sleep:
            await generator.sleep()

    def _differ(self, step: int, one: Difference) -> None:
        close = self._request.close
        if close and one.recorded and math.isinf(one.gap):
            self._tally.flips += 1
        elif not (close and one.gap <= close):
            what = f"rollout {one.index} of group {one.group_id}, token {one.token} (version {one.policy_version})"
            cause = "it was sampled by other weights than recorded, or depended on what ran at the same time"
            raise Diverged(step, what, one.recorded or "nothing", one.found, self._request.cause or cause)

    async def _step(self, step: int) -> None:
        request, (_, groups) = self._request, self._ahead.popleft()
        is_wanted = step >= request.first

        def told(_: int, __: list[RolloutGroup], result: PolicyStepResult | None) -> None:
            if is_wanted and result and "train" in request.parts and request.trained:
                request.trained(step, groups, result)

        work = list[Coroutine[None, None, None]]()
        if self._scoring and is_wanted:
            work.append(self._judge(step, groups, self._scoring))
        if self._trains:
            work.append(train_again([(step, groups)], self._trainer, self._critic, on_step=told))
        await asyncio.gather(*work)
        if is_wanted:
            self._tally.steps += 1
            self._tally.rollouts += sum(len(group.rollouts) for group in groups)
            request.on_step(step)

    async def _judge(self, step: int, groups: Sequence[RolloutGroup], scoring: Scorers) -> None:
        batch = list[PendingGroup]()
        for group in groups:
            request = self._asked(group)
            batch.append(
                PendingGroup(group.prompt, [InFlightRollout(request=request, rollout=r) for r in group.rollouts])
            )
        for was, now in zip(groups, await scoring(batch), strict=True):
            self._tally.judged += len(was.results)
            for index, (old, new) in enumerate(zip(was.results, now.results, strict=True)):
                rollout = f"rollout {index} of group {was.group_id}"
                if (old.outcome, old.value) != (new.outcome, new.value):
                    self._tally.rewards.append(
                        f"step {step}, {rollout}: recorded {old.outcome} {old.value:g}, judged {new.outcome} "
                        f"{new.value:g} now ({new.reason or 'no reason given'})"
                    )
                before, after = (one.rollouts[index].reference_logprobs_T.tolist() for one in (was, now))
                if found := first_difference(before, after, self._request.close):
                    what = f"{rollout}, log-probabilities of the reference{found[0]}"
                    raise Diverged(step, what, *found[1:], self._request.cause or "the reference is another model")
