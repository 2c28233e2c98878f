"""What replaying rollouts says. No torch: who compares runs reads it."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A token that did not come out as it was recorded, or a rollout whose record says too little."""

    group_id: int
    index: int
    token: int
    """Its place in the response."""
    policy_version: int
    """That sampled it."""
    recorded: str
    found: str
    gap: float
    """Between both log-probabilities, in nats; infinite where the token is another one."""


class Replayed(NamedTuple):
    """What one version has sampled."""

    num_tokens: int
    """That were drawn again."""
    differences: list[Difference]
