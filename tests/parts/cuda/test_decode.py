"""Decode attention of the Triton kernels against float64: by the interpreter, or on the GPU where there is one.

Not covered without a GPU: speed. That Triton compiles the kernels says `test_compile.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llamarl.kernels import gpu
from llamarl.kernels.attention import BLOCK_SIZE
from llamarl.parts.cuda import checks
from tests.nightly import also, crossed, nightly, some
from tests.parts.cuda.interpreter import computing_as_a_gpu, needs_interpreter

decode = pytest.importorskip("llamarl.parts.cuda.decode")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one after the other, and needs milliseconds for each."""
    monkeypatch.setattr(decode, "_PROGRAMS", 1)
    monkeypatch.setattr(decode, "_LEAST_TILES", 1)


def attended(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    spread: float = 1.0,
    cached: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Of rows with so many tokens of a prefix and of their own, in blocks anywhere, and in float64.

    Whatever no row may see is NaN: the rest of each block, the blocks of others, what the table says behind a row.
    """
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    blocks = [[-(-tokens // BLOCK_SIZE) for tokens in row] for row in lengths]
    width, num_blocks = max(map(sum, blocks)) + 3, sum(map(sum, blocks)) + 5
    keys, values = torch.full((2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=cached or dtype)
    free = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(lengths), width), int(free[-1]), dtype=torch.int32)
    q = (torch.randn(len(lengths), num_heads, head_dim, generator=generator) * spread).to(dtype)
    exact = torch.empty(q.shape, dtype=torch.float64)
    for row, tokens in enumerate(lengths):
        seen = list[tuple[Tensor, Tensor]]()
        for start, count in zip((0, blocks[row][0]), tokens, strict=True):
            ids, free = free.split((-(-count // BLOCK_SIZE), len(free) - -(-count // BLOCK_SIZE)))
            table[row, start : start + len(ids)] = ids
            place_N = torch.arange(count)
            of_both = torch.randn(2, count, num_kv_heads, head_dim, generator=generator).to(cached or dtype)
            for stored, of_one in zip((keys, values), of_both, strict=True):
                stored[ids[place_N // BLOCK_SIZE], :, place_N % BLOCK_SIZE] = of_one
            seen.append(of_both.double())
        key_J_N_K, value_J_N_K = torch.cat(seen, 1).transpose(1, 2)
        scores_J_r_N = q[row].double().unflatten(0, (num_kv_heads, -1)) @ key_J_N_K.transpose(1, 2) * head_dim**-0.5
        exact[row] = (torch.softmax(scores_J_r_N, -1) @ value_J_N_K).flatten(0, 1)
    counts = torch.tensor(lengths, dtype=torch.int32).T.contiguous()
    integers = table.flatten(), torch.tensor([width], dtype=torch.int32), *counts
    arguments = (x.to(DEVICE) for x in (q, keys.transpose(2, 3), values, *integers))
    return decode.decode_attention(*arguments).double().cpu(), exact


def share_apart(out: Tensor, exact: Tensor) -> float:
    """Share of numbers that are not the exact ones rounded to bfloat16. A third, if weights were rounded once."""
    assert (out - exact).norm() / exact.norm() < 3e-3
    return (out != exact.bfloat16().double()).double().mean().item()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A unit in the last place of bfloat16: the interpreter cuts off where a GPU rounds."""
    return {"rtol": 2.0**-7 if dtype == torch.bfloat16 else 0.0, "atol": 2e-6}


@pytest.mark.parametrize(
    ("heads", "dtype"), some(crossed([(2, 2), (6, 2), (20, 1)], [torch.float32, torch.bfloat16]), 2), ids=str
)
def test_odd_lengths_and_shared_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = [(0, 1), (15, 16), (16, 17), (64, 64), (300, 1), (5, 259), (0, 256), (0, 257)]
    out, exact = attended(lengths, heads, 32, dtype)
    torch.testing.assert_close(out, exact, **tolerance(dtype))


@pytest.mark.parametrize("head_dim", [8, 80, *also(24, 128, 256)])
def test_any_head_size(head_dim: int) -> None:
    out, exact = attended([(9, 70), (33, 20)], (4, 2), head_dim, torch.float32)
    torch.testing.assert_close(out, exact, **tolerance(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_in_float8(dtype: torch.dtype) -> None:
    """Read as they are; what no row may see is NaN there too."""
    out, exact = attended([(9, 70), (0, 1), (300, 20)], (6, 2), 32, dtype, cached=torch.float8_e4m3fn)
    torch.testing.assert_close(out, exact, **tolerance(dtype))


@nightly("Triton's interpreter is slow; by day heads and lengths of other tests here are beside torch")
@pytest.mark.parametrize("tokens", [500, 20_000])
def test_no_error_grows_with_the_context(tokens: int) -> None:
    """The result is rounded to bfloat16 once, at any length."""
    out, exact = attended([(tokens // 3, tokens - tokens // 3)], (4, 1), 32, torch.bfloat16, spread=3.0)
    torch.testing.assert_close(out, exact, **tolerance(torch.bfloat16))


@pytest.mark.parametrize(
    ("heads", "head_dim", "cached"),
    [
        ((8, 2), 64, torch.float8_e4m3fn), ((8, 1), 128, torch.bfloat16), ((2, 2), 256, torch.bfloat16),
        *also(
            ((8, 2), 64, torch.bfloat16), ((8, 2), 128, torch.bfloat16), ((4, 2), 128, torch.bfloat16),
            *(((num, of), size, torch.float8_e4m3fn) for num, of, size in ((8, 2, 128), (8, 1, 128), (4, 2, 128),
                                                                           (2, 2, 256))),
        ),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU takes this branch in all tests")
def test_the_branch_that_gpus_take(heads: tuple[int, int], head_dim: int, cached: torch.dtype) -> None:
    """Products of tiles in bfloat16, with weights as two numbers, or in float16; the result is rounded once.

    Each kv head has as many query heads as in models of today. Two of them show whose keys are read: a program knows
    no more of the others.
    """
    with computing_as_a_gpu():
        for lengths, spread in (([(15, 16), (0, 1), (300, 1), (5, 259)], 1.0), ([(33, 700)], 3.0)):
            out, exact = attended(lengths, heads, head_dim, torch.bfloat16, spread, cached)
            # A float8 cache is multiplied by weights of 11 bits; its own numbers have 4.
            assert share_apart(out, exact) < (0.09 if cached == torch.float8_e4m3fn else 0.03)


@nightly("Triton's interpreter is slow; by day heads and lengths of other tests here are beside torch")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU takes this branch in all tests")
def test_the_branch_that_gpus_take_over_long_contexts() -> None:
    with computing_as_a_gpu():
        out, exact = attended([(2667, 5333)], (8, 2), 64, torch.bfloat16, spread=3.0)
    assert share_apart(out, exact) < 0.03


@pytest.mark.parametrize(("norms", "cached"), crossed([False, True], [torch.float32, torch.float8_e4m3fn]), ids=str)
def test_one_launch_rotates_writes_and_attends(norms: bool, cached: torch.dtype) -> None:
    """Bit for bit what two launches compute; queries, keys and values lie in one matrix, as they do in a step."""
    head_dim, num_heads, num_kv_heads, width, generator = 24, 4, 2, 20, torch.Generator().manual_seed(0)
    lengths = torch.tensor([[0, 15, 33, 0], [1, 17, 200, 16]], dtype=torch.int32)
    num_rows, num_blocks = lengths.shape[1], 90
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(DEVICE)
    sizes = [num_heads * head_dim, *[num_kv_heads * head_dim] * 2]
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in qkv.split(sizes, 1))
    rotation = torch.randn(num_rows, 2, head_dim, generator=generator).to(DEVICE).split(1, 1)
    weights = torch.randn(2, head_dim, generator=generator).to(DEVICE).unbind() if norms else None
    table = torch.randperm(num_blocks, generator=generator)[: num_rows * width].int().to(DEVICE)
    prefix_B, own_B = lengths.to(DEVICE)
    rows = table, torch.tensor([width], dtype=torch.int32, device=DEVICE), prefix_B, own_B
    last_B = (prefix_B + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + own_B - 1
    places = table.view(num_rows, width).gather(1, (last_B // BLOCK_SIZE).long()[:, None])[:, 0], last_B % BLOCK_SIZE
    stored = torch.randn(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim, generator=generator).to(DEVICE, cached)
    found = list[tuple[Tensor, Tensor]]()
    for is_whole in (False, True):
        keys, values = stored.clone()
        caches = keys.transpose(2, 3), values
        if is_whole:
            out = decode.attend_rotated(q, k, v, rotation, weights, 1e-6, caches, rows)
        else:
            ops = pytest.importorskip("llamarl.parts.cuda.ops")
            turned = ops.rotate_and_write(q, k, v, rotation, weights, 1e-6, caches, places)
            out = decode.decode_attention(turned, *caches, *rows)
        found.append((out, torch.stack((keys, values)).view(torch.uint8)))
    assert torch.equal(found[0][1], found[1][1]), "the caches"
    assert torch.equal(found[0][0], found[1][0])
    assert not decode._tickets(DEVICE).any(), "counters are ready for the next launch"


def test_rows_that_fill_the_device_are_not_cut_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 8 kv heads as before; 256 rows of 256 tokens are one part each, and 8k tokens still two."""
    monkeypatch.undo()
    assert decode._parts(64 * 8) == (4, 4)
    parts, least = decode._parts(256 * 8)
    tokens_of_part = least * decode._TILE
    assert parts == 2 and tokens_of_part >= 1024
    assert decode._parts(1024 * 8)[0] == 1
    assert decode._parts(8)[0] == 64


@nightly("Triton's interpreter is slow; by day heads and lengths of other tests here are beside torch")
def test_what_a_gpu_checks_at_start() -> None:
    assert checks.decode_error(decode, DEVICE) < 1e-2
    assert checks.decode_error(decode, DEVICE, torch.float32) < 1e-5
    assert not gpu.kernel("decode", torch.device("cpu"))
    rotated, alone = decode.attend_rotated, decode.decode_attention
    for wrong in (
        {"decode_attention": lambda q, *rest: q, "attend_rotated": rotated},
        {"decode_attention": alone, "attend_rotated": lambda q, *rest: q},
    ):
        assert checks.decode_error(SimpleNamespace(**wrong), DEVICE) > 0.1
