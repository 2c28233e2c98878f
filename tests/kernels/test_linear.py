"""Products against float64; rows do not influence each other; what this processor lacks compiles at least."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.kernels import build, linear
from llamarl.kernels.linear import Linear

CPU = torch.device("cpu")
SOURCE = Path(build.__file__).with_name("linear.cpp")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
SHAPES = [(1, 5, 3), (2, 16, 384), (7, 33, 769), (13, 100, 1537), (257, 17, 64)]


@pytest.fixture(params=["kernel", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Both ways on the same machine."""
    caches = build.load, linear.kernels, linear.path
    if request.param == "torch":
        monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    elif linear.kernels().library is None:
        pytest.skip(linear.kernels().reason)
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def weights(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values and scales for `Linear`, and what they stand for in float64."""
    w = random(n, k, seed=1)
    if dtype != torch.int8:
        values = w.to(dtype)
        return values, None, values.double()
    scales = w.abs().amax(1) / 127
    values = (w / scales[:, None]).round().to(torch.int8)
    return values, scales, values.double() * scales.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_bias_and_sum(engine, dtype, shape):
    m, n, k = shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.int8: 2e-2}[dtype]
    values, scales, exact = weights(n, k, dtype)
    x, bias = random(m, k, seed=2) * 10.0 ** torch.arange(-3, m - 3)[:, None].clamp(max=3), random(n, seed=3)
    product = x.double() @ exact.T
    reach = x.double().norm(dim=1, keepdim=True) * exact.norm(dim=1) * tolerance
    plain, with_bias = Linear(values, scales), Linear(values, scales, bias)
    assert ((plain(x) - product).abs() <= reach).all()
    assert ((with_bias(x) - product - bias).abs() <= reach + 1e-5).all()
    residual = random(m, n, seed=4)
    expected = with_bias(x) + residual
    assert with_bias(x, residual) is residual
    torch.testing.assert_close(residual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    if linear.path(dtype, CPU) == "torch":
        pytest.skip("torch's matmul depends on the number of rows")
    values, scales, _ = weights(50, 1000, dtype)
    x, layer = random(300, 1000), Linear(values, scales)
    together = layer(x)
    for rows in ([5], [7, 299], [0, 1, 2], list(range(40, 57)), list(range(280))):
        assert torch.equal(layer(x[rows]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_not_finite_and_harms_no_other(engine, dtype, bad):
    values, scales, _ = weights(20, 100, dtype)
    x, layer = random(5, 100), Linear(values, scales)
    good = layer(x)
    x[3, 99] = bad
    found = layer(x)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4]], good[[0, 1, 2, 4]])


def test_a_bad_scale_or_weight_gives_nan_in_its_column(engine):
    for dtype in DTYPES:
        values, scales, _ = weights(20, 100, dtype)
        target = values if scales is None else scales
        target[7] = float("nan")
        found = Linear(values, scales)(random(5, 100))
        assert found[:, 7].isnan().all()
        assert found[:, :7].isfinite().all() and found[:, 8:].isfinite().all()


@pytest.mark.parametrize("k", [256, 4096, 32768])
def test_int8_sums_do_not_saturate(engine, k):
    values = torch.full((8, k), 127, dtype=torch.int8)
    values[4:] = -127
    found = Linear(values, torch.full((8,), 1 / 127))(torch.full((3, k), 2.0))
    expected = torch.tensor([2.0 * k] * 4 + [-2.0 * k] * 4).expand(3, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_what_multiplies_has_a_name(engine):
    names = {linear.path(dtype, CPU) for dtype in DTYPES}
    assert (names == {"torch"}) == (engine == "torch")
    assert bool(linear.kernels().reason) == (engine == "torch")


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    loaded = build.load("linear")
    if loaded.library is None:
        pytest.skip(loaded.reason)

    class Wrong:
        def __getattr__(self, name):
            return (lambda *arguments: None) if name == "linear_int8" else getattr(loaded.library, name)

    monkeypatch.setattr(build, "load", lambda name: build.Kernel(library=Wrong(), reason=""))
    found = linear.kernels.__wrapped__()
    assert found.library is None
    assert "off by" in found.reason and "int8" in found.reason


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "skylake-avx512", "sapphirerapids", "alderlake"])
def test_compiles_for_processors_that_are_not_here(processor):
    """Generic vectors, AVX-512 without and with VNNI and bfloat16, and VNNI without AVX-512."""
    command = ["g++", "-std=c++17", "-O1", f"-march={processor}", "-Wall", "-fsyntax-only", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "bad value" in done.stderr:
        pytest.skip(f"this g++ does not know {processor}")
    assert done.returncode == 0, done.stderr


def test_loading_leaves_denormals_alone():
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    code = (
        "from llamarl.kernels.linear import kernels; kernels(); import torch; print((torch.tensor(1e-40) * 1).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) > 0
