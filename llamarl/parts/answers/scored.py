"""Settings of an evaluation, derived from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from llamarl.config import ConfigError, RunConfig, from_home
from llamarl.config.data import EvalConfig
from llamarl.data.prompts import open_tokenizer, resolved_data
from llamarl.run.hub_pins import named, resolved
from llamarl.run.models import OF_GENERATOR
from llamarl.run.prepare import Delays
from llamarl.run.trust import check_trust, code_of, with_trusted

EVERY_PROMPT = 1 << 30
BASE: dict[str, Any] = {"model": {"path": ""}, "data": {"train": "jsonl"}, "eval": {"max_prompts": EVERY_PROMPT}}
OF_RUN: Any = {
    "data": True, "reward": True, "rollout": {"max_new_tokens", "stop_strings", "environment", "agent"},
    "generator": OF_GENERATOR,
}  # fmt: skip
"""Sections, and settings of one section, that an evaluation copies from a run."""


def settings_for(model: str, run: RunConfig | None) -> dict[str, Any]:
    """Returns the tables to evaluate this model on the problems and with the reward of a run, if a run is given."""
    of_run = run.model_dump(mode="json", exclude_none=True, include=OF_RUN) if run else {}
    of_run.get("data", {}).pop("date", None)  # `ready` sets it if the model's chat template uses it
    return BASE | {"model": {"path": model}} | of_run


def completed(settings: Mapping[str, Any], resolve: Callable[[dict[str, Any]], RunConfig]) -> RunConfig:
    """Returns complete settings with the defaults of an evaluation: several samples are drawn at temperature 1, and a
    single generator runs in this process. Settings of `eval` override those of a run's sets. Raises ConfigError."""
    settings, plain = dict(settings), _without(settings, EvalConfig.model_fields)
    config = resolve(plain)
    said = config.eval.model_fields_set - (set() if config.eval.max_prompts < EVERY_PROMPT else {"max_prompts"})
    settings = _without(settings, said)
    if config.eval.samples > 1:  # greedy samples would be identical
        settings["eval"] = {"temperature": 1.0} | settings["eval"]
    if config.generator.replicas * config.generator.tensor_parallel == 1:
        settings["cluster"] = {"kind": "inline"}
    return resolve(settings)


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the tables without these `eval` settings in the held-out sets. If `samples` is among them, the sets do
    not fix greedy decoding either."""

    def stays(name: str, value: object) -> bool:
        return name not in names and not ("samples" in names and name == "temperature" and value == 0)

    data = dict(settings["data"])
    if isinstance(sets := data.get("eval"), list):
        data["eval"] = [{name: value for name, value in one.items() if stays(name, value)} for one in sets]
    return dict(settings) | {"data": data}


def ready(
    config: RunConfig, run: RunConfig | None, place: object, command: str, delays: Delays = nullcontext,
    which: Literal["train", "eval"] = "eval",
) -> RunConfig:  # fmt: skip
    """Returns settings with the Hub commits that an evaluation reads (recorded ones first), and with the date of the
    run's prompts if none is set and the model's chat template writes it.

    Args:
        config: settings of the evaluation.
        run: run whose settings apply.
        place: path of the run's settings, in its folder. None or tables mean that there is no file.
        command: prefix of messages about Hub names, on standard error.
        delays: context manager that reports progress during slow steps.
        which: data that is read.

    Raises:
        ConfigError: a name does not exist, or the tokenizer cannot be read.
    """
    folder = Path(from_home(place)).parent if isinstance(place, str | Path) else None
    options = [one.option for one in named(config) if one.option.startswith(("model.path", f"data.{which}"))]
    pinned = resolved(config, run=folder, command=command, only=options)
    with delays():
        tokenizer, for_agent = open_tokenizer(pinned.model.path, pinned.data), pinned.rollout.agent is not None
    data = resolved_data(pinned.data, tokenizer, run.data if run else None, for_agent=for_agent)
    return pinned.model_copy(update={"data": data})


def with_code_of(
    run: RunConfig, place: Path, config: RunConfig, command: str, *, is_trusted: bool
) -> RunConfig:  # fmt: skip
    """Returns settings of an evaluation that may execute the code named in the settings of the model's run.

    Args:
        place: path of the run's settings, in its folder.
        config: settings of the evaluation.

    Raises:
        ConfigError: another user could have written that code, and `is_trusted` is False.
    """
    if not set(code_of(config)) & set(code_of(run)):
        return config
    check_trust(place.parent, config, command=command, is_trusted=is_trusted)
    return with_trusted(config) if is_trusted else config


def check_names(config: RunConfig, only: Collection[str]) -> None:
    """Raises ConfigError if a name is not the name of a set."""
    known = [name for name in config.by_eval_set if name]
    if unknown := [name for name in only if name not in known]:
        has = (
            f"it has {', '.join(known)}"
            if known
            else "it is not a list, so its problems have no name; leave --only out"
        )
        raise ConfigError(f"--only {unknown[0]}: data.eval has no such set; {has}")
