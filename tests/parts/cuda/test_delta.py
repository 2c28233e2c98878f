"""The Triton kernels of delta nets against torch in float64: by the interpreter, or on the GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.kernels import delta, gpu
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.delta_rule import ROOT, Branches, Packed
from llamarl.parts.cuda import checks
from tests.kernels.test_delta import SHAPES, given, runs, slots
from tests.nightly import NIGHTLY, also, nightly
from tests.parts.cuda.interpreter import needs_interpreter

kernels = pytest.importorskip("llamarl.parts.cuda.delta")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUT = replace(SHAPES["plain"], num_key_heads=1, num_value_heads=2)
"""Heads of a tensor-parallel rank of two."""
SMALL = DeltaShape(layers=(0,), num_key_heads=1, num_value_heads=2, key_dim=5, value_dim=11, conv_width=3)


def recur(runs_R_4: np.ndarray, shape: DeltaShape, inputs: tuple[Tensor, ...], kept: tuple[Tensor, Tensor]) -> Tensor:
    """Changes `kept`, which is on CPUs."""
    own = tuple(x.to(DEVICE) for x in kept)
    out = kernels.recur(runs_R_4, shape, tuple(x.to(DEVICE) for x in inputs), own)
    for target, changed in zip(kept, own, strict=True):
        target.copy_(changed)
    return out.cpu()


def rows(inputs: tuple[Tensor, ...], chosen: slice | list[int]) -> tuple[Tensor, ...]:
    """All but the weights of the convolution, which have no tokens."""
    mixed, conv, *decays = inputs
    return mixed[chosen], conv, *(x[chosen] for x in decays)


def assert_as_exact_as_torch(some: np.ndarray, shape: DeltaShape, num_tokens: int) -> None:
    """Compares with float64: the error is at most 4 times that of torch in float32, plus some units in the last
    place."""
    inputs, results = given(shape, num_tokens), list[list[Tensor]]()
    for compute, dtype in ((delta.recur_by_torch, torch.float64), (delta.recur_by_torch, torch.float32), (recur, None)):
        kept = tuple(x.to(dtype or torch.float32) for x in slots(shape))
        out = compute(some, shape, tuple(x.to(dtype or torch.float32) for x in inputs), kept)
        results.append([x.double() for x in (out, *kept)])
    for exact, theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours.isnan(), exact.isnan()), "it changes the slots that torch changes"
        largest, error, own = (x.nan_to_num(0).abs().sum() for x in (exact, theirs - exact, ours - exact))
        assert own <= 4 * error + 1e-6 * largest


@nightly("Triton's interpreter is slow; by day the package computes by these kernels")
@pytest.mark.parametrize("name", [*(SHAPES if NIGHTLY else ["odd"]), "cut"])
def test_runs_that_depend_on_each_other(name: str) -> None:
    """A prompt in two chunks, a copy of its state, two forks, and a fork that continues."""
    some = runs((0, 4, 0, 1), (4, 1, 1, 1), (5, 0, 1, 2), (5, 1, 1, 3), (6, 2, 1, 4), (8, 1, 3, 3))
    assert kernels.waves(some.tolist()) == [0, 1, 2, 2, 2, 3]
    assert_as_exact_as_torch(some, SHAPES.get(name, CUT), 9)


@nightly("Triton's interpreter is slow; by day the package computes by these kernels")
def test_a_slot_is_not_overwritten_before_it_is_read() -> None:
    some = runs((0, 2, 0, 1), (2, 3, 1, 2), (5, 1, 1, 1), (6, 1, 2, 5), (7, 1, 1, 2))
    assert kernels.waves(some.tolist()) == [0, 1, 2, 2, 3]
    assert_as_exact_as_torch(some, SHAPES["odd"], 8)


@nightly("Triton's interpreter is slow; by day the package computes by these kernels")
def test_runs_of_one_token_that_follow_each_other() -> None:
    some = runs(*((token, 1, min(token, 1), 1) for token in range(5)), (5, 1, 0, 2), (6, 1, 0, 3))
    assert kernels.waves(some.tolist()) == [0, 1, 2, 3, 4, 0, 0]
    assert_as_exact_as_torch(some, SHAPES["plain"], 7)


@nightly("Triton's interpreter is slow; by day the package computes by these kernels")
@pytest.mark.parametrize("name", ["small", *also("one")])
def test_a_token_has_the_same_bits_in_any_run(name: str) -> None:
    """Whole, in pieces, decoded one by one, moved between slots, and next to other runs at another place."""
    shape, num = SHAPES.get(name, SMALL), 6
    inputs, whole_slots = given(shape, num + 2), slots(shape)
    whole = recur(runs((0, num, 0, 1)), shape, inputs, whole_slots)[:num]
    cuts = {
        "pieces": runs((0, 3, 0, 1), (3, 1, 1, 1), (4, 2, 1, 1)),
        "decoded": runs((0, 1, 0, 1), *((token, 1, 1, 1) for token in range(1, num))),
        "moved": runs((0, 2, 0, 3), (2, 3, 3, 2), (5, 1, 2, 1)),
    }
    for cut, some in cuts.items():
        kept = slots(shape)
        assert torch.equal(recur(some, shape, inputs, kept)[:num], whole), cut
        assert all(torch.equal(x[1], y[1]) for x, y in zip(kept, whole_slots, strict=True)), cut
    kept, parts = slots(shape), list[Tensor]()
    for start, count, read, write in cuts["moved"].tolist():  # as many calls
        part = rows(inputs, slice(start, start + count))
        parts.append(recur(runs((0, count, read, write)), shape, part, kept))
    assert torch.equal(torch.cat(parts), whole)
    kept = slots(shape)
    together = runs((1, num, 0, 1), (0, 1, 0, 2), (num + 1, 1, 1, 3))
    found = recur(together, shape, rows(inputs, [num, *range(num), num + 1]), kept)
    assert torch.equal(found[1 : num + 1], whole)
    fork = recur(runs((0, num + 1, 0, 1)), shape, rows(inputs, [*range(num), num + 1]), slots(shape))
    assert torch.equal(found[num + 1], fork[num])
    assert not torch.isnan(kept[0][1:4]).any() and torch.isnan(kept[0][4:]).all() and not kept[0][0].any()


def test_nothing_to_compute() -> None:
    shape, kept = SHAPES["plain"], slots(SHAPES["plain"])
    assert recur(runs(), shape, given(shape, 0), kept).shape == (0, 4, 32)
    assert torch.isnan(kept[0][1:]).all()


def test_the_package_computes_by_them_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent form of a batch with a shared prompt."""
    monkeypatch.setattr(gpu, "kernel", lambda name, device: {"delta": kernels}.get(name))
    monkeypatch.setattr(delta, "_library", lambda x: None)
    shape, calls, compute = SHAPES["plain"], list[int](), kernels.recur
    monkeypatch.setattr(kernels, "recur", lambda *args: calls.append(len(args[0])) or compute(*args))
    packed = Packed(lambda: Branches([0, 4, 6], [4, 2, 3], [ROOT, 0, 0]), 9, DEVICE)
    inputs = given(shape, 9)
    found, exact = (
        packed.recurrent_form()(0, shape, *(x.to(DEVICE, dtype) for x in inputs))
        for dtype in (torch.float32, torch.float64)
    )
    assert calls == [3], "torch computes float64"
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@nightly("Triton's interpreter is slow; by day the package computes by these kernels")
def test_what_a_gpu_checks_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.delta_error(kernels, DEVICE) < 1e-4
    monkeypatch.setattr(kernels, "waves", lambda some: [0] * len(some))
    kernels._upload.cache_clear()
    assert not checks.delta_error(kernels, DEVICE) < 1e-2, "runs out of order"
    kernels._upload.cache_clear()
