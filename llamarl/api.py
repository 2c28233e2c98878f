"""Python interface of llamarl, for scripts (no `__main__` guard needed) and notebooks.

- `train` trains a model and returns a `RunRecord`.
- `evaluate` scores a model on held-out problems and returns an `EvalRecord`.
- `generate` answers prompts with a model.
- `open_run` opens a run folder and returns its `RunRecord`.

Example::

    import llamarl

    def reward(prompt, response, answer, **row):
        return response.strip().endswith(answer)

    run = llamarl.train("demo", reward=reward, steps=20, trainer={"learning_rate": 1e-4})
    print(run.metrics()[-1]["reward_mean"])
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.cluster.fork_server import fork_server
from llamarl.config import ConfigError, RunConfig, from_home, load_config, tables
from llamarl.config.errors import told_in_python
from llamarl.config.load import is_record
from llamarl.config.ref import part
from llamarl.config.section import checked_path
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.screen import print_to
from llamarl.observability.spans import now_s, report_delays
from llamarl.run.python_inputs import Rewards, Rows, reward_settings, sources_of
from llamarl.run.rollouts import RunRecord

HALF = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which no tokenizer accepts."""
Config = str | Path | Mapping[str, Any] | RunConfig
_computed_in = list[int]()
"""Id of the process that has run a computation through this module: this process, or one that it was forked from."""


def _note_computing() -> None:
    """Records that this process runs computations, so that a forked child can detect it. Raises ConfigError if this
    process was forked from one that has computed, because the threads of its parent are missing here."""
    if _computed_in not in ([], [os.getpid()]):
        raise ConfigError(
            f"process {_computed_in[-1]} has already trained or generated and was forked afterwards; this process "
            "lacks the threads of its parent, so a run would hang; start processes with "
            "multiprocessing.get_context('spawn'), or fork before the first call"
        )
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a process without a console, as services and windowed programs are
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for as long as it lives
    _computed_in[:] = [os.getpid()]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """Scores of a model on held-out problems, as `evaluate` returns them.

    Example::

        record = llamarl.evaluate("runs/demo")
        print(record.metrics.accuracy, record.metrics.num_prompts)
        print(record.responses[0]["response"])
    """

    metrics: EvalMetrics
    """Accuracy, its confidence interval, pass@k and counts."""
    responses: list[dict[str, Any]]
    """One row per response: prompt_id, prompt, response, answer, outcome, reward, right, reason."""


@told_in_python
def train(
    config: Config, *, reward: Rewards = None, data: Rows = None, eval_data: Rows = None, resume: bool = False,
    overwrite: bool = False, watch: bool = False, trust: bool = False, **settings: Any,
) -> RunRecord:  # fmt: skip
    """Trains a model, as `llamarl train` does. Returns the record of the finished run.

    Example::

        rows = [{"question": "What is 3 + 4?", "answer": "7"}, {"question": "What is 9 - 5?", "answer": "4"}]
        run = llamarl.train({"model": {"path": "Qwen/Qwen3-0.6B"}}, data=rows, reward="math", steps=50)
        print(run.path, run.evals())

    Args:
        config: path of a TOML file, name of a run file that comes with the package (such as `demo`), a dict of
            settings, or a `RunConfig`.
        reward: function `reward(prompt, response, answer, **row) -> float | bool`, plain or `async`; name of a
            reward; a list of these; or a dict from each of these to its weight. The first reward decides whether a
            response is right. None means the reward of `config`.
        data: training problems: rows with `question` (or `messages`) and `answer`, a DataFrame, a
            `datasets.Dataset`, or a source as in TOML, such as `{"name": "hub", "path": "openai/gsm8k"}`. A dict by
            label or a list mixes several sources; an entry may be `{"data": rows, "weight": 2.0, "reward": function}`.
            None means the data of `config`.
        eval_data: held-out problems, in the forms of `data`. Several sources are evaluated as separate sets, for
            example `{"data": rows, "samples": 4}`. None means those of `config`.
        resume: continue an existing run from its newest checkpoint.
        overwrite: replace an existing run of the same name.
        watch: serve the page of the run in a browser while it trains.
        trust: with `resume`, run the code that the run folder names, even if another user owns the folder.
        settings: settings that override `config`: `steps=10, trainer={"learning_rate": 1e-5}`, or
            `**{"trainer.learning_rate": 1e-5}`.

    Returns:
        The record of the run: its settings, metrics, evaluations and rollouts.

    Raises:
        ConfigError: the run cannot start. The message names the setting, its value and a fix.
        KeyboardInterrupt: the run was interrupted, after it saved a checkpoint.
        ExecutorError, FolderLost, NonFiniteStep, NotSaved, Stalled, TooManyInvalid, WeightsWrong: the run failed.
    """
    _note_computing()
    started_s, resolved = now_s(), _resolved(config, settings, reward=reward, data=data, eval_data=eval_data)
    with fork_server(resolved.cluster.kind):  # imports torch while this process imports what a controller needs
        return _trained(resolved, started_s, resume=resume, overwrite=overwrite, watch=watch, trust=trust)


def _trained(
    resolved: RunConfig, started_s: float, *, resume: bool, overwrite: bool, watch: bool, trust: bool
) -> RunRecord:
    """Trains with complete settings. Raises what `train` raises."""
    from llamarl.controller.supervision import Interrupted
    from llamarl.run.prepare import begin
    from llamarl.run.train import run

    try:
        begun = begin(
            resolved, resume=resume, overwrite=overwrite, command="llamarl", tell=_tell, trust=trust,
            delays=lambda: report_delays(""),
        )  # fmt: skip
    except KeyboardInterrupt:
        again = " with resume=True" * resume
        raise KeyboardInterrupt(f"interrupted before the run started; start it again{again}") from None
    try:
        with begun.folder, part("page", "watching")(begun.folder.path) if watch else nullcontext("") as address:
            if address:
                _tell(address)
            run(
                begun.config, begun.prepared, begun.folder, resume=resume, command_started_s=started_s, watch=address
            )  # fmt: skip
    except (Interrupted, KeyboardInterrupt) as error:
        cause = str(error) or "interrupted"
        raise KeyboardInterrupt(f"{cause}; continue with resume=True. Files: {begun.folder.path}") from None
    return RunRecord(begun.folder.path)


@told_in_python
def evaluate(
    model: str | Path,
    data: Rows = None,
    *,
    reward: Rewards = None,
    config: Config | None = None,
    trust: bool = False,
    **settings: Any,
) -> EvalRecord | dict[str, EvalRecord]:
    """Answers held-out problems with a model and scores the responses, as `llamarl eval` does.

    Example::

        rows = [{"question": "What is 3 + 4?", "answer": "7"}]
        record = llamarl.evaluate("runs/demo", rows, reward="math", eval={"samples": 4})
        print(record.metrics.accuracy)

    Args:
        model: run folder (its newest checkpoint), exported model, adapters, Hugging Face folder, or Hub name.
        data: held-out problems, in the forms of `eval_data` of `train`. None means those of `config`.
        reward: reward, in the forms of `train`. None means the reward of `config`.
        config: run whose data, reward and limits apply, in the forms of `train`. None means the run that `model`
            names, if it is a run folder.
        trust: run the code that the run folder in `model` names, even if another user owns the folder.
        settings: settings that override `config`, as for `train`.

    Returns:
        One record. If the problems form several named sets, a dict with a record for each name.

    Raises:
        ConfigError: the evaluation cannot start. The message names the setting, its value and a fix.
        KeyboardInterrupt: the evaluation was interrupted.
        ExecutorError, Stalled: the evaluation failed.
    """
    _note_computing()
    run = None if config is None else _resolved(config, {})
    given = partial(_given, settings=settings, reward=reward, eval_data=data)
    found = part("answers", "evaluated")(str(model), run, config, given, trust=trust)
    records = {metrics.name: EvalRecord(metrics=metrics, responses=responses) for metrics, responses in found}
    return records[None] if None in records else {str(name): one for name, one in records.items()}


@told_in_python
def generate(model: str | Path, prompts: Iterable[str], *, chat: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """Answers prompts with the generation engine, as `llamarl generate` does, without a trainer or a reward.

    Example::

        rows = llamarl.generate("Qwen/Qwen3-0.6B", ["Name a prime number."], rollout={"max_new_tokens": 64})
        print(rows[0]["text"])

    Args:
        model: run folder (its newest checkpoint), exported model, adapters, Hugging Face folder, or Hub name.
        prompts: list of at least one text.
        chat: require the model's chat template. False formats prompts as the run formatted its questions. A model
            without a run uses its chat template, or adds a line break to each prompt if it has none.
        settings: settings, as for `train`, such as `rollout={"max_new_tokens": 64}` or `eval={"samples": 4}`.

    Returns:
        One row per response, in the order of the prompts: number, index, prompt, text, num_tokens and more.

    Raises:
        ConfigError: generation cannot start. The message names the setting, its value and a fix.
        ExecutorError: generation failed.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
    if not is_list or not (asked := list(prompts)) or not all(isinstance(p, str) for p in asked):
        raise ConfigError(f"prompts = {prompts!r:.60}: give a list of texts, at least one")
    if bad := next((p for p in asked if HALF.search(p)), None):
        raise ConfigError(f"prompts: {bad!r:.60} contains a lone surrogate, half of a character; remove it")
    _note_computing()
    rows = part("answers", "answered")(from_home(str(model)), asked, chat, settings)
    return sorted(rows, key=lambda row: (row["number"], row["index"]))


@told_in_python
def open_run(path: str | Path) -> RunRecord:
    """Opens the record of a run, whether the run is in progress or has ended.

    Example::

        run = llamarl.open_run("runs/demo")
        print(run.summary, run.metrics()[-1]["reward_mean"])

    Args:
        path: folder of the run.

    Returns:
        The record. It reads the folder again at each call.

    Raises:
        ConfigError: the folder does not contain a run.
    """
    return RunRecord(checked_path(path, "path"))


def _tell(text: str) -> None:
    print_to(sys.stdout, text)


def _resolved(config: Config, settings: Mapping[str, Any], **own: Any) -> RunConfig:
    """Returns the complete settings of a call. Raises ConfigError."""
    base, given = _given(config, settings, **own)
    return load_config(base, settings=given, recorded=isinstance(config, str | Path) and is_record(config))


def _given(
    config: Config, settings: Mapping[str, Any], reward: Rewards = None, data: Rows = None, eval_data: Rows = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns base settings and the settings that override them. Writes rows and functions below the folder of runs.
    Raises ConfigError."""
    if not isinstance(config, str | os.PathLike | Mapping | RunConfig):
        raise ConfigError(f"config = {config!r:.60} is not a run; give the path of a TOML file, or its tables")
    if isinstance(config, RunConfig):  # recipes decide unset fields
        base = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    else:
        base = dict(config) if isinstance(config, Mapping) else tables(config)
    given, output = dict(settings), settings.get("output", base.get("output", "runs"))
    if not isinstance(output, str | os.PathLike):
        raise ConfigError(f"output = {output!r:.60} is not a path; give the folder of runs as text")
    output = checked_path(output, "output")
    if reward is not None:
        if isinstance(held := base.get("reward"), Mapping):
            base["reward"] = {key: value for key, value in held.items() if key not in ("parts", "weights")}
        _win(given, "reward", {f"reward.{name}": value for name, value in reward_settings(reward, output).items()})
    for name, rows in (("train", data), ("eval", eval_data)):
        if rows is not None:
            keyword = "data" if name == "train" else "eval_data"
            _win(given, keyword, {f"data.{name}": sources_of(rows, output, f"data.{name}")})
    return base, given


def _win(given: dict[str, Any], keyword: str, more: Mapping[str, Any]) -> None:
    """Adds settings from a keyword argument to `given`. Raises ConfigError if `given` already has one of them."""
    for name in more:
        if twice := next((one for one in given if f"{one}.".startswith(f"{name}.")), None):
            raise ConfigError(f"`{twice}` and {keyword}= set the same setting; give only one of them")
    given |= more
