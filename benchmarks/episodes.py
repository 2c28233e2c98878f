"""What turns and the gateway cost, and how many verdicts the judge of code gives.

    python benchmarks/episodes.py [--model runs/base/calculator] [--concurrent 32] [--groups 32] [--rounds 5]

The policy of `configs/calculator.toml` (made if need be, a minute) answers its held-out problems. Every round has three
runs of the same requests, whose steps take turns: one without turns, where `?` ends nothing; one with turns, answered
by the calculator between two steps of the engine; and one with turns whose keys and values are not held. Then come
rounds of the engine in a process of its own, asked directly and by agents over the gateway. A round's ratios are of its
own runs.
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
from _gateway import measure as measure_gateway
from _record import write_result

from llamarl.config import RunConfig, load_config
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, load_generator_model
from llamarl.models.folder import load_shape
from llamarl.parts.episodes.environments._base import Task, Turn
from llamarl.parts.episodes.environments.calculator import Calculator
from llamarl.parts.episodes.sandbox.judge import JudgeJob, ProgramJudge
from llamarl.parts.sft.base_model import ensure_base_model
from llamarl.types import FinishReason, GenerationRequest, Prompt, Rollout, SamplingParams, observed

BARS = {"turns_ratio": 0.95, "gateway_ratio": 0.75, "prefill_ratio": 1.3, "verdicts_per_s": 200.0}
NOTES = [
    (
        "turns_ratio: sampled tokens per second of the engine's processor time, on one thread, with turns over those "
        "without; the median of the rounds. What the calculator takes is left out, as in a run another process gives "
        "the answers; `turns_ratio_with_answers` has the texts of turns, their answers and tokens in it as well."
    ),
    (
        "gateway_ratio: tokens per second of greedy single calls by `concurrent` episodes at a time, over those of the "
        "same requests in the engine directly; the median of the rounds. Both write the same tokens."
    ),
    (
        "prefill_ratio: prefilled tokens with turns over those that nobody can do without: prompts, and what was "
        "observed, which no engine has computed before. It is 1 where everything that was computed is found again. "
        "`prefill_ratio_of_prompts` has the prompts alone below the line, and grows with what is observed, whatever "
        "the engine does; `prefill_ratio_not_held` is what holding saves."
    ),
    "verdicts_per_s: programs of a few lines with three tests each, by two workers, after their start.",
]


class Talk:
    """Requests that run to their end, perhaps with a calculator."""

    def __init__(
        self, model: GeneratorModel, tokenizer: Tokenizer, requests: list[GenerationRequest], concurrent: int,
        *, turns: bool, holds: bool,
    ) -> None:  # fmt: skip
        self._tokenizer, self._calculator = tokenizer, Calculator() if turns else None
        strings = tuple(self._calculator.stop) if self._calculator else ()
        requests = [
            replace(one, sampling=replace(one.sampling, stop_strings=strings), has_turns=holds) for one in requests
        ]
        self._by_id = {one.group_id: one for one in requests}
        self.engine = Engine(
            model, EngineSettings(max_running=concurrent, prefill_tokens=2048, kv_bytes=None), decode=tokenizer.decode
        )
        self._done = list[Rollout]()
        self.engine_s = self.answers_s = 0.0
        self.engine.submit(requests)

    def step(self) -> None:
        """Of the engine, and the answers to the turns that it has ended."""
        start_s = time.process_time()
        ended = self.engine.step()
        said_s = time.process_time()
        said = list(map(self._answered, ended)) if self._calculator else [None] * len(ended)
        answered_s = time.process_time()
        if go_on := [one for one in said if one is not None]:
            self.engine.submit(go_on)
        if over := [rollout for rollout, answer in zip(ended, said, strict=True) if answer is None]:
            self.engine.release([(rollout.group_id, rollout.index) for rollout in over])
        self._done += over
        self.answers_s += answered_s - said_s
        self.engine_s += time.process_time() - answered_s + said_s - start_s

    def figures(self) -> dict[str, float]:
        stats = self.engine.stats()
        assert stats.kv_use == 0
        return {
            "tokens_per_s": stats.decode_tokens / self.engine_s,
            "tokens_per_s_with_answers": stats.decode_tokens / (self.engine_s + self.answers_s),
            "prefill_tokens": stats.prefill_tokens,
            "observed_tokens": sum(int((~rollout.is_sampled_T).sum()) for rollout in self._done),
            "sampled_tokens": stats.decode_tokens,
            "steps": stats.steps,
            "turns": statistics.mean(rollout.num_turns for rollout in self._done),
        }

    def _answered(self, rollout: Rollout) -> GenerationRequest | None:
        """How it goes on; None: it is over."""
        assert self._calculator is not None
        if rollout.finish_reason is not FinishReason.STOP:
            return None
        said = self._tokenizer.decode(rollout.turns[-1][1])
        answer = self._calculator.reply(Task(prompt="", answer="", metadata={}), [Turn(response=said)])
        if answer is None:
            return None
        columns = observed(rollout.columns, self._tokenizer.encode(answer))
        parked = replace(rollout, columns=columns, finish_reason=FinishReason.PARKED)
        return replace(self._by_id[rollout.group_id], partials=(parked,))


def talk_in_turn(talks: dict[str, Talk]) -> dict[str, dict[str, float]]:
    """One step of each after the other, so that what else the machine does slows them all alike."""
    while working := [one for one in talks.values() if one.engine.has_work]:
        for one in working:
            one.step()
    return {name: one.figures() for name, one in talks.items()}


def make_requests(config: RunConfig, model: str, groups: int) -> tuple[list[GenerationRequest], list[Prompt]]:
    """Of the held-out problems, and these."""
    tokenizer = Tokenizer(model)
    prompts = load_prompts(config.data, tokenizer, load_shape(model).max_position_embeddings, "eval").prompts[:groups]
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens, stop_token_ids=tokenizer.eos_token_ids)
    requests = [
        GenerationRequest(group_id=n, prompt_token_ids_T=prompt.token_ids_T, group_size=8, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]
    return requests, list(prompts)


def verdicts_per_s(count: int) -> float:
    """Of programs that pass their tests."""
    judge = ProgramJudge(workers=2, cpu_s=5, wall_s=30.0, memory_bytes=1 << 29)
    jobs = [
        JudgeJob(
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
    path = options.model or config.model.path
    tokenizer, model = Tokenizer(path), load_generator_model(path, "float32", torch.device("cpu"))
    requests, _ = make_requests(config, path, options.groups)

    def talk(*, turns: bool, holds: bool) -> Talk:
        return Talk(model, tokenizer, requests, options.concurrent, turns=turns, holds=holds)

    rounds = [
        talk_in_turn(
            {
                "without": talk(turns=False, holds=False),
                "held": talk(turns=True, holds=True),
                "not_held": talk(turns=True, holds=False),
            }
        )
        for _ in range(options.rounds + 1)
    ][1:]  # the first one finds everything cold
    calls = measure_gateway(path, *make_requests(config, path, 256), options.concurrent, options.rounds)

    def median(top: str, key: str = "tokens_per_s", below: str = "without") -> float:
        return statistics.median(one[top][key] / one[below]["tokens_per_s"] for one in rounds)

    prompts, held = rounds[0]["without"]["prefill_tokens"], rounds[0]["held"]
    needed = prompts + held["observed_tokens"]
    figures = {
        "turns_ratio": median("held"),
        "turns_ratio_with_answers": median("held", "tokens_per_s_with_answers"),
        "turns_ratio_not_held": median("not_held"),
        "gateway_ratio": statistics.median(one["gateway"] / one["direct"] for one in calls),
        "prefill_ratio": held["prefill_tokens"] / needed,
        "prefill_ratio_not_held": rounds[0]["not_held"]["prefill_tokens"] / needed,
        "prefill_ratio_of_prompts": held["prefill_tokens"] / prompts,
        "turns_mean": held["turns"],
        "verdicts_per_s": verdicts_per_s(options.verdicts),
        "bars": BARS,
        "rounds": rounds,
        "gateway_rounds": calls,
        "load_average": os.getloadavg()[0],
    }
    print({name: round(value, 3) for name, value in figures.items() if isinstance(value, float)})
    print(write_result("episodes", vars(options) | {"model": path}, figures, NOTES))


if __name__ == "__main__":
    main()
