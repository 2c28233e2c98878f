"""The two ends of a decode step on GPUs: embeddings of its tokens, and one token drawn from each row's logits.

A step that is launched before the host has read the tokens of the step before names them by row: token -1 - i is what
row i of that step drew (`fed`). So the host stays a step behind, and the device never waits for it.

Drawing is `sampler.invert` without truncation, in two launches: sums of exponentials of chunks of the vocabulary, and
then the chunk, and the token in it, at a share of their sum. Tested as `decode.py` is.

Shape suffixes: B rows, V vocabulary, D model dim, Q parts of a hidden state; in the kernels C tokens of a chunk, N
chunks and D as powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048
"""Tokens of a chunk of the vocabulary."""
_BELOW_ONE = tl.constexpr(1 - 2**-24)
"""The largest float32 below 1."""


def embed(token_B: Tensor, fed_R: Tensor, embedding_V_D: Tensor, num_parts: int = 0) -> tuple[Tensor, Tensor]:
    """Returns float32 rows of the embedding, and their sums of squares, [Q, B]: `products.py` adds up such parts.

    Args:
        token_B: int32; a negative one is an entry of `fed`, -1 the first.
        num_parts: Q; all but the first part are 0.
    """
    width, num_rows = embedding_V_D.shape[1], len(token_B)
    x_B_D = torch.empty(num_rows, width, dtype=torch.float32, device=token_B.device)
    squares_Q_B = torch.empty(num_parts, num_rows, dtype=torch.float32, device=token_B.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(token_B):
        launch: Any = _embed_row[(num_rows,)]
        launch(
            token_B, fed_R, embedding_V_D, x_B_D, squares_Q_B, num_rows, width, num_parts,
            Q=max(1, triton.next_power_of_2(num_parts)), D=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return x_B_D, squares_Q_B


def draw(logits_B_V: Tensor, noise_B: Tensor, temperature_B: Tensor, fed_R: Tensor | None = None) -> Tensor:
    """Returns tokens and the bits of their log-probabilities, int32 [B, 2]; see `sampler.invert`. Writes the tokens to
    `fed` too.

    A row of temperature 0 takes the first of its most likely tokens, at temperature 1. A row that is not finite gets
    NaN.
    """
    assert logits_B_V.is_contiguous()
    assert logits_B_V.dtype == torch.float32
    num_rows, width = logits_B_V.shape
    chunk = min(_CHUNK, 1 << (width - 1).bit_length())
    chunks = -(-width // chunk)
    most_B_C, sums_B_C = torch.empty(2, num_rows, chunks, dtype=torch.float32, device=logits_B_V.device)
    drawn_B_2 = torch.empty(num_rows, 2, dtype=torch.int32, device=logits_B_V.device)
    with torch.cuda.device_of(logits_B_V):
        weigh: Any = _weigh_chunk[num_rows, chunks]
        weigh(logits_B_V, temperature_B, most_B_C, sums_B_C, width, C=chunk, num_warps=4)
        pick: Any = _pick[(num_rows,)]
        pick(
            logits_B_V, noise_B, temperature_B, most_B_C, sums_B_C, drawn_B_2,
            drawn_B_2 if fed_R is None else fed_R, width, chunks, FEEDS=fed_R is not None, C=chunk,
            N=triton.next_power_of_2(chunks), num_warps=4,
        )  # fmt: skip
    return drawn_B_2


# Where the integers of a step begin differs from step to step: see `decode.py`.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tokens", "fed"])
def _embed_row(
    tokens, fed, embedding, x, squares, num_rows, width, num_parts, Q: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    row, d_D, q_Q = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, Q)
    token = tl.load(tokens + row)
    token = tl.where(token < 0, tl.load(fed + tl.maximum(-1 - token, 0)), token)
    x_D = tl.load(embedding + token.to(tl.int64) * width + d_D, mask=d_D < width, other=0.0).to(tl.float32)
    tl.store(x + row * width + d_D, x_D, mask=d_D < width)
    squares_Q = tl.where(q_Q == 0, tl.sum(x_D * x_D, 0), 0.0)
    tl.store(squares + q_Q * num_rows + row, squares_Q, mask=q_Q < num_parts)


@triton.jit
def _scaled(logits, row, temperature, first, width, C: tl.constexpr):
    """Logits of a chunk over the temperature, 1 if it is 0; -inf behind the vocabulary."""
    place_C = first + tl.arange(0, C)
    logits_C = tl.load(logits + row * width + place_C, mask=place_C < width, other=-float("inf"))
    return logits_C / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["temperatures"])
def _weigh_chunk(logits, temperatures, mosts, sums, width, C: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_C = _scaled(logits, row, tl.load(temperatures + row), chunk * C, width, C)
    most = tl.max(logits_C, 0)
    # Reductions may drop NaN; the second term is 0 or NaN.
    bad = tl.sum(tl.where(logits_C == -float("inf"), 0.0, logits_C * 0.0), 0)
    total = tl.sum(tl.where(logits_C == -float("inf"), 0.0, tl.exp(logits_C - most)), 0) + bad
    tl.store(mosts + row * tl.num_programs(1) + chunk, most)
    tl.store(sums + row * tl.num_programs(1) + chunk, total)


@triton.jit(do_not_specialize=["width", "chunks"], do_not_specialize_on_alignment=["noises", "temperatures"])
def _pick(
    logits, noises, temperatures, mosts, sums, drawn, fed, width, chunks, FEEDS: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    row, n_N, c_C = tl.program_id(0).to(tl.int64), tl.arange(0, N), tl.arange(0, C)
    temperature = tl.load(temperatures + row)
    most_N = tl.load(mosts + row * chunks + n_N, mask=n_N < chunks, other=-float("inf"))
    sum_N = tl.load(sums + row * chunks + n_N, mask=n_N < chunks, other=0.0)
    most = tl.max(most_N, 0)
    sum_N = tl.where(most_N == -float("inf"), sum_N * 0.0, sum_N * tl.exp(most_N - most))
    end_N = tl.cumsum(sum_N, 0)
    total = tl.sum(tl.where(n_N == N - 1, end_N, 0.0), 0)
    target = tl.load(noises + row) * total
    chunk = tl.minimum(tl.sum((end_N <= target).to(tl.int32), 0), chunks - 1)
    if temperature == 0.0:
        chunk = tl.min(tl.where((most_N == most) & (n_N < chunks), n_N, chunks - 1), 0)
    logits_C = _scaled(logits, row, temperature, chunk * C, width, C)
    end_C = tl.cumsum(tl.where(logits_C == -float("inf"), 0.0, tl.exp(logits_C - most)), 0)
    of_chunk = tl.sum(tl.where(c_C == C - 1, end_C, 0.0), 0)
    # The share is below 1, so its product with the last sum is below that sum: a token above 0 is found.
    before = tl.sum(tl.where(n_N < chunk, sum_N, 0.0), 0)
    share = tl.minimum((target - before) / tl.sum(tl.where(n_N == chunk, sum_N, 0.0), 0), _BELOW_ONE)
    place = tl.sum((end_C <= tl.maximum(share, 0.0) * of_chunk).to(tl.int32), 0)
    if temperature == 0.0:
        place = tl.min(tl.where(logits_C == most, c_C, C - 1), 0)
    place = tl.minimum(place, tl.minimum(C, width - chunk * C) - 1)  # of a row that is not finite
    logit = tl.sum(tl.where(c_C == place, logits_C, 0.0), 0)
    logprob = (logit - most) - tl.log(total)
    tl.store(drawn + row * 2, chunk * C + place)
    tl.store(drawn + row * 2 + 1, logprob.to(tl.int32, bitcast=True))
    if FEEDS:
        tl.store(fed + row, chunk * C + place)
