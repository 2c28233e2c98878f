"""Kernels of a pretended GPU that take less than the CPU's do, or round more often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llamarl.models.flash_attention import Segments
from tests.models import flash

aten = torch.ops.aten
CALLS = Counter[str]()
"""Of kernels that a test asks for."""


class Refused(RuntimeError):
    """A kernel does not take these."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """cuBLASLt's: rows of scales for rows of `a` and for columns of `b`."""
    del use_fast_accum
    _require(a.dtype == b.dtype == torch.float8_e4m3fn, "both factors are float8")
    _require(a.is_contiguous() and b.t().is_contiguous(), "the first factor is row-major, the second column-major")
    _require(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, f"K and N are multiples of 16, not {tuple(b.shape)}")
    _require(scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1]), "a scale for each row and column")
    _require(all(one.dtype == torch.float32 and one.is_contiguous() for one in (scale_a, scale_b)), "float32 scales")
    _require(out_dtype == torch.bfloat16 and bias is None and scale_result is None, "rowwise scales give bfloat16")
    return ((a.float() @ b.float()) * scale_a * scale_b).to(torch.bfloat16)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    _require(a.dtype == b.dtype == torch.int8, "both factors are int8")
    _require(len(a) > 16, f"more than 16 rows, not {len(a)}")
    _require(all(one % 8 == 0 for one in b.shape), f"K and N are multiples of 8, not {tuple(b.shape)}")
    return (a.double() @ b.double()).to(torch.int32)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Sums stay as they are, in float32."""
    _require(a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16), "two factors of 16 bits, of one type")
    _require(out_dtype == torch.float32, "16-bit factors give float32")
    _require(out is None or out.dtype == out_dtype, "the result is written in its own type")
    product = a.float() @ b.float()
    return product if out is None else out.copy_(product)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, cum_q, cum_k)
    _require(not dropout and not return_debug_mask and not options, "without dropout")
    out, lse = flash.forward(q.float(), k.float(), v.float(), Segments(cum_q, cum_k, max_q, max_k, is_causal))
    nothing = torch.zeros(0)
    return out.to(q.dtype), lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int,
    max_k: int, dropout: float, is_causal: bool, *_: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, cum_q, cum_k)
    _require(lse.dtype == torch.float32 and lse.is_contiguous() and not dropout, "float32 sums, without dropout")
    given = (one.float() for one in (grad, q, k, v, out, lse))
    return tuple(
        one.to(q.dtype) for one in flash.backward(*given, Segments(cum_q, cum_k, max_q, max_k, is_causal))
    )  # fmt: skip


def _flash_of_one(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of a batch of one, heads first; heads may share keys."""
    _require(len(q) == 1 and scale in (None, q.shape[-1] ** -0.5), "one sequence, scores over sqrt(head dim)")
    bounds = [torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k)]
    given = (x[0].transpose(0, 1) for x in (q, k, v))
    CALLS["flash of one"] += 1
    out, lse, *rest = _flash_forward(*given, *bounds, q.shape[2], k.shape[2], dropout, is_causal, return_debug_mask)
    return out.transpose(0, 1)[None], lse[None], *bounds, q.shape[2], k.shape[2], *rest


def _check_flash(q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor) -> None:
    _require(q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16), "16 bits, of one type")
    _require(all(one.stride(-1) == 1 for one in (q, k, v)), "channels lie next to each other")
    _require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"head dims in eights, to 256, not {q.shape[-1]}")
    _require(all(one.dtype == torch.int32 for one in bounds), "segments are bounded by int32")


def _fused_choice(*_: Any, **__: Any) -> int:
    """SDPA by the composite of products and a softmax: the others are kernels of one device each."""
    return 0


def _added(base: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """`index_add_`, rounding to the type of the sum once per addition, as each atomic does."""
    rows, parts = base.movedim(dim, 0), (source * alpha).movedim(dim, 0)
    left = torch.arange(len(index))
    while len(left):  # one addition to each row that still gets some
        targets, inverse = index[left].unique(return_inverse=True)
        first = torch.full((len(targets),), len(left)).scatter_reduce(0, inverse, torch.arange(len(left)), "amin")
        rows[targets] = rows[targets] + parts[left[first]]
        keep = torch.ones(len(left), dtype=torch.bool)
        keep[first] = False
        left = left[keep]
    return base


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_mm.default: _scaled_mm,
    aten._int_mm.default: _int_mm,
    aten.mm.dtype: _mm,
    aten.mm.dtype_out: _mm,
    aten._fused_sdp_choice.default: _fused_choice,
    aten._flash_attention_forward.default: _flash_forward,
    aten._flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_of_one,
    aten.index_add_.default: _added,
}
"""Those that differ from the CPU's."""


def _product_shape(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    return a.new_empty(len(a), b.shape[1], dtype=out_dtype) if out is None else out


SHAPES: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: _product_shape,
    aten.mm.dtype_out: _product_shape,
    aten._fused_sdp_choice.default: lambda *_, **__: 2,  # of the kernels that keep no scores, the one for float32
}
"""Those of tensors without values that torch has no shapes for, or other ones."""
