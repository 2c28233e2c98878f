"""`Shaping`: what each token of a scored group has earned, as training sees it.

Shape suffixes: G rollouts of one group, T tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamarl.algorithms.advantages._base import GroupRewards
from llamarl.algorithms.kl import KlPenalty, penalty
from llamarl.algorithms.shaping import length_share, overlong_share
from llamarl.config.schema import RunConfig, ShapingConfig
from llamarl.training.packing import to_sample_group, valid_rollouts
from llamarl.types import FinishReason, Outcome, Rollout, RolloutGroup, SampleGroup


@dataclass(frozen=True, slots=True)
class Shaping:
    """The only place where rewards are changed. The groups, which are recorded, keep what the reward said."""

    config: ShapingConfig
    max_tokens: int
    """`rollout.max_new_tokens`."""
    kl: KlPenalty | None = None
    """Price of each token for leaving the reference; None: nothing."""
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)
    """`max_new_tokens` of sources of a mixture, by label."""

    def rewards(self, group: RolloutGroup) -> GroupRewards:
        """The response's reward less its penalties at the last token, the price of leaving the reference at each. The
        greedy response's reward is unshaped."""
        cost_G = sum(self._penalties(group).values(), np.zeros(len(group.rollouts)))
        token_rewards = [self._token_rewards(rollout) for rollout in group.rollouts]
        for rewards_T, result, cost in zip(token_rewards, group.results, cost_G, strict=True):
            rewards_T[-1:] += result.value - cost  # what ends a response was sampled
        baseline = group.baseline
        return GroupRewards(
            token_rewards=tuple(token_rewards),
            valid_G=valid_rollouts(group, mask_truncated=self.config.mask_truncated),
            values=tuple(rollout.values_T for rollout in group.rollouts),
            is_sampled=tuple(rollout.is_sampled_T for rollout in group.rollouts),
            baseline=np.nan if baseline is None or baseline.outcome is Outcome.INVALID else baseline.value,
        )

    def batch(
        self, groups: Sequence[RolloutGroup], advantages: Callable[[Sequence[GroupRewards]], list[list[np.ndarray]]]
    ) -> tuple[list[SampleGroup], list[list[np.ndarray]]]:
        """Samples that are learnt from, and the advantages [T] that it is made with, per group and rollout."""
        rewards = [self.rewards(group) for group in groups]
        found = advantages(rewards)
        samples = [
            to_sample_group(group, of_group, earned.valid_G)
            for group, of_group, earned in zip(groups, found, rewards, strict=True)
        ]
        return samples, found

    def _token_rewards(self, rollout: Rollout) -> np.ndarray:
        """Before the response's own reward, float64 [T]."""
        if self.kl is None:
            return np.zeros(rollout.num_tokens)
        cost_T = self.kl(rollout.behavior_logprobs_T.astype(np.float64) - rollout.reference_logprobs_T)
        return np.where(rollout.is_sampled_T, -cost_T, 0.0)

    def _penalties(self, group: RolloutGroup) -> dict[str, np.ndarray]:
        """Penalties that are switched on, by name, [G] each."""
        config, found = self.config, dict[str, np.ndarray]()
        max_tokens = self.max_tokens_of.get(group.prompt.source, self.max_tokens)
        num_tokens_G = np.array([rollout.is_sampled_T.sum() for rollout in group.rollouts])
        if config.length_penalty:
            found["length_penalty"] = config.length_penalty * length_share(num_tokens_G, max_tokens)
        if config.overlong_penalty:
            buffer_tokens = config.overlong_share * max_tokens
            share_G = overlong_share(num_tokens_G, max_tokens, buffer_tokens)
            found["overlong_penalty"] = config.overlong_penalty * share_G
        return found

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Mean penalty per rollout, share of rollouts that are masked as truncated, mean reward of greedy responses."""
        penalties = [self._penalties(group) for group in groups]
        found = {
            f"{name}_mean": float(np.concatenate([one[name] for one in penalties]).mean())
            for name in (penalties[0] if penalties else ())
        }
        if self.config.mask_truncated:
            reasons = [rollout.finish_reason for group in groups for rollout in group.rollouts]
            found["masked_truncated_share"] = reasons.count(FinishReason.LENGTH) / max(len(reasons), 1)
        greedy = [group.baseline for group in groups if group.baseline is not None]
        if judged := [one.value for one in greedy if one.outcome is not Outcome.INVALID]:
            found["greedy_reward_mean"] = float(np.mean(judged))
        return found


UNSHAPED = Shaping(ShapingConfig(), 1)


def shaping(config: RunConfig) -> Shaping:
    """Shaping of the rewards that trainer and critic see."""
    limits = {label: one.rollout.max_new_tokens for label, one in config.by_source.items()}
    return Shaping(config.shaping, limits.pop(""), penalty(config.reference, "reward"), limits)
