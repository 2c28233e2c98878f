"""What changes in the generators' weights from one optimizer step to the next, and the bytes of a delta.

    python benchmarks/delta.py [--steps 20]

A synchronous loop without controller: the demo's base model generates 16 x 8 answers, rewards score them, llamarl's
Trainer takes one step with the demo's settings, once at the demo's learning rate and once at 1e-6 (no warm-up). After
each step the weights are cast or quantized as a generator of that precision holds them and compared with those of the
step before, tensor by tensor; a tensor whose changes take more bytes than it has is sent whole.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _record import write_result
from torch import Tensor

from llamarl.config import RunConfig, build, load_config
from llamarl.data.tokenizer import Tokenizer
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.models.hf import load_model
from llamarl.models.quantize import QUANTIZED_DTYPES, dequantize_rows, quantize_rows
from llamarl.rewards._build import build_reward
from llamarl.run.prepare import prepare
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import GenerationRequest, Prompt, RewardItem, Rollout, RolloutGroup, SamplingParams
from llamarl.weight_sync.delta import encode

CODECS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FIRST_STEPS = 2
"""Left out of the figures: in them AdamW's moments are young."""


def published(model: GeneratorModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a generator of one rank serves."""
    tensors = dict[str, Tensor]()
    for spec in model.specs():
        if spec.dtype in QUANTIZED_DTYPES:
            values, scales = quantize_rows(weights[spec.name], spec.dtype)
            tensors |= {spec.key: values, f"{spec.name}.scale": scales}
        elif spec.part == "values":
            tensors[spec.key] = weights[spec.name].detach().to(getattr(torch, spec.dtype), copy=True)
    return tensors


def difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, float]:
    """Shares of elements and of bytes; `values` are those of the projections, which int8 quantizes, `rest` is not."""
    parts = {"values": list[str](), "scales": list[str](), "rest": list[str]()}
    for key in new:
        parts["scales" if key.endswith(".scale") else "values" if key.endswith("_proj.weight") else "rest"].append(key)
    found, sent_bytes, dense_bytes = dict[str, float](), 0, 0
    for part, keys in parts.items():
        num_changed, num_elements = 0, 0
        for key in keys:
            number, message = encode(old[key], new[key])
            sent_bytes += sum(piece.nbytes for piece in message)
            dense_bytes += new[key].nbytes
            words = [tensor.view(-1).view(WORDS[tensor.element_size()]) for tensor in (old[key], new[key])]
            num_changed += int((words[0] != words[1]).sum())
            assert number in (words[0].numel(), int((words[0] != words[1]).sum()))
            num_elements += new[key].numel()
        if keys:
            found[f"changed_share_{part}"] = num_changed / num_elements
    return found | {"delta_bytes": sent_bytes, "dense_bytes": dense_bytes, "bytes_share": sent_bytes / dense_bytes}


class Loop:
    """Generate, score, train, with the demo's settings but for the learning rate."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._problems = prepare(config).problems
        self._tokenizer = Tokenizer(config.model.path)
        self._reward = build_reward(config.reward)
        first = load_model(config.model.path, torch.float32, "cpu")
        self._generator = GeneratorModel(first.shape, config.generator.dtype, "cpu")
        self._generator.load(first)
        limits = config.generator
        self._engine = Engine(
            self._generator,
            EngineSettings(max_running=limits.max_running, prefill_tokens=limits.prefill_tokens, kv_bytes=None),
        )
        self.trainer = Trainer(
            first,
            config.trainer,
            Objective(
                loss=build(config.trainer.loss, "llamarl.algorithms.losses", "trainer.loss"),
                advantage=build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
                temperature=config.rollout.temperature,
            ),
        )
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            stop_token_ids=self._problems.stop_token_ids,
            seed=config.seed,
        )

    def step(self, number: int) -> float:
        """Returns the mean reward."""
        rollout, train = self._config.rollout, self._problems.train
        prompts = {
            group_id: train[group_id % len(train)]
            for group_id in range(number * rollout.prompts_per_step, (number + 1) * rollout.prompts_per_step)
        }
        self._engine.set_version(number)
        self._engine.submit(
            GenerationRequest(
                group_id=group_id,
                prompt_token_ids_T=prompt.token_ids_T,
                group_size=rollout.group_size,
                sampling=self._sampling,
            )
            for group_id, prompt in prompts.items()
        )
        finished = list[Rollout]()
        while self._engine.has_work:
            finished += self._engine.step()
        groups = [self._scored(group_id, prompt, finished) for group_id, prompt in prompts.items()]
        self.trainer.step(groups)
        self._generator.load(self.trainer.model)
        return statistics.fmean(result.value for group in groups for result in group.results)

    def _scored(self, group_id: int, prompt: Prompt, finished: list[Rollout]) -> RolloutGroup:
        rollouts = tuple(rollout for rollout in finished if rollout.group_id == group_id)
        texts = tuple(self._tokenizer.decode(rollout.token_ids_T) for rollout in rollouts)
        items = [
            RewardItem(prompt=prompt.text, response=text, answer=prompt.answer, metadata=prompt.metadata)
            for text in texts
        ]
        results = tuple(self._reward.score(items))
        return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts, results=results, responses=texts)


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    """Medians over the steps, for each codec, and every step's figures."""
    torch.manual_seed(config.seed)
    loop = Loop(config)
    weights = dict(loop.trainer.model.named_parameters())
    models = {name: GeneratorModel(loop.trainer.model.shape, name, "cpu") for name in CODECS}

    def copies() -> dict[str, dict[str, Tensor]]:
        return {name: published(models[name], weights) for name in CODECS}

    old, rewards, every = copies(), list[float](), {name: list[dict[str, float]]() for name in CODECS}
    for number in range(steps):
        rewards.append(loop.step(number))
        new = copies()
        for name in CODECS:
            every[name].append(difference(old[name], new[name]))
        old = new
        print(
            f"  step {number + 1}: " + ", ".join(f"{n} {f[-1]['bytes_share']:.4f}" for n, f in every.items()),
            flush=True,
        )
    return {
        "learning_rate": config.trainer.learning_rate,
        "rewards": rewards,
        "codecs": {
            name: {key: statistics.median(one[key] for one in found[FIRST_STEPS:]) for key in found[0]}
            | {"relative_error": relative_error(weights, old[name])}
            | {"every_step": found}
            for name, found in every.items()
        },
    }


def relative_error(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> float:
    """Root mean square of the projections' rounding errors, relative to the weights'."""
    names = [name for name in weights if name.endswith("_proj.weight")]
    exact = {name: weights[name].detach() for name in names}
    stood_for = {
        name: dequantize_rows(tensors[name], tensors[f"{name}.scale"])
        if f"{name}.scale" in tensors
        else tensors[name].float()
        for name in names
    }
    square = sum(float((stood_for[name] - exact[name]).square().sum()) for name in names)
    return (square / sum(float(exact[name].square().sum()) for name in names)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    start_s, figures = time.process_time(), dict[str, Any]()
    for name, overrides in {"demo": [], "low": ["--trainer.learning_rate=1e-6", "--trainer.warmup_steps=0"]}.items():
        config = load_config("configs/demo.toml", overrides)
        print(f"learning rate {config.trainer.learning_rate:g}", flush=True)
        figures[name] = measure(config, steps)
    settings = {"steps": steps, "first_steps_left_out": FIRST_STEPS, "cpu_s": round(time.process_time() - start_s, 1)}
    notes = [
        "Medians per optimizer step; shares of bytes are of the same precision's dense bytes.",
        "Synchronous loop with the demo's model, prompts, rewards, loss, advantage and AdamW settings, on one core.",
        "int8: projections; embedding and head are bfloat16, norms float32. Free scales move with a row's maximum.",
    ]
    for name, found in figures.items():
        for codec, each in found["codecs"].items():
            shares = ", ".join(
                f"{key} {each[key]:.4f}" for key in each if key.endswith(("values", "scales", "bytes_share"))
            )
            print(f"{name}: {codec}: {shares}, error {each['relative_error']:.4f}, {each['delta_bytes']:.0f} bytes")
    print(write_result("delta", settings, figures, notes))


if __name__ == "__main__":
    main()
