"""`Split` of a simulation's GPUs between the roles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.config import ConfigError, RunConfig
from llamarl.parts.forecast.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Number of GPUs of each role."""

    trainer_gpus: int
    replicas: int
    generator_gpus: int
    """GPUs of one replica."""

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + self.replicas * self.generator_gpus


def best_split(config: RunConfig, costs: Costs, gpus: int) -> Split:
    """Returns the split of `gpus` with the shortest step, by `step_parts_s`. Raises ConfigError."""
    each = costs.generator_gpus
    most = (gpus - 1) // each
    if most < 1:
        raise ConfigError(
            f"`--gpus {gpus}` is too few by {each + 1 - gpus}: one generator takes {each} (generator_gpus of the "
            f"costs) and the trainer at least one; give --gpus {each + 1} or more"
        )
    counts = np.arange(1, most + 1)
    generate_s, train_s = step_parts_s(config, costs, replicas=counts, trainer_gpus=gpus - counts * each)
    replicas = int(counts[np.argmin(np.maximum(generate_s, train_s))])
    return Split(trainer_gpus=gpus - replicas * each, replicas=replicas, generator_gpus=each)


def step_parts_s(
    config: RunConfig, costs: Costs, *, replicas: np.ndarray, trainer_gpus: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of generators and of the trainer for one step's rollouts, without stragglers.

    (S + 1) * P * G rollouts are in flight, evenly distributed. With n of them on a replica a decode step takes a + b *
    n.
    """
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.group_size
    tokens = min(costs.response_tokens, float(rollout.max_new_tokens))
    lengths = [one for group in costs.measured_groups for one, _ in group] or costs.response_lengths
    if lengths:
        tokens = float(np.minimum(lengths, rollout.max_new_tokens).mean())
    prompts = rollout.prompts_per_step * costs.prompt_tokens
    running = np.clip((rollout.max_staleness + 1) * samples / replicas, 1, config.generator.max_running)
    decode_s = samples * tokens / running * costs.decode_s(running)
    generate_s = (decode_s + prompts * costs.prefill_token_s) / replicas + costs.adopt_s
    return generate_s, costs.publish_s + costs.train_s(samples * tokens + prompts, trainer_gpus)


def choose_split(config: RunConfig, costs: Costs, gpus: int | None, trainer_gpus: int | None) -> Split:
    """Returns the split that the command line requests. Without `gpus`: the run's generators, and as many trainer GPUs.

    Raises:
        ConfigError: there are too few GPUs.
    """
    each, replicas = costs.generator_gpus, config.generator.replicas
    for name, value in (("gpus", gpus), ("trainer-gpus", trainer_gpus)):
        if value is not None and value < 1:
            raise ConfigError(f"`--{name} {value}` is not a cluster; give 1 or more")
    trainer_gpus = trainer_gpus or costs.trainer_gpus or None
    if gpus is None:
        return Split(trainer_gpus=trainer_gpus or replicas * each, replicas=replicas, generator_gpus=each)
    if trainer_gpus is None:
        return best_split(config, costs, gpus)
    if gpus < trainer_gpus + each:
        raise ConfigError(
            f"`--trainer-gpus {trainer_gpus}` leaves {max(0, gpus - trainer_gpus)} of {gpus} GPUs, and one generator "
            f"takes {each} (generator_gpus of the costs); "
            + (f"give --trainer-gpus {gpus - each} or less" if gpus > each else f"give --gpus {each + 1} or more")
        )
    return Split(trainer_gpus=trainer_gpus, replicas=(gpus - trainer_gpus) // each, generator_gpus=each)
