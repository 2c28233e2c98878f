"""`llamarl generate MODEL --prompts FILE`: the engine alone, without cluster, trainer or rewards."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import add_settings, command_parser, told_of_delay
from llamarl.config import ConfigError, RunConfig, read_rows, read_text, settled
from llamarl.config.schema import GeneratorConfig
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams

if TYPE_CHECKING:
    from llamarl.data.tokenizer import Tokenizer
    from llamarl.generation.backend import GenerationBackend
    from llamarl.generation.engine import Engine


ENGINE = ("generator.dtype", "generator.device", "generator.threads", "generator.max_running")
"""Settings that `open_engine` reads."""
BASE = {
    "model": {"path": ""}, "data": {"train": "jsonl"}, "eval": {"temperature": 1.0}, "cluster": {"kind": "inline"},
}  # fmt: skip
SETTINGS = (
    "eval.samples", "eval.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.max_new_tokens",
    "rollout.stop_strings", "seed", *ENGINE,
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "generate",
        "Answer the prompts of a file: one JSON line per response, in the order in which they finish.",
        "FILE is JSON Lines when its name ends in .jsonl, else text with a prompt in each line.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("--prompts", metavar="FILE", required=True, help="what to answer")
    parser.add_argument("--field", default="prompt", help="field of a JSON line that holds the prompt (prompt)")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message in the chat template")
    parser.add_argument("--output", metavar="FILE", help="where the responses go (standard output)")
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    options = _parser().parse_args(arguments)
    config = settled(BASE, options.overrides)
    generator, samples = config.generator, config.eval.samples
    prompts = read_prompts(Path(options.prompts), options.field)

    from llamarl.data.tokenizer import Tokenizer, check_vocabulary
    from llamarl.models.folder import load_shape

    with told_of_delay("generate"):
        tokenizer = Tokenizer(options.model)
        check_vocabulary(tokenizer, load_shape(options.model).vocab_size)
        sampling = _sampling(config, tokenizer.eos_token_ids)
        requests = _requests(prompts, tokenizer, options.chat, samples, sampling)
        first = next(requests)  # a template that cannot work fails before the weights are read
    with Responses(options.output, prompts, tokenizer) as responses:
        with told_of_delay("generate"):
            engine = open_engine(options.model, generator, tokenizer)
        responses.begin()
        return _run(engine, chain([first], requests), generator.max_running, responses, len(prompts) * samples)


def _sampling(config: RunConfig, end_token_ids: tuple[int, ...]) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=config.eval.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens, stop_strings=tuple(rollout.stop_strings), seed=config.seed,
        stop_token_ids=end_token_ids,
    )  # fmt: skip


def read_prompts(path: Path, field: str) -> list[str]:
    """Prompts of a JSON Lines file (`field` of each line) or of a text file (each line that is not blank)."""
    fix = "give --prompts a file of prompts"
    if path.suffix == ".jsonl":
        return [_prompt(row, place, field) for place, row in read_rows(path, fix)]
    prompts = [line.removesuffix("\r") for line in read_text(path, fix).split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} is empty; it needs a prompt in each line")
    return prompts


def _prompt(row: dict[str, Any], place: str, field: str) -> str:
    if field not in row:
        raise ConfigError(f"{place}: there is no `{field}`; name the prompt's --field, one of {', '.join(row)}")
    if not isinstance(row[field], str):
        raise ConfigError(f"{place}: `{field}` is {row[field]!r:.60}, not text; name the prompt's --field")
    return row[field]


def _requests(
    prompts: Sequence[str], tokenizer: Tokenizer, chat: bool, samples: int, sampling: SamplingParams
) -> Iterator[GenerationRequest]:
    """Tokenized one by one, as the engine has room: group id = number of the prompt, from 0."""
    for number, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
        # A chat template writes its own BOS; a plain text gets the one that the model saw in pretraining.
        token_ids_T = tokenizer.encode(text, add_special_tokens=not chat)
        yield GenerationRequest(group_id=number, prompt_token_ids_T=token_ids_T, group_size=samples, sampling=sampling)


def open_engine(path: str, config: GeneratorConfig, tokenizer: Tokenizer) -> Engine:
    """Without a cluster. Raises ConfigError."""
    from llamarl.distributed.runtime import set_up_device
    from llamarl.generation.engine import Engine
    from llamarl.generation.model import load_generator_model

    device = set_up_device(config.device, config.threads, "generator.device")
    model = load_generator_model(path, config.dtype, device)
    return Engine(
        model, max_running=config.max_running, prefill_tokens=config.prefill_tokens, kv_bytes=None,
        decode=tokenizer.decode,
    )  # fmt: skip


class Responses:
    """The file of responses: whole lines only, even when the disk is full."""

    def __init__(self, path: str | None, prompts: Sequence[str], tokenizer: Tokenizer) -> None:
        """Raises ConfigError when `path` cannot be written; what it holds stays until `begin`."""
        self._path, self._prompts, self._tokenizer = path, prompts, tokenizer
        self._whole_bytes = self.count = self.num_failed = 0
        try:
            self._file = FileIO(path or 1, "ab", closefd=bool(path))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --output") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> None:
        """Forgets what the file held."""
        self._cut()

    def write(self, rollouts: Sequence[Rollout]) -> None:
        """Raises ConfigError when the disk is full, BrokenPipeError when the reader has gone."""
        data = "".join(json.dumps(self._row(rollout), ensure_ascii=False) + "\n" for rollout in rollouts).encode()
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException as error:
            self._cut()
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                held = f"{self._path or 'standard output'}: {error.strerror}; it holds {self.count} responses"
                raise ConfigError(f"cannot write {held}, choose another --output") from None
            raise
        self._whole_bytes += len(data)
        self.count += len(rollouts)
        self.num_failed += sum(rollout.finish_reason is FinishReason.FAILED for rollout in rollouts)

    def _cut(self) -> None:
        if self._path:
            with suppress(OSError):  # pipes and devices have no length
                self._file.truncate(self._whole_bytes)

    def _row(self, rollout: Rollout) -> dict[str, Any]:
        logprob = float(rollout.behavior_logprobs_T.sum(dtype=np.float64))
        return {
            "prompt": self._prompts[rollout.group_id],
            "number": rollout.group_id,
            "index": rollout.index,
            "text": self._tokenizer.decode(rollout.token_ids_T),
            "num_tokens": rollout.num_tokens,
            "logprob": logprob if isfinite(logprob) else None,
            "finish_reason": rollout.finish_reason.value,
            "error": rollout.error,
        }


def _run(engine: Engine, requests: Iterator[GenerationRequest], ahead: int, responses: Responses, total: int) -> int:
    """Generates and reports; the exit code."""
    start_s, interrupted = time.monotonic(), False
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        try:
            for rollouts in generate(engine, requests, ahead):
                responses.write(rollouts)
                bar.update(task, completed=responses.count)
        except KeyboardInterrupt:
            interrupted = True
    elapsed_s, stats = time.monotonic() - start_s, engine.stats()
    facts = [
        f"{'interrupted: ' * interrupted}{responses.count} of {total} responses",
        f"{stats.decode_tokens} tokens in {elapsed_s:.1f} s",
        f"{stats.decode_tokens / elapsed_s:.0f} tokens/s",
    ]
    if stats.slot_steps:
        facts.append(f"decode slots {stats.filled_slot_steps / stats.slot_steps:.0%} full while prompts waited")
    if responses.num_failed:
        facts.append(f"{responses.num_failed} failed, see `error`")
    print(", ".join(facts), file=sys.stderr)
    if interrupted:
        return INTERRUPTED
    return FAILURE if responses.num_failed == total else 0


def generate(engine: GenerationBackend, requests: Iterator[GenerationRequest], ahead: int) -> Iterator[list[Rollout]]:
    """Rollouts in the order in which they finish. At most `ahead` wait in the engine, and one request more."""
    while True:
        waiting = engine.stats().waiting
        while waiting < ahead and (request := next(requests, None)):
            engine.submit([request])
            waiting += request.group_size
        if not engine.has_work:
            return
        if rollouts := engine.step():
            yield rollouts
