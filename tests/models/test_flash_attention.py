"""The two calls of flash attention and their merger, with float64 in the place of the GPU's kernels."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llamarl.models import flash_attention
from llamarl.models.attention import packed_attend
from llamarl.models.flash_attention import FlashAttend, Segments, can_serve

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
BATCHES = {
    "groups": ([5, 3], [(4, 2, 6), (1, 7)]),
    "one response is one document": ([4, 6], [(3,), (2, 2)]),
    "prompts alone": ([7, 2], [(), ()]),
    "no prompt": ([0, 3], [(4, 2), (2, 5)]),
    "an empty response": ([3], [(0, 2)]),
    "nobody has a prompt to see": ([4, 5], [(2,), ()]),
}


def probabilities(q: Tensor, k: Tensor, lse_H_Q: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """[H, Q, S] of one segment, relative to a log-sum-exp (its own, if none is given)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores_H_Q_S = torch.einsum("qhk,shk->hqs", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        assert scores_H_Q_S.shape[1] == scores_H_Q_S.shape[2]
        scores_H_Q_S = scores_H_Q_S.masked_fill(torch.ones_like(scores_H_Q_S, dtype=torch.bool).triu(1), -torch.inf)
    lse_H_Q = scores_H_Q_S.logsumexp(-1) if lse_H_Q is None else lse_H_Q
    return (scores_H_Q_S - lse_H_Q[:, :, None]).exp(), lse_H_Q


def parts(segments: Segments) -> list[tuple[slice, slice]]:
    queries, keys = segments.queries.tolist(), segments.keys.tolist()
    assert segments.queries.dtype == segments.keys.dtype == torch.int32
    assert segments.max_queries == max(b - a for a, b in pairwise(queries))
    assert segments.max_keys == max(b - a for a, b in pairwise(keys))
    return [
        (slice(a, b), slice(c, d))
        for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True)
    ]  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    assert segments.queries[-1] == len(q) and segments.keys[-1] == len(k) == len(v)
    for rows, seen in parts(segments):
        p_H_Q_S, lse[:, rows] = probabilities(q[rows], k[seen], None, segments.is_causal)
        out[rows] = torch.einsum("hqs,shk->qhk", p_H_Q_S, v[seen].repeat_interleave(q.shape[1] // k.shape[1], 1))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernel does it: probabilities from `lse`, dS = P (dP - sum(dO * O)) (arXiv 2307.08691, algorithm 2)."""
    dq, dk, dv, ratio = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1] // k.shape[1]
    for rows, seen in parts(segments):
        p_H_Q_S, _ = probabilities(q[rows], k[seen], lse[:, rows], segments.is_causal)
        dp_H_Q_S = torch.einsum("qhk,shk->hqs", grad[rows], v[seen].repeat_interleave(ratio, 1))
        delta_H_Q = (grad[rows] * out[rows]).sum(-1).t()
        ds_H_Q_S = p_H_Q_S * (dp_H_Q_S - delta_H_Q[:, :, None]) / math.sqrt(q.shape[-1])
        dq[rows] = torch.einsum("hqs,shk->qhk", ds_H_Q_S, k[seen].repeat_interleave(ratio, 1))
        dk[seen] += torch.einsum("hqs,qhk->shk", ds_H_Q_S, q[rows]).unflatten(1, (-1, ratio)).sum(2)
        dv[seen] += torch.einsum("hqs,qhk->shk", p_H_Q_S, grad[rows]).unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "flash_forward", forward)
    monkeypatch.setattr(flash_attention, "flash_backward", backward)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_it_is_the_packed_attention_of_processors_with_its_gradients(batch: tuple) -> None:
    prompts, responses = batch
    num_tokens = sum(prompts) + sum(map(sum, responses))
    torch.manual_seed(0)
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(num_tokens, HEADS, HEAD_DIM, dtype=torch.float64)
    found = []
    for attend in (FlashAttend(prompts, responses, CPU), packed_attend(prompts, responses)):
        inputs = [x.clone().requires_grad_() for x in given]
        out = attend(0, *inputs)
        (out * weight).sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_whole_microbatch_takes_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(flash_attention, "flash_forward", lambda *given: calls.append(given[-1]) or forward(*given))
    attend = FlashAttend([5, 3, 4], [(4, 2), (1, 7), (2,)], CPU)
    attend(0, *(torch.randn(28, heads, HEAD_DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    own, others = calls
    assert own.is_causal and own.queries.tolist() == own.keys.tolist() == [0, 5, 9, 11, 14, 15, 22, 28]
    assert not others.is_causal and (others.queries.tolist(), others.keys.tolist()) == ([0, 6, 14], [0, 5, 8])


def test_it_serves_halves_on_gpus() -> None:
    gpu = torch.device("cuda", 0)
    assert can_serve(gpu, torch.bfloat16, 128) and can_serve(gpu, torch.float16, 64)
    assert not can_serve(gpu, torch.float32, 128) and not can_serve(CPU, torch.bfloat16, 128)
    assert not can_serve(gpu, torch.bfloat16, 512) and not can_serve(gpu, torch.bfloat16, 20)
