"""Experts of a mixture against those of each row by themselves; rows do not influence each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from llamarl.kernels import experts, ops
from llamarl.kernels.experts import ExpertFeedForward, Stack
from llamarl.kernels.linear import Linear, Workspace, exactly
from llamarl.models.quantize import dequantize_rows, quantize_rows
from tests.kernels.engines import ENGINES, engine

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
SIZES = [(5, 33, 50, 2), (8, 64, 96, 2), (3, 10, 7, 3), (4, 24, 32, 2)]
"""Experts, width, model dim and experts of a row: joined where the width fills whole panels."""


@pytest.fixture(params=ENGINES)
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    with engine(request.param):
        yield request.param


def stacks(num_experts: int, width: int, dim: int, dtype: torch.dtype) -> tuple[Stack, Stack, Stack]:
    """Gate, up and down."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(num_experts, *size, generator=generator) / dim**0.5 for size in ((width, dim),) * 2]
    made.append(torch.randn(num_experts, dim, width, generator=generator) / width**0.5)
    if dtype == torch.int8:
        gate, up, down = (quantize_rows(one, "int8") for one in made)
        return gate, up, down
    gate, up, down = ((one.to(dtype), None) for one in made)
    return gate, up, down


def rows(num_rows: int, sizes: tuple[int, int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, experts and their gates; the last expert is nobody's."""
    num_experts, _, dim, per_row = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, dim, generator=generator)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    if num_experts > per_row:
        scores[:, -1] = -1
    gates, ids = scores.topk(per_row)
    return x, ids, gates


def one_by_one(made: tuple[Stack, ...], x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """Each row by itself, through the kernels of dense layers."""
    linears = list[tuple[Linear, Linear]]()
    for expert in range(len(made[0][0])):
        (gate, gate_s), (up, up_s), (down, down_s) = (_matrix(one, expert) for one in made)
        linears.append((Linear(torch.cat((gate, up)), _joined(gate_s, up_s)), Linear(down, down_s)))
    y = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, share in sorted(zip(ids[row].tolist(), gates[row].tolist(), strict=True)):
            into, back = linears[expert]
            gate, up = into(x[row : row + 1]).chunk(2, -1)
            y[row] += share * back(ops.silu_mul(gate, up))[0]
    return y


def _matrix(stack: Stack, expert: int) -> tuple[Tensor, Tensor | None]:
    values, scales = stack
    return values[expert], None if scales is None else scales[expert]


def _joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else torch.cat((one, other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_are_the_dense_kernels_on_their_rows(computed_by, dtype, sizes):
    made, (x, ids, gates) = stacks(*sizes[:3], dtype), rows(23, sizes)
    found = ExpertFeedForward(*made)(x, ids, gates)
    torch.testing.assert_close(found, one_by_one(made, x, ids, gates), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_arithmetic_is_that_of_the_widened_weights(computed_by, dtype):
    sizes = SIZES[1]
    made, (x, ids, gates) = stacks(*sizes[:3], dtype), rows(23, sizes)
    gate, up, down = (dequantize_rows(v, s).double() if s is not None else v.double() for v, s in made)
    wide, expected = x.double(), torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, share in zip(ids[row].tolist(), gates[row].double(), strict=True):
            inner = torch.nn.functional.silu(gate[expert] @ wide[row]) * (up[expert] @ wide[row])
            expected[row] += share * (down[expert] @ inner)
    layer = ExpertFeedForward(*made)
    with exactly():
        exact = layer(x, ids, gates)
    torch.testing.assert_close(exact.double(), expected, rtol=0, atol=2e-6)
    assert (layer(x, ids, gates) - expected).norm() < 0.03 * expected.norm(), "activations are rounded too"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(computed_by, dtype):
    if computed_by == "torch":
        pytest.skip("torch's matmul depends on the number of rows")
    sizes = (8, 64, 96, 3)
    layer, (x, ids, gates) = ExpertFeedForward(*stacks(*sizes[:3], dtype)), rows(700, sizes)
    assert layer._library is not None
    together = layer(x, ids, gates)
    for chosen in ([5], [7, 299], [0, 1, 2], list(range(40, 57)), list(range(33)), list(range(600))):
        assert torch.equal(layer(x[chosen], ids[chosen], gates[chosen]), together[chosen])
    backwards = torch.arange(699, -1, -1)
    assert torch.equal(layer(x[backwards], ids[backwards], gates[backwards]), together[backwards])
    turned = ids.flip(1).contiguous(), gates.flip(1).contiguous()
    assert torch.equal(layer(x, *turned), together), "nor on the order in which it names its experts"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_of_one_expert_and_no_rows_of_others(computed_by, dtype):
    sizes = (4, 64, 96, 1)
    made, (x, ids, gates) = stacks(*sizes[:3], dtype), rows(300, sizes)
    ids = torch.full_like(ids, 2)
    found, alone = (
        ExpertFeedForward(*made)(x, ids, gates),
        tuple((v[2:3], s[2:3] if s is not None else None) for v, s in made),
    )
    torch.testing.assert_close(ExpertFeedForward(*alone)(x, ids - 2, gates), found, rtol=1e-5, atol=2e-6)
    assert len(ExpertFeedForward(*made)(x[:0], ids[:0], gates[:0])) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_with_some_experts_each_add_up(computed_by, dtype):
    sizes = SIZES[1]
    made, (x, ids, gates) = stacks(*sizes[:3], dtype), rows(23, sizes)
    parts = list[Tensor]()
    for first, last in ((0, 3), (3, 8)):
        own = tuple((v[first:last], s[first:last] if s is not None else None) for v, s in made)
        parts.append(ExpertFeedForward(*own, first)(x, ids, gates))
    assert all(part.abs().sum(1).eq(0).any() for part in parts), "some rows have nothing here"
    torch.testing.assert_close(sum(parts), ExpertFeedForward(*made)(x, ids, gates), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_results_follow_a_change_in_place(computed_by, dtype, sizes):
    """Also those of a path that packs a copy, in memory that it uses again."""
    made, given, workspace = stacks(*sizes[:3], dtype), rows(23, sizes), Workspace()
    layer = ExpertFeedForward(*made, workspace=workspace)
    before, size = layer(*given), workspace.num_bytes
    for values, scales in made:
        old = layer(*given)
        values[1] = values[0]
        if scales is not None:
            scales[1] = scales[0]
        changed = (given[1] == 1).any(1)
        found = layer(*given)
        assert torch.equal(found[~changed], old[~changed]) or computed_by == "torch"
        assert not torch.equal(found[changed], old[changed])
    workspace.begin()
    again = ExpertFeedForward(*made, workspace=workspace)
    assert torch.equal(again(*given), layer(*given)) and not torch.equal(again(*given), before)
    assert workspace.num_bytes == size
    assert bool(size) == (layer._packed is not None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_row_is_not_finite_and_harms_no_other(computed_by, dtype):
    sizes = SIZES[1]
    layer, (x, ids, gates) = ExpertFeedForward(*stacks(*sizes[:3], dtype)), rows(9, sizes)
    good = layer(x, ids, gates)
    x[3, 7] = torch.nan
    found, others = layer(x, ids, gates), [0, 1, 2, 4, 5, 6, 7, 8]
    assert not found[3].isfinite().any()
    torch.testing.assert_close(found[others], good[others], rtol=0, atol=0 if computed_by != "torch" else 1e-5)


def test_what_multiplies_has_a_name(computed_by):
    names = {name for dtype in DTYPES for name, _ in ExpertFeedForward(*stacks(4, 32, 64, dtype)).multipliers()}
    assert (names == {"torch"}) == (computed_by == "torch")
    assert any(name.startswith(computed_by.removeprefix("emulated-")) for name in names)
    assert bool(experts.kernels().reason) == (computed_by == "torch")


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    if experts.kernels().library is None:
        pytest.skip(experts.kernels().reason)
    monkeypatch.setattr(ExpertFeedForward, "_by_torch", lambda self, x, *_: x + 1)
    assert "experts.cpp is off by" in experts.kernels.__wrapped__().reason
