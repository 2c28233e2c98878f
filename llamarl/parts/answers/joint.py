"""The joint of answers: the Python interface (`llamarl/api.py`) and the engine of `llamarl serve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.observability.screen import print_to
from llamarl.observability.spans import report_delays
from llamarl.parts.answers.answering import PromptRun, open_engine, prompt_tables, row_of

if TYPE_CHECKING:
    from llamarl.observability.metrics import EvalMetrics

__all__ = ["answered", "evaluated", "open_engine"]

Tables = dict[str, Any]


def answered(model: str, prompts: Sequence[str], chat: bool, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of responses for `llamarl.generate`, in the order in which they finish. Raises ConfigError,
    ExecutorError."""
    from llamarl.run.models import asked_model

    with ExitStack() as opened:
        with report_delays("", "starting the engine"):
            asked = opened.enter_context(asked_model(model, "model", command="llamarl"))
            answers = PromptRun(load_config(prompt_tables(asked), settings=settings), prompts, chat=chat)
            print_to(sys.stderr, answers.first_prompt)
            opened.enter_context(answers)
        return [row_of(one, prompts, answers.tokenizer) for rollouts in answers.rollouts() for one in rollouts]


def evaluated(
    model: str, run: RunConfig | None, place: object, given: Callable[[Tables], tuple[Tables, Tables]], *, trust: bool
) -> list[tuple[EvalMetrics, list[dict[str, Any]]]]:
    """Returns metrics and rows of responses for each set of problems of `llamarl.evaluate`.

    Args:
        model: model folder, run folder or Hub name.
        run: run whose settings apply.
        place: path of that run's settings. Anything else means that the settings have no file.
        given: returns the tables of the call and the settings that override them, from the tables of an evaluation.
        trust: the user trusts the code that the run folder names.

    Raises:
        ConfigError, ExecutorError, KeyboardInterrupt, Stalled: as for `llamarl.evaluate`.
    """
    from llamarl.controller.supervision import Interrupted
    from llamarl.parts.answers.evaluate import evaluate_checkpoint, response_rows, tell_invalid
    from llamarl.parts.answers.scored import completed, ready, settings_for, with_code_of
    from llamarl.run.models import asked_model

    with asked_model(model, "model", command="llamarl") as asked:
        is_own = run is None
        run, place = (asked.run, asked.place) if run is None else (run, place)
        base, settings = given(settings_for(asked.path, run))
        config = completed(base, lambda found: load_config(found, settings=settings))
        if config.data.eval is None:
            raise ConfigError("there are no problems: give `data`, or a `config` with data.eval")
        if is_own and asked.run is not None and asked.place is not None:
            config = with_code_of(asked.run, asked.place, config, "llamarl.evaluate", is_trusted=trust)
        config = ready(config, run, place, "llamarl", partial(report_delays, ""))
        try:
            results = evaluate_checkpoint(config, lambda done, total: None, partial(print_to, sys.stderr))
        except Interrupted as error:
            raise KeyboardInterrupt(str(error)) from None
    tell_invalid(results)
    return [(one.metrics, list(response_rows([one]))) for one in results]
