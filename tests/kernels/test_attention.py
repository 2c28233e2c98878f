"""The attention kernel against float64. Parts for other processors run here with the vectors that this one has."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.kernels import attention, build, ops, train_attention
from llamarl.kernels.attention import BLOCK_SIZE, PagedAttention, Tasks
from tests.nightly import crossed, nightly

needs_kernel = pytest.mark.skipif(attention.kernel().library is None, reason=attention.kernel().reason or "has one")


class Scene:
    """Sequences of given lengths in scattered blocks of a cache that is NaN elsewhere, and their last tokens."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, new: int = 1) -> None:
        self.lengths, self.new = lengths, new
        num_heads, num_kv_heads, head_dim = heads
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(1)
        sizes = [-(-length // BLOCK_SIZE) for length in lengths]
        ids = rng.permutation(sum(sizes) + 3)
        self.blocks = np.split(ids[: sum(sizes)], np.cumsum(sizes)[:-1])
        self.keys = torch.full((len(ids), num_kv_heads, head_dim, BLOCK_SIZE), torch.nan, dtype=dtype)
        self.values = torch.full((len(ids), num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype)
        # One row of a joined projection per token: the heads of q, k and v are parts of it.
        parts = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.joined = [torch.randn(length, sum(parts), generator=generator).to(dtype).float() for length in lengths]
        self.parts, self.head_dim = parts, head_dim

    def split(self, joined: torch.Tensor) -> list[torch.Tensor]:
        return [flat.unflatten(1, (-1, self.head_dim)) for flat in joined.split(self.parts, 1)]

    def fill(self) -> None:
        """All but the new tokens are in the cache."""
        for joined, length, blocks in zip(self.joined, self.lengths, self.blocks, strict=True):
            _, k, v = self.split(joined)
            for t in range(length - self.new):
                self.keys[blocks[t // BLOCK_SIZE], :, :, t % BLOCK_SIZE] = k[t].to(self.keys.dtype)
                self.values[blocks[t // BLOCK_SIZE], :, t % BLOCK_SIZE] = v[t].to(self.keys.dtype)

    def attend(self, order: list[int]) -> list[torch.Tensor]:
        """Of the new tokens of some sequences."""
        places = [np.arange(self.lengths[i] - self.new, self.lengths[i]) for i in order]
        slots = [
            self.blocks[i][t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for i, t in zip(order, places, strict=True)
        ]
        starts = np.cumsum([0] + [len(self.blocks[i]) for i in order])
        tasks = Tasks(
            table=np.array([
                [n * self.new, self.new, starts[n], self.lengths[i] - self.new + 1, 1] for n, i in enumerate(order)
            ]),
            members=np.arange(len(order) * self.new),
            blocks=np.concatenate([self.blocks[i] for i in order]),
            slots_N=np.concatenate(slots),
        )  # fmt: skip
        q, k, v = self.split(torch.cat([self.joined[i][t] for i, t in zip(order, places, strict=True)]))
        library = attention.kernel().library
        out = PagedAttention(library, tasks, self.keys, self.values)(q, k, v, self.keys, self.values)
        return list(out.split(self.new))

    def exact(self, i: int) -> torch.Tensor:
        q, k, v = (x.double().transpose(0, 1) for x in self.split(self.joined[i]))
        mask = torch.ones(self.new, self.lengths[i], dtype=torch.bool).tril(self.lengths[i] - self.new)
        q = q[:, -self.new :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(
            0, 1
        )


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "new"),
    crossed([(1, 1, 8), (4, 4, 32), (4, 2, 64), (6, 2, 40), (10, 2, 24), (8, 1, 128)], [1, 21]),
    ids=str,
)
def test_equals_float64(heads: tuple[int, int, int], dtype: torch.dtype, new: int) -> None:
    scene = Scene([21, 22, 33, 64, 256, 257, 300, 600], heads, dtype, new)
    scene.fill()
    order = [5, 0, 7, 3, 2, 1, 4, 6]
    for i, out in zip(order, scene.attend(order), strict=True):
        torch.testing.assert_close(out, scene.exact(i).float(), rtol=1e-5, atol=2e-6)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_depend_neither_on_its_neighbors_nor_on_prefill(dtype: torch.dtype) -> None:
    scene = Scene([20, 45, 290, 31], (6, 2, 40), dtype, new=9)
    scene.fill()
    together = scene.attend([3, 2, 1, 0])
    alone = [scene.attend([i])[0] for i in (3, 2, 1, 0)]
    scene.new = 1
    decoded = scene.attend([0, 1, 2, 3])[::-1]
    for chunk, single, last in zip(together, alone, decoded, strict=True):
        assert torch.equal(chunk, single)
        assert torch.equal(chunk[-1:], last)


@needs_kernel
def test_what_is_not_finite_stays_in_its_sequence() -> None:
    scene = Scene([40, 40, 40], (4, 2, 32), torch.float32)
    scene.fill()
    scene.keys[scene.blocks[1][1], 0, 3, 2] = torch.nan
    scene.values[scene.blocks[2][0], 1, 3, 2] = torch.inf
    clean, nan, infinite = scene.attend([0, 1, 2])
    assert clean.isfinite().all()
    assert nan[:, :2].isnan().all()
    assert nan[:, 2:].isfinite().all()
    assert infinite[:, 2:, 2].isinf().all()


def test_where_it_cannot_serve_there_is_a_reason() -> None:
    cpu = torch.device("cpu")
    assert attention.unusable(torch.float16, cpu, 32) == "keys are torch.float16"
    assert attention.unusable(torch.float32, cpu, 12) == "head_dim = 12 is no multiple of 8"
    assert attention.unusable(torch.float32, torch.device("meta"), 32) == "meta device"


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Kernels are loaded anew, and compiled where this code was not yet with these flags."""
    caches = build.load, attention.kernel, ops.kernels, train_attention.kernels
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reloaded: None) -> None:
    """Kernels are compiled anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("reloaded")
@needs_kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("flag", ["-DLLAMARL_LANES=16", "-march=x86-64"])
def test_the_code_of_other_processors_passes_the_checks_at_load(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of AVX-512 in halves, and a machine without AVX. Compiled with little optimization, which takes long."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1", "-Wno-psabi", flag))
    assert attention.kernel().reason == ""
    assert ops.kernels().reason == ""
    assert train_attention.kernels().reason == ""


@nightly("a compiler reads each file; by day those kernels run that this processor has")
@needs_kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86-64")
@pytest.mark.parametrize("name", ["attention", "copy", "ops", "delta", "train_attention", "train_delta"])
def test_the_code_of_avx512_compiles(name: str) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    source = Path(build.__file__).with_name(f"{name}.cpp")
    command = [compiler, *build.FLAGS, "-march=x86-64-v4", "-fsyntax-only", str(source)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=240).stderr == ""


@nightly("compiles once more; by day a kernel that fails its check is not used in test_build.py")
@pytest.mark.usefixtures("fresh")
@needs_kernel
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The header, with a slip in it, is part of what is compiled."""
    folder = Path(build.__file__).parent
    header = (folder / "vectors.h").read_text()
    assert "5.0000001201e-1f" in header
    (tmp_path / "vectors.h").write_text(header.replace("5.0000001201e-1f", "5.1e-1f"))
    (tmp_path / "ops.cpp").write_text((folder / "ops.cpp").read_text())
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    assert ops.kernels().library is None
    assert ops.kernels().reason == "ops.cpp: silu_mul differs from torch on this processor"
