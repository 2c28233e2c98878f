"""The gated delta rule of training in C++ with its gradients, against the recurrent form's in float64."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarl.kernels import build, train_delta
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.attention import packed_attend
from llamarl.models.delta_rule import Branches, Packed
from tests.models.test_hybrid import one_by_one
from tests.nightly import examples

pytestmark = pytest.mark.skipif(train_delta.kernels().library is None, reason=train_delta.kernels().reason or "has one")
SHAPES = {
    "plain": DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32),
    "odd": DeltaShape(layers=(0,), num_key_heads=3, num_value_heads=3, key_dim=7, value_dim=21, conv_width=3),
    "wide": DeltaShape(layers=(0,), num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128),
    "one": DeltaShape(layers=(0,), num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=1),
}
Lengths = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def drawn(shape: DeltaShape, num_tokens: int, fastest: float, seed: int = 0) -> list[Tensor]:
    """Mixed channels, convolution, log decays of which few are fast, strengths, and gradients of outputs, float64 of
    what float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    heads = shape.num_value_heads
    mixed = torch.randn(num_tokens, shape.mixed_size, generator=generator)
    conv = torch.randn(shape.mixed_size, shape.conv_width, generator=generator)
    decay = -torch.rand(num_tokens, heads, generator=generator).pow(4) * fastest
    strength = torch.rand(num_tokens, heads, generator=generator)
    grad = torch.randn(num_tokens, heads, shape.value_dim, generator=generator)
    return [one.double() for one in (mixed, conv, decay, strength, grad)]


def sequences_of(lengths: Lengths, shared: int) -> list[list[int]]:
    """Packed tokens of each response behind those that it continues; of a prompt, if it has no response."""
    found, start = list[list[int]](), shared
    for prompt, responses in zip(*lengths, strict=True):
        beginning = [*range(shared), *range(start, start + prompt)]
        start += prompt
        for response in responses or (0,):
            found.append([*beginning, *range(start, start + response)])
            start += response
    return found


def outcome(compute: object, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients."""
    *own, grad = (one.to(dtype) for one in inputs)
    own = [one.requires_grad_() for one in own]
    out = compute(own)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def agree(name: str, lengths: Lengths, shared: int = 0, fastest: float = 1.0, most: int | None = None) -> None:
    """Output and gradients are those of float64 to a few roundings."""
    shape, sequences = SHAPES[name], sequences_of(lengths, shared)
    num_tokens = shared + sum(lengths[0]) + sum(map(sum, lengths[1]))
    inputs = drawn(shape, num_tokens, fastest)

    def alone(own: list[Tensor]) -> Tensor:
        mixed, conv, decay, strength = own
        outputs = [mixed.new_zeros(shape.num_value_heads, shape.value_dim)] * num_tokens
        for tokens in sequences:
            if tokens:
                found = one_by_one((mixed[tokens], conv, decay[tokens], strength[tokens]), shape)
                for place, token in enumerate(tokens):
                    outputs[token] = found[place]
        return torch.stack(outputs)

    attend = packed_attend(*lengths, fused=True, shared=shared)
    with pytest.MonkeyPatch.context() as patch:
        if most:
            patch.setattr(DeltaShape, "chunk_tokens", lambda *_: most)
        found = outcome(lambda own: attend.recur(0, shape, *own), inputs, torch.float32)
    exact = outcome(alone, inputs, torch.float64)
    for kind, ours, theirs in zip(("out", "mixed", "conv", "decay", "strength"), found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm() + 1e-7, kind


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("most", [8, 16, 64])
def test_it_is_the_recurrent_form_in_float64(name: str, most: int) -> None:
    """One sequence of several chunks, the last one not full; one token."""
    agree(name, ((75,), ((),)), most=most)
    agree(name, ((1,), ((),)), most=most)


@pytest.mark.parametrize(
    ("shared", "lengths"),
    [(0, ((20, 7), ((60, 33, 1), (40,)))), (19, ((5, 0, 1), ((3, 2), (17,), ()))), (0, ((0, 3), ((0, 50), (2, 2, 2))))],
    ids=str,
)
@pytest.mark.parametrize("name", ["plain", "odd"])
def test_sequences_fork_behind_what_they_continue(name: str, shared: int, lengths: Lengths) -> None:
    agree(name, lengths, shared)


def test_fast_decays_lose_no_digits_of_slow_ones() -> None:
    """Sums of log decays are hundreds in a chunk, and their differences tiny."""
    agree("plain", ((64,), ((),)), fastest=80.0, most=64)


@given(
    prompts=st.lists(st.integers(0, 20), min_size=1, max_size=3), shared=st.integers(0, 9),
    responses=st.lists(st.lists(st.integers(0, 25), max_size=3), min_size=3, max_size=3),
)  # fmt: skip
@settings(max_examples=examples(10), deadline=None)
def test_any_lengths(prompts: list[int], shared: int, responses: list[list[int]]) -> None:
    lengths = tuple(prompts), tuple(map(tuple, responses[: len(prompts)]))
    if shared + sum(lengths[0]) + sum(map(sum, lengths[1])):
        agree("odd", lengths, shared)


def test_what_it_does_not_serve_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["plain"]
    inputs = drawn(shape, 20, 1.0)[:4]

    def computed(dtype: torch.dtype, fused: bool) -> Tensor:
        packed = Packed(lambda: Branches([0], [20], [-1]), 20, torch.device("cpu"), fused)
        half = torch.float32 if dtype == torch.bfloat16 else dtype
        return packed(0, shape, *(one.to(dtype) for one in inputs[:2]), *(one.to(half) for one in inputs[2:]))

    calls = list[int]()
    forward = train_delta.forward
    monkeypatch.setattr(train_delta, "forward", lambda *given: calls.append(1) or forward(*given))
    for dtype, fused, num_calls in ((torch.float64, True, 0), (torch.float32, False, 0), (torch.bfloat16, True, 1)):
        out = computed(dtype, fused)
        assert (len(calls), out.dtype) == (num_calls, torch.float64 if dtype == torch.float64 else torch.float32)
    torch.set_num_threads(2)
    computed(torch.float32, True)
    torch.set_num_threads(1)
    assert len(calls) == 1


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Kernels are loaded anew, and compiled where this code was not yet with these flags."""
    for cached in (build.load, train_delta.kernels):
        cached.cache_clear()
    yield
    for cached in (build.load, train_delta.kernels):
        cached.cache_clear()


@pytest.mark.usefixtures("reloaded")
@pytest.mark.parametrize("name", [one for one in build.offered() if one != "torch"])
def test_the_code_of_each_pinned_processor_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, name)
    assert train_delta.kernels().reason == ""
    agree("odd", ((20,), ((9, 30),)))


@pytest.mark.usefixtures("reloaded")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("flag", ["-DLLAMARL_LANES=16", "-march=x86-64"])
def test_the_code_of_other_processors_is_right(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of AVX-512 in halves, and a machine without AVX."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1", "-Wno-psabi", flag))
    assert train_delta.kernels().reason == ""
    agree("odd", ((20,), ((9, 30),)))
    agree("plain", ((20,), ((9, 30),)))


@pytest.mark.usefixtures("reloaded")
def test_a_kernel_that_is_wrong_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(build.__file__).parent
    source = (folder / "train_delta.cpp").read_text()
    assert "sums[num - 1] += along[t]" in source
    (tmp_path / "train_delta.cpp").write_text(source.replace("sums[num - 1] += along[t]", "sums[num - 1] -= along[t]"))
    (tmp_path / "vectors.h").write_text((folder / "vectors.h").read_text())
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert train_delta.kernels().reason == "train_delta.cpp differs from torch on this processor"


def test_gradients_have_the_same_bits_again() -> None:
    shape = SHAPES["plain"]
    inputs = drawn(shape, 60, 1.0)
    attend = packed_attend((20,), ((25, 15),), fused=True)
    once, again = (outcome(lambda own: attend.recur(0, shape, *own), inputs, torch.float32) for _ in range(2))
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(once, again, strict=True))
