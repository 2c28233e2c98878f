"""What turns cost, and how many verdicts the judge of code gives: engine, calculator and judge in one process.

    python benchmarks/episodes.py [--model runs/base/calculator] [--concurrent 32] [--groups 32] [--rounds 5]

The policy of `configs/calculator.toml` (made if need be, a minute) answers its held-out problems. Every round has three
runs of the same requests: one without turns, where `?` ends nothing; one with turns, answered by the calculator between
two steps of the engine; and one with turns whose keys and values are not held. A round's ratios are of its own runs.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _record import write_result

from llamarl.config import RunConfig, load_config
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments._base import Task, Turn
from llamarl.environments.calculator import Calculator
from llamarl.generation.engine import Engine
from llamarl.generation.model import load_generator_model
from llamarl.models.folder import load_shape
from llamarl.run.warm_start import ensure_base_model
from llamarl.sandbox.judge import Job, Judge
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams, observed

BARS = {"turns_ratio": 0.95, "prefill_ratio": 1.3, "verdicts_per_s": 200.0}
NOTES = [
    (
        "turns_ratio: sampled tokens per second of processor time, on one thread, with turns over those without; the "
        "median of the rounds. Decoding, answering and encoding of turns is in it."
    ),
    (
        "prefill_ratio: prefilled tokens with turns over those that nobody can do without, the prompts of the run "
        "without turns and what was observed. `prefill_ratio_of_prompts` has the prompts alone below the line."
    ),
    "verdicts_per_s: programs of a few lines with three tests each, by two workers, after their start.",
]


class Talk:
    """Requests that run to their end, perhaps with a calculator."""

    def __init__(self, model: str, concurrent: int) -> None:
        self._tokenizer, self._calculator = Tokenizer(model), Calculator()
        self._model = load_generator_model(model, "float32", torch.device("cpu"))
        self._concurrent = concurrent

    def __call__(self, requests: list[GenerationRequest], *, turns: bool, holds: bool) -> dict[str, float]:
        strings = tuple(self._calculator.stop) if turns else ()
        requests = [
            replace(one, sampling=replace(one.sampling, stop_strings=strings), has_turns=holds) for one in requests
        ]
        by_id = {one.group_id: one for one in requests}
        engine = Engine(
            self._model, max_running=self._concurrent, prefill_tokens=2048, kv_bytes=None, decode=self._tokenizer.decode
        )
        done, start_s = list[Rollout](), time.process_time()
        engine.submit(requests)
        while engine.has_work:
            for rollout in engine.step():
                goes_on = self._answered(rollout) if turns else None
                if goes_on is not None:
                    engine.submit([replace(by_id[rollout.group_id], partials=(goes_on,))])
                else:
                    engine.release([(rollout.group_id, rollout.index)])
                    done.append(rollout)
        seconds = time.process_time() - start_s
        assert engine.stats().kv_use == 0
        observed_tokens = sum(int((~rollout.is_sampled_T).sum()) for rollout in done)
        return {
            "tokens_per_s": engine.stats().decode_tokens / seconds,
            "prefill_tokens": engine.stats().prefill_tokens,
            "observed_tokens": observed_tokens,
            "sampled_tokens": engine.stats().decode_tokens,
            "steps": engine.stats().steps,
            "turns": statistics.mean(rollout.num_turns for rollout in done),
        }

    def _answered(self, rollout: Rollout) -> Rollout | None:
        if rollout.finish_reason is not FinishReason.STOP:
            return None
        said = self._tokenizer.decode(rollout.turns[-1][1])
        answer = self._calculator.reply(Task(prompt="", answer="", metadata={}), [Turn(response=said)])
        if answer is None:
            return None
        columns = observed(rollout.columns, self._tokenizer.encode(answer))
        return replace(rollout, columns=columns, finish_reason=FinishReason.PARKED)


def make_requests(config: RunConfig, model: str, groups: int) -> list[GenerationRequest]:
    """Of the held-out problems."""
    tokenizer = Tokenizer(model)
    prompts = load_prompts(config.data, tokenizer, load_shape(model).max_position_embeddings, "eval").prompts[:groups]
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, stop_token_ids=tokenizer.eos_token_ids)
    return [
        GenerationRequest(group_id=n, prompt_token_ids_T=prompt.token_ids_T, group_size=8, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]


def verdicts_per_s(count: int) -> float:
    """Of programs that pass their tests."""
    judge = Judge(workers=2, cpu_s=5, wall_s=30.0, memory_bytes=1 << 29)
    jobs = [
        Job(
            code=f"def add(a, b):\n    return a + b + {n}",
            tests="\n".join(f"assert add({a}, 2) == {a + 2 + n}" for a in range(3)),
        )
        for n in range(count)
    ]
    judge.judge(jobs[:20], 60.0)
    start_s = time.perf_counter()
    verdicts = judge.judge(jobs, 120.0)
    seconds = time.perf_counter() - start_s
    judge.close()
    assert all(getattr(verdict, "is_right", False) for verdict in verdicts), verdicts
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder; that of configs/calculator.toml")
    parser.add_argument("--concurrent", type=int, default=32, help="rollouts that decode at once")
    parser.add_argument("--groups", type=int, default=32, help="problems, of 8 rollouts each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verdicts", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(Path(__file__).parents[1] / "configs/calculator.toml")
    if not options.model:
        ensure_base_model(config)
    model = options.model or config.model.path
    talk, requests = Talk(model, options.concurrent), make_requests(config, model, options.groups)
    talk(requests, turns=True, holds=True)
    rounds = [
        {
            "without": talk(requests, turns=False, holds=False),
            "held": talk(requests, turns=True, holds=True),
            "not_held": talk(requests, turns=True, holds=False),
        }
        for _ in range(options.rounds)
    ]

    def median(top: str, key: str = "tokens_per_s", below: str = "without") -> float:
        return statistics.median(one[top][key] / one[below][key] for one in rounds)

    prompts, held = rounds[0]["without"]["prefill_tokens"], rounds[0]["held"]
    needed = prompts + held["observed_tokens"]
    figures = {
        "turns_ratio": median("held"),
        "turns_ratio_not_held": median("not_held"),
        "prefill_ratio": held["prefill_tokens"] / needed,
        "prefill_ratio_not_held": rounds[0]["not_held"]["prefill_tokens"] / needed,
        "prefill_ratio_of_prompts": held["prefill_tokens"] / prompts,
        "turns_mean": held["turns"],
        "verdicts_per_s": verdicts_per_s(options.verdicts),
        "bars": BARS,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }
    print({name: round(value, 3) for name, value in figures.items() if isinstance(value, float)})
    print(write_result("episodes", vars(options) | {"model": model}, figures, NOTES))


if __name__ == "__main__":
    main()
