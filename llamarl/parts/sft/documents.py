"""Prompts with their solutions, the documents of supervised training. No torch.

Shape suffix: T tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llamarl.config.errors import ConfigError
from llamarl.data.sampler import PromptSampler
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer, WrittenTurn
from llamarl.types import SampleGroup, TrainSample


def reply_of(row: ProblemRow, where: str, name: str = "solution") -> Mapping[str, Any]:
    """Returns the assistant's message that answers a row, or the text in its field `name`. Raises ConfigError if the
    row has neither."""
    if row.reply is not None:
        return row.reply
    solution = row.fields.get(name)
    if not isinstance(solution, str) or not solution:
        raise ConfigError(
            f"{where}: {row.name} has no `{name}` text to learn from; every row needs one, or to be a "
            "conversation that ends with the assistant's message"
        )
    return {"role": "assistant", "content": solution}


def to_documents(
    prompts: Iterable[np.ndarray], solutions: Sequence[str], tokenizer: Tokenizer
) -> Iterator[SampleGroup]:
    """Yields a group per row, whose response is the solution and the end of text. Prompt and response are tokenized
    separately, as in generation."""
    for prompt_T, solution_T in zip(prompts, tokenizer.encode_batch(solutions), strict=True):
        response_T = np.append(solution_T, tokenizer.eos_token_id).astype(np.int32)
        columns = {"token_ids": response_T, "loss_mask": np.ones(len(response_T), bool)}
        yield SampleGroup(prompt_token_ids_T=prompt_T, samples=(TrainSample(columns=columns),))


def to_conversation(
    messages: Sequence[Mapping[str, Any]], num_given: int, tokenizer: Tokenizer, row: str
) -> SampleGroup:
    """Returns a group whose response begins with the first assistant turn after the `num_given` messages without a
    training signal. The loss mask covers the assistant's turns, including the token that ends each turn. Pieces are
    tokenized separately, as in generation.

    Raises:
        ConfigError: a turn is empty, contains an end token, or is not reproduced by the chat template.
    """
    try:
        turns = _turns(messages, num_given, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"data.train: {row}: {error}") from None
    (prompt_T,) = tokenizer.encode_prompts([turns[0].given], is_chat=True)
    between = [np.array([], np.int32), *tokenizer.encode_batch([one.given for one in turns[1:]])]
    said = tokenizer.encode_batch([one.said for one in turns])
    if any(np.isin(said_T, tokenizer.eos_token_ids).any() for said_T in said):
        raise ConfigError(f"data.train: {row}: the assistant says a token that ends its turn; take it out of there")
    trained = [np.append(said_T, one.end_id) for said_T, one in zip(said, turns, strict=True)]
    pieces = [piece for pair in zip(between, trained, strict=True) for piece in pair]
    loss_mask = np.concatenate([np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)])
    columns = {"token_ids": np.concatenate(pieces).astype(np.int32), "loss_mask": loss_mask}
    return SampleGroup(prompt_token_ids_T=prompt_T, samples=(TrainSample(columns=columns),))


def _turns(messages: Sequence[Mapping[str, Any]], num_given: int, tokenizer: Tokenizer) -> list[WrittenTurn]:
    """Returns the written turns. Raises ConfigError, without the row's name."""
    whole, turns = tokenizer.apply_chat_template(messages, add_generation_prompt=False), list[WrittenTurn]()
    for number in range(num_given, len(messages)):
        if messages[number]["role"] == "assistant":
            turns.append(tokenizer.turn(messages, number, whole, turns[-1].after if turns else 0))
            if not turns[-1].said:
                raise ConfigError(f"message {number + 1}, an assistant's, is empty")
    return turns


def num_tokens(document: SampleGroup) -> int:
    """Returns the tokens of a document, prompt and response."""
    return len(document.prompt_token_ids_T) + document.samples[0].num_tokens


def filled(documents: Sequence[SampleGroup], max_tokens: int, seed: int) -> Iterator[list[SampleGroup]]:
    """Yields steps endlessly, each with as many documents as fit into `max_tokens`. Every document must fit."""
    sampler = PromptSampler(len(documents), seed)
    document = documents[sampler.next()]
    while True:
        step, room = list[SampleGroup](), max_tokens
        while (size := num_tokens(document)) <= room:
            step.append(document)
            document, room = documents[sampler.next()], room - size
        yield step
