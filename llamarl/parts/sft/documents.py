"""Prompts with their worked solutions: what supervised training learns. No torch.

Shape suffix: T tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from llamarl.config.errors import ConfigError
from llamarl.data.sampler import PromptSampler
from llamarl.data.tokenizer import Tokenizer
from llamarl.types import SampleGroup, TrainSample


def solution_of(fields: Mapping[str, object], row: str, where: str, name: str = "solution") -> str:
    """The text in the field `name` of a row. Raises ConfigError: there is none."""
    solution = fields.get(name)
    if not isinstance(solution, str) or not solution:
        raise ConfigError(f"{where}: row {row!r} has no `{name}` text to learn from; every row needs one")
    return solution


def to_documents(
    prompts: Iterable[np.ndarray], solutions: Sequence[str], tokenizer: Tokenizer
) -> Iterator[SampleGroup]:
    """A group each, whose response is the solution and the end of text. Prompt and response are tokenized apart, as
    they are when a model answers."""
    for prompt_T, solution_T in zip(prompts, tokenizer.encode_batch(solutions), strict=True):
        response_T = np.append(solution_T, tokenizer.eos_token_id).astype(np.int32)
        columns = {"token_ids": response_T, "loss_mask": np.ones(len(response_T), bool)}
        yield SampleGroup(prompt_token_ids_T=prompt_T, samples=(TrainSample(columns=columns),))


def num_tokens(document: SampleGroup) -> int:
    """Tokens of a document, prompt and response together."""
    return len(document.prompt_token_ids_T) + document.samples[0].num_tokens


def filled(documents: Sequence[SampleGroup], max_tokens: int, seed: int) -> Iterator[list[SampleGroup]]:
    """Steps without end, of as many documents as `max_tokens` hold; each of them must fit."""
    sampler = PromptSampler(len(documents), seed)
    document = documents[sampler.next()]
    while True:
        step, room = list[SampleGroup](), max_tokens
        while (size := num_tokens(document)) <= room:
            step.append(document)
            document, room = documents[sampler.next()], room - size
        yield step
