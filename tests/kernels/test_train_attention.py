"""Attention of training with its gradients, against torch's in float64; `test_attention.py` compiles it for other
processors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarl.distributed.mesh import ALONE
from llamarl.kernels import train_attention
from llamarl.models import attention
from llamarl.models.attention import packed_attend
from llamarl.models.transformer import Attend
from tests.nightly import examples

CPU = torch.device("cpu")
Lengths = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
pytestmark = pytest.mark.skipif(
    train_attention.kernels().library is None, reason=train_attention.kernels().reason or "has one"
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outcome(attend: Attend, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients."""
    q, k, v, grad = (one.detach().to(dtype) for one in inputs)
    own = [one.requires_grad_() for one in (q, k, v)]
    out = attend(0, *own)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def agree(lengths: Lengths, heads: tuple[int, int, int], spread: float = 1.0, shared: int = 0) -> None:
    """Output and gradients are those of float64 to a few roundings of the largest, or of what cancels in them."""
    (prompts, responses), (num_heads, num_kv_heads, head_dim) = lengths, heads
    size = shared + sum(prompts) + sum(map(sum, responses))
    shapes = [(size, num_heads, head_dim), *[(size, num_kv_heads, head_dim)] * 2, (size, num_heads, head_dim)]
    inputs = [drawn(number, *shape) for number, shape in enumerate(shapes)]
    inputs[0] = inputs[0] * spread
    found = outcome(packed_attend(prompts, responses, fused=True, shared=shared), inputs, torch.float32)
    exact_attend = attention._masked_attend(prompts, responses, CPU, ALONE.cp)
    if shared:
        exact_attend = attention._whole_attend(sees(prompts, responses, shared))
    exact = outcome(exact_attend, inputs, torch.float64)
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, exact, strict=True):
        largest = max(1.0, float(theirs.abs().max()))
        assert (ours.double() - theirs).abs().max() <= 5e-6 * largest * max(1.0, spread), name


def sees(prompts: tuple[int, ...], responses: tuple[tuple[int, ...], ...], shared: int) -> Tensor:
    """Which token sees which, from each sequence's tokens in order."""
    size = shared + sum(prompts) + sum(map(sum, responses))
    found, start = torch.zeros(size, size, dtype=torch.bool), shared
    for prompt, lengths in zip(prompts, responses, strict=True):
        before, start = [*range(shared), *range(start, start + prompt)], start + prompt
        for length in lengths or (0,):
            rows = before + list(range(start, start + length))
            start += length
            for place, row in enumerate(rows):
                found[row, rows[: place + 1]] = True
    return found


@pytest.mark.parametrize(
    ("shared", "lengths"),
    [(16, ((20, 7), ((60, 33, 1), (90,)))), (300, ((5, 40), ((3, 2), ()))), (33, ((0, 1), ((31,), (2, 65))))],
)
def test_prompts_continue_what_they_share(shared: int, lengths: Lengths) -> None:
    agree(lengths, (4, 2, 32), shared=shared)


@pytest.mark.parametrize("heads", [(4, 2, 32), (6, 2, 22), (3, 3, 1), (2, 1, 128)])
@pytest.mark.parametrize(
    "lengths",
    [
        ((20, 7), ((60, 33, 1), (90,))),
        ((0, 3), ((60,), ())),
        ((300,), ((600, 31, 257),)),  # keys by the chunk, and lanes that are not full
        ((1,), ((1,),)),
        ((513, 0), ((), (33, 32))),
    ],
)
def test_it_is_torch_s_in_float64(lengths: Lengths, heads: tuple[int, int, int]) -> None:
    agree(lengths, heads)


@settings(max_examples=examples(60), deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(1, 70), max_size=4).map(tuple)), min_size=1, max_size=4
    ).filter(lambda groups: any(prompt or responses for prompt, responses in groups)),
    kv_heads=st.integers(1, 2),
    repeats=st.integers(1, 3),
    head_dim=st.integers(1, 20),
)
def test_any_lengths(groups: list[tuple[int, tuple[int, ...]]], kv_heads: int, repeats: int, head_dim: int) -> None:
    prompts, responses = zip(*groups, strict=True)
    agree((prompts, responses), (kv_heads * repeats, kv_heads, head_dim))


def test_scores_that_leave_one_key_alone() -> None:
    """Exponentials that vanish, and scores at which a sum without its maximum overflows."""
    agree(((40,), ((50, 60),)), (2, 1, 16), spread=100.0)


def test_what_nobody_sees_has_no_effect_and_no_gradient() -> None:
    """Another group's tokens, another response, and later tokens."""
    prompts, responses = (4, 3), ((5, 6), (7,))
    q, k, v = drawn(0, 25, 2, 8), drawn(1, 25, 1, 8), drawn(2, 25, 1, 8)
    attend = packed_attend(prompts, responses, fused=True)
    before = attend(0, q, k, v)
    for token in range(25):
        changed = k.clone()
        changed[token] += 5.0
        differs = (attend(0, q, changed, v) != before).flatten(1).any(1)
        group, last = (range(15), 15) if token < 15 else (range(15, 25), 25)
        own = range(token, 9) if 4 <= token < 9 else range(token, last)
        assert not differs[[n for n in range(25) if n not in group or n not in own]].any(), token
        assert differs[token] or token in (0, 15), "it sees itself; the first of a group sees nothing else"


def test_not_a_number_stays_where_it_is_seen() -> None:
    q, k, v = drawn(0, 12, 2, 8), drawn(1, 12, 1, 8), drawn(2, 12, 1, 8)
    q[5] = torch.nan
    out = packed_attend((4,), ((3, 5),), fused=True)(0, q, k, v)
    assert out[5].isnan().all()
    assert out[[*range(5), *range(6, 12)]].isfinite().all()


def test_the_same_bits_each_time_and_of_parts_of_wider_rows() -> None:
    q, k, v = drawn(0, 30, 2, 8), drawn(1, 30, 2, 8), drawn(2, 30, 4, 8)[:, ::2]
    attend = packed_attend((6,), ((10, 14),), fused=True)
    first = attend(0, q, k, v)
    assert torch.equal(attend(0, q, k, v), first)
    assert torch.equal(attend(0, q, k, v.contiguous()), first)


def test_torch_serves_other_types_and_several_threads() -> None:
    x = drawn(0, 4, 2, 8)
    assert train_attention.can_serve(x, x, x)
    assert not train_attention.can_serve(x.double(), x, x)
    assert not train_attention.can_serve(x.to("meta"), x, x)
    torch.set_num_threads(2)
    try:
        assert not train_attention.can_serve(x, x, x)
    finally:
        torch.set_num_threads(1)
