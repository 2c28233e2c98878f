"""Answers prompts with a checkpoint's engine, without a cluster, a trainer or rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import DataConfig
from llamarl.data.prompts import CHAT, check_template, open_tokenizer, render, resolved_data, shown_prompt
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer, check_vocabulary
from llamarl.models.folder import load_shape
from llamarl.types import GenerationRequest, Rollout, SamplingParams

if TYPE_CHECKING:
    from llamarl.generation.backend import RolloutEngine
    from llamarl.run.models import AskedModel

BASE = {"model": {"path": ""}, "data": {"train": "jsonl"}, "eval": {"temperature": 1.0}}
"""Default settings for answering prompts: responses are sampled."""


def prompt_tables(asked: AskedModel) -> dict[str, Any]:
    """Returns tables of settings that format the prompts of a file as the model's run would."""
    tables = {name: dict(table) for name, table in BASE.items()} | {"model": {"path": asked.path}}
    for name, table in asked.settings.items():
        tables[name] = tables.get(name, {}) | table
    return tables


class PromptRun:
    """Requests for prompts, and, as a context manager, the engine that answers them."""

    engine: RolloutEngine

    first_prompt: str
    """Sentence that shows the first prompt as the model sees it."""

    def __init__(self, config: RunConfig, prompts: Sequence[str], *, chat: bool) -> None:
        """Raises ConfigError if no tokenizer or template fits. Does not read weights."""
        self._config, self.tokenizer = config, open_tokenizer(config.model.path, config.data)
        check_vocabulary(self.tokenizer, load_shape(config.model.path).vocab_size)
        if chat and not self.tokenizer.has_chat_template:
            raise ConfigError(
                f"--chat: {self.tokenizer.folder} has no chat template; leave it out, or give --data.template a text "
                "such as '{question}\\n'"
            )
        given = config.data.model_copy(update={"template": CHAT} if chat else {})
        data = resolved_data(given, self.tokenizer)
        check_template(data, self.tokenizer)
        sampling = _sampling(config, self.tokenizer.eos_token_ids)
        requests = _requests(prompts, self.tokenizer, data, config.eval.samples, sampling)
        first = next(requests)
        shown = self.tokenizer.decode(first.prompt_token_ids_T, skip_special=False)
        self.first_prompt = shown_prompt(given.template, data.template, shown)
        self._requests = chain([first], requests)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError, ExecutorError."""
        self.engine = self._opened.enter_context(open_engine(self._config))
        return self

    def __exit__(self, *failure: object) -> None:
        self._opened.close()

    def rollouts(self) -> Iterator[list[Rollout]]:
        """Rollouts in the order in which they finish. Raises ExecutorError."""
        generator = self._config.generator
        return generate(self.engine, self._requests, generator.max_running * generator.replicas)


def _sampling(config: RunConfig, end_token_ids: tuple[int, ...]) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=config.eval.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens, stop_strings=tuple(rollout.stop_strings), seed=config.seed,
        stop_token_ids=end_token_ids,
    )  # fmt: skip


def _requests(
    prompts: Sequence[str], tokenizer: Tokenizer, data: DataConfig, samples: int, sampling: SamplingParams
) -> Iterator[GenerationRequest]:
    """Yields requests that are tokenized on demand. The group id is the number of the prompt, from 0."""
    for number, prompt in enumerate(prompts):
        text = render(ProblemRow(problem_id=str(number), question=prompt, answer=""), data, tokenizer)
        (token_ids_T,) = tokenizer.encode_prompts([text], is_chat=data.template == CHAT)
        yield GenerationRequest(group_id=number, prompt_token_ids_T=token_ids_T, group_size=samples, sampling=sampling)


@contextmanager
def open_engine(config: RunConfig) -> Iterator[RolloutEngine]:
    """Opens an engine in this process, or a `Fleet` for several generators. Raises ConfigError, ExecutorError."""
    from llamarl.executors.generator import open_native
    from llamarl.parts.answers.fleet import Fleet

    generator = config.generator.model_copy(update={"router_replay": False})  # not trained on
    config = config.model_copy(update={"generator": generator})
    if generator.replicas * generator.tensor_parallel > 1:
        with Fleet(config) as fleet:
            yield fleet
    else:
        yield open_native(config.model.path, generator).engine


def generate(engine: RolloutEngine, requests: Iterator[GenerationRequest], ahead: int) -> Iterator[list[Rollout]]:
    """Yields rollouts in the order in which they finish. The engine holds at most `ahead` rollouts and one request
    more."""
    while True:
        waiting = engine.stats().waiting
        while waiting < ahead and (request := next(requests, None)):
            engine.submit([request])
            waiting += request.group_size
        if not engine.has_work:
            return
        if rollouts := engine.step():
            yield rollouts


def row_of(rollout: Rollout, prompts: Sequence[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a response as a row of JSON."""
    logprob = float(rollout.behavior_logprobs_T.sum(dtype=np.float64))
    return {
        "prompt": prompts[rollout.group_id],
        "number": rollout.group_id,
        "index": rollout.index,
        "text": tokenizer.decode(rollout.token_ids_T),
        "num_tokens": rollout.num_tokens,
        "logprob": logprob if isfinite(logprob) else None,
        "finish_reason": rollout.finish_reason.value,
        "error": rollout.error,
    }
