"""Results of replaying rollouts. No torch: who compares runs reads them."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A token that did not come out as it was recorded, or a rollout whose record says too little."""

    group_id: int
    index: int
    token: int
    """Place of the token in the response."""
    policy_version: int
    """Policy version that sampled the token."""
    recorded: str
    found: str
    gap: float
    """Gap between both log-probabilities, in nats; infinite where the token is another one."""


class Replayed(NamedTuple):
    """Result of sampling again what one version sampled."""

    num_tokens: int
    """Number of tokens that were drawn again."""
    differences: list[Difference]
