"""Rollouts go in replies that a call carries: tokens and recorded experts count, those of a shared prompt once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamarl.executors.generator import REPLY_ROUTES_BYTES, REPLY_TOKENS, _sizes
from llamarl.types import Rollout


def rollout(group_id: int, num_tokens: int, prompt_routes: np.ndarray | None) -> Rollout:
    columns = {"token_ids": np.zeros(num_tokens, np.int32), "routes": np.zeros((num_tokens, 8), np.uint8)}
    return replace(Rollout.empty(group_id, 0), columns=columns, prompt_routes=prompt_routes)


def test_experts_of_a_prompt_count_once() -> None:
    prompts = [np.zeros((1000, 8), np.uint8) for _ in range(2)]
    rollouts = [rollout(0, 10, prompts[0]), rollout(0, 20, prompts[0]), rollout(1, 5, prompts[1]), rollout(2, 7, None)]
    tokens, routes = [10, 20, 5, 7], [80 + 8000, 160, 40 + 8000, 56]
    expected = [n / REPLY_TOKENS + m / REPLY_ROUTES_BYTES for n, m in zip(tokens, routes, strict=True)]
    assert [*_sizes(rollouts)] == pytest.approx(expected)
