"""Scores a checkpoint on held-out problems, without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamarl.channels.channel import Channel
from llamarl.cluster.api import ExecutorSpec, open_cluster
from llamarl.config.schema import (
    MAX_SEGMENT_TOKENS,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    GeneratorConfig,
    RewardConfig,
)
from llamarl.controller.evaluation import EvalResult
from llamarl.controller.generators import Generators
from llamarl.controller.pipeline import Pipeline
from llamarl.controller.spawn import spawn_all
from llamarl.controller.specs import executor_spec, generator_specs
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer, check_vocabulary
from llamarl.models.folder import load_shape
from llamarl.types import Rollout, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """One evaluation."""

    model_path: str
    """Hugging Face folder."""
    data: DataConfig
    """Its `eval` source is taken."""
    eval: EvalConfig
    reward: RewardConfig
    generator: GeneratorConfig
    cluster: ClusterConfig
    max_new_tokens: int
    seed: int


def evaluate_checkpoint(settings: EvalSettings, progress: Callable[[int, int], None]) -> EvalResult:
    """Answers and scores the problems; `progress` hears of (done, total) prompts.

    Raises:
        ConfigError: model, data or a combination of them cannot work.
        ExecutorError, Stalled: it failed.
    """
    with generator_specs(settings.model_path, settings.generator) as generator:
        reward = executor_spec(
            "reward", "reward:RewardExecutor", 1, model_path=settings.model_path, config=settings.reward
        )
        specs = [reward, *map(generator, range(settings.generator.replicas))]
        return asyncio.run(_evaluate(settings, specs, progress))


async def _evaluate(
    settings: EvalSettings, specs: Sequence[ExecutorSpec], progress: Callable[[int, int], None]
) -> EvalResult:
    path, cluster_config = settings.model_path, settings.cluster
    shape, tokenizer = load_shape(path), Tokenizer(path)
    check_vocabulary(tokenizer, shape.vocab_size)
    prompts = load_prompts(settings.data, tokenizer, shape.max_position_embeddings, "eval").prompts
    sampling = SamplingParams(
        max_new_tokens=settings.max_new_tokens, stop_token_ids=tokenizer.eos_token_ids, seed=settings.seed
    )
    supervisor = Supervisor()
    cluster = open_cluster(cluster_config.kind)
    try:
        reward, *generators = await spawn_all(cluster, specs, cluster_config.start_timeout_s)
        for handle in (reward, *generators):
            supervisor.watch(handle)
        watch = StallWatch(cluster_config.stall_timeout_s, lambda: _describe(pipeline))
        collected = Channel[Rollout]("collected rollouts", capacity=4 * len(prompts) * settings.eval.samples)
        timeout_s = cluster_config.call_timeout_s
        all_generators = Generators(
            generators,
            collected,
            supervisor,
            timeout_s,
            segment_tokens=MAX_SEGMENT_TOKENS if settings.max_new_tokens > MAX_SEGMENT_TOKENS else 0,
            progress=watch.progress,
        )
        pipeline = Pipeline(all_generators, collected, reward, watch, timeout_s)
        pipeline.start(supervisor, _deliver_nothing)
        supervisor.start(watch.loop(), "stall watch")
        return await supervisor.run(pipeline.evaluate(settings.eval, sampling, prompts, 0, progress))
    finally:
        await supervisor.stop()
        await cluster.shutdown(cluster_config.shutdown_timeout_s)


async def _describe(pipeline: Pipeline) -> str:
    return "; ".join([pipeline.describe_pending(), *pipeline.generators.debts()])


async def _deliver_nothing(groups: object) -> None:
    raise AssertionError(f"no training here, yet groups came: {groups}")
