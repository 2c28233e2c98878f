"""The questions of `docs/planner.md`: their figures are the planner's, and right by arithmetic that is not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from llamarl.config import ConfigError
from llamarl.parts.forecast.cli.plan import asked, parser
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.report import choose
from tests.architecture.repository import ROOT

ROW = re.compile(r"^\| ([^|]+\?) \| `(--model [^`]+)` \| ([^|]+) \|$", re.MULTILINE)
QUESTIONS = ROW.findall((ROOT / "docs/planner.md").read_text(encoding="utf-8"))
PARAMETERS = {
    "qwen3-1.7b": 1.72e9, "qwen3-8b": 8.19e9, "llama3-70b": 70.6e9, "qwen2.5-72b": 72.7e9, "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-32b": 32.8e9, "qwen2.5-7b": 7.62e9, "qwen3-235b-a22b": 235.1e9, "qwen3-30b-a3b": 30.5e9,
}  # fmt: skip
ACTIVE = {"qwen3-235b-a22b": 22.2e9, "qwen3-30b-a3b": 3.35e9}
"""By the model cards; of a mixture also those that a token meets, embedding included."""
CARDS = {
    "h100-80g": (80e9, 3.35e12, 989e12, 3.0), "rtx4090-24g": (24e9, 1.008e12, 165.2e12, 0.4),
    "a10-24g": (24e9, 0.6e12, 125e12, 0.75), "l4-24g": (24e9, 0.3e12, 121e12, 0.7),
    "a100-80g": (80e9, 2.039e12, 312e12, 1.8),
}  # fmt: skip
"""Bytes, bytes per second, FLOPs per second, US dollars per hour, by the data sheets."""
STATE, LIGHT_STATE = 16, 2 + 2 + 2 + 8 / 256
"""Bytes of weight, gradient and two moments in float32, and with weights in bfloat16 and moments in 8 bits."""
FIGURES: dict[str, Callable[[Plan, Plan | None, Plan], list[float]]] = {
    r"([\d.,]+) s a step": lambda plan, other, _: [one.step_s for one in (plan, other) if one],
    r"([\d.,]+) GB": lambda plan, _, chosen: [chosen.peak_bytes / 1e9],
    r"([\d.,]+) USD a day": lambda plan, _, chosen: [24 * chosen.dollars_per_hour],
    r"(\d+) train": lambda plan, other, _: [one.trainer.gpus for one in (plan, other) if one],
    r"(\d+) generate": lambda plan, other, _: [one.generator.gpus for one in (plan, other) if one],
    r"staleness (\d+)": lambda plan, other, _: [one.staleness for one in (plan, other) if one],
}
"""Figures of an answer, and those of the plans that they may be."""


def request_of(words: str):
    return asked(parser().parse_args(shlex.split(words)), None)


def option(words: str, name: str, default: str) -> str:
    given = shlex.split(words)
    return given[given.index(name) + 1] if name in given else default


def test_there_are_ten() -> None:
    assert len({words for _, words, _ in QUESTIONS}) == 10


@pytest.mark.parametrize(("question", "words", "answer"), [row for row in QUESTIONS if not row[2].startswith("no: s")
                                                           and "DeepSeek" not in row[1]])  # fmt: skip
def test_a_plan_is_as_told_and_possible(question: str, words: str, answer: str) -> None:
    request = request_of(words)
    synchronous, asynchronous = plans(request)
    assert synchronous
    chosen = choose(synchronous, asynchronous)
    told = 0
    for pattern, values in FIGURES.items():
        for text in re.findall(pattern, answer):
            figure, known = float(text.replace(",", "")), values(synchronous, asynchronous, chosen)
            told += 1
            assert any(
                figure == pytest.approx(one, rel=0.005, abs=0.5 * (figure > 9 and "." not in text)) for one in known
            ), f"{question} {text} is none of {known}"
    assert told >= 2
    for plan in filter(None, (synchronous, asynchronous)):
        check_bounds(words, plan)


def check_bounds(words: str, plan: Plan) -> None:
    """Memory and seconds against what they cannot be under, and time but for an exchange of experts' rows against four
    times that of its products."""
    model, card = option(words, "--model", ""), option(words, "--gpu", "h100-80g")
    parameters, (memory, bandwidth, flops, price) = PARAMETERS[model], CARDS[card]
    samples = int(option(words, "--rollout.prompts_per_step", "256")) * 8
    tokens = samples * (512 + 0.3 * int(option(words, "--rollout.max_new_tokens", "4096")))
    trainer, generator, is_lora = plan.trainer, plan.generator, "lora" in words
    # Weights in bfloat16 at least, of what adapters leave frozen; else the whole state.
    each = LIGHT_STATE if "8bit" in words else STATE
    state = (2 if is_lora else each) * parameters / trainer.gpus
    assert state * 0.99 <= trainer.memory_parts["state"] <= (4.2 / 2 if is_lora else 1.01) * state
    assert generator.memory_parts["weights"] >= 0.99 * 2 * parameters * generator.weight_bytes / generator.tp
    assert plan.peak_bytes <= 0.92 * memory
    # Forward, forward again, and backward: of all products, or without those of frozen weights' gradients. What a
    # look-up of embeddings does is no product: at most a third of these models' parameters.
    products = (6 if is_lora else 8) * ACTIVE.get(model, parameters) * tokens / trainer.gpus
    assert 0.65 * products / flops <= trainer.busy_s - trainer.time_parts["exchange"] <= 4 * products / flops
    # Each decode step reads all weights of a replica at least once.
    steps = (
        samples * 0.3 * int(option(words, "--rollout.max_new_tokens", "4096")) / generator.replicas / generator.slots
    )
    assert generator.busy_s >= 0.7 * steps * parameters * generator.weight_bytes / generator.tp / bandwidth
    used = trainer.gpus + generator.gpus if plan.staleness else max(trainer.gpus, generator.gpus)
    assert used <= int(option(words, "--gpus", ""))
    assert plan.dollars_per_step == pytest.approx(used * price * plan.step_s / 3600)
    assert plan.gpu_hours_per_step == pytest.approx(used * plan.step_s / 3600)


@pytest.mark.parametrize(("question", "words", "answer"), [row for row in QUESTIONS if row[2].startswith("no: state")])
def test_what_does_not_fit_gets_the_least_that_does(question: str, words: str, answer: str) -> None:
    request, gpus = request_of(words), int(option(words, "--gpus", ""))
    with pytest.raises(ConfigError) as refused:
        plans(request)
    state = STATE * PARAMETERS[option(words, "--model", "")] / gpus
    told = float(re.findall(r"([\d.]+) GB", answer)[0]) * 1e9
    assert told == pytest.approx(state, rel=0.01) and f"state {told / 1e9:.1f}" in str(refused.value)
    assert state > CARDS[option(words, "--gpu", "h100-80g")][0], "no layout can be right"
    fewest = int(re.findall(r"use --gpus (\d+)", str(refused.value))[0])
    assert f" { ({2: 'two', 3: 'three'}.get(fewest, str(fewest))) } cards" in answer
    assert fewest * CARDS[option(words, "--gpu", "h100-80g")][0] > STATE * PARAMETERS[option(words, "--model", "")]


def test_what_is_not_computed_is_refused() -> None:
    words, answer = next((words, answer) for _, words, answer in QUESTIONS if "DeepSeek" in words)
    with pytest.raises(ConfigError) as refused:
        request_of(words)
    assert "latent attention" in str(refused.value) and answer.rsplit(" ", 1)[1] in str(refused.value)
