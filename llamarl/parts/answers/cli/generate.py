"""`llamarl generate MODEL --prompts FILE`: answers prompts without a cluster, a trainer or rewards."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import ASKED_HELP, ENGINE, add_settings, check_output, command_parser, report_delays
from llamarl.config import ConfigError, read_rows, read_text, resolved
from llamarl.parts.answers.answering import BASE, PromptRun, prompt_tables, row_of
from llamarl.types import FinishReason, Rollout

if TYPE_CHECKING:
    from llamarl.data.tokenizer import Tokenizer

SETTINGS = (
    "eval.samples", "eval.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.max_new_tokens",
    "rollout.stop_strings", "data.template", "data.system", "data.examples", "data.template_arguments", "data.date",
    "seed", *ENGINE,
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "generate",
        "Answer the prompts of a file: one JSON line per response, in the order in which they finish.",
        "FILE is JSON Lines if its name ends in .jsonl, else text with one prompt per line. Prompts are formatted as "
        "the run formatted its questions. For a model without a run, a prompt is a user message in the model's chat "
        "template, or, without a template, the text and a line break. --data.template '{question}' passes the text "
        "unchanged.",
    )
    parser.add_argument("model", metavar="MODEL|RUN", help=ASKED_HELP)
    parser.add_argument("--prompts", metavar="FILE", required=True, help="file of prompts")
    parser.add_argument("--field", default="prompt", help="field of a JSON line that holds the prompt (prompt)")
    parser.add_argument(
        "--chat", action="store_true", help="use the model's chat template, even if the run has another"
    )
    parser.add_argument("--output", metavar="FILE", help="file of responses (standard output)")
    add_settings(parser, BASE, *SETTINGS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    resolved(BASE, options.overrides)  # fails early on a mistake
    if options.output:
        check_output(options.output, options.prompts)
    prompts = read_prompts(Path(options.prompts), options.field)

    from llamarl.run.models import asked_model

    with ExitStack() as opened:
        with report_delays("generate"):
            asked = opened.enter_context(asked_model(options.model, "MODEL", command="llamarl generate"))
            config = resolved(prompt_tables(asked), options.overrides)
            answers = PromptRun(config, prompts, chat=options.chat)
        print(answers.first_prompt, file=sys.stderr)
        responses = opened.enter_context(Responses(options.output, prompts, answers.tokenizer))
        with report_delays("generate", "starting the engine"):
            opened.enter_context(answers)
        responses.begin()
        return _run(answers, responses, len(prompts) * config.eval.samples)


def read_prompts(path: Path, field: str) -> list[str]:
    """Returns the prompts of a JSON Lines file (`field` of each line) or of a text file (each line that is not
    blank)."""
    fix = "give --prompts a file of prompts"
    if path.suffix == ".jsonl":
        return [_prompt(row, place, field) for place, row in read_rows(path, fix)]
    prompts = [line.removesuffix("\r") for line in read_text(path, fix).split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} is empty; it needs a prompt in each line")
    return prompts


def _prompt(row: dict[str, Any], place: str, field: str) -> str:
    if field not in row:
        raise ConfigError(f"{place}: there is no `{field}`; set --field to one of {', '.join(row)}")
    if not isinstance(row[field], str):
        raise ConfigError(f"{place}: `{field}` is {row[field]!r:.60}, not text; set --field to the field of the prompt")
    return row[field]


class Responses:
    """File of responses. Writes whole lines only, even when the disk is full."""

    def __init__(self, path: str | None, prompts: Sequence[str], tokenizer: Tokenizer) -> None:
        """Raises ConfigError if `path` cannot be written. The file keeps its content until `begin`."""
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
        """Empties the file."""
        self._cut()

    def write(self, rollouts: Sequence[Rollout]) -> None:
        """Raises ConfigError when the disk is full, BrokenPipeError when the reader has gone."""
        data = "".join(
            json.dumps(row_of(rollout, self._prompts, self._tokenizer), ensure_ascii=False) + "\n"
            for rollout in rollouts
        ).encode()
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


def _run(answers: PromptRun, responses: Responses, total: int) -> int:
    """Generates and reports. Returns the exit code."""
    start_s, interrupted = time.monotonic(), False
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        try:
            for rollouts in answers.rollouts():
                responses.write(rollouts)
                bar.update(task, completed=responses.count)
        except KeyboardInterrupt:
            interrupted = True
    elapsed_s, stats = time.monotonic() - start_s, answers.engine.stats()
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
