"""Settings of an evaluation: those of a run that it is like, and what an evaluation is otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from llamarl.config import ConfigError, RunConfig, from_home
from llamarl.config.data import EvalConfig
from llamarl.data.prompts import open_tokenizer, settled
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
"""Sections of a run, and settings of one, that an evaluation takes over."""


def settings_for(model: str, run: RunConfig | None) -> dict[str, Any]:
    """Tables of an evaluation of this model, on the problems of a run and by its reward, if one is given."""
    of_run = run.model_dump(mode="json", exclude_none=True, include=OF_RUN) if run else {}
    of_run.get("data", {}).pop("date", None)  # `ready` takes it, if the model's chat template does
    return BASE | {"model": {"path": model}} | of_run


def completed(settings: Mapping[str, Any], settle: Callable[[dict[str, Any]], RunConfig]) -> RunConfig:
    """Settled settings, with those that follow where nobody says otherwise: several samples are drawn, and one
    generator needs no process of its own. What is said of `eval` wins over what sets of the run say. Raises
    ConfigError."""
    settings, plain = dict(settings), _without(settings, EvalConfig.model_fields)
    config = settle(plain)
    said = config.eval.model_fields_set - (set() if config.eval.max_prompts < EVERY_PROMPT else {"max_prompts"})
    settings = _without(settings, said)
    if config.eval.samples > 1:  # greedy ones are all the same
        settings["eval"] = {"temperature": 1.0} | settings["eval"]
    if config.generator.replicas * config.generator.tensor_parallel == 1:
        settings["cluster"] = {"kind": "inline"}
    return settle(settings)


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Tables in which sets of held-out problems do not settle these of `eval` themselves; where others say how many
    samples there are, nor that they are greedy."""

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
    """Settings with commits of the names that an evaluation reads, those on record first, and with the date of the
    run's prompts, where nobody gives one and this model's chat template writes it.

    Args:
        config: of the evaluation.
        run: that it is like.
        place: path of the run's settings, in its folder; None, or tables: it has none.
        command: begins lines about the Hub's names, on standard error.
        delays: entered while nothing else says how far this is.
        which: the data that is read.

    Raises:
        ConfigError: a name means nothing, or the tokenizer cannot be read.
    """
    folder = Path(from_home(place)).parent if isinstance(place, str | Path) else None
    options = [one.option for one in named(config) if one.option.startswith(("model.path", f"data.{which}"))]
    pinned = resolved(config, run=folder, command=command, only=options)
    with delays():
        tokenizer, for_agent = open_tokenizer(pinned.model.path, pinned.data), pinned.rollout.agent is not None
    data = settled(pinned.data, tokenizer, run.data if run else None, for_agent=for_agent)
    return pinned.model_copy(update={"data": data})


def with_code_of(
    run: RunConfig, place: Path, config: RunConfig, command: str, *, is_trusted: bool
) -> RunConfig:  # fmt: skip
    """Settings of an evaluation that may execute what the settings of the run that was named as the model say.

    Args:
        place: path of the run's settings, in its folder.
        config: of the evaluation.

    Raises:
        ConfigError: somebody else may have written what would be executed, and the user does not trust them.
    """
    if not set(code_of(config)) & set(code_of(run)):
        return config
    check_trust(place.parent, config, command=command, is_trusted=is_trusted)
    return with_trusted(config) if is_trusted else config


def check_names(config: RunConfig, only: Collection[str]) -> None:
    """Raises ConfigError: a name is no set's."""
    known = [name for name in config.by_eval_set if name]
    if unknown := [name for name in only if name not in known]:
        has = (
            f"it has {', '.join(known)}"
            if known
            else "it is not a list, so its problems have no name; leave --only out"
        )
        raise ConfigError(f"--only {unknown[0]}: data.eval has no such set; {has}")
