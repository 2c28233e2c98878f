"""Driving an engine, and slow references for what it must say: full forwards of the float32 `Transformer`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.generation.backend import GenerationBackend
from llamarl.models.attention import causal_attend
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams

TOLERANCE = 1e-4
"""Natural log-probabilities and logits of two float32 implementations of one model."""
DEADLINE_S = 240.0
Key = tuple[int, int]
"""Group id and index."""


def drive(backend: GenerationBackend, until: Callable[[], bool]) -> list[Rollout]:
    """Step until the condition holds; what came out."""
    rollouts, deadline_s = list[Rollout](), time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline_s, f"nothing after {DEADLINE_S} s; {backend.stats()}"
        rollouts += backend.step()
    return rollouts


def drain(backend: GenerationBackend) -> list[Rollout]:
    return drive(backend, lambda: not backend.has_work)


def by_key(rollouts: Iterable[Rollout]) -> dict[Key, Rollout]:
    rollouts = list(rollouts)
    result = {(rollout.group_id, rollout.index): rollout for rollout in rollouts}
    assert len(result) == len(rollouts), "each rollout is returned once"
    return result


def run(backend: GenerationBackend, requests: Iterable[GenerationRequest]) -> dict[Key, Rollout]:
    backend.submit(list(requests))
    return by_key(drain(backend))


def resumed(requests: Iterable[GenerationRequest], rollouts: Iterable[Rollout]) -> list[GenerationRequest]:
    """The requests again, for those of their rollouts that were parked or aborted."""
    left = [one for one in rollouts if one.finish_reason in (FinishReason.PARKED, FinishReason.ABORTED)]
    requests = [
        replace(request, partials=tuple(one for one in left if one.group_id == request.group_id))
        for request in requests
    ]
    return [request for request in requests if request.partials]


def run_segments(backend: GenerationBackend, requests: list[GenerationRequest]) -> tuple[dict[Key, Rollout], int]:
    """Submit again what was parked until nothing is; the rollouts, and how often one was parked."""
    done, pending, num_parked = list[Rollout](), requests, 0
    while pending:
        rollouts = list(run(backend, pending).values())
        parked = [one for one in rollouts if one.finish_reason == FinishReason.PARKED]
        done += [one for one in rollouts if one.finish_reason != FinishReason.PARKED]
        num_parked += len(parked)
        pending = resumed(requests, parked)
    return by_key(done), num_parked


def full_logits(model: Transformer, token_ids_T: np.ndarray) -> Tensor:
    token_ids = torch.from_numpy(token_ids_T.astype(np.int64))
    with torch.no_grad():
        return model.logits(model(token_ids, torch.arange(len(token_ids)), causal_attend([len(token_ids)])))


def logits_in_flight(
    models: Mapping[int, Transformer], prompt_T: np.ndarray, rollout: Rollout, kv_on_update: str
) -> Tensor:
    """Logits that predict each response token, by the weights that sampled it.

    With "recompute" those weights saw everything. With "keep", keys and values of a token are those of the weights
    with which it was fed; the prompt was fed with the first.
    """
    tokens_T, versions_T, first = rollout.token_ids_T, rollout.policy_versions_T, len(prompt_T) - 1
    fed_T = np.concatenate((prompt_T, tokens_T[:-1]))
    if kv_on_update == "recompute":
        rows = {version: full_logits(models[version], fed_T)[first:] for version in set(versions_T.tolist())}
        return torch.stack([rows[version][i] for i, version in enumerate(versions_T.tolist())])
    borders = [0, *(first + np.flatnonzero(np.diff(versions_T)) + 1).tolist(), len(fed_T)]
    past: dict[int, list[tuple[Tensor, Tensor]]] = {}
    parts = []
    for start, stop in itertools.pairwise(borders):
        model = models[int(versions_T[max(start - first, 0)])]
        tokens = torch.from_numpy(fed_T[start:stop].astype(np.int64))
        with torch.no_grad():
            parts.append(model.logits(model(tokens, torch.arange(start, stop), _attend_with(past))))
    return torch.cat(parts)[first:]


def _attend_with(past: dict[int, list[tuple[Tensor, Tensor]]]) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    def attend(layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        seen = past.setdefault(layer, [])
        seen.append((k_N_J_K, v_N_J_K))
        keys, values = (torch.cat(part).transpose(0, 1)[None] for part in zip(*seen, strict=True))
        count, total = len(q_N_H_K), keys.shape[2]
        mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        out = F.scaled_dot_product_attention(q_N_H_K.transpose(0, 1)[None], keys, values, mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def gathered(logits_T_V: Tensor, token_ids_T: np.ndarray) -> np.ndarray:
    """Log-probabilities of tokens."""
    return F.log_softmax(logits_T_V.double(), -1).gather(1, torch.from_numpy(token_ids_T).long()[:, None])[:, 0].numpy()


def assert_greedy(logits_T_V: Tensor, rollout: Rollout) -> None:
    """Each token is the best one, and its log-probability is that at temperature 1."""
    chosen_T = logits_T_V.gather(1, torch.from_numpy(rollout.token_ids_T).long()[:, None])[:, 0]
    assert (logits_T_V.max(-1).values - chosen_T).max() < TOLERANCE
    np.testing.assert_allclose(rollout.behavior_logprobs_T, gathered(logits_T_V, rollout.token_ids_T), atol=TOLERANCE)


def response_logits(model: Transformer, prompt_T: np.ndarray, rollout: Rollout) -> Tensor:
    return full_logits(model, np.concatenate((prompt_T, rollout.token_ids_T)))[len(prompt_T) - 1 : -1]


def distribution(logits_T_V: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p of what is left, then min-p, renormalized; float64."""
    probs_T_V = torch.softmax(logits_T_V.double() / params.temperature, -1)
    ranked_T_V, order_T_V = probs_T_V.sort(dim=-1, descending=True)
    keep_T_V = ranked_T_V >= params.min_p * ranked_T_V[:, :1]
    if params.top_k:
        keep_T_V[:, params.top_k :] = False
        ranked_T_V = ranked_T_V * (torch.arange(logits_T_V.shape[1]) < params.top_k)
    before_T_V = ranked_T_V.cumsum(-1) - ranked_T_V
    keep_T_V &= before_T_V < params.top_p * ranked_T_V.sum(-1, keepdim=True)
    kept_T_V = torch.zeros_like(probs_T_V).scatter(1, order_T_V, ranked_T_V * keep_T_V)
    return kept_T_V / kept_T_V.sum(-1, keepdim=True)
