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


def make_layout(config: RunConfig, costs: SimulatorCosts, *, gpus: int, replicas: int | None = None) -> Layout:
    """Splits `gpus`: the trainer gets what `replicas` generators leave, or the split that makes the step shortest.

    Raises:
        ConfigError: there are too few GPUs.
    """
    each = costs.generator_gpus
    most = (gpus - 1) // each
    if most < (replicas or 1):
        raise ConfigError(
            f"`--gpus {gpus}` is too few by {(replicas or 1) * each + 1 - gpus}: {replicas or 1} generators take {each} "
            f"GPUs each (generator_gpus of the costs) and the trainer at least one; give --gpus "
            f"{(replicas or 1) * each + 1} or fewer generators"
        )
    if replicas is None:
        counts = np.arange(1, most + 1)
        generate_s, train_s = step_parts_s(config, costs, replicas=counts, trainer_gpus=gpus - counts * each)
        replicas = int(counts[np.argmin(np.maximum(generate_s, train_s))])
    return Layout(trainer_gpus=gpus - replicas * each, replicas=replicas, generator_gpus=each)


def step_parts_s(
    config: RunConfig, costs: SimulatorCosts, *, replicas: np.ndarray, trainer_gpus: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of generators and of the trainer for one step's rollouts, stragglers left out.

    In flight are (S + 1) * P * G rollouts, dealt evenly; with n of them on a replica a decode step takes a + b * n.
    """
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.group_size
    tokens = min(costs.response_tokens, float(rollout.max_new_tokens))
    if costs.response_lengths:
        tokens = float(np.minimum(costs.response_lengths, rollout.max_new_tokens).mean())
    prompts = rollout.prompts_per_step * costs.prompt_tokens
    running = np.clip((rollout.max_staleness + 1) * samples / replicas, 1, config.generator.max_running)
    decode_s = samples * tokens / running * (costs.decode_base_s + costs.decode_per_rollout_s * running)
    generate_s = (decode_s + prompts * costs.prefill_token_s) / replicas + costs.adopt_s
    train_s = costs.train_base_s + costs.publish_s + costs.train_token_gpu_s * (samples * tokens + prompts) / trainer_gpus
    return generate_s, train_s
