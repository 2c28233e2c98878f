"""Settings of the trainer and of the executors that judge: critic, reference model, reward model and agents."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from llamarl.config.errors import did_you_mean
from llamarl.config.ref import Ref
from llamarl.config.section import Device, FilePath, Section


class ParallelismConfig(Section):
    """Sizes of the layout of trainer or critic. Processes = fsdp * tp * pp * cp, one device each. All layouts compute
    the same."""

    fsdp: int = Field(default=1, ge=1, le=1 << 14)
    """Shares of each batch. Weights, gradients and optimizer state are sharded as many times (FSDP2)."""
    tp: int = Field(default=1, ge=1)
    """Shards of every matrix (tensor and sequence parallel), for the fast links within a host."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages of consecutive layers. Several microbatches per step keep all stages busy."""
    cp: int = Field(default=1, ge=1)
    """Shards of every sequence, for contexts whose activations do not fit. Shards weights as fsdp does."""
    ep: int = Field(default=1, ge=1)
    """Ranks, of the fsdp * cp ranks, that share the experts of a mixture. Tokens travel to their experts, which is
    fastest if ep * tp ranks are on one host."""

    @model_validator(mode="after")
    def _check_experts(self) -> ParallelismConfig:
        if (self.fsdp * self.cp) % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide the {self.fsdp * self.cp} ranks of fsdp and cp; use a divisor"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.fsdp * self.tp * self.pp * self.cp

    def smaller(self) -> list[ParallelismConfig]:
        """Returns layouts with fewer processes that fit every model that fits this one: all sizes divide this one's,
        and as many ranks as possible share experts. Layouts with more processes come first, then those most similar to
        this one."""
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
"""Projections that can have adapters in a mixture of experts."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) for a frozen model. Its weights have no gradients, no moments and no
    checkpoints. Only adapters are sent to the generators, which merge them."""

    rank: int = Field(ge=1, le=1 << 14)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """The product of an adapter is scaled by `alpha / rank`."""
    targets: list[Projection] = Field(default_factory=lambda: list(get_args(Projection)), min_length=1)
    """Projections with an adapter, in every layer."""

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
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay after the warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer step, counted from the start of the run, at which the learning rate reaches its floor."""
    decay_floor: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` that is left after the decay."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment. Stale rollouts act like more momentum: lower it if `rollout.max_staleness` is 3 or
    more (docs/staleness.md)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment. 0.95 forgets old gradients sooner, because gradients drift in RL."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this value."""
    passes: int = Field(default=1, ge=1, le=256)
    """Updates on each batch before the next version is published. From the second pass on, `decoupled_ppo` and clipping
    losses with `truncate` keep the policy near the one before the first pass."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward pass. Bounds memory and does not change the gradient. A sequence must fit."""
    activation_checkpointing: bool | Literal["selective"] = False
    """true: keeps only the input of each layer and recomputes the rest in backward, a third more arithmetic, much less
    memory. "selective": on GPUs in bfloat16, keeps the products and recomputes norms and gated activations, a quarter
    less memory at little cost. Gradients stay the same to the bit."""
    compile: bool = False
    """Fuses the operations between matrix products with `torch.compile`. Start-up takes minutes longer, which pays off
    for large models in float32. Experts are not fused. Results change by rounding. In bfloat16 on a GPU llamarl's
    kernels are faster."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights stay float32."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of master weights and their gradients. In bfloat16, updates are rounded stochastically (seeded by run, step
    and position), so that small updates count on average; rounding to nearest would lose them."""
    moments: Literal["float32", "8bit"] = "float32"
    """Moments of AdamW: exact, or 8-bit codes with a scale per 256 values, which take a quarter of the memory and train
    as well."""
    moments_on: Literal["device", "host"] = "device"
    """Place of the moments: on the device, or in host memory, from which each step copies them to the GPU. Results
    stay the same to the bit."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A non-finite loss or gradient ends the run, or its step is skipped and counted. Three skipped steps in a row end
    the run."""
    parallelism: ParallelismConfig = ParallelismConfig()
    lora: LoraConfig | None = None
    """Trains only adapters. None means all weights."""
    train_router: bool = True
    """Trains the routers of a mixture of experts, too. False freezes them, without gradients and moments, so that
    experts keep their roles."""

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
                "trainer.weights = 'bfloat16' with trainer.dtype = 'float32': computing in float32 gains nothing from "
                "bfloat16 weights; use trainer.dtype = 'bfloat16'"
            )
        if self.weights == "bfloat16" and self.lora:
            raise ValueError("trainer.weights = 'bfloat16' with trainer.lora: adapters are small; leave one out")
        if not self.train_router and self.lora:
            raise ValueError("trainer.train_router = false with trainer.lora: LoRA freezes routers; leave it out")
        return self


class ReferenceConfig(Section):
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Penalty per token and nat of divergence from a frozen reference model. 0 means no penalty and no such
    executor."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Adds the penalty to the policy loss, or subtracts it from the reward of each token, where advantages include
    it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence, see `algorithms/kl.py`. With `kl_in = "reward"`, k1 is common."""
    path: FilePath = ""
    """Hugging Face folder or name of a model with the policy's vocabulary. Empty means `model.path`, the initial
    policy."""
    dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """Type of the weights, as `generator.dtype`."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""


class CriticConfig(Section):
    """Used if `trainer.advantage` needs values (`gae`). Other settings of its optimizer are the trainer's."""

    path: FilePath = ""
    """Hugging Face folder or name of a model with the policy's vocabulary: a causal model, or a classification model
    with one label. Empty means `model.path`. Without `score.weight`, its values start at 0."""
    learning_rate_scale: float = Field(default=10.0, gt=0)
    """Its learning rate divided by the trainer's. Values may change faster than policies."""
    clip: float = Field(default=0.2, gt=0)
    """Clip range of a value per step, in units of the reward."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads of each process."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Layout of its processes."""


MAX_WEIGHT = 1e9
"""Largest weight of a part of the reward, and largest ratio of two weights."""


class RewardParts(Section):
    """Parts of the reward, and their weights."""

    parts: list[Ref] = Field(min_length=1)
    """Files in `rewards`. With several, the reward is their weighted sum, and only the first part decides
    correctness."""
    weights: list[float] = Field(default_factory=list)
    """One weight per part. Empty means 1 for each."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> RewardParts:
        if self.weights and len(self.weights) != len(self.parts):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.parts)} parts; give one each"
            )
        sizes = [abs(one) for one in self.weights if one]
        if sizes and (max(sizes) > MAX_WEIGHT * min(1.0, *sizes) or max(sizes) * MAX_WEIGHT < 1):
            raise ValueError(
                f"reward.weights = {self.weights}: one of them is lost to rounding; give weights within a factor of "
                f"{MAX_WEIGHT:g} of 1 and of each other"
            )
        return self


REWARD_MODEL_TOKENS = 8192
"""Tokens per forward pass of the reward model. A longer response has its own pass."""


class RewardModelConfig(Section):
    path: FilePath
    """Hugging Face folder or name of a sequence classification model with one label (`score.weight`)."""
    weight: float = 1.0
    """Weight of its score in the reward, next to the rule-based parts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""


class AgentConfig(Section):
    """An agent. One that comes with llamarl has further options."""

    model_config = ConfigDict(extra="allow")

    name: str
    """`package.module:run` of an `async def run(task, base_url, api_key)`, or an agent that comes with llamarl, such as
    `verifiers`."""
    episode_s: float = Field(default=600.0, gt=0)
    """Time limit of an episode in seconds, including the policy's time. A longer episode is INVALID."""
    workers: int = Field(default=1, ge=1, le=256)
    """Parallel processes that run agents."""
    memory_bytes: int = Field(default=1 << 32, ge=1 << 28)
    """Address space of each process."""

    @model_validator(mode="after")
    def _options_of_programs(self) -> AgentConfig:
        if ":" in self.name and self.options:
            name = next(iter(self.options))
            known = did_you_mean(name, sorted(type(self).model_fields))
            raise ValueError(f"rollout.agent.{name}: the function {self.name!r} has no options; {known}")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Options of an agent that comes with llamarl."""
        return dict(self.model_extra or {})
