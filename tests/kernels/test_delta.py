"""The recurrent form of delta nets for generators: a token has the same bits in any run, next to any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.kernels import build, delta
from llamarl.kernels.delta import log_decay
from llamarl.kernels.delta_shape import DeltaShape
from tests.models.test_hybrid import one_by_one

SHAPES = {
    "plain": DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32),
    "odd": DeltaShape(layers=(0,), num_key_heads=3, num_value_heads=3, key_dim=7, value_dim=21, conv_width=3),
    "wide": DeltaShape(layers=(0,), num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128),
    "one": DeltaShape(layers=(0,), num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=1),
}


@pytest.fixture(params=["best", "torch"], autouse=True)
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.set_num_threads(1)
    if request.param == "torch":
        monkeypatch.setenv(build.VARIABLE, "torch")
    delta.kernel.cache_clear()
    build.load.cache_clear()
    assert (delta.kernel().library is None) == (request.param == "torch")
    yield request.param
    monkeypatch.undo()
    delta.kernel.cache_clear()
    build.load.cache_clear()


def given(shape: DeltaShape, num_tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, shape.mixed_size, generator=generator)
    conv = torch.randn(shape.mixed_size, shape.conv_width, generator=generator)
    decay = -torch.rand(num_tokens, shape.num_value_heads, generator=generator).pow(4) * 20
    return mixed, conv, decay, torch.rand(num_tokens, shape.num_value_heads, generator=generator)


def slots(shape: DeltaShape, count: int = 6) -> tuple[Tensor, Tensor]:
    """The first one holds zeros, the others what must not be read."""
    states = torch.full((count, shape.num_value_heads, shape.key_dim, shape.value_dim), torch.nan)
    inputs = torch.full((count, shape.conv_width - 1, shape.mixed_size), torch.nan)
    states[0], inputs[0] = 0, 0
    return states, inputs


def runs(*each: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(each, np.int64).reshape(-1, 4)


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_recurrent_form_in_float64(name: str) -> None:
    shape, num = SHAPES[name], 40
    inputs = given(shape, num)
    found = delta.recur(runs((0, num, 0, 1)), shape, *inputs, *slots(shape))
    exact = one_by_one(tuple(x.double() for x in inputs), shape)
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_has_the_same_bits_in_any_run(name: str) -> None:
    """Prefilled whole, in pieces, decoded one by one, and next to another sequence that forks from it."""
    shape, num = SHAPES[name], 12
    inputs = given(shape, num + 2)
    whole = delta.recur(runs((0, num, 0, 1)), shape, *inputs, *slots(shape))
    cuts = {
        "pieces": runs((0, 5, 0, 1), (5, 1, 1, 1), (6, 6, 1, 1)),
        "decoded": runs((0, 1, 0, 1), *((token, 1, 1, 1) for token in range(1, num))),
        "moved": runs((0, 5, 0, 3), (5, 4, 3, 2), (9, 3, 2, 4)),
    }
    for cut, some in cuts.items():
        states, kept, parts = *slots(shape), list[Tensor]()
        for run in some:  # as many calls
            start, count = int(run[0]), int(run[1])
            part = tuple(x if x is inputs[1] else x[start : start + count] for x in inputs)
            parts.append(delta.recur(runs((0, count, *run[2:].tolist())), shape, *part, states, kept))
        assert torch.equal(torch.cat(parts), whole[:num]), cut
    states, kept = slots(shape)
    mixed, conv, *decays = inputs
    order = [num, *range(num), num + 1]  # decode rows around a prefill, in one call
    together = delta.recur(
        runs((1, num, 0, 1), (0, 1, 0, 2), (num + 1, 1, 1, 3)), shape, mixed[order], conv,
        *(x[order] for x in decays), states, kept,
    )  # fmt: skip
    assert torch.equal(together[1 : num + 1], whole[:num])
    fork = delta.recur(runs((0, num + 2, 0, 1)), shape, mixed[[*range(num), num + 1, num]], conv,
        *(x[[*range(num), num + 1, num]] for x in decays), *slots(shape))  # fmt: skip
    assert torch.equal(together[num + 1], fork[num])
    assert not torch.isnan(states[1:4]).any() and torch.isnan(states[4:]).all() and not states[0].any()


@pytest.mark.parametrize("heads", [1, 4, 37])
def test_gates_are_those_of_torch_and_alike_in_each_row(heads: int, computed_by: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ba, x = torch.randn(9, 2 * heads, generator=generator) * 8, torch.randn(9, 5 * heads, generator=generator)
    a_log, dt_bias = torch.randn(2, heads, generator=generator)
    b, a = ba.chunk(2, 1)
    decay, strength = delta.gates(b, a, a_log, dt_bias)
    exact = log_decay(a.double(), a_log.double(), dt_bias.double())
    torch.testing.assert_close(decay.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(strength, b.sigmoid(), rtol=1e-5, atol=1e-6)
    gated = [delta.sigmoid_mul(x, gate) for gate in (b[:, :1], x.flip(0))]
    torch.testing.assert_close(gated[0], x * b[:, :1].sigmoid(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gated[1], x * x.flip(0).sigmoid(), rtol=1e-5, atol=1e-6)
    if computed_by == "best":
        for row in range(9):
            one = slice(row, row + 1)
            assert torch.equal(
                torch.stack(delta.gates(b[one], a[one], a_log, dt_bias))[:, 0], torch.stack((decay, strength))[:, row]
            )
            assert torch.equal(delta.sigmoid_mul(x[one], b[one, :1]), gated[0][one])
            assert torch.equal(delta.sigmoid_mul(x[one], x.flip(0)[one]), gated[1][one])


def test_a_run_without_tokens_copies_its_slot() -> None:
    for name in ("plain", "odd"):
        shape = SHAPES[name]
        states, kept = slots(shape)
        delta.recur(runs((0, 5, 0, 1), (5, 0, 1, 2), (5, 4, 1, 1)), shape, *given(shape, 9), states, kept)
        expected = slots(shape)
        inputs = given(shape, 9)
        delta.recur(runs((0, 5, 0, 2)), shape, *(x if x is inputs[1] else x[:5] for x in inputs), *expected)
        assert torch.equal(states[2], expected[0][2]) and torch.equal(kept[2], expected[1][2])


def test_runs_of_one_token_that_follow_each_other() -> None:
    """The last token of a prefix, the first one of two rollouts that begin behind it, and one that goes on."""
    shape = SHAPES["plain"]
    inputs = given(shape, 9)
    together, states, kept = runs((0, 5, 0, 1), (5, 1, 1, 1), (6, 1, 1, 2), (7, 1, 1, 3), (8, 1, 3, 3)), *slots(shape)
    found = delta.recur(together, shape, *inputs, states, kept)
    alone, own, own_kept = list[Tensor](), *slots(shape)
    for start, count, read, write in together.tolist():
        part = tuple(x if x is inputs[1] else x[start : start + count] for x in inputs)
        alone.append(delta.recur(runs((0, count, read, write)), shape, *part, own, own_kept))
    torch.testing.assert_close(found, torch.cat(alone))
    torch.testing.assert_close(states, own, equal_nan=True)
    torch.testing.assert_close(kept, own_kept, equal_nan=True)


def test_nothing_to_compute() -> None:
    shape = SHAPES["plain"]
    assert delta.recur(runs(), shape, *given(shape, 0), *slots(shape)).shape == (0, 4, 32)


def test_a_kernel_that_is_wrong_is_not_used(computed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if computed_by == "torch":
        pytest.skip("there is no kernel")
    folder = Path(delta.__file__).parent
    source = (folder / "delta.cpp").read_text().replace("kept * found[b]", "found[b]")
    (tmp_path / "delta.cpp").write_text(source)
    (tmp_path / "vectors.h").write_text((folder / "vectors.h").read_text())
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    delta.kernel.cache_clear()
    build.load.cache_clear()
    assert delta.kernel().reason == "delta.cpp: delta_runs differs from torch on this processor"
