"""Supervised fine-tuning of a checkpoint in a run folder, with documents from `data.train` and one executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from llamarl.cluster.api import Cluster, ExecutorError, ExecutorHandle, port
from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import DataConfig
from llamarl.controller.ports import SftPort
from llamarl.controller.supervision import Interrupted, Supervisor, run_pausable
from llamarl.controller.train_loop import NotSaved, refusals_named
from llamarl.data.prompts import CHAT, PromptSet, conversation, load_prompts, open_tokenizer, resolved_data
from llamarl.data.sampler import PromptSampler, fingerprint
from llamarl.data.tokenizer import Tokenizer, check_vocabulary
from llamarl.distributed.links import open_rendezvous
from llamarl.models.folder import load_shape
from llamarl.models.tensors import check_weights
from llamarl.observability.sinks import MetricsLog
from llamarl.parts.sft.documents import num_tokens, reply_of, to_conversation, to_documents
from llamarl.parts.sft.recorded import SftRecord, recorded
from llamarl.run.checks import check_moments, check_parallelism, check_training
from llamarl.run.copies import open_copier
from llamarl.run.executors import WIND_DOWN_S, executor_spec, nothing_to_resume, spawn_all, supervised
from llamarl.run.folder import RunFolder
from llamarl.run.placement import LocalPlacer, Machines, open_machines
from llamarl.types import SampleGroup

Progress = Callable[[int, dict[str, float]], None]
"""Called after each step with the number of finished steps and the step's metrics."""


def load_documents(config: RunConfig, warn: Callable[[str], None]) -> list[SampleGroup]:
    """Returns prompts of `data.train` with their solutions. The model must exist. Calls `warn` with the number of
    skipped rows.

    Raises:
        ConfigError: the model, the data or their combination cannot work.
    """
    if isinstance(config.data.train, list):
        raise ConfigError(
            f"data.train lists {len(config.data.train)} sources, and supervised training learns one; name one, with "
            "its template, or run `llamarl sft` once for each"
        )
    shape, path = load_shape(config.model.path), config.model.path
    check_training(config, shape)
    check_parallelism(shape, config.trainer.parallelism, path)
    check_moments(config, shape)
    if config.cluster.kind != "hosts":
        check_weights(path)
    tokenizer = open_tokenizer(path, config.data)
    check_vocabulary(tokenizer, shape.vocab_size)
    loaded = load_prompts(config.data, tokenizer, shape.max_position_embeddings)
    for said in filter(None, (*loaded.warnings, loaded.note, loaded.first_prompt)):
        warn(said)
    documents = _documents(resolved_data(config.data, tokenizer), loaded, tokenizer)
    limit = min(config.trainer.microbatch_tokens, shape.max_position_embeddings)
    fitting = [document for document in documents if num_tokens(document) <= limit]
    if num_overlong := len(documents) - len(fitting):
        said = f"data.train: {num_overlong} documents have more than {limit} tokens"
        if not fitting or config.data.overlong_prompts == "refuse":
            raise ConfigError(f"{said}; raise trainer.microbatch_tokens (within the model's context), or shorten them")
        warn(f"{said} and were skipped")
    return fitting


def _documents(config: DataConfig, loaded: PromptSet, tokenizer: Tokenizer) -> list[SampleGroup]:
    replies = [reply_of(row, "data.train", config.solution) for row in loaded.rows]
    if config.template != CHAT:
        prompts, solutions = [one.token_ids_T for one in loaded.prompts], [one["content"] for one in replies]
        return list(to_documents(prompts, solutions, tokenizer))
    documents = list[SampleGroup]()
    for row, reply in zip(loaded.rows, replies, strict=True):
        head, own = conversation(row, config)
        documents.append(to_conversation([*head, *own, reply], len(head), tokenizer, row.name))
    return documents


def place_trainer(config: RunConfig) -> LocalPlacer | None:
    """Returns the devices of the trainer. None means that several hosts must connect first. Raises ConfigError if the
    devices are missing."""
    if config.cluster.kind == "hosts":
        return None
    placer = LocalPlacer(config, only="trainer")
    placer.check()
    return placer


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRun:
    """A run of `steps` steps with `rollout.prompts_per_step` documents each."""

    config: RunConfig
    documents: list[SampleGroup]
    placer: LocalPlacer | None
    folder: RunFolder
    resume: bool
    progress: Progress
    warn: Callable[[str], None]
    record: SftRecord | None = None
    """Events and summary of this run. `run` opens it."""

    def run(self) -> None:
        """Runs to the end.

        Raises:
            ConfigError: the checkpoint cannot work.
            Interrupted: the user interrupted the run. The last checkpoint is intact.
            ExecutorError, FolderLost, NonFiniteStep, NotSaved: the run failed.
        """
        shape, max_bytes = load_shape(self.config.model.path), self.config.record.max_bytes
        record = SftRecord(self.folder, self.config.name, self.warn, max_bytes)
        record.begin(f"{shape.family} {shape.num_parameters / 1e6:.3g}M", resumed=self.resume)
        own = replace(self, warn=record.warn, record=record)
        log = MetricsLog(self.folder.metrics, lambda failure: record.warn(str(failure)), max_bytes)
        with self.folder, recorded(record), closing(log):
            run_pausable(own._with_executor(log))

    async def _with_executor(self, log: MetricsLog) -> None:
        limits, folder = self.config.cluster, self.folder
        machines = open_machines(self.config, folder.logs, folder.path, self.placer, self.warn, "trainer")
        cluster = machines.open()
        spawned = supervised(lambda: self._spawn(cluster, machines), cluster.shutdown, limits.shutdown_timeout_s)
        async with spawned as (handle, supervisor):
            supervisor.watch(handle)
            machines.end_with(handle, supervisor)
            trainer = port(SftPort, handle, limits.timeout_s)
            under_way = list[asyncio.Task[None]]()
            copying = open_copier(self.config, self.folder, self.warn)
            if copying:
                supervisor.start(copying.loop(), "copies of checkpoints")
            try:
                await supervisor.run(self._learn(trainer, log, supervisor, under_way))
            except Interrupted:
                await self._wind_down(trainer, under_way)
                raise
            finally:
                if copying:
                    await copying.finish(self.warn)

    async def _spawn(self, cluster: Cluster, machines: Machines) -> ExecutorHandle:
        config, num_ranks = self.config, self.config.trainer.parallelism.num_ranks
        found = (await machines.places(self.warn)).place("trainer")
        spec = executor_spec(
            "trainer", "llamarl.parts.sft.executor:SftExecutor", config.trainer.threads, num_ranks, config=config,
            resume=self.resume, place=found,
            rendezvous=open_rendezvous(num_ranks, config.cluster.timeout_s),
            checkpoint_folder=str(self.folder.checkpoints),
        )  # fmt: skip
        return (await spawn_all(cluster, [spec], config.cluster.timeout_s))[0]

    async def _learn(
        self, trainer: SftPort, log: MetricsLog, supervisor: Supervisor, under_way: list[asyncio.Task[None]]
    ) -> None:
        """Runs all steps. An interruption waits for the step `under_way`, so that its metrics and checkpoint agree."""
        config, done = self.config, 0
        rows_T = (np.append(one.prompt_token_ids_T, one.samples[0].token_ids_T) for one in self.documents)
        sampler = PromptSampler(len(self.documents), config.seed, fingerprint(("", row_T) for row_T in rows_T))
        order, damaged = await trainer.resumed()
        if damaged:
            self.warn(f"--resume: {'; '.join(damaged)}")
        if order is not None:
            sampler.restore(order)
            done = order["step"]
        else:
            nothing_to_resume(self.resume, damaged, self.warn)
        if self.resume:
            log.drop_after(done)
            if lack := self.folder.unrecorded(done, self.config.checkpoint.keep):
                self.warn(f"--resume: {lack}")
            self.folder.write_config()
        supervisor.start(self.folder.check_loop(), "run folder")
        while done < config.steps:
            documents = [self.documents[sampler.next()] for _ in range(config.rollout.prompts_per_step)]
            done += 1
            step = self._step(trainer, log, documents, sampler.state() | {"step": done})
            under_way[:] = [supervisor.start(step, f"step {done}")]
            await asyncio.shield(under_way[0])
        self.folder.check()

    async def _step(
        self, trainer: SftPort, log: MetricsLog, documents: list[SampleGroup], order: dict[str, int]
    ) -> None:
        config, done = self.config, order["step"]
        result = await trainer.step(documents, order)
        times = self.record.step(done, result.metrics) if self.record else {}
        log.write({"kind": "step", "step": done, **times, "skipped": int(result.skipped), **result.metrics})
        self.progress(done, result.metrics)
        if result.skipped:
            self.warn(f"skipped {result.cause}")
        every = config.checkpoint.every_steps
        if done == config.steps or (every and done % every == 0):
            try:
                await _save(trainer, f"at step {done}")
            except NotSaved as error:
                if done == config.steps:
                    raise
                self.warn(f"{error}; the run continues")

    async def _wind_down(self, trainer: SftPort, under_way: list[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(WIND_DOWN_S):
                await asyncio.gather(*under_way)
                await _save(trainer, "at the end")
        except (TimeoutError, ExecutorError, NotSaved) as error:
            why = f"it took more than {WIND_DOWN_S:g} s" if isinstance(error, TimeoutError) else str(error)
            self.warn(f"no checkpoint was saved at the end: {why}; --resume continues from the newest one before")


async def _save(trainer: SftPort, when: str) -> None:
    with refusals_named(when):
        await trainer.save()
        await trainer.commit()
