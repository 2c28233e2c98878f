"""Results of replayed rollouts. No torch, because commands that compare runs read them."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A token that differs from the record, or a rollout whose record is incomplete."""

    group_id: int
    index: int
    token: int
    """Position of the token in the response."""
    policy_version: int
    """Policy version that sampled the token."""
    recorded: str
    found: str
    gap: float
    """Difference of both log-probabilities in nats. Infinite if the tokens differ."""


class Replayed(NamedTuple):
    """Result of sampling the tokens of one version again."""

    num_tokens: int
    """Number of tokens that were sampled again."""
    differences: list[Difference]
