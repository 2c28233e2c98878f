"""Scores a checkpoint on held-out problems: a run without a trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from llamarl.cluster.open import check_cluster, open_cluster
from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.controller.admission import Problems
from llamarl.controller.clock import run_patiently
from llamarl.controller.evaluation import EvalResult
from llamarl.controller.ports import Executors
from llamarl.controller.telemetry import Telemetry
from llamarl.data.prompts import open_tokenizer
from llamarl.data.tokenizer import check_vocabulary
from llamarl.models.folder import load_shape
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import MetricsLog
from llamarl.run.assembly import assembled
from llamarl.run.executors import GeneratorSpecs, reward_spec, spawn_all
from llamarl.run.held_out import load_held_out
from llamarl.run.placement import LocalPlacer


class _EvalProgress(NullScreen):
    """Tells how many prompts are answered."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        if done is not None and total is not None:
            self._progress(done, total)


def evaluate_checkpoint(
    config: RunConfig,
    progress: Callable[[int, int], None],
    tell: Callable[[str], None],
    only: Collection[str] = (),
) -> list[EvalResult]:
    """Answers and scores the problems of `data.eval`, a result for each of its sets.

    Args:
        config: settings of the evaluation.
        progress: hears of (done, total) prompts, of all sets together.
        tell: hears sentences for the user.
        only: names of sets; empty: all.

    Raises:
        ConfigError: model, data or a combination of them cannot work.
        ExecutorError, Interrupted, Stalled: it failed, or was ended.
    """
    with tempfile.TemporaryDirectory(prefix="llamarl-", ignore_cleanup_errors=True) as logs:
        return run_patiently(_evaluate(config, progress, tell, only, Path(logs)))


async def _evaluate(
    config: RunConfig,
    progress: Callable[[int, int], None],
    tell: Callable[[str], None],
    only: Collection[str],
    logs: Path,
) -> list[EvalResult]:
    path = config.model.path
    shape, tokenizer = load_shape(path), open_tokenizer(path, config.data)
    check_vocabulary(tokenizer, shape.vocab_size)
    loaded = load_held_out(config, shape.max_position_embeddings, only)
    ends = tokenizer.eos_token_ids
    problems = Problems(train=(), eval=loaded.sets, stop_token_ids=ends, stops_of=loaded.stops_of)
    check_cluster(config.cluster)
    placer = LocalPlacer(config, only="generator")
    placer.check()
    cluster = open_cluster(config.cluster, logs)

    async def spawn() -> Executors:
        reward = reward_spec(config)
        models = [part("episodes", "spec")(config)] if config.has_episodes else []
        generator, names = GeneratorSpecs(config=config), placer.of_role("generator")
        specs = [reward, *models, *(generator(number, placer.place(name)) for number, name in enumerate(names))]
        first, *others = await spawn_all(cluster, specs, config.cluster.start_timeout_s)
        beside, generators = others[: len(models)], others[len(models) :]
        return Executors(reward=first, models={handle.name: handle for handle in beside}, generators=generators)

    telemetry = Telemetry(config, _EvalProgress(progress), MetricsLog(None, print), 0)
    async with assembled(config, problems, telemetry, cluster.shutdown, spawn) as (controller, supervisor):
        for said in (*loaded.warnings, *loaded.first_prompts):
            tell(said)
        await supervisor.run(controller.start())
        return await supervisor.run(controller.evaluate())


def response_rows(results: Iterable[EvalResult]) -> Iterator[dict[str, Any]]:
    """A row for each response of an evaluation: what was asked and answered, and what the reward says; of several sets
    with the name of each."""
    for result in results:
        of_set = {"set": result.metrics.name} if result.metrics.name else {}
        for group in result.groups:
            for response, judged in zip(group.responses, group.results, strict=True):
                yield of_set | {
                    "prompt_id": group.prompt.prompt_id,
                    "prompt": group.prompt.text,
                    "response": response,
                    "answer": group.prompt.answer,
                    "outcome": judged.outcome.value,
                    "right": judged.is_right,
                    "reward": judged.value,
                    "reason": judged.reason,
                }
