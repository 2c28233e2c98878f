"""Scores a checkpoint on held-out problems: a run without a trainer."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llamarl.cluster.fork_server import fork_server
from llamarl.cluster.open import check_cluster, open_cluster
from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.controller.admission import Problems
from llamarl.controller.evaluation import EvalResult, HeldOutSet, judged
from llamarl.controller.ports import Executors
from llamarl.controller.supervision import run_pausable
from llamarl.controller.telemetry import Telemetry
from llamarl.data.prompts import open_tokenizer
from llamarl.data.rates import digest, rate_rows
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import check_vocabulary
from llamarl.models.folder import load_shape
from llamarl.observability.metrics import held_out, unjudged
from llamarl.observability.screen import NullScreen, print_to
from llamarl.observability.sinks import MetricsLog
from llamarl.run.executors import GeneratorSpecs, assembled, reward_spec, spawn_all
from llamarl.run.placement import LocalPlacer
from llamarl.run.prepare import load_held_out, train_prompts
from llamarl.types import RolloutGroup


class _EvalProgress(NullScreen):
    """Reports the number of answered prompts."""

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
    """Answers and scores the problems of `data.eval`. Returns one result per set.

    Args:
        config: settings of the evaluation.
        progress: called with (done, total) prompts over all sets.
        tell: called with sentences for the user.
        only: names of the sets to evaluate. Empty means all.

    Raises:
        ConfigError: the model, the data or their combination cannot work.
        ExecutorError, Interrupted, Stalled: the evaluation failed or was interrupted.
    """
    with fork_server(config.cluster.kind):
        loaded = load_held_out(config, load_shape(config.model.path).max_position_embeddings, only)
        said = (*loaded.warnings, *loaded.first_prompts)
        return _scored(config, loaded.sets, loaded.stops_of, progress, lambda: [*map(tell, said)])


def measured_rates(
    config: RunConfig, model: str, progress: Callable[[int, int], None], tell: Callable[[str], None]
) -> tuple[EvalResult, list[str]]:
    """Answers and scores the problems of `data.train` without filters, each source with its own settings. Returns the
    result and the lines of a pass rate file for `data.filter`, with the name of the model. Has the arguments and errors
    of `evaluate_checkpoint`."""
    config = unfiltered(config)
    with fork_server(config.cluster.kind):
        train = train_prompts(config, load_shape(config.model.path).max_position_embeddings)
        asked = HeldOutSet(settings=config.eval, prompts=train.prompts[: config.eval.max_prompts])
        said = (*train.warnings, "\n".join(train.first_prompts))
        (result,) = _scored(config, (asked,), train.stops_of, progress, lambda: [*map(tell, said)])
    header = {"model": model, "samples": config.eval.samples, "temperature": config.eval.temperature}
    return result, [*rate_rows(header, _rates(result.groups, train.rows))]


def _rates(groups: Sequence[RolloutGroup], rows: Sequence[ProblemRow]) -> Iterator[dict[str, Any]]:
    """Yields the solve rate of each problem, over responses with a verdict. `rows` may be longer than `groups`."""
    for group, row in zip(groups, rows, strict=False):
        num_right, num_judged = judged(group)
        yield {
            "id": group.prompt.prompt_id,
            "source": group.prompt.source,
            "right": num_right,
            "samples": num_judged,
            "problem": digest(row),
        }


def _scored(
    config: RunConfig, sets: tuple[HeldOutSet, ...], stops_of: dict[str, tuple[str, ...]],
    progress: Callable[[int, int], None], begins: Callable[[], object],
) -> list[EvalResult]:  # fmt: skip
    """Calls `begins` when the executors have started."""
    tokenizer = open_tokenizer(config.model.path, config.data)
    check_vocabulary(tokenizer, load_shape(config.model.path).vocab_size)
    problems = Problems(train=(), eval=sets, stop_token_ids=tokenizer.eos_token_ids, stops_of=stops_of)
    with tempfile.TemporaryDirectory(prefix="llamarl-", ignore_cleanup_errors=True) as logs:
        return run_pausable(_evaluate(config, problems, progress, begins, Path(logs)))


async def _evaluate(
    config: RunConfig, problems: Problems, progress: Callable[[int, int], None], begins: Callable[[], object],
    logs: Path,
) -> list[EvalResult]:  # fmt: skip
    check_cluster(config.cluster)
    placer = LocalPlacer(config, only="generator")
    placer.check()
    cluster = open_cluster(config.cluster, logs)

    async def spawn() -> Executors:
        reward = reward_spec(config)
        models = [part("episodes", "spec")(config)] if config.has_episodes else []
        specs = [reward, *models, *GeneratorSpecs(config=config).first(placer)]
        first, *others = await spawn_all(cluster, specs, config.cluster.timeout_s)
        beside, generators = others[: len(models)], others[len(models) :]
        return Executors(reward=first, models={handle.name: handle for handle in beside}, generators=generators)

    telemetry = Telemetry(config, _EvalProgress(progress), MetricsLog(None, print), 0)
    async with assembled(config, problems, telemetry, cluster.shutdown, spawn) as (controller, supervisor):
        begins()
        await supervisor.run(controller.start())
        return await supervisor.run(controller.evaluate())


def unfiltered(config: RunConfig) -> RunConfig:
    """Returns the settings without `data.filter`, also for sources."""
    data = config.data.model_copy(update={"filter": None})
    if data.sources:
        data = data.model_copy(update={"train": [one.model_copy(update={"filter": None}) for one in data.sources]})
    return config.model_copy(update={"data": data})


def tell_invalid(results: Iterable[EvalResult]) -> None:
    """Prints to standard error which sets have responses without a verdict, and the reason of the first."""
    for entry in (result.metrics for result in results if result.metrics.num_invalid):
        said = unjudged(entry.num_invalid, entry.num_prompts * entry.k, entry.invalid_reason)
        print_to(sys.stderr, f"warning: {held_out(entry.name)}: {said}")


def response_rows(results: Iterable[EvalResult]) -> Iterator[dict[str, Any]]:
    """Yields a row per response: prompt, response and result of the reward, and the name of the set if there are
    several."""
    for result in results:
        of_set = {"set": result.metrics.name} if result.metrics.name else {}
        for group in result.groups:
            for response, said in zip(group.responses, group.results, strict=True):
                yield of_set | {
                    "prompt_id": group.prompt.prompt_id,
                    "prompt": group.prompt.text,
                    "response": response,
                    "answer": group.prompt.answer,
                    "outcome": said.outcome.value,
                    "right": said.is_right,
                    "reward": said.value,
                    "reason": said.reason,
                }
