"""Forward and backward of packed tokens at 1B or 8B shape, as a share of the device's peak; and the log-prob path.

    python benchmarks/gpu/train.py [--device cuda] [--model 8b] [--tokens 4096] [--compile]

Of the 8B shape as many layers as fit with gradients and moments. Flops are 6 N plus attention; what is computed again
does not count.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from shapes import DATA_SHEET_TFLOPS, MODELS, RandomWeights, copy_bytes_per_s, say, seconds_of, settings
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import TrainerConfig
from llamarl.generation.model import part_reader
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.training.cost import step_cost
from llamarl.training.optimization import finished
from llamarl.training.parallel import Read
from llamarl.training.policy import target_logprobs
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import SampleGroup, TrainSample

REPEATS = 5
KEPT: dict[str, Any] = {"none": False, "selective": "selective", "all": True}
"""Values of `trainer.activation_checkpointing`."""
OPTIMIZER_BYTES = 4 + 8 + 28
"""Of a weight: its gradient is read for the norm, and scaled, and the step reads weight, gradient and two moments, and
writes all but the gradient."""
BYTES_PER_WEIGHT = 4 + 4 + 8 + 2
"""Weight, gradient, moments, and the copy that is computed with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--compile", action="store_true", help="trainer.compile")
    parser.add_argument("--checkpointing", default="selective", choices=["none", "selective", "all"])
    options = settings(parser, tokens=256)
    model, device, tokens = options.model, options.device, options.tokens
    bandwidth, shape = copy_bytes_per_s(device), fitted(MODELS[model], device)
    kept = options.checkpointing
    trainer, groups = make_trainer(shape, device, tokens, compiled=options.compile, checkpointing=KEPT[kept])
    about = {"model": model, "compile": options.compile, "checkpointing": kept}
    say(about, lambda: trained(trainer, groups, tokens))
    if options.compile:
        return
    say({"optimizer": model}, lambda: optimized(trainer, bandwidth))
    say({"logprobs": model}, lambda: log_probabilities(shape, device, 2 * tokens))


def fitted(shape: ModelShape, device: str) -> ModelShape:
    """With as many layers as fit in three quarters of the memory."""
    if not device.startswith("cuda"):
        return shape
    rest = replace(shape, num_layers=0).num_parameters
    layer = replace(shape, num_layers=1).num_parameters - rest
    room = 0.75 * torch.cuda.mem_get_info()[0] / BYTES_PER_WEIGHT - rest
    return replace(shape, num_layers=min(shape.num_layers, int(room // layer)))


def make_trainer(
    shape: ModelShape,
    device: str,
    num_tokens: int,
    read: Read | None = None,
    compiled: bool = False,
    checkpointing: Any = "selective",
) -> tuple[Trainer, list[SampleGroup]]:
    """With given weights or random ones, and two groups of one prompt and three responses each."""
    rng = np.random.default_rng(0)
    groups = [sample_group(shape, rng, num_tokens // 8) for _ in range(2)]
    with torch.device("meta"):  # its weights are drawn where they are computed with: a processor takes minutes for 8B
        model = Transformer(shape)
    read = read or part_reader(RandomWeights(shape, device, torch.float32))
    config = TrainerConfig(
        dtype="bfloat16", activation_checkpointing=checkpointing, microbatch_tokens=num_tokens, compile=compiled
    )
    return Trainer(
        model,
        config,
        Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
        device=torch.device(device),
        read=read,
    ), groups


def trained(trainer: Trainer, groups: list[SampleGroup], num_tokens: int) -> dict[str, Any]:
    """Gradients of packed tokens."""
    shape, device = trainer.model.shape, str(trainer.device)
    work = lambda: finished(trainer.accumulate(groups, num_tokens))  # noqa: E731
    seconds_of(device, work)
    step_s = statistics.median(seconds_of(device, work) for _ in range(REPEATS))
    return {
        "layers": shape.num_layers, "parameters": shape.num_parameters, "tokens": num_tokens, "step_s": step_s,
        "mfu": step_cost(shape, groups, None).flops / step_s / DATA_SHEET_TFLOPS / 1e12,
    }  # fmt: skip


def optimized(trainer: Trainer, bandwidth: float) -> dict[str, Any]:
    """Clipping and the optimizer's step. The norm reads a gradient, clipping reads and writes it, and the step reads
    and writes weight, gradient and moments: 40 bytes a weight."""

    def optimize() -> None:
        trainer.sharding.clip_gradients(1.0)
        trainer.optimizer.step()

    device = str(trainer.device)
    seconds_of(device, optimize)  # makes the moments
    step_s = statistics.median(seconds_of(device, optimize) for _ in range(REPEATS))
    share = OPTIMIZER_BYTES * trainer.model.shape.num_parameters / step_s / bandwidth
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
    return {"step_s": step_s, "bandwidth_share": share, "peak_bytes": peak}


def sample_group(shape: ModelShape, rng: np.random.Generator, length: int) -> SampleGroup:
    def tokens() -> np.ndarray:
        return rng.integers(0, shape.vocab_size, length).astype(np.int32)

    columns = {
        "behavior_logprobs": np.full(length, -5.0, np.float32), "policy_versions": np.zeros(length, np.int32),
        "advantages": np.ones(length, np.float32), "loss_mask": np.ones(length, bool),
    }  # fmt: skip
    samples = tuple(TrainSample(columns={"token_ids": tokens(), **columns}) for _ in range(3))
    return SampleGroup(prompt_token_ids_T=tokens(), samples=samples)


def log_probabilities(shape: ModelShape, device: str, num_targets: int) -> dict[str, float]:
    """Log-probabilities of so many targets and their gradients, by tiles, and by all logits at once."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    hidden_R_D = (torch.randn(num_targets, shape.hidden_size, device=device, dtype=dtype) * 0.1).requires_grad_()
    head_V_D = (torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets_R = torch.randint(0, shape.vocab_size, (num_targets,), device=device)

    def tiled() -> None:
        target_logprobs(hidden_R_D, head_V_D, targets_R, 1.0).sum().backward()

    def plain() -> None:
        logits_R_V: Tensor = (hidden_R_D @ head_V_D.t()).float()
        logits_R_V.log_softmax(-1).gather(1, targets_R[:, None]).sum().backward()

    found = {}
    for name, work in (("tiled", tiled), ("plain", plain)):
        seconds_of(device, work)
        found[f"{name}_s"] = statistics.median(seconds_of(device, work) for _ in range(REPEATS))
    flops = 8 * num_targets * shape.vocab_size * shape.hidden_size  # logits are computed again in backward
    return found | {"time_ratio": found["tiled_s"] / found["plain_s"], "tflops": flops / found["tiled_s"] / 1e12}


if __name__ == "__main__":
    main()
