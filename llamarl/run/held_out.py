"""Sets of held-out problems: rows become prompts, each set with its own settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from llamarl.config import RunConfig
from llamarl.config.data import OF_EVAL
from llamarl.controller.evaluation import HeldOutSet
from llamarl.data.prompts import load_prompts, open_tokenizer
from llamarl.run.sources import environment_of, of_source, source_name
from llamarl.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSets:
    """All sets of a run."""

    sets: tuple[HeldOutSet, ...]
    stops_of: dict[str, tuple[str, ...]]
    """Strings that end a turn, by `Prompt.source`."""
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
        ConfigError: a source or a template is wrong, or leaves no prompt.
    """
    sets, stops_of, warnings, first_prompts = [], {}, [], []
    for number, (name, run) in enumerate(config.by_eval_set.items()):
        if only and name not in only:
            continue
        tokenizer, for_agent = open_tokenizer(run.model.path, run.data), run.rollout.agent is not None
        key = OF_EVAL + name if name else ""
        with of_source(key):
            tools, stops_of[key] = environment_of(run)
            found = load_prompts(run.data, tokenizer, context_tokens, "eval", tools, for_agent=for_agent)
        prompts = tuple(replace(one, source=key) for one in found.prompts[: run.eval.max_prompts])
        sets.append(HeldOutSet(name=name, number=number, settings=run.eval, prompts=prompts))
        warnings += [_of_set(key, text) for text in found.warnings]
        first_prompts.append(_of_set(key, found.first_prompt))
    return LoadedSets(sets=tuple(sets), stops_of=stops_of, warnings=tuple(warnings), first_prompts=tuple(first_prompts))


def _of_set(key: str, text: str) -> str:
    """A sentence, behind the name of the set that is meant."""
    return f"{source_name(key)}: {text.removeprefix('data.eval: ')}" if key else text


def learnt_too(sets: Sequence[HeldOutSet], train: Sequence[Prompt]) -> list[str]:
    """Warnings about sets of which every prompt is trained on."""
    learnt = {prompt.token_ids_T.tobytes() for prompt in train}
    said = "data.eval: all of its prompts are in data.train too, so it cannot tell learning from memorizing"
    return [
        _of_set(one.prompts[0].source, said)
        for one in sets
        if all(prompt.token_ids_T.tobytes() in learnt for prompt in one.prompts)
    ]
