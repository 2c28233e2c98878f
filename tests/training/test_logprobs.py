"""`target_logprobs` against log_softmax, for every tile size, and without all logits in memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llamarl.kernels.linear import rounds_activations
from llamarl.models.masking import NEVER, UnusedIds
from llamarl.training import policy
from llamarl.training.policy import target_logprobs

R, D, V = 9, 6, 13


def random_case(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden_R_D = (torch.randn(R, D, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    head_V_D = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_R_D, head_V_D, torch.randint(V, (R,), generator=generator)


def plain(hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    logits_R_V = hidden_R_D @ head_V_D.T / temperature
    return logits_R_V.log_softmax(-1).gather(1, targets_R[:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("tile", range(1, R + 2))
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, tile: int, temperature: float) -> None:
    monkeypatch.setattr(policy, "TILE_LOGITS", tile * V)
    hidden_R_D, head_V_D, targets_R = random_case()
    weights_R = torch.randn(R, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for function in (target_logprobs, plain):
        values_R = function(hidden_R_D, head_V_D, targets_R, temperature)
        results.append((values_R, *torch.autograd.grad(values_R @ weights_R, (hidden_R_D, head_V_D))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tile", [1, 4, R + 1])
def test_candidates_alone(monkeypatch: pytest.MonkeyPatch, tile: int, temperature: float) -> None:
    """Against a softmax over what is at least as likely as the target times e^cutoff; the target always is."""
    monkeypatch.setattr(policy, "TILE_LOGITS", tile * V)
    monkeypatch.setattr(policy, "_ROWS", 4)
    hidden_R_D, head_V_D, targets_R = random_case()
    cutoffs_R = torch.tensor([-torch.inf, -3.0, -1.0, -0.1, 0.0, -0.5, -2.0, 0.0, -torch.inf], dtype=torch.float64)
    weights_R = torch.randn(R, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits_R_V = hidden_R_D @ head_V_D.T / temperature
    own_R_1 = logits_R_V.gather(1, targets_R[:, None])
    is_own_R_V = torch.zeros(R, V, dtype=torch.bool).scatter_(1, targets_R[:, None], True)
    is_out_R_V = (logits_R_V < own_R_1 + cutoffs_R[:, None]) & ~is_own_R_V
    expected_R = own_R_1[:, 0] - logits_R_V.masked_fill(is_out_R_V, -torch.inf).logsumexp(1)
    found_R = target_logprobs(hidden_R_D, head_V_D, targets_R, temperature, cutoffs_R=cutoffs_R)
    assert R < is_out_R_V.sum() < R * (V - 3)
    for ours, theirs in zip(
        (found_R, *torch.autograd.grad(found_R @ weights_R, (hidden_R_D, head_V_D))),
        (expected_R, *torch.autograd.grad(expected_R @ weights_R, (hidden_R_D, head_V_D))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Log-probs are float32 even where the matmul is not; gradients come back in the type of their input."""
    exact = plain(*random_case(), 0.7)
    hidden_R_D, head_V_D, targets_R = random_case(dtype)
    values_R = target_logprobs(hidden_R_D, head_V_D, targets_R, 0.7)
    assert values_R.dtype is torch.float32
    torch.testing.assert_close(values_R.double(), exact, rtol=tolerance, atol=tolerance)
    values_R.sum().backward()
    assert hidden_R_D.grad is not None
    assert head_V_D.grad is not None
    assert (hidden_R_D.grad.dtype, head_V_D.grad.dtype) == (dtype, dtype)


def test_large_logits_stay_finite() -> None:
    hidden_R_D, head_V_D, targets_R = random_case(torch.float32, scale=1e4)
    values_R = target_logprobs(hidden_R_D, head_V_D, targets_R, 0.1)
    values_R.sum().backward()
    assert torch.isfinite(values_R).all()
    assert hidden_R_D.grad is not None
    assert torch.isfinite(hidden_R_D.grad).all()


def test_no_targets() -> None:
    hidden_R_D, head_V_D, targets_R = random_case()
    values_R = target_logprobs(hidden_R_D[:0], head_V_D, targets_R[:0], 1.0)
    assert values_R.shape == (0,)
    values_R.sum().backward()


class LiveBytes(TorchDispatchMode):
    """Most bytes that results of operations held at once, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._live[id(leaf)] = weakref.ref(leaf)
        tensors = [tensor for ref in self._live.values() if (tensor := ref()) is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.peak = max(self.peak, sum(storages.values()))
        self._live = {id(tensor): weakref.ref(tensor) for tensor in tensors}
        return result


def peak_bytes(function: Any) -> int:
    generator = torch.Generator().manual_seed(0)
    hidden_R_D = torch.randn(640, 4, generator=generator, requires_grad=True)
    head_V_D = torch.randn(500, 4, generator=generator, requires_grad=True)
    targets_R = torch.randint(500, (640,), generator=generator)
    with LiveBytes() as live:
        function(hidden_R_D, head_V_D, targets_R, 0.9).sum().backward()
    return live.peak


def test_memory_does_not_hold_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes of live results, forward and backward; the plain formula shows that the count can fail."""
    monkeypatch.setattr(policy, "TILE_LOGITS", 16 * 500)
    all_logits, tile = 640 * 500 * 4, 16 * 500 * 4
    assert peak_bytes(plain) >= 2 * all_logits
    assert peak_bytes(target_logprobs) < 4 * tile + all_logits / 10
    assert peak_bytes(target_logprobs) < 0.15 * peak_bytes(plain)


def test_tiles_are_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of targets: libraries keep code for every size of product that they have met."""
    monkeypatch.setattr(policy, "TILE_LOGITS", 1 << 12)
    head_V_D = torch.zeros(100, 4)
    sizes = {
        tuple(len(head_T_D) for _, head_T_D, _ in policy._Tiles(torch.zeros(num, 4), head_V_D, 1.0))
        for num in range(1, 400)
    }
    assert len(sizes) <= 5 and all(sum(one) == 100 for one in sizes)


@pytest.mark.parametrize("cutoff", [None, -1.5])
@pytest.mark.parametrize("tile", [1, 4, V])
def test_unused_ids_have_no_probability_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, tile: int, cutoff: float | None
) -> None:
    """As if the head had no rows for them, whatever these hold."""
    monkeypatch.setattr(policy, "TILE_LOGITS", tile * R)
    hidden_R_D, head_V_D, targets_R = random_case()
    spans = ((0, 1), (4, 8), (11, V))
    used = torch.tensor([one for one in range(V) if not any(a <= one < b for a, b in spans)])
    with torch.no_grad():
        head_V_D.view(V, D)[[0, 5, 12]] *= 100
    places_R = targets_R % len(used)
    cutoffs_R = None if cutoff is None else torch.full((R,), cutoff, dtype=torch.float64)
    results = []
    for head, targets, unused in ((head_V_D, used[places_R], spans), (head_V_D[used], places_R, ())):
        values_R = target_logprobs(hidden_R_D, head, targets, 0.7, cutoffs_R=cutoffs_R, unused_ids=UnusedIds(unused))
        results.append((values_R, *torch.autograd.grad(values_R.sum(), (hidden_R_D, head_V_D))))
    for ours, without in zip(*results, strict=True):
        torch.testing.assert_close(ours, without, rtol=1e-11, atol=1e-12)
    unused_rows = [one for one in range(V) if one not in used.tolist()]
    assert not results[0][2][unused_rows].any()


def test_a_rank_leaves_out_the_unused_ids_of_its_part() -> None:
    hidden_R_D, head_V_D, _ = random_case()
    unused = UnusedIds(((2, 3), (9, 12)))
    tiles = policy._Tiles(hidden_R_D.detach(), head_V_D.detach()[7:], 1.0, unused, 7)
    ((_, _, logits_R_T),) = tiles
    assert [7 + one for one in range(V - 7) if bool((logits_R_T[:, one] == NEVER).all())] == [9, 10, 11]


@pytest.mark.skipif(not rounds_activations(), reason="products with bfloat16 weights keep float32 activations here")
@pytest.mark.parametrize("tile", [1, 4, R + 1])
@pytest.mark.parametrize("cut", [False, True])
def test_rounded_factors(monkeypatch: pytest.MonkeyPatch, tile: int, cut: bool) -> None:
    """Values are those of rounded factors with sums in float32. Gradients go to the unrounded inputs."""
    monkeypatch.setattr(policy, "TILE_LOGITS", tile * V)
    hidden_R_D, head_V_D, targets_R = random_case(torch.float32)
    cutoffs_R = torch.full((R,), -0.7) if cut else None
    weights_R = torch.randn(R, generator=torch.Generator().manual_seed(1))
    found_R = target_logprobs(hidden_R_D, head_V_D, targets_R, 0.6, cutoffs_R=cutoffs_R, rounds=True)
    found = torch.autograd.grad(found_R @ weights_R, (hidden_R_D, head_V_D))
    exact = [one.detach().bfloat16().double().requires_grad_() for one in (hidden_R_D, head_V_D)]
    cutoffs_R = None if cutoffs_R is None else cutoffs_R.double()
    exact_R = target_logprobs(*exact, targets_R, 0.6, cutoffs_R=cutoffs_R)
    torch.testing.assert_close(found_R.double(), exact_R, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(exact_R @ weights_R.double(), exact), strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm()
    with torch.inference_mode():
        again_R = target_logprobs(
            hidden_R_D, head_V_D, targets_R, 0.6, cutoffs_R=None if not cut else cutoffs_R.float(), rounds=True
        )
    torch.testing.assert_close(again_R, found_R.detach(), rtol=0, atol=0)
