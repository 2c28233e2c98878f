"""Sets of held-out problems: rows become prompts, each set with its own settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llamarl.config import ConfigError, RunConfig
from llamarl.config.ref import part
from llamarl.controller.evaluation import HeldOutSet
from llamarl.data.prompts import first_prompt, load_prompts, open_tokenizer
from llamarl.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSets:
    """All sets of a run."""

    sets: tuple[HeldOutSet, ...]
    warnings: tuple[str, ...]
    """Sentences about rows and columns that are left out."""
    first_prompts: tuple[str, ...]
    """Sentence for each set that shows its first prompt as the model sees it."""


def load_held_out(config: RunConfig, context_tokens: int, only: Collection[str] = ()) -> LoadedSets:
    """The prompts of `data.eval`; none where that is not set.

    Args:
        config: of a run.
        context_tokens: the model's longest sequence.
        only: names of sets; empty: all.

    Raises:
        ConfigError: a source or a template is wrong, or leaves no prompt; or a name is none.
    """
    known = [name for name in config.by_eval_set if name]
    if unknown := [name for name in only if name not in known]:
        has = f"it has {', '.join(known)}" if known else "it is no list, so its problems have no name; leave --only out"
        raise ConfigError(f"--only {unknown[0]}: data.eval has no such set; {has}")
    loaded = [
        _loaded(run, name, number, context_tokens)
        for number, (name, run) in enumerate(config.by_eval_set.items())
        if not only or name in only
    ]
    return LoadedSets(
        sets=tuple(one for one, _, _ in loaded),
        warnings=tuple(text for _, texts, _ in loaded for text in texts),
        first_prompts=tuple(text for _, _, text in loaded),
    )


def _loaded(config: RunConfig, name: str | None, number: int, context_tokens: int) -> tuple[HeldOutSet, list[str], str]:
    """A set, warnings, and its first prompt, of a run with this set alone. Raises ConfigError."""
    tokenizer, for_agent = open_tokenizer(config.model.path, config.data), config.rollout.agent is not None
    environment = config.rollout.environment
    tools = part("episodes", "build_environment")(environment).tools() if environment else []
    try:
        found = load_prompts(config.data, tokenizer, context_tokens, "eval", tools, for_agent=for_agent)
    except ConfigError as error:
        raise ConfigError(_with_name(str(error), name)) from None
    prompts = found.prompts[: config.eval.max_prompts]
    held_out = HeldOutSet(name=name, number=number, settings=config.eval, prompts=prompts)
    warnings = [_with_name(text, name) for text in found.warnings]
    shown = first_prompt(config.data, tokenizer, prompts[0], for_agent=for_agent)
    return held_out, warnings, f"{name}: {shown}" if name else shown


def _with_name(text: str, name: str | None) -> str:
    """A sentence about `data.eval`, with the name of the set that is meant."""
    if name is None:
        return text
    option, named = "data.eval", f"data.eval ({name})"
    return text.replace(option, named, 1) if option in text else f"{named}: {text}"


def learnt_too(sets: Sequence[HeldOutSet], train: Sequence[Prompt]) -> list[str]:
    """Warnings about sets of which every prompt is trained on."""
    learnt = {prompt.token_ids_T.tobytes() for prompt in train}
    return [
        _with_name(
            "data.eval: all of its prompts are in data.train too, so it does not tell learning from memory", one.name
        )
        for one in sets
        if all(prompt.token_ids_T.tobytes() in learnt for prompt in one.prompts)
    ]
