"""Settings of the executors that judge, reference, critic and reward model, and of agents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from llamarl.config.device import Device
from llamarl.config.path import FilePath
from llamarl.config.ref import Ref
from llamarl.config.section import Section
from llamarl.config.trainer import ParallelismConfig


class ReferenceConfig(Section):
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Price of a nat of divergence from a frozen reference model, per token; 0: no penalty and no such executor."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Beside the policy loss, or taken off the reward of each token, where advantages see it too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence, see `algorithms/kl.py`; with `kl_in = "reward"` k1 is usual."""
    path: FilePath = ""
    """Hugging Face folder or name with the policy's tokens; empty: `model.path`, the policy before the first step."""
    dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """Weights, as `generator.dtype`."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""


class CriticConfig(Section):
    """Used when `trainer.advantage` needs values (`gae`); other settings of its optimizer are the trainer's."""

    path: FilePath = ""
    """Hugging Face folder or name with the policy's tokens, of a causal or a one-label classification model; empty:
    `model.path`. Without `score.weight` its values begin at 0."""
    learning_rate_scale: float = Field(default=10.0, gt=0)
    """Its learning rate over the trainer's: values may move faster than policies."""
    clip: float = Field(default=0.2, gt=0)
    """Values may move so far per step before the loss stops rewarding it, in units of the reward."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads of each process."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Its own processes."""


MAX_WEIGHT = 1e9
"""Largest weight of a part of the reward, and largest ratio of two."""


class RewardParts(Section):
    """Who judges, and how much each counts."""

    parts: list[Ref] = Field(min_length=1)
    """Files in `rewards`; with several, the reward is their weighted sum and the first alone decides what is right."""
    weights: list[float] = Field(default_factory=list)
    """One weight per part; empty means 1 for each."""

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


class RewardModelConfig(Section):
    path: FilePath
    """Hugging Face folder or name of a sequence classification model with one label (`score.weight`)."""
    weight: float = 1.0
    """Factor of its score in the reward; the rule-based parts keep theirs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward; a longer response is one by itself."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""


class AgentConfig(Section):
    name: str
    """`package.module:run` of an `async def run(task, base_url, api_key)`."""
    episode_s: float = Field(default=600.0, gt=0)
    """Seconds for one episode, the policy's included; a longer one is INVALID."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that agents run in, side by side."""
    memory_bytes: int = Field(default=1 << 32, ge=1 << 28)
    """Address space of each of them."""
