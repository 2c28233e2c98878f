"""The two ends of a decode step against torch: by the interpreter, or on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llamarl.generation.sampler import draw_on_device, unpacked
from llamarl.parts.cuda import checks
from tests.nightly import nightly
from tests.parts.cuda.interpreter import needs_interpreter

sample = pytest.importorskip("llamarl.parts.cuda.sample")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settings(noise_B: Tensor, temperature_B: Tensor) -> Tensor:
    return torch.stack((noise_B, temperature_B, *torch.zeros(3, len(noise_B)))).to(DEVICE)


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_tokens_and_logprobs_are_those_of_torch(vocab_size: int) -> None:
    """One chunk of the vocabulary, and three; sampled and greedy rows."""
    generator = torch.Generator().manual_seed(0)
    logits_B_V = (torch.randn(12, vocab_size, generator=generator) * 3).to(DEVICE)
    noise_B, temperature_B = torch.rand(12, generator=generator), torch.tensor([1.0, 0.6, 1.5, 0.0] * 3)
    given = settings(noise_B, temperature_B)
    expected, fed_R = unpacked(draw_on_device(logits_B_V, given, False, True)), torch.zeros(20).int().to(DEVICE)
    found = unpacked(sample.draw(logits_B_V, *given[:2], fed_R))
    assert found.token_ids_B.tolist() == expected.token_ids_B.tolist() == fed_R[:12].tolist()
    assert found.logprobs_B == pytest.approx(expected.logprobs_B, abs=2e-5)


def test_the_ends_of_the_unit_interval_and_of_the_vocabulary() -> None:
    """Tokens without probability are never drawn; the first of equally likely ones is greedy."""
    logits_B_V = torch.full((4, 5000), -1e30)
    logits_B_V[:, [3, 2047, 2048, 4999]] = 1.0
    noise_B, temperature_B = torch.tensor([0.0, 1 - 2**-24, 0.5, 0.3]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = unpacked(sample.draw(logits_B_V.to(DEVICE), *settings(noise_B, temperature_B)[:2]))
    assert found.token_ids_B.tolist() == [3, 4999, 2048, 3]
    assert found.logprobs_B == pytest.approx([-(4.0**0) * 1.3862944] * 4, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so(bad: float) -> None:
    logits_B_V = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    logits_B_V[1, 2500] = bad
    found = unpacked(sample.draw(logits_B_V.to(DEVICE), *settings(torch.full((3,), 0.4), torch.ones(3))[:2]))
    assert [bool(one == one) for one in found.logprobs_B] == [True, False, True]
    assert 0 <= found.token_ids_B[1] < 3000


@nightly("many draws; by day tokens and log-probs are those of torch")
def test_shares_of_tokens_are_their_probabilities() -> None:
    """50 draws at even shares hit each of three tokens as often as it is likely."""
    logits_V = torch.full((4100,), -1e30)
    logits_V[[5, 2100, 4099]] = torch.tensor([0.5, 0.3, 0.2]).log()
    noise_B = (torch.arange(50) + 0.5) / 50
    found = unpacked(
        sample.draw(logits_V.expand(50, -1).contiguous().to(DEVICE), *settings(noise_B, torch.ones(50))[:2])
    )
    counts = [int((found.token_ids_B == token).sum()) for token in (5, 2100, 4099)]
    assert counts == pytest.approx([25, 15, 10], abs=1)


def test_what_a_gpu_checks_at_start() -> None:
    assert checks.sample_error(sample, DEVICE) < 1e-4
