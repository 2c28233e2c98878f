"""The engine over the Triton kernels, on a GPU or by their interpreter; see `test_decode.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel
from llamarl.kernels import gpu
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.cuda.graphs import DecodeGraphs
from llamarl.types import GenerationRequest
from tests.generation.native import GREEDY, SAMPLED, assert_same, make_engine, run
from tests.kernels.engines import engine as computed_by
from tests.nightly import NIGHTLY, also, nightly
from tests.parts.cuda.interpreter import needs_interpreter

ops = pytest.importorskip("llamarl.parts.cuda.ops")
decode = pytest.importorskip("llamarl.parts.cuda.decode")
products = pytest.importorskip("llamarl.parts.cuda.products")
sample = pytest.importorskip("llamarl.parts.cuda.sample")
KERNELS = {"decode": decode, "ops": ops, "sample": sample, "products": products}
pytestmark = needs_interpreter
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


SERVED = {"qwen3": replace(SAMPLED, top_p=0.9), **({"llama": GREEDY} if NIGHTLY else {})}
"""By day the one whose kernels do all that the other's do, and more; the interpreter takes seconds for each."""


@nightly("Triton's interpreter is slow; each kernel is beside torch by day")
@pytest.mark.parametrize("few", [True, *also(False)], ids=["few rows", *also("separate")])
@pytest.mark.parametrize(("family", "sampling"), SERVED.items(), ids=SERVED)
def test_an_engine_generates_the_same(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, family: str, sampling: object, few: bool
) -> None:
    """Its steps, those with prefill and padded ones included, run all kernels, and need no clean blocks. The next step
    is launched before the tokens of one are read."""
    monkeypatch.setattr(DecodeGraphs, "_measure", lambda *_: few)
    if few:  # without truncation, so that the graphs draw
        sampling = replace(sampling, top_p=1.0)
    requests = [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=torch.arange(1, 4 + 15 * i, dtype=torch.int32).numpy(), group_size=2 - i,
            sampling=replace(sampling, max_new_tokens=4 + 8 * i),
        )
        for i in range(2)
    ]  # fmt: skip

    def engine(**options: object) -> Engine:
        served = GeneratorModel(make_model(family=family).shape, "float32", DEVICE)
        served.load(make_model(family=family))
        return make_engine(served, blocks=9, prefill_tokens=7, max_running=3, **options)

    monkeypatch.setattr(decode, "_PROGRAMS", 1)
    with computed_by("torch"):
        monkeypatch.setattr(gpu, "kernel", lambda name, device: None)
        expected = run(engine(graphs=False), requests)
        monkeypatch.setattr(gpu, "kernel", lambda name, device: KERNELS.get(name))
        graphed = engine(graphs=True, goes_ahead=True)
        assert " triton" in graphed.describe()
        for stored in (graphed._cache.keys_L_C_J_K_S, graphed._cache.values_L_C_J_S_K):
            stored.fill_(torch.nan)
        assert_same(run(graphed, requests), expected)


@nightly("Triton's interpreter is slow; each kernel is beside torch by day")
def test_quantized_rows_and_sums_go_from_kernel_to_kernel(
    make_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms add the product before and quantize for the next; against torch, which does one after the other."""
    token_N, logits = torch.arange(1, 21, device=DEVICE), list[torch.Tensor]()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + (k + v).repeat_interleave(2, 1)

    with computed_by("torch"):
        for kernels in ({}, {"ops": ops}):
            monkeypatch.setattr(gpu, "kernel", lambda name, device, kernels=kernels: kernels.get(name))
            served = GeneratorModel(make_model().shape, "int8", DEVICE)
            served.load(make_model())
            hidden_N_D = served(token_N, torch.arange(20, device=DEVICE), attend)
            logits.append(served.logits(hidden_N_D))
    expected, found = logits
    assert 0 < ((found - expected).norm() / expected.norm()).item() < 0.03


class Launches(TorchDispatchMode):
    """Counts operations that launch something, and the launches of this package's kernels."""

    OF_FUNCTION: ClassVar[dict[str, int]] = {"draw": 2}

    def __init__(self) -> None:
        super().__init__()
        self.count, self._is_inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
        is_free = func.name().startswith(("aten::empty", "aten::detach")) or (bool(aliases) and all(aliases))
        self.count += not (is_free or self._is_inside)
        return func(*args, **(kwargs or {}))

    def of(self, module: Any) -> Any:
        """Returns a module of kernels whose calls are counted."""

        def counted(name: str, function: Any) -> Any:
            if not callable(function) or name == "num_parts":
                return function

            def call(*arguments: Any, **options: Any) -> Any:
                self.count += 0 if self._is_inside else self.OF_FUNCTION.get(name, 1)
                was, self._is_inside = self._is_inside, True
                try:
                    return function(*arguments, **options)
                finally:
                    self._is_inside = was

            return call

        return SimpleNamespace(**{name: counted(name, value) for name, value in vars(module).items()})


@nightly("Triton's interpreter is slow; each kernel is beside torch by day")
@pytest.mark.parametrize(("few", "of_layer", "most"), [(True, 5, 200), *also((False, 8, 270))])
def test_launches_of_a_decode_step(monkeypatch: pytest.MonkeyPatch, few: bool, of_layer: int, most: int) -> None:
    """Of the 32 layers of 8B, with head and sampling: at most 200, where 320 and more were launched."""
    monkeypatch.setattr(DecodeGraphs, "_measure", lambda *_: few)
    found, counted = list[int](), Launches()
    kernels = {name: counted.of(module) for name, module in KERNELS.items()}
    monkeypatch.setattr(gpu, "kernel", lambda name, device: kernels.get(name))
    for num_layers in (1, 2):
        shape = ModelShape(
            family="llama", hidden_size=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=8,
            intermediate_size=48, vocab_size=40, max_position_embeddings=96,
        )  # fmt: skip
        model = Transformer(shape)
        model.initialize(0, 0.25)
        with computed_by("torch"), torch.inference_mode():
            served = GeneratorModel(shape, "float32", DEVICE)
            served.load(model)
            engine = make_engine(served, blocks=9, max_running=2, graphs=True)
            assert isinstance(engine._graphs, DecodeGraphs)
            engine._graphs._capture(2, True)
            (replays,) = engine._graphs._replays.values()
            replays[2, True]()  # makes the table of rotations, which a capture does beforehand
            with counted:
                before = counted.count
                replays[2, True]()
            found.append(counted.count - before)
    assert found[1] - found[0] == of_layer
    assert found[0] + 31 * of_layer <= most
