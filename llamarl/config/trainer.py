"""Settings of the trainer."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal, get_args

from pydantic import Field, model_validator

from llamarl.config.device import Device
from llamarl.config.ref import Ref
from llamarl.config.section import Section


class ParallelismConfig(Section):
    """Processes of trainer or critic, a device each: the product of the first four. All layouts compute the same."""

    fsdp: int = Field(default=1, ge=1, le=1 << 14)
    """Shares of each batch; weights, gradients and optimizer state are cut as many times (FSDP2)."""
    tp: int = Field(default=1, ge=1)
    """Parts of every matrix (tensor and sequence parallel); for the fast links inside of a host."""
    pp: int = Field(default=1, ge=1)
    """Stages of consecutive layers; needs several microbatches per step to keep all of them busy."""
    cp: int = Field(default=1, ge=1)
    """Parts of every sequence, for contexts whose activations do not fit; cuts weights as fsdp does."""
    ep: int = Field(default=1, ge=1)
    """Ranks, of those of fsdp and cp, that share the experts of a mixture; tokens travel to theirs, fastest where
    ep times tp ranks are on one host."""

    @model_validator(mode="after")
    def _check_experts(self) -> ParallelismConfig:
        if (self.fsdp * self.cp) % self.ep:
            raise ValueError(
                f"ep = {self.ep} ranks are some of the {self.fsdp * self.cp} of fsdp and cp; use a divisor"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.fsdp * self.tp * self.pp * self.cp

    def smaller(self) -> list[ParallelismConfig]:
        """Layouts of fewer processes that what fits this one fits, too: sizes that divide these, with experts shared
        by as many ranks as there can be. The first have the most processes, and of as many cut the model most alike."""
        axes = (self.fsdp, self.tp, self.pp, self.cp)
        each = [[size for size in range(1, most + 1) if most % size == 0] for most in axes]
        found = [
            ParallelismConfig(fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=math.gcd(self.ep, fsdp * cp))
            for fsdp, tp, pp, cp in product(*each)
        ]
        fewer = [one for one in found if one.num_ranks < self.num_ranks]
        return sorted(fewer, key=lambda one: (one.num_ranks, one.tp, one.pp, one.cp), reverse=True)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.model_dump().items() if name != "ep" or size > 1)


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ATTENTION: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Projections that can have an adapter in a mixture of experts."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) beside a frozen model: its own weights have no gradients, no moments and no
    checkpoints, and only adapters go to the generators, which merge them."""

    rank: int = Field(ge=1, le=1 << 14)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's product counts `alpha / rank` times."""
    targets: list[Projection] = Field(default_factory=lambda: list(get_args(Projection)), min_length=1)
    """Projections of every layer that have an adapter."""

    @model_validator(mode="after")
    def _once(self) -> LoraConfig:
        if twice := [one for one in self.targets if self.targets.count(one) > 1]:
            raise ValueError(f"trainer.lora.targets names {twice[0]!r} twice; name each once")
        return self

    @property
    def scale(self) -> float:
        """Factor of B @ A."""
        return self.alpha / self.rank


class TrainerConfig(Section):
    loss: Ref = Ref(name="aipo")
    """File in `algorithms/losses`."""
    advantage: Ref = Ref(name="group_mean")
    """File in `algorithms/advantages`."""
    learning_rate: float = Field(default=1e-6, gt=0, le=10)
    """Peak step size of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's fall after the warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer step, counted from the first of the run, at which it has fallen to its floor, where it stays."""
    decay_floor: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` that is left at the end of the decay."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment. Gradients of stale rollouts act like more momentum: lower it where
    `rollout.max_staleness` is 3 or more (docs/staleness.md)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment; 0.95 forgets old gradients sooner, as RL gradients drift."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this."""
    passes: int = Field(default=1, ge=1, le=256)
    """Updates on each batch, all before the next version is published. From the second on `decoupled_ppo`, and clipping
    losses with `truncate`, stay near the policy before the first."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward; bounds memory, does not change the gradient. A sequence must fit."""
    activation_checkpointing: bool | Literal["selective"] = False
    """true: keep only the input of each layer and compute the rest again in backward, a third more arithmetic for a
    small part of the memory. "selective": on GPUs in bfloat16, keep the products and compute norms and gated
    activations again, which takes three quarters of the memory and little time. Gradients stay the same bits."""
    compile: bool = False
    """Fuse what lies between the matrix products with `torch.compile`: worth its minutes of start-up for large models
    in float32. Experts are not fused. Results change by rounding. In bfloat16 on a GPU llamarl's kernels are faster."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights stay float32."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Master weights and their gradients. In bfloat16 each update is rounded up or down by chance in proportion, drawn
    from the run's seed, the step and the place, so that small ones count on average; rounded to the nearest they would
    be lost."""
    moments: Literal["float32", "8bit"] = "float32"
    """Moments of AdamW: exact, or codes of 8 bits with a scale for each 256, which take a quarter of the memory and
    learn as well."""
    moments_on: Literal["device", "host"] = "device"
    """Their place: on a GPU beside the weights, or in its host's memory, from which they visit the GPU in each step;
    results stay the same bits."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A non-finite loss or gradient ends the run, or skips that step and counts it."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """Skipped steps in a row, of trainer or critic, that end the run all the same, with `on_nonfinite = "skip"`."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """TFLOP/s of one device of the trainer, from its data sheet, for the share of it that is used (`mfu`); none: what a
    large matrix product reaches there."""
    parallelism: ParallelismConfig = ParallelismConfig()
    lora: LoraConfig | None = None
    """Train adapters only; none: all weights."""
    train_router: bool = True
    """Train the routers of a mixture of experts, too; false leaves them as they are, without gradients and moments, so
    that what an expert is for stays."""

    @model_validator(mode="after")
    def _fused(self) -> TrainerConfig:
        if self.compile and self.dtype == "bfloat16" and self.device != "cpu":
            raise ValueError(
                "trainer.compile = true with trainer.dtype = 'bfloat16' on a GPU replaces llamarl's kernels by slower "
                "ones; set trainer.compile = false"
            )
        return self

    @model_validator(mode="after")
    def _light_weights(self) -> TrainerConfig:
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(
                "trainer.weights = 'bfloat16' with trainer.dtype = 'float32': nothing is gained by computing with more "
                "than is kept; use trainer.dtype = 'bfloat16'"
            )
        if self.weights == "bfloat16" and self.lora:
            raise ValueError("trainer.weights = 'bfloat16' with trainer.lora: adapters are small; leave one out")
        if not self.train_router and self.lora:
            raise ValueError("trainer.train_router = false with trainer.lora: routers are frozen then; leave it out")
        return self
