"""How many GPUs each role has in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.config import ConfigError, RunConfig
from llamarl.simulator.costs import SimulatorCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Who has how many GPUs."""

    trainer_gpus: int
    replicas: int
    generator_gpus: int
    """GPUs of one replica."""

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + self.replicas * self.generator_gpus


def make_layout(config: RunConfig, costs: SimulatorCosts, gpus: int | None) -> Layout:
    """Splits `gpus` so that trainer and generators take equally long; without `gpus`, by `generator.replicas`.

    theta* = f_t / (f_t + f_g), where f is the GPU time per sample of each role. Raises ConfigError.
    """
    each, settings = costs.generator_gpus, config.generator
    train, generate = gpu_s_per_sample(config, costs)
    if gpus is None:
        generators = settings.replicas * each
        return Layout(
            trainer_gpus=max(1, round(generators * train / generate)), replicas=settings.replicas, generator_gpus=each
        )
    if gpus < each + 1:
        raise ConfigError(
            f"`--gpus {gpus}` is too few: one generator takes {each} GPUs (generator_gpus of the costs) and the trainer "
            f"at least one; give --gpus {each + 1} or more"
        )
    replicas = min(max(1, round(gpus * generate / (train + generate) / each)), (gpus - 1) // each)
    return Layout(trainer_gpus=gpus - replicas * each, replicas=replicas, generator_gpus=each)


def gpu_s_per_sample(config: RunConfig, costs: SimulatorCosts) -> tuple[float, float]:
    """GPU-seconds of training and of generating one rollout with full batches."""
    group_size, slots = config.rollout.group_size, config.generator.max_running
    tokens = min(costs.response_tokens, float(config.rollout.max_new_tokens))
    if costs.response_lengths:
        tokens = float(np.minimum(costs.response_lengths, config.rollout.max_new_tokens).mean())
    train = costs.train_token_gpu_s * (tokens + costs.prompt_tokens / group_size)
    decode = (costs.decode_base_s / slots + costs.decode_per_rollout_s) * tokens
    return train, costs.generator_gpus * (decode + costs.prefill_token_s * costs.prompt_tokens / group_size)
