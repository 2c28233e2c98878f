"""llamarl from Python, in a script without a `__main__` guard or in a notebook.

import llamarl

def reward(prompt, response, answer, **row):
    return response.strip().endswith(answer)

run = llamarl.train("demo", reward=reward, steps=20, trainer={"learning_rate": 1e-4})
run.metrics()[-1]["reward_mean"]
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
"""Half of a character, which no tokenizer takes."""
Config = str | Path | Mapping[str, Any] | RunConfig
_computed_in = list[int]()
"""Process that has computed by a call of this module: this one, or one that it was forked from."""


def _note_computing() -> None:
    """Notes that this process computes, for those that are forked from it. Raises ConfigError: this process was forked
    from one that has computed, and lacks the threads that it needs."""
    if _computed_in not in ([], [os.getpid()]):
        raise ConfigError(
            f"process {_computed_in[-1]} has trained or answered and was forked afterwards, and threads that it "
            "started are missing in this process, so a run would hang; start processes with "
            "multiprocessing.get_context('spawn'), or fork before the first call"
        )
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a process without a console, as services and windowed programs are
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for as long as it lives
    _computed_in[:] = [os.getpid()]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """Scores of a checkpoint on held-out problems."""

    metrics: EvalMetrics
    responses: list[dict[str, Any]]
    """A row for each: prompt_id, prompt, response, answer, outcome, reward, right, reason."""


@told_in_python
def train(
    config: Config, *, reward: Rewards = None, data: Rows = None, eval_data: Rows = None, resume: bool = False,
    overwrite: bool = False, watch: bool = False, trust: bool = False, **settings: Any,
) -> RunRecord:  # fmt: skip
    """Trains, as `llamarl train` does, and gives the record of the run.

    Args:
        config: path of a TOML file, name of one that comes with the package, its tables, or settings.
        reward: `def reward(prompt, response, answer, **row) -> float | bool`, or `async def`; several in a list, or in
            a table with their weights; or names of rewards. The first decides what is right.
        data: problems to learn: rows with `question` (or `messages`) and `answer`, a DataFrame, a `datasets.Dataset`;
            or a source as in a TOML file, such as `{"name": "hub", "path": "openai/gsm8k"}`. Several are mixed: a table
            of them by label, or a list, each by itself or as `{"data": rows, "weight": 2.0, "reward": function}`.
        eval_data: held-out problems, as `data`; several are sets of their own, as `{"data": rows, "samples": 4}`.
        resume: go on where the run ended.
        overwrite: replace an existing run of the name.
        watch: show the run in a browser meanwhile.
        trust: with `resume`, execute what the run's folder names, whoever owns it.
        settings: win over `config`, as on the command line: `steps=10, trainer={"learning_rate": 1e-5}`, or
            `**{"trainer.learning_rate": 1e-5}`.

    Raises:
        ConfigError: it cannot start.
        KeyboardInterrupt: it was interrupted, and has saved a checkpoint.
        ExecutorError, FolderLost, NonFiniteStep, NotSaved, Stalled, TooManyInvalid, WeightsWrong: it failed.
    """
    _note_computing()
    started_s, settled = now_s(), _settled(config, settings, reward=reward, data=data, eval_data=eval_data)
    with fork_server(settled.cluster.kind):  # imports torch while this process imports what a controller needs
        return _trained(settled, started_s, resume=resume, overwrite=overwrite, watch=watch, trust=trust)


def _trained(
    settled: RunConfig, started_s: float, *, resume: bool, overwrite: bool, watch: bool, trust: bool
) -> RunRecord:
    """Trains, and raises as `train` does."""
    from llamarl.controller.supervision import Interrupted
    from llamarl.run.prepare import begin
    from llamarl.run.train import run

    try:
        begun = begin(
            settled, resume=resume, overwrite=overwrite, command="llamarl", tell=_tell, trust=trust,
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
    """Answers and scores problems, as `llamarl eval` does; of problems in several sets, a record for each by its name.

    Args:
        model: run folder (its newest checkpoint), export, adapters, Hugging Face folder, or name of the Hub.
        data: held-out problems, as `eval_data` of `train`; None: those of `config`.
        reward: as for `train`; None: those of `config`.
        config: of a run, whose data, reward and limits count; None: that of the run which `model` names.
        trust: execute what the run's folder that `model` names says, whoever owns it.
        settings: as for `train`.

    Raises:
        ConfigError: it cannot start.
        KeyboardInterrupt: it was interrupted.
        ExecutorError, Stalled: it failed.
    """
    _note_computing()
    run = None if config is None else _settled(config, {})
    given = partial(_given, settings=settings, reward=reward, eval_data=data)
    found = part("answers", "evaluated")(str(model), run, config, given, trust=trust)
    records = {metrics.name: EvalRecord(metrics=metrics, responses=responses) for metrics, responses in found}
    return records[None] if None in records else {str(name): one for name, one in records.items()}


@told_in_python
def generate(model: str | Path, prompts: Iterable[str], *, chat: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """Answers prompts by the engine alone, as `llamarl generate` does: rows in the order of the prompts.

    Args:
        model: run folder (its newest checkpoint), export, adapters, Hugging Face folder, or name of the Hub.
        chat: insist on the chat template. Otherwise prompts are written as the run wrote its questions; of a model
            without a run in its chat template, else with a line break behind each.
        settings: as for `train`, such as `rollout={"max_new_tokens": 64}, eval={"samples": 4, "temperature": 1.0}`.

    Raises:
        ConfigError: it cannot start.
        ExecutorError: it failed.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
    if not is_list or not (asked := list(prompts)) or not all(isinstance(p, str) for p in asked):
        raise ConfigError(f"prompts = {prompts!r:.60}: give a list of texts, at least one")
    if bad := next((p for p in asked if HALF.search(p)), None):
        raise ConfigError(f"prompts: {bad!r:.60} holds half of a character (a lone surrogate); remove it")
    _note_computing()
    rows = part("answers", "answered")(from_home(str(model)), asked, chat, settings)
    return sorted(rows, key=lambda row: (row["number"], row["index"]))


@told_in_python
def open_run(path: str | Path) -> RunRecord:
    """The record of a run, under way or not. Raises ConfigError: there is none."""
    return RunRecord(checked_path(path, "path"))


def _tell(text: str) -> None:
    print_to(sys.stdout, text)


def _settled(config: Config, settings: Mapping[str, Any], **own: Any) -> RunConfig:
    """All settings of a call. Raises ConfigError."""
    base, given = _given(config, settings, **own)
    return load_config(base, settings=given, recorded=isinstance(config, str | Path) and is_record(config))


def _given(
    config: Config, settings: Mapping[str, Any], reward: Rewards = None, data: Rows = None, eval_data: Rows = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables, and the settings that win over them; rows and functions are written below the folder of runs. Raises
    ConfigError."""
    if not isinstance(config, str | os.PathLike | Mapping | RunConfig):
        raise ConfigError(f"config = {config!r:.60} is not a run; give the path of a TOML file, or its tables")
    if isinstance(config, RunConfig):  # what nobody has set is left to recipes
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
    """Adds settings that an argument of its own brings. Raises ConfigError: they are given already."""
    for name in more:
        if twice := next((one for one in given if f"{one}.".startswith(f"{name}.")), None):
            raise ConfigError(f"`{twice}` and {keyword}= are both given, and mean the same; give one of them")
    given |= more
