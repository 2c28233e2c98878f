"""The two calls of flash attention and their merger, with float64 in the place of the GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from llamarl.distributed.mesh import Axis
from llamarl.models import flash_attention
from llamarl.models.attention import own_rows, packed_attend
from llamarl.models.flash_attention import FlashAttend, FlashSlices, can_serve
from tests.models.flash import backward, forward

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


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_context_ranks_compute_their_rows_of_it_with_its_gradients(batch: tuple, num_ranks: int) -> None:
    """Each rank has two slices, which cut documents anywhere; keys are those of all ranks. Gradients of keys add up."""
    prompts, responses = batch
    missing = -(sum(prompts) + sum(map(sum, responses))) % (2 * num_ranks)
    prompts, responses = [*prompts, missing], [*responses, ()]  # as microbatches are padded
    num_tokens = sum(prompts) + sum(map(sum, responses))
    torch.manual_seed(0)
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    weight = torch.randn(num_tokens, HEADS, HEAD_DIM, dtype=torch.float64)
    exact = [x.clone().requires_grad_() for x in given]
    out = packed_attend(prompts, responses)(0, *exact)
    (out * weight).sum().backward()
    found, (q, k, v) = torch.zeros_like(out), (x.clone().requires_grad_() for x in given)
    for rank in range(num_ranks):
        slices = own_rows(num_tokens, Axis(rank, num_ranks))
        rows = torch.cat([torch.arange(one.start, one.stop) for one in slices])
        of_rank = FlashSlices(prompts, responses, slices, CPU)(0, q[rows], k, v)
        (of_rank * weight[rows]).sum().backward()
        found[rows] = of_rank.detach()
    torch.testing.assert_close(found, out.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


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
    assert can_serve(gpu, torch.bfloat16, 128) and can_serve(gpu, torch.float16, 72)
    assert not can_serve(gpu, torch.float32, 128) and not can_serve(CPU, torch.bfloat16, 128)
    assert not can_serve(gpu, torch.bfloat16, 512) and not can_serve(gpu, torch.bfloat16, 20)
