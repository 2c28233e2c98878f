"""Scores a checkpoint on held-out problems: a run without a trainer."""

from __future__ import annotations

from collections.abc import Callable

from llamarl.cluster.open import open_cluster
from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.controller.admission import Problems
from llamarl.controller.clock import run_patiently
from llamarl.controller.evaluation import EvalResult
from llamarl.controller.ports import Executors
from llamarl.controller.telemetry import Telemetry
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer, check_vocabulary
from llamarl.models.folder import load_shape
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import MetricsLog
from llamarl.run.assembly import assembled
from llamarl.run.executors import GeneratorSpecs, executor_spec, spawn_all
from llamarl.run.prepare import environment_of


class _EvalProgress(NullScreen):
    """Tells how many prompts are answered."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        if done is not None and total is not None:
            self._progress(done, total)


def evaluate_checkpoint(config: RunConfig, progress: Callable[[int, int], None]) -> EvalResult:
    """Answers and scores the problems of `data.eval`; `progress` hears of (done, total) prompts.

    Raises:
        ConfigError: model, data or a combination of them cannot work.
        ExecutorError, Interrupted, Stalled: it failed, or was ended.
    """
    return run_patiently(_evaluate(config, progress))


async def _evaluate(config: RunConfig, progress: Callable[[int, int], None]) -> EvalResult:
    path = config.model.path
    shape, tokenizer = load_shape(path), Tokenizer(path)
    check_vocabulary(tokenizer, shape.vocab_size)
    tools, stop_strings = environment_of(config)
    prompts = load_prompts(config.data, tokenizer, shape.max_position_embeddings, "eval", tools).prompts
    problems = Problems(train=(), eval=prompts, stop_token_ids=tokenizer.eos_token_ids, stop_strings=stop_strings)
    cluster = open_cluster(config.cluster)

    async def spawn() -> Executors:
        reward = executor_spec("reward", "reward:RewardExecutor", 1, model_path=path, config=config.reward)
        models = [part("episodes", "spec")(config)] if config.rollout.has_episodes else []
        specs = [reward, *models, *map(GeneratorSpecs(config=config), range(config.generator.replicas))]
        first, *others = await spawn_all(cluster, specs, config.cluster.start_timeout_s)
        beside, generators = others[: len(models)], others[len(models) :]
        return Executors(reward=first, models={handle.name: handle for handle in beside}, generators=generators)

    telemetry = Telemetry(config, _EvalProgress(progress), MetricsLog(None, print), 0)
    async with assembled(config, problems, telemetry, cluster.shutdown, spawn) as (controller, supervisor):
        await supervisor.run(controller.start())
        return await supervisor.run(controller.evaluate())
