"""Experts of an agent's sequences: of each token those of the one before it, prompts and answers alike."""

from __future__ import annotations

import numpy as np

from llamarl.parts.episodes.gateway.episode import AgentEpisode
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams

W, UNKNOWN = 4, 255


def routes_of(token_ids_T: np.ndarray) -> np.ndarray:
    """Routes of these tokens, which are told by the token alone."""
    return np.repeat(token_ids_T.astype(np.uint8)[:, None], W, 1)


def answer(request: GenerationRequest, more: int) -> Rollout:
    """What an engine gives back: the tokens so far with what their prefill told, and some more."""
    start = request.starts()[0]
    ids = np.concatenate((start.token_ids_T, np.arange(60 + start.num_tokens, 60 + start.num_tokens + more)))
    whole = np.concatenate((request.prompt_token_ids_T, ids)).astype(np.int32)
    size, first = len(ids), len(request.prompt_token_ids_T)
    versions = np.concatenate((start.policy_versions_T, np.zeros(more, np.int32))).astype(np.int32)
    columns = {
        "token_ids": ids.astype(np.int32), "behavior_logprobs": np.zeros(size, np.float32),
        "policy_versions": versions, "routes": routes_of(whole[first - 1 : -1]),
    }  # fmt: skip
    return Rollout(
        group_id=request.group_id, index=0, columns=columns, finish_reason=FinishReason.STOP,
        prompt_routes=routes_of(whole[: first - 1]),
    )  # fmt: skip


def test_every_row_is_of_the_token_before() -> None:
    sampling = SamplingParams(max_new_tokens=40)
    episode = AgentEpisode(name="one", sampling=sampling, segment_tokens=0)
    first_T = np.arange(5, dtype=np.int32)
    prompt_T = first_T
    for more in (3, 4):
        request = episode.request(prompt_T, sampling, ())
        said = episode.answered(request, prompt_T, answer(request, more))
        assert said.num_tokens == more
        episode.session.record(prompt_T, said.columns, said.prompt_routes)
        prompt_T = np.concatenate((prompt_T, said.token_ids_T, [30, 31])).astype(np.int32)  # and its environment's
    columns = episode.session.columns()
    ids_T, routes = columns["token_ids"], columns["routes"]
    assert len(ids_T) == 5 + 3 + 2 + 4
    assert (routes[0] == UNKNOWN).all()
    np.testing.assert_array_equal(routes[1:], routes_of(ids_T[:-1]))
