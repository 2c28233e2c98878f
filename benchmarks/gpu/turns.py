"""Training all weights of 8B (or 1B) on one device: trainer and generator take turns, and the generator serves the
trainer's own weights.

    python benchmarks/gpu/turns.py [--device cuda] [--model 8b] [--steps 20] [--tokens 8192] [--rows 64]

A row for each step: seconds of generating, of going to sleep, of training, of waking (graphs included), and most bytes
so far. Weights are random: what is learnt here is nothing, what it takes is real.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from shapes import MODELS, RandomWeights, requests, say, seconds_of, settings
from train import sample_group

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import TrainerConfig
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, part_reader
from llamarl.models.memory import kv_token_bytes
from llamarl.models.transformer import Transformer
from llamarl.training.optimization import finished
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import SampleGroup

PROMPT, RESPONSE = 256, 256
LIGHT = TrainerConfig(
    dtype="bfloat16", weights="bfloat16", moments="8bit", activation_checkpointing=True, learning_rate=1e-6
)


class Turns:
    """A trainer, and a generator that sleeps while it works."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, shape = options.device, MODELS[options.model]
        is_gpu = self.device.startswith("cuda")
        with torch.device("meta"):
            model = Transformer(shape)
        config = LIGHT.model_copy(update={"microbatch_tokens": options.tokens})
        read = part_reader(RandomWeights(shape, self.device, torch.bfloat16))
        self.trainer = Trainer(
            model,
            config,
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
            device=torch.device(self.device),
            read=read,
        )
        self.served = GeneratorModel(shape, "bfloat16", self.device)
        kv_bytes = int(options.rows * (PROMPT + RESPONSE + 32) * kv_token_bytes(shape, 1, 2))
        self.engine = Engine(
            self.served,
            EngineSettings(
                max_running=options.rows,
                prefill_tokens=2048,
                kv_bytes=kv_bytes,
                asleep=True,
                graphs=None if is_gpu else False,
            ),
        )
        rng = np.random.default_rng(0)
        self.groups: list[SampleGroup] = [sample_group(shape, rng, options.tokens // 8) for _ in range(2)]
        self.options, self.step, self.copied_bytes = options, 0, 0

    def __call__(self) -> dict[str, Any]:
        """A step: seconds by phase."""
        found, options = dict[str, Any](), self.options
        self.copied_bytes = 0
        phases = {"rest_s": self.trainer.rest, "wake_s": self._wake, "generate_s": self._generate}
        phases |= {"sleep_s": self.engine.sleep, "train_s": self._train}
        for name, work in phases.items():
            found[name] = seconds_of(self.device, work)
            if self.device.startswith("cuda"):
                found[name.replace("_s", "_bytes")] = torch.cuda.memory_allocated()
        if self.device.startswith("cuda"):
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        self.step += 1
        return found | {"copied_bytes": self.copied_bytes, "tokens": options.tokens, "rows": options.rows}

    def _wake(self) -> None:
        weights, served = self.trainer.sharding.weights, dict[str, torch.Tensor]()
        for spec in self.served.specs():
            there = weights[spec.name].detach()
            served[spec.key] = there.to(
                getattr(torch, spec.dtype)
            )  # itself on a GPU; processors keep vectors in float32
            self.copied_bytes += 0 if served[spec.key] is there else served[spec.key].nbytes
        self.served.use(served)
        self.engine.wake()

    def _generate(self) -> None:
        engine = self.engine
        engine.submit(requests(self.served.shape, range(self.options.rows), PROMPT, RESPONSE))
        while engine.has_work:
            engine.step()

    def _train(self) -> None:
        self.trainer.sharding.hold_gradients()
        finished(self.trainer.update(self.groups, self.step + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--rows", type=int, default=64, help="that are decoded together")
    options = settings(parser, tokens=256, rows=4, steps=2)
    turns = Turns(options)
    for step in range(options.steps):
        say({"turn": options.model, "step": step}, turns)


if __name__ == "__main__":
    main()
