"""Float32 products of training: every path reproduces float64, gradients too, and a run keeps its choice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llamarl.kernels import build, products
from llamarl.kernels.products import COPIED, INPUT, ONEDNN, OUTPUT, PRODUCTS, TORCH, WEIGHT
from tests.nightly import nightly

PATHS = (TORCH, ONEDNN, COPIED) if products.onednn() else (TORCH,)
SIZES = st.integers(1, 70)


@contextmanager
def serving(path: str) -> Iterator[None]:
    """Meanwhile all products are computed by one path."""
    forced = products.ProductPaths(paths=dict.fromkeys(PRODUCTS, path), measured_us={}, refused=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "chosen", lambda num_outputs, num_inputs: forced)
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(path=st.sampled_from(PATHS), m=SIZES, o=SIZES, i=SIZES, spread=st.sampled_from([1, 3]), turned=st.booleans())
def test_every_path_reproduces_float64(path: str, m: int, o: int, i: int, spread: int, turned: bool) -> None:
    """Of matrices that are parts of others, and lie the other way round."""

    def matrix(rows: int, columns: int, seed: int) -> Tensor:
        if turned:
            return drawn(columns * spread, rows, seed=seed)[::spread].t()
        return drawn(rows, columns * spread, seed=seed)[:, ::spread]

    x, g, w = matrix(m, i, 1), matrix(m, o, 2), matrix(o, i, 3)
    cases = {OUTPUT: (x, w, x.double() @ w.double().T), INPUT: (g, w, g.double() @ w.double())}
    cases[WEIGHT] = g, x, g.double().T @ x.double()
    with serving(path):
        for product, (a, b, exact) in cases.items():
            found = products.multiply(product, a, b)
            torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
            assert torch.equal(products.multiply(product, a, b), found), "the same bits each time"
            out = torch.ones_like(found)
            assert products.multiply(product, a, b, out) is out
            assert torch.equal(out, found)
            products.multiply(product, a, b, out, add=True)
            torch.testing.assert_close(out.double(), 2 * exact, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(len(PATHS) == 1, reason="this torch has no oneDNN")
@pytest.mark.parametrize("path", [ONEDNN, COPIED])
def test_onednn_sees_few_sizes(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Whatever the number of tokens, as it keeps code for each size; and no token is lost between calls."""
    seen, operation = set[tuple[torch.Size, torch.Size]](), products.onednn()
    assert operation is not None

    def noted(a: Tensor, b: Tensor) -> Tensor:
        seen.add((a.shape, b.shape))
        return operation(a, b)

    monkeypatch.setattr(products, "onednn", lambda: noted)
    w = drawn(5, 3)
    with serving(path):
        for m in range(1, 1537, 5):
            x, g = drawn(m, 3, seed=m), drawn(m, 5, seed=m + 1)
            for product, (a, b), exact in (
                (OUTPUT, (x, w), x @ w.T), (INPUT, (g, w), g @ w), (WEIGHT, (g, x), g.T @ x)
            ):  # fmt: skip
                torch.testing.assert_close(products.multiply(product, a, b), exact, atol=1e-4, rtol=1e-4)
    tokens = {max(a[0], a[1], b[1]) for a, b in seen}
    assert tokens <= {*range(64, 513, 64), 640, 768, 896, 1024, 1152, 1280, 1408, 1536}
    assert len(seen) <= 3 * len(tokens)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_float64(path: str, bias: bool) -> None:
    x, w, g = drawn(65, 33), drawn(47, 33, seed=1), drawn(65, 47, seed=2)
    b = drawn(47, seed=3) if bias else None
    exact = [one.double().requires_grad_() for one in (x, w, b) if one is not None]
    F.linear(*exact).backward(g.double())
    own = [one.clone().requires_grad_() for one in (x, w, b) if one is not None]
    with serving(path):
        y = products.linear(*own)
        y.backward(g)
    for one, other in zip(own, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(len(PATHS) == 1, reason="this torch has no oneDNN")
@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_bfloat16_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch, product: str, has_instructions: bool
) -> None:
    """Whether the processor multiplies bfloat16 or the same numbers in float32."""
    monkeypatch.setattr(products, "multiplies_half", lambda: has_instructions)
    a, b = (one.bfloat16() for one in products._operands(product, 61, 96, 40))
    exact = products._multiply(products.TORCH, product, a.double(), b.double(), None, False)
    found = products.multiply_half(product, a, b)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


def test_products_of_bfloat16_are_of_the_processor_s_kind() -> None:
    """AVX2 alone has no instructions for them, and torch would take five times as long."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx2" in flags:
        assert products.multiplies_half() == ("avx512_bf16" in flags)


class TestServed:
    def test_frozen_weights_and_frozen_inputs_cost_no_product(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen, real = list[str](), products.multiply
        monkeypatch.setattr(products, "multiply", lambda product, *rest: seen.append(product) or real(product, *rest))
        with serving(ONEDNN):
            products.linear(drawn(9, 8).requires_grad_(), drawn(7, 8)).sum().backward()
            products.linear(drawn(9, 8), drawn(7, 8).requires_grad_()).sum().backward()
            with torch.no_grad():
                products.linear(drawn(9, 8), drawn(7, 8).requires_grad_())
        assert seen == [OUTPUT, INPUT, OUTPUT, WEIGHT, OUTPUT]

    @pytest.mark.parametrize("kind", ["bfloat16", "float64", "three_dimensions", "no_rows", "meta", "autocast"])
    def test_everything_else_is_torchs(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("served"))
        x, w = drawn(9, 8), drawn(7, 8)
        if kind in ("bfloat16", "float64"):
            x, w = x.to(getattr(torch, kind)), w.to(getattr(torch, kind))
        elif kind != "autocast":
            x = {"three_dimensions": x[None], "no_rows": x[:0], "meta": x.to("meta")}[kind]
            w = w.to(x.device)
        with serving(ONEDNN), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            assert products.linear(x, w).shape == F.linear(x, w).shape

    def test_inside_of_compile_it_is_torchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(products, "_multiply", lambda *_: pytest.fail("served"))
        x, w = drawn(9, 8), drawn(7, 8)
        with serving(ONEDNN):
            compiled = torch.compile(products.linear, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x, w), F.linear(x, w))


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, float]]:
    """A cache folder of its own, and microseconds that each path takes."""
    found = {TORCH: 9.0, ONEDNN: 4.0, COPIED: 6.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_run_folder", [])
    monkeypatch.setattr(products, "_choices", {})
    monkeypatch.setattr(products, "_notes", [])
    monkeypatch.setattr(products, "_times_us", lambda paths, *_: {path: [found[path]] * 3 for path in paths})
    products._chosen.cache_clear()
    yield found
    products._chosen.cache_clear()


def paths_of(o: int, i: int) -> list[str]:
    products._chosen.cache_clear()
    return [*products.chosen(o, i).paths.values()]


@pytest.mark.skipif(len(PATHS) == 1, reason="this torch has no oneDNN")
class TestChoice:
    def test_the_fastest_serves_a_class_of_shapes(self, speeds: dict[str, float]) -> None:
        assert paths_of(100, 65) == [ONEDNN] * 3
        assert products.describe() == (
            "float32 products of weights: 128x128: output by onednn (2.25 times), input by onednn (2.25 times), "
            "weight by onednn (2.25 times)"
        )
        speeds[COPIED] = 3.0
        assert paths_of(128, 128) == [ONEDNN] * 3, "it is measured once"
        assert paths_of(10_000, 65) == [ONEDNN, COPIED, COPIED]

    def test_near_ties_fall_to_torch(self, speeds: dict[str, float]) -> None:
        speeds |= {ONEDNN: 7.5, COPIED: 8.0}
        assert paths_of(32, 32) == [TORCH] * 3

    def test_one_disturbed_round_decides_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert products._fastest({TORCH: [9.0, 90.0, 9.0], ONEDNN: [9.0, 9.0, 9.0]}) == TORCH
        assert products._fastest({TORCH: [90.0, 90.0, 9.0], ONEDNN: [9.0, 9.0, 9.0]}) == TORCH
        assert products._fastest({TORCH: [9.0, 9.0, 9.0], ONEDNN: [4.0, 40.0, 4.0]}) == ONEDNN

    def test_a_path_that_is_wrong_is_refused_and_told(
        self, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As one that rounds factors to bfloat16."""
        monkeypatch.setattr(
            products, "onednn", lambda: lambda a, b: (a.bfloat16().float() @ b.bfloat16().float().t()).contiguous()
        )
        assert paths_of(32, 32) == [TORCH] * 3
        assert "onednn-copied is off by 0.002 in weight 32x32" in products.describe()

    def test_one_that_fails_is_refused(self, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(a: Tensor, b: Tensor) -> Tensor:
            raise RuntimeError("could not create a primitive")

        monkeypatch.setattr(products, "onednn", lambda: fails)
        assert paths_of(32, 32) == [TORCH] * 3
        assert "onednn is off by inf in weight 32x32" in products.describe()

    def test_without_onednn_or_pinned_torch_serves(
        self, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(build.VARIABLE, "torch")
        assert paths_of(32, 32) == [TORCH] * 3
        monkeypatch.delenv(build.VARIABLE)
        monkeypatch.setattr(products, "onednn", lambda: None)
        assert paths_of(32, 32) == [TORCH] * 3

    def test_a_run_goes_on_as_it_began(
        self, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Whatever a later measurement would say; on another processor it says that bits differ."""
        folder = tmp_path / "run" / "kernels"
        build.keep_choices_in(folder)
        assert paths_of(32, 32) == [ONEDNN] * 3
        (kept,) = folder.iterdir()
        assert json.loads(kept.read_text())["paths"] == dict.fromkeys(PRODUCTS, ONEDNN)
        speeds[TORCH] = 1.0
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert paths_of(32, 32) == [ONEDNN] * 3
        assert "another processor" not in products.describe()
        monkeypatch.setattr(build, "processor", lambda: "another")
        assert paths_of(32, 32) == [TORCH] * 3
        assert products.describe().endswith("; " + products._notes[0])
        assert "the run began on another processor, torch or number of threads" in products._notes[0]


def test_a_measurement_is_real_and_draws_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_rng_state()
    choice = products._measured(16, 32)
    assert torch.equal(before, torch.get_rng_state())
    assert set(choice.paths.values()) <= set(PATHS)
    assert not choice.refused or len(PATHS) == 1
    assert all(times[TORCH] > 0 for times in choice.measured_us.values())


def test_what_was_measured_under_other_instructions_serves_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = list[tuple[str, ...]]()
    monkeypatch.setattr(
        products.build, "remembered", lambda name, parts, measure: keys.append(tuple(parts)) or measure()
    )
    for value in (None, "COMPATIBLE", "AVX2"):
        if value:
            monkeypatch.setenv("MKL_CBWR", value)
        else:
            monkeypatch.delenv("MKL_CBWR", raising=False)
        products._chosen.cache_clear()
        products.chosen(8, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    products.chosen(8, 8)
    products._chosen.cache_clear()
    assert len(set(keys)) == 4, "nor by another number of threads"


GROWN = """
import random
import torch
from llamarl.kernels import products

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_num_threads(1)
products.bound_caches()
sizes = ((960, 576), (576, 576), (1536, 576))
weights = [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
before = None
for round in range(120):
    num_tokens = random.randrange(300, 900)
    for weight in weights:
        (torch.randn(num_tokens, 576, dtype=torch.bfloat16, requires_grad=True) @ weight.T).sum().backward()
        weight.grad = None
    before = before or (resident() if round == 50 else None)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@nightly("ten seconds of products")
def test_products_of_ever_new_sizes_take_no_more_memory() -> None:
    """With oneDNN's own bound these products take 400 MB."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no oneDNN products of bfloat16")
    grown = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True, timeout=300)
    assert int(grown.stdout) < 64 << 20
