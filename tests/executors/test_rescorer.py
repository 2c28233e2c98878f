"""What kept keys and values change, in a model of which it is known: its logits are the mean of a number over all
tokens before, and each update makes that number another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.executors.rescorer import Rescorer
from llamarl.generation.engine import Engine
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attend
from llamarl.training.probe import WHOLE_TOKENS, over_kept
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tests.generation.native import make_engine

TEMPERATURE, NUM_TOKENS, PROMPT_T = 0.7, 12, np.array([0, 1, 1, 0, 1], np.int32)
SCALES = (-2.0, 3.0, 0.5)
"""By version."""


class Averaging:
    """A decoder of two tokens. The second one's logit is the mean of `scale` when the tokens before were computed; the
    first one's is 0."""

    kv_dtype, device = torch.float32, torch.device("cpu")
    shape = ModelShape(
        family="llama", hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=8,
        vocab_size=2, max_position_embeddings=2 * WHOLE_TOKENS,
    )  # fmt: skip

    def __init__(self) -> None:
        self.scale = SCALES[0]

    def __call__(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        nothing_N_1_8 = torch.zeros(len(token_ids_N), 1, 8)
        return attend(0, nothing_N_1_8, nothing_N_1_8, torch.full_like(nothing_N_1_8, self.scale))[:, 0]

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        return torch.stack((torch.zeros(len(hidden_N_D)), hidden_N_D[:, 0]), dim=1)


def logprobs(token_ids_T: np.ndarray, logits_T: np.ndarray) -> np.ndarray:
    logits_T = logits_T / TEMPERATURE
    return token_ids_T * logits_T - np.logaddexp(0, logits_T)


def request(group_id: int = 0, num_tokens: int = NUM_TOKENS, **options: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=num_tokens, seed=5)
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=PROMPT_T, group_size=2, sampling=sampling, is_rescored=True, **options
    )


class Generator:
    """The part of one that rescores; version after version, each after so many tokens."""

    def __init__(self, **options: Any) -> None:
        self.model, self.version = Averaging(), 0
        self.engine = make_engine(self.model, **options)  # type: ignore[arg-type]
        self.rescorer = Rescorer(self.engine)

    def submit(self, *requests: GenerationRequest) -> None:
        self.rescorer.submitted(requests)
        self.engine.submit(requests)

    def adopt(self) -> None:
        self.rescorer.update(self.version)
        self.version += 1
        self.model.scale = SCALES[self.version]
        self.engine.set_version(self.version)

    def ends(self, *changes: int) -> list[Rollout]:
        """Those that leave, with updates after so many steps each."""
        left, deadline = list[Rollout](), 2000
        for number in range(deadline):
            if not self.engine.has_work:
                return left
            for _ in range(changes.count(number)):
                self.adopt()
            left += self.rescorer.left(self.engine.step(), self.version)
        raise AssertionError("the engine does not end")


def first_of(rollouts: list[Rollout]) -> Rollout:
    (found,) = (one for one in rollouts if one.index == 0)
    assert all("fresh_logprobs" not in one.columns for one in rollouts if one.index)
    return found


@pytest.mark.parametrize("changes", [(4,), (3, 7), (2, 2)])
def test_what_is_kept_is_what_is_off(changes: tuple[int, ...]) -> None:
    generator = Generator()
    generator.submit(request())
    one = first_of(generator.ends(*changes))
    versions_T = np.searchsorted(changes, np.arange(NUM_TOKENS), side="right")
    np.testing.assert_array_equal(one.policy_versions_T, versions_T)
    # The token at place t was predicted over the prompt, fed by version 0, and t tokens, fed as their next was drawn.
    fed_T = np.concatenate([[SCALES[0]] * len(PROMPT_T), np.array(SCALES)[versions_T[1:]]])
    means_T = np.cumsum(fed_T)[len(PROMPT_T) - 1 :] / (len(PROMPT_T) + np.arange(NUM_TOKENS))
    fresh_T = logprobs(one.token_ids_T, np.array(SCALES)[versions_T])
    np.testing.assert_allclose(one.behavior_logprobs_T, logprobs(one.token_ids_T, means_T), atol=1e-5)
    np.testing.assert_allclose(one.columns["fresh_logprobs"], fresh_T, atol=1e-5)
    assert over_kept(one).tolist() == (versions_T > 0).tolist()
    assert np.abs(one.columns["fresh_logprobs"] - one.behavior_logprobs_T)[versions_T > 0].min() > 0.01


def test_what_is_recomputed_is_not_off() -> None:
    generator = Generator(kv_on_update="recompute")
    generator.submit(request())
    one = first_of(generator.ends(3, 7))
    assert set(one.policy_versions_T.tolist()) == {0, 1, 2} and not over_kept(one).any()
    np.testing.assert_allclose(one.columns["fresh_logprobs"], one.behavior_logprobs_T, atol=1e-6)


@pytest.mark.parametrize("resume", [True, False])
def test_a_rollout_that_goes_on_elsewhere_keeps_what_is_known(resume: bool) -> None:
    """Of the tokens of each generator that one tells, by its own weights. Where it goes on all is prefilled anew."""
    first, second = Generator(), Generator()
    asked = request(segment_tokens=5 if resume else 0)
    first.submit(asked)
    if resume:
        parked = first.ends(2)
    else:
        for number in range(5):
            first.adopt() if number == 2 else None
            first.engine.step()
        parked = list(first.rescorer.left(first.engine.abort([0]), first.version))
    for _ in range(2):
        second.adopt()
    assert [one.num_tokens for one in parked] == [5, 5]
    second.submit(replace(asked, partials=tuple(parked), segment_tokens=0))
    one = first_of(second.ends())
    assert one.policy_versions_T.tolist() == [0] * 2 + [1] * 3 + [2] * 7
    scales_T = np.array(SCALES)[one.policy_versions_T]
    np.testing.assert_allclose(one.columns["fresh_logprobs"], logprobs(one.token_ids_T, scales_T), atol=1e-5)
    assert over_kept(one).tolist() == [False] * 2 + [True] * 3 + [False] * 7


def test_of_a_long_one_the_beginning() -> None:
    generator = Generator(prefill_tokens=64, blocks=None)
    generator.submit(request(num_tokens=WHOLE_TOKENS))
    one = first_of(generator.ends())
    assert one.num_tokens == WHOLE_TOKENS
    known = WHOLE_TOKENS - len(PROMPT_T)
    assert np.isnan(one.columns["fresh_logprobs"]).tolist() == [False] * known + [True] * len(PROMPT_T)


def test_nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has left is forgotten, failed or not."""
    monkeypatch.setattr(Engine, "score", None)
    generator = Generator()
    generator.submit(replace(request(), is_rescored=False), request(1, num_tokens=0))
    assert all("fresh_logprobs" not in one.columns for one in generator.ends(1))
    generator.submit(request(2))
    aborted = generator.rescorer.left(generator.engine.abort([2]), 0)
    assert {one.finish_reason for one in aborted} == {FinishReason.ABORTED}
    assert not generator.rescorer._asked and not generator.rescorer._known


def test_what_the_sampler_left_out_is_left_out() -> None:
    generator, asked = Generator(), request()
    generator.submit(replace(asked, sampling=replace(asked.sampling, top_k=1)))
    one = first_of(generator.ends())
    assert one.columns["fresh_logprobs"].tolist() == [0.0] * NUM_TOKENS
