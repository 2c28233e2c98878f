"""Products against float64; rows do not influence each other; what this processor lacks runs as loops, and compiles."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.kernels import build, linear, paths
from llamarl.kernels.linear import Linear, Workspace
from tests.kernels.engines import EMULATED, ENGINES, engine, rounded, steps
from tests.nightly import nightly

FOLDER = Path(build.__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
SHAPES = [(1, 5, 3), (2, 16, 384), (7, 33, 769), (13, 100, 1537), (33, 64, 128), (257, 17, 64)]


@pytest.fixture(params=ENGINES)
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way that there is."""
    with engine(request.param):
        yield request.param


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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_with_bias_and_sum(computed_by, dtype, shape):
    """Against float64 of the activations as the path rounds them: what is left are sums in float32, and activations
    that lie between two integers, where one more float32 rounding decides."""
    m, n, k = shape
    values, scales, exact = weights(n, k, dtype)
    x, bias = random(m, k, seed=2) * 10.0 ** torch.arange(-3, m - 3)[:, None].clamp(max=3), random(n, seed=3)
    plain, with_bias = Linear(values, scales), Linear(values, scales, bias)
    product = rounded(plain.path, x) @ exact.T
    reach = x.double().norm(dim=1, keepdim=True) * exact.norm(dim=1) * 1e-6
    if dtype == torch.int8 and plain.path != "torch":
        reach = reach + 2 * steps(plain.path, x) * exact.abs().amax(1)
    assert ((plain(x) - product).abs() <= reach).all()
    assert ((with_bias(x) - product - bias).abs() <= reach + 1e-5).all()
    residual = random(m, n, seed=4)
    expected = with_bias(x) + residual
    assert with_bias(x, residual) is residual
    torch.testing.assert_close(residual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_that_of_rounded_activations(computed_by, dtype):
    """Rounding to steps of s adds noise of s / sqrt(12) per activation; bfloat16's s is 2^-8 to 2^-7 of its number."""
    m, n, k = 24, 96, 1024
    values, scales, exact = weights(n, k, dtype)
    x, layer = random(m, k, seed=2), Linear(values, scales)
    product = x.double() @ exact.T
    error = (layer(x) - product).norm() / product.norm()
    step = steps(layer.path, x).norm() / x.norm(dim=1, keepdim=True).double().norm() * k**0.5
    noise = step / 12**0.5 if step else torch.tensor(1.66e-3 if layer.path.endswith("-bf16") else 0.0)
    assert 0.9 * noise <= error <= 1.1 * noise + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(computed_by, dtype):
    values, scales, _ = weights(50, 1000, dtype)
    x, layer = random(300, 1000), Linear(values, scales)
    if layer.path == "torch":
        pytest.skip("torch's matmul depends on the number of rows")
    together = layer(x)
    for rows in ([5], [7, 299], [0, 1, 2], list(range(40, 57)), list(range(33)), list(range(280))):
        assert torch.equal(layer(x[rows]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_not_finite_and_harms_no_other(computed_by, dtype, bad):
    values, scales, _ = weights(20, 100, dtype)
    x, layer = random(5, 100), Linear(values, scales)
    good = layer(x)
    x[3, 99] = bad
    found = layer(x)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4]], good[[0, 1, 2, 4]])


def test_a_bad_scale_or_weight_gives_nan_in_its_column(computed_by):
    for dtype in DTYPES:
        values, scales, _ = weights(20, 100, dtype)
        target = values if scales is None else scales
        target[7] = float("nan")
        found = Linear(values, scales)(random(5, 100))
        assert found[:, 7].isnan().all()
        assert found[:, :7].isfinite().all() and found[:, 8:].isfinite().all()


@pytest.mark.parametrize("k", [256, 4096, 32768])
def test_int8_sums_do_not_saturate(computed_by, k):
    values = torch.full((8, k), 127, dtype=torch.int8)
    values[4:] = -127
    found = Linear(values, torch.full((8,), 1 / 127))(torch.full((3, k), 2.0))
    expected = torch.tensor([2.0 * k] * 4 + [-2.0 * k] * 4).expand(3, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_follow_a_change_in_place(computed_by, dtype):
    """Also those of a path that packs a copy, in memory that it uses again."""
    values, scales, _ = weights(40, 96, dtype)
    workspace, x = Workspace(), random(3, 96)
    layer = Linear(values, scales, workspace=workspace)
    before, address = layer(x), layer._arguments[0] if layer.path != "torch" else None
    values[11] = values[12]
    assert torch.equal(layer(x)[:, 11], before[:, 12] * (1 if scales is None else scales[11] / scales[12])) or (
        scales is not None
    )
    assert not torch.equal(layer(x)[:, 11], before[:, 11])
    assert torch.equal(layer(x)[:, 13:], before[:, 13:])
    packs = layer._packed is not None
    assert workspace.num_bytes == (layer._path.packed_bytes(40, 96) if packs else 0)
    workspace.begin()
    again = Linear(values, scales, workspace=workspace)
    assert torch.equal(again(x), layer(x))
    assert not packs or again._arguments[0] == address


def test_both_ways_to_multiply_int8_by_8_bits_agree_bit_for_bit():
    """Tiles and vectors sum the same integers and share what follows."""
    values, scales, _ = weights(70, 300, torch.int8)
    x, found = random(45, 300), list[Tensor]()
    for name in (*EMULATED, *(name for name in ("amx", "avx512") if name in build.offered())):
        with engine(name):
            layer = Linear(values, scales)
            if layer.path.endswith(("-int8", "-vnni")):
                found.append(layer(x))
    assert len(found) >= 2
    assert all(torch.equal(one, found[0]) for one in found)


def test_what_multiplies_has_a_name(computed_by):
    names = {Linear(*weights(20, 100, dtype)[:2]).path for dtype in DTYPES}
    assert (names == {"torch"}) == (computed_by == "torch")
    assert bool(linear.kernels().reason) == (computed_by == "torch")
    assert any(name.startswith(computed_by.removeprefix("emulated-")) for name in names)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", [("-DLLAMARL_LANES=16",), ("-DLLAMARL_LANES=8",), ("-march=x86-64",)], ids=str)
def test_panels_of_other_vectors(flags, kind, monkeypatch):
    """Widths that this processor does not choose, or makes of several registers."""
    monkeypatch.setitem(build._LIMITS, "others", flags)
    if build.load("panels", "others").library is None:
        pytest.skip(build.load("panels", "others").reason)
    (path,) = paths.vector_path(kind, "others")
    assert paths.error_of(path, kind) <= 1e-6
    x, w = random(40, 700), random(37, 700, seed=1).to(getattr(torch, kind))
    packed, y, one = path.packed(w), torch.empty(40, 37), torch.empty(1, 37)
    assert len(packed) == path.packed_bytes(37, 700)
    path.multiply(x.data_ptr(), packed.data_ptr(), None, y.data_ptr(), 40, 37, 700, 0)
    for row in (0, 13, 39):
        path.multiply(x[row].data_ptr(), packed.data_ptr(), None, one.data_ptr(), 1, 37, 700, 0)
        assert torch.equal(one[0], y[row])


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64")
@pytest.mark.parametrize("name", ["linear", "panels", "packed"])
@pytest.mark.parametrize("processor", ["x86-64", "skylake-avx512", "cascadelake", "sapphirerapids", "alderlake"])
@pytest.mark.parametrize("pin", ["", "avx512", "avx2"])
def test_compiles_for_processors_that_are_not_here(name, processor, pin):
    """Generic vectors, AVX-512 without and with VNNI, with bfloat16 and AMX, VNNI without AVX-512, and what is pinned
    there."""
    if name == "packed" and processor in ("x86-64", "alderlake"):
        pytest.skip("needs AVX-512")
    if (pin and processor != "sapphirerapids") or (name, pin) == ("packed", "avx2"):
        pytest.skip("has little to leave out")
    command = ["g++", "-std=c++17", "-O1", f"-march={processor}", *build._LIMITS.get(pin, ()), "-Wall"]
    status, errors, found = assembled(name, command)
    if "bad value" in errors:
        pytest.skip(f"this g++ does not know {processor}")
    assert status == 0, errors
    if (name, processor) == ("packed", "sapphirerapids"):
        for instruction in INSTRUCTIONS:
            assert (instruction in found) == (not pin or instruction.startswith("v"))


INSTRUCTIONS = ("tdpbf16ps", "tdpbsud", "vpdpbusd")


def assembled(name: str, command: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, what the compiler says, and which of the instructions are in what it makes; as kernels are, compiled
    once per source, compiler and flags, since it takes long."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    texts = build.source_text(name), version, *command, *INSTRUCTIONS
    kept = build.cache_folder() / f"assembled-{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        made = subprocess.run([*command, "-S", str(FOLDER / f"{name}.cpp"), "-o-"], capture_output=True, timeout=240)
        found = [one for one in INSTRUCTIONS if one.encode() in made.stdout]
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([made.returncode, made.stderr.decode(errors="replace"), found]))
        partial.replace(kept)
    return tuple(json.loads(kept.read_text()))


@nightly("a process of its own; by day products keep small numbers")
def test_loading_leaves_denormals_alone():
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    code = "import torch; from llamarl.kernels import paths; paths.offered('int8'); print(torch.tensor(1e-40) * 1 > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "tensor(True)"


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    if not paths.offered("int8"):
        pytest.skip(linear.kernels().reason)
    monkeypatch.setattr(paths, "_functions", lambda *_: {"multiply": lambda *arguments: None})
    assert paths.offered.__wrapped__("int8") == ()
    monkeypatch.setattr(paths, "offered", paths.offered.__wrapped__)
    found = linear.kernels.__wrapped__()
    assert found.library is None
    assert "off by" in found.reason
