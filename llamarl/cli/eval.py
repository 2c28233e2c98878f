"""`llamarl eval MODEL DATA.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llamarl.cli.main import FAILURE, INTERRUPTED
from llamarl.cli.options import checked, command_parser, told_of_delay, write_output
from llamarl.config import ConfigError, Ref, RunConfig, load_config
from llamarl.config.schema import (
    ClusterConfig,
    DataConfig,
    EvalConfig,
    GeneratorConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)

if TYPE_CHECKING:
    from llamarl.controller.evaluation import EvalResult


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "eval",
        "Score a checkpoint on held-out problems: pass@1, pass@k, mean length.",
        "With --config, data, reward, template and limits come from that run's TOML; options here win.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("data", metavar="DATA.jsonl", nargs="?", help="problems; default: data.eval of --config")
    parser.add_argument("--config", metavar="RUN.toml", help="a run's settings, for example its config.toml")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="responses per problem (1)")
    parser.add_argument("--temperature", type=float, default=None, help="0 is greedy (0; 1 with several samples)")
    parser.add_argument("--max-prompts", type=int, default=1 << 30, metavar="N", help="take the first N (all)")
    parser.add_argument("--max-new-tokens", type=int, default=None, metavar="N", help="longest response (256)")
    parser.add_argument("--template", help="prompt text with {question}, or `chat` ({question} and a newline)")
    parser.add_argument("--reward", help="what is right: gsm8k, math, exact, ... (gsm8k)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the generator (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise (0)")
    parser.add_argument("--output", metavar="FILE", help="write every response as JSON Lines")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code."""
    options = _parser().parse_args(arguments)
    from llamarl.cluster.api import ExecutorError
    from llamarl.controller.supervision import Interrupted, Stalled
    from llamarl.observability.screen import eval_facts
    from llamarl.run.evaluate import evaluate_checkpoint

    run = load_config(options.config) if options.config else None
    temperature = options.temperature if options.temperature is not None else float(options.samples > 1)
    config = RunConfig(
        model=ModelConfig(path=options.model),
        data=_data(options, run),
        rollout=checked(RolloutConfig, max_new_tokens=_max_new_tokens(options, run), **_turns(run)),
        eval=checked(EvalConfig, max_prompts=options.max_prompts, samples=options.samples, temperature=temperature),
        reward=_reward(options, run),
        generator=checked(GeneratorConfig, threads=options.threads),
        cluster=ClusterConfig(kind="inline"),
        seed=options.seed,
    )
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar, ExitStack() as preparing:
        preparing.enter_context(told_of_delay("eval"))
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            preparing.close()
            bar.update(task, completed=done, total=total)

        try:
            result = evaluate_checkpoint(config, show)
        except Interrupted as error:
            print(f"llamarl eval: {error}", file=sys.stderr)
            return INTERRUPTED
        except (ExecutorError, Stalled) as error:
            print(f"llamarl eval: {type(error).__name__}: {error}", file=sys.stderr)
            return FAILURE
    print(eval_facts(result.metrics))
    if options.output:
        _write_responses(Path(options.output), result)
    return 0


def _write_responses(path: Path, result: EvalResult) -> None:
    rows = (
        {
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text,
            "response": response,
            "answer": group.prompt.answer,
            "outcome": judged.outcome.value,
            "right": judged.is_right,
        }
        for group in result.groups
        for response, judged in zip(group.responses, group.results, strict=True)
    )
    write_output(path, "".join(json.dumps(row) + "\n" for row in rows))


def _reward(options: argparse.Namespace, run: RunConfig | None) -> RewardConfig:
    if options.reward:
        return RewardConfig(parts=[Ref(name=options.reward)])
    return run.reward if run else RewardConfig()


def _max_new_tokens(options: argparse.Namespace, run: RunConfig | None) -> int:
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    return run.rollout.max_new_tokens if run else 256


def _turns(run: RunConfig | None) -> dict[str, Any]:
    """Settings of the run that say how responses end, and what answers them; empty without a run."""
    return {name: getattr(run.rollout, name) for name in ("stop_strings", "environment", "agent")} if run else {}


def _data(options: argparse.Namespace, run: RunConfig | None) -> DataConfig:
    source = Ref.model_validate({"name": "jsonl", "path": options.data}) if options.data else None
    if run:
        chosen = {"eval": source or run.data.eval, "template": options.template or run.data.template}
        data = run.data.model_copy(update=chosen)
    elif source:
        template = options.template or DataConfig.model_fields["template"].default
        data = DataConfig(train=source, eval=source, template=template)
    else:
        raise ConfigError("DATA.jsonl is missing: name a file of problems, or a run with --config")
    if data.eval is None:
        raise ConfigError(f"{options.config} has no data.eval; name a file of problems")
    return data
