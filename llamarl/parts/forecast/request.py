"""`PlanRequest`: the model, the workload of one step, the machines, and the freedom of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import ATTENTION, LoraConfig, TrainerConfig
from llamarl.config.schema import DataConfig, RolloutConfig
from llamarl.models.memory import MOMENTS_BYTES, WIDTHS
from llamarl.models.sizes import adapter_parameters
from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.hardware import BF16, Pool
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.shapes import DecoderShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Freedom of a placement. All False is the synchronous baseline of the theory, all True is asynchronous."""

    own_memory: bool = False
    """Training and generation do not share device memory."""
    own_parallelism: bool = False
    """Training and generation have separate layouts, and trainer state is sharded over data-parallel ranks. Otherwise
    both use one tensor-parallel size, and each group holds the whole trainer state, as in the paper's synchronous
    problem."""
    own_precision: bool = False
    """Generation may use 8-bit weights."""
    overlap: bool = False
    """Trainer and generators work concurrently, on separate GPUs. Otherwise they alternate, each on all GPUs."""
    partial_rollouts: bool = False
    """Generation does not wait for the longest response of a step."""
    direct_sync: bool = False
    """Weights go from shard to shard. Otherwise they go through one node."""

    @property
    def one_layout(self) -> bool:
        """Whether training and generation hold the same weights in the same groups."""
        return not self.own_memory and not self.own_parallelism


BASELINE = Rules()
"""The synchronous problem of the paper (like DeepSpeed-Chat): everything is shared."""
SYNCHRONOUS = Rules(own_parallelism=True, own_precision=True, direct_sync=True)
"""The best synchronous colocated system: weights are resharded between the phases, and KV cache and activations use the
same memory in turn. Only trainer state and the generator's weights are in memory together."""
ASYNCHRONOUS = replace(SYNCHRONOUS, own_memory=True, overlap=True, partial_rollouts=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A model, a workload and a cluster."""

    model: DecoderShape
    prompt_tokens: int
    """Mean and maximum prompt length in tokens."""
    lengths: Lengths
    """Distribution of response lengths."""
    prompts_per_step: int
    """Prompts per optimizer step, P."""
    group_size: int
    """Responses per prompt, G."""
    max_staleness: int
    """Maximum staleness S of the plan, in optimizer steps. With 0 there is no asynchronous plan."""
    pools: tuple[Pool, ...]
    """Machines. With two pools, trainer and generators may each use either."""
    constants: Constants
    lora: LoraConfig | None = None
    """Adapters to train instead of the weights."""
    weight_bytes: int = 4
    """Bytes of a trained weight, and of its gradient."""
    moment_bytes: float = MOMENTS_BYTES["float32"]
    """Bytes of both moments of a trained weight."""
    keeps_moments: bool = True
    """Moments are on the device, not in its host's memory."""

    @property
    def trained_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        return adapter_parameters(self.model, self.lora) if self.lora else self.model.num_parameters

    @property
    def saved_bytes(self) -> float:
        """Bytes of a checkpoint: trained weights and their moments."""
        return self.trained_parameters * (self.weight_bytes + self.moment_bytes)

    @classmethod
    def of_run(cls, data: DataConfig, rollout: RolloutConfig, **others: Any) -> PlanRequest:
        """Returns the request for the workload of a run. `others` are the fields that settings lack or that differ from
        them."""
        settings: dict[str, Any] = {
            "prompt_tokens": data.max_prompt_tokens,
            "prompts_per_step": rollout.prompts_per_step,
            "group_size": rollout.group_size,
            "max_staleness": rollout.max_staleness,
        }
        return cls(**settings | others)

    def with_trainer(self, trainer: TrainerConfig) -> PlanRequest:
        """Returns the request with weights and moments stored as in a run's trainer."""
        return replace(
            self, lora=trainer.lora, weight_bytes=WIDTHS[trainer.weights], moment_bytes=MOMENTS_BYTES[trainer.moments],
            keeps_moments=trainer.moments_on == "device",
        )  # fmt: skip

    @property
    def num_samples(self) -> int:
        """B0: responses per optimizer step."""
        return self.prompts_per_step * self.group_size

    @property
    def step_tokens(self) -> float:
        """Tokens that a step computes. A prompt counts once for all of its responses."""
        return self.prompts_per_step * self.prompt_tokens + self.num_samples * self.lengths.mean_tokens

    @property
    def longest_tokens(self) -> int:
        """Longest prompt plus response."""
        return self.prompt_tokens + self.lengths.limit_tokens

    def rank_samples(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the samples of the fullest of `ranks` data-parallel ranks. Groups are not split."""
        return np.ceil(self.prompts_per_step / ranks) * self.group_size

    def usable_bytes(self, pool: Pool) -> float:
        """Device memory that a plan may fill."""
        return pool.gpu.memory_bytes * (1 - self.constants.reserved_share)

    def check(self) -> None:
        """Raises ConfigError for a number that no layout can satisfy, with the nearest number that works."""
        for pool in self.pools:
            if pool.count < 1:
                raise ConfigError(f"{pool.count} GPUs of kind {pool.gpu.name} is not a cluster; use --gpus 1 or more")
        if self.model.moe and self.lora and not {*self.lora.targets} <= {*ATTENTION}:
            raise ConfigError(
                f"trainer.lora with {self.model.name}: experts get no adapters; use trainer.lora.targets = "
                f"{[*ATTENTION]}"
            )
        context = self.model.max_position_embeddings
        over = self.longest_tokens - context
        if over > 0:
            raise ConfigError(
                f"{self.prompt_tokens} prompt and {self.lengths.limit_tokens} response tokens exceed the context of "
                f"{self.model.name} ({context}) by {over}; " + self._shorter(context)
            )

    def _shorter(self, context: int) -> str:
        room = context - self.prompt_tokens
        if room > 0:
            return f"use --rollout.max_new_tokens {room}"
        return f"use --data.max_prompt_tokens {context // 2} or less"


def precisions(pool: Pool, rules: Rules) -> tuple[int, ...]:
    """Returns the bytes per weight that a generator may use."""
    return pool.gpu.scalar_bytes if rules.own_precision else (BF16,)


def uncounted(config: RunConfig) -> str:
    """Returns a sentence on limits of single sources, which a forecast ignores. Empty means none."""
    names = [
        f"data.train.{number}.{name}"
        for number, source in enumerate(config.data.sources)
        for name in ("max_prompt_tokens", "max_new_tokens")
        if getattr(source, name) is not None
    ]
    said = "not counted: all sources are taken to have data.max_prompt_tokens and rollout.max_new_tokens"
    return f"{', '.join(names)} {said}" if names else ""
