"""`ExpertFeedForward`: the gated feed-forward of the experts that a row has chosen, in float32, bfloat16, int8 or fp8.

On the CPU `experts.cpp` sorts places by expert, and the path for matrices of these sizes (`paths.py`) multiplies each
expert. A row has the same bits for any other rows. Packed, the three matrices of an expert are adjacent. On GPUs
torch's grouped product multiplies bfloat16 weights and reads the places of experts on the device. Everything else is
multiplied expert by expert, for which the host reads the number of rows of each.

Shape suffixes: N rows, K experts of a row, P places (rows times experts of a row), E experts, D model dim, F width of
an expert.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import linear, ops, paths
from llamarl.kernels.build import Kernel, load

_P, _I = ctypes.c_void_p, ctypes.c_int64
Stack = tuple[Tensor, Tensor | None]
"""One projection of all experts: values [E, outputs, inputs] and, with 8 bits, float32 scales [E, outputs]."""


class _Matrices(ctypes.Structure):
    """One projection of all experts, as `experts.cpp` reads it."""

    _fields_ = (
        ("multiply", _P), ("first", _P), ("step_bytes", _I), ("scales", _P), ("num_outputs", _I), ("num_inputs", _I),
    )  # fmt: skip


@functools.cache
def kernels() -> Kernel:
    """Compiles the kernels, and checks them against torch, at the first call."""
    for needed in (linear.kernels(), ops.kernels()):
        if needed.library is None:
            return needed
    loaded = load("experts")
    if loaded.library is None:
        return loaded
    loaded.library.feed_forward.argtypes = (*[_P] * 8, _I, _I, _I, _I)
    loaded.library.feed_forward.restype = None
    loaded.library.route.argtypes, loaded.library.route.restype = (_P, _P, _P, _I, _P, _P), None
    error = _error(loaded)
    return loaded if error < 1e-5 else Kernel(library=None, reason=f"experts.cpp is off by {error:.1g} here")


class ExpertFeedForward:
    """Sums gates * down(silu(gate(x)) * up(x)) over a row's experts. Holds pointers, and packed copies if the paths
    need them."""

    def __init__(
        self, gate: Stack, up: Stack, down: Stack, first: int = 0, workspace: linear.Workspace | None = None,
        loaded: Kernel | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            gate, up: values [E, F, D].
            down: values [E, D, F].
            first: number of the first of these experts. Rows get nothing from other experts.
            workspace: buffer for packed copies.
            loaded: the kernels for the CPU. None means `kernels()`.
        """
        self._gate, self._up, self._down, self._first = gate, up, down, first
        (self.num_experts, self.width, self.dim), self.device = gate[0].shape, gate[0].device
        assert up[0].shape == gate[0].shape
        assert down[0].shape == (self.num_experts, self.dim, self.width)
        assert all(tensor.is_contiguous() for stack in (gate, up, down) for tensor in stack if tensor is not None)
        self._packed: Tensor | None = None
        self._paths: tuple[paths.Path, paths.Path] | None = None
        self._library = None
        kind = paths.KINDS.get(gate[0].dtype) if self.device.type == "cpu" else None
        loaded = (loaded or kernels()) if kind else None
        if kind is None or loaded is None or loaded.library is None:
            return
        into, back = paths.chosen(kind, 2 * self.width, self.dim), paths.chosen(kind, self.dim, self.width)
        assert into is not None, "there are kernels"
        assert back is not None
        self._library, self._paths = loaded.library, (into, back)
        sizes = [into.packed_bytes(self.width, self.dim) if into.pack else 0] * 2
        self._sizes = [*sizes, back.packed_bytes(self.dim, self.width) if back.pack else 0]
        # Full panels of gate are followed by those of up.
        self._is_joined = bool(into.pack) and into.packed_bytes(self.width + 1, self.dim) > sizes[0]
        if sum(self._sizes):
            self._packed = (workspace or linear.Workspace()).take(self.num_experts * sum(self._sizes))
        self._pack()

    @property
    def reads_counts(self) -> bool:
        """True if the host waits for each expert's number of rows, so a CUDA graph cannot contain this."""
        return self.device.type != "cpu" and not self._is_grouped

    def multipliers(self) -> list[tuple[str, str]]:
        """Returns (path, shape) of the products, for the log."""
        sizes = (f"{self.num_experts} x {2 * self.width}x{self.dim}", f"{self.num_experts} x {self.dim}x{self.width}")
        if self._paths:
            names = [path.name for path in self._paths]
        else:
            names = ["torch's grouped product" if self._is_grouped else "torch"] * 2
        return [*zip(names, sizes, strict=True)]

    def __call__(self, x_N_D: Tensor, ids_N_K: Tensor, gates_N_K: Tensor) -> Tensor:
        """Returns [N, D], in the type of `x`. `ids` are int64 and `gates` float32."""
        if self._library is None or linear.is_exact():
            return self._by_torch(x_N_D, ids_N_K, gates_N_K)
        if self._versions() != self._seen:
            self._pack()
        (num_rows, dim), per_row = x_N_D.shape, ids_N_K.shape[1]
        assert dim == self.dim, f"{dim} columns, not {self.dim}"
        assert gates_N_K.shape == ids_N_K.shape
        assert (ids_N_K.dtype, gates_N_K.dtype, x_N_D.dtype) == (torch.int64, torch.float32, torch.float32)
        assert all(tensor.is_contiguous() for tensor in (x_N_D, ids_N_K, gates_N_K))
        y_N_D = torch.empty(num_rows, dim)
        gate, up, down = (None if matrices is None else ctypes.byref(matrices) for matrices in self._matrices)
        pointers = (tensor.data_ptr() for tensor in (x_N_D, ids_N_K, gates_N_K, y_N_D))
        self._library.feed_forward(
            gate, up, down, self._silu_mul, *pointers, num_rows, per_row, self._first, self.num_experts
        )
        return y_N_D

    def _versions(self) -> list[int]:
        """Returns the counts of in-place changes of copied tensors."""
        copied = (self._gate, self._up, self._down) if self._packed is not None else ()
        return [tensor._version for stack in copied for tensor in stack if tensor is not None]

    def _pack(self) -> None:
        """Packs copies for the paths, and sets the pointers that they read."""
        assert self._paths is not None
        library = ops.kernels().library
        assert library is not None
        self._silu_mul = ctypes.cast(library.silu_mul, _P)
        self._seen, (into, back) = self._versions(), self._paths
        step, packed = sum(self._sizes), self._packed.data_ptr() if self._packed is not None else 0
        matrices, offset = list[_Matrices | None](), 0
        for path, size, (values, scales) in zip(
            (into, into, back), self._sizes, (self._gate, self._up, self._down), strict=True
        ):
            outputs, inputs = values.shape[1:]
            first, step_bytes = values.data_ptr(), outputs * inputs * values.itemsize
            if size:
                assert not values.is_inference(), "an inference tensor has no version"
                for expert in range(self.num_experts):
                    path.pack(values.data_ptr() + expert * step_bytes, outputs, inputs, packed + offset + expert * step)
                first, step_bytes, offset = packed + offset, step, offset + size
            multiply = ctypes.cast(path.multiply, _P)
            scales_at = None if scales is None else scales.data_ptr()
            matrices.append(_Matrices(multiply, first, step_bytes, scales_at, outputs, inputs))
        self._scales = None
        if self._is_joined:
            gate = matrices[0]
            assert gate is not None
            gate.num_outputs, matrices[1] = 2 * self.width, None
            if self._gate[1] is not None and self._up[1] is not None:
                self._scales = torch.cat((self._gate[1], self._up[1]), 1)
                gate.scales = self._scales.data_ptr()
        self._matrices = matrices

    @functools.cached_property
    def _is_grouped(self) -> bool:
        """True if torch's grouped product serves, which does not wait for the device."""
        return (
            self.device.type == "cuda"
            and self._gate[0].dtype == torch.bfloat16
            and self.width % 8 == self.dim % 8 == 0  # its rows begin at multiples of 16 bytes
            and torch.cuda.get_device_capability(self.device) >= (8, 0)
        )

    def _by_torch(self, x_N_D: Tensor, ids_N_K: Tensor, gates_N_K: Tensor) -> Tensor:
        """Computes with places sorted by expert. Places of experts of other ranks are last."""
        num_rows, per_row = ids_N_K.shape
        local_P = ids_N_K.flatten() - self._first
        local_P = local_P.where((local_P >= 0) & (local_P < self.num_experts), self.num_experts)
        sorted_P, order_P = local_P.sort(stable=True)
        rows_P_D = x_N_D[order_P // per_row]
        ends_E = torch.searchsorted(sorted_P, torch.arange(self.num_experts, device=self.device), right=True)
        y_P_D = self._grouped(rows_P_D, ends_E) if self._is_grouped else self._one_by_one(rows_P_D, ends_E.tolist())
        y_P_D = y_P_D.float() * gates_N_K.flatten()[order_P, None]
        # Values behind the last expert's rows are undefined.
        y_P_D = y_P_D.masked_fill((sorted_P == self.num_experts)[:, None], 0.0)
        place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=self.device))
        return y_P_D[place_P].view(num_rows, per_row, self.dim).sum(1).to(x_N_D.dtype)

    def _grouped(self, rows_P_D: Tensor, ends_E: Tensor) -> Tensor:
        offsets_E = ends_E.int()

        def multiply(x: Tensor, stack: Stack) -> Tensor:
            return F.grouped_mm(x, stack[0].transpose(1, 2), offs=offsets_E)

        return multiply(ops.silu_mul(multiply(rows_P_D, self._gate), multiply(rows_P_D, self._up)), self._down)

    def _one_by_one(self, rows_P_D: Tensor, ends: list[int]) -> Tensor:
        y_P_D = torch.zeros_like(rows_P_D)
        for expert, (start, end) in enumerate(pairwise((0, *ends))):
            if start == end:
                continue

            def multiply(x: Tensor, stack: Stack, expert: int = expert) -> Tensor:
                values, scales = stack
                return linear.by_torch(x, values[expert], None if scales is None else scales[expert])

            x = rows_P_D[start:end]
            inner = F.silu(multiply(x, self._gate)) * multiply(x, self._up)
            y_P_D[start:end] = multiply(inner, self._down)
        return y_P_D


class _Rule(ctypes.Structure):
    """Rule by which a router's logits choose experts, as `experts.cpp` reads it."""

    _fields_ = (
        ("num_experts", _I), ("per_row", _I), ("num_groups", _I), ("groups_per_row", _I),
        ("is_sigmoid", ctypes.c_int32), ("is_normalized", ctypes.c_int32), ("scaling", ctypes.c_float),
    )  # fmt: skip


class RouteKernel:
    """The choice of experts on the CPU, like `route` of `models/experts.py`. Needs kernels, and float32 logits."""

    def __init__(
        self, num_experts: int, per_row: int, num_groups: int, groups_per_row: int, is_sigmoid: bool,
        is_normalized: bool, scaling: float,
    ) -> None:  # fmt: skip
        library = kernels().library
        assert library is not None, "there are no kernels"
        self._library, self._per_row = library, per_row
        self._rule = _Rule(num_experts, per_row, num_groups, groups_per_row, is_sigmoid, is_normalized, scaling)

    def __call__(self, logits_N_E: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the experts of each row, int64 [N, K], the likeliest first, and their gates, float32 [N, K]."""
        num_rows = len(logits_N_E)
        assert logits_N_E.shape[1] == self._rule.num_experts
        inputs = [logits_N_E] if bias_E is None else [logits_N_E, bias_E]
        assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in inputs)
        ids_N_K = torch.empty(num_rows, self._per_row, dtype=torch.int64)
        gates_N_K = torch.empty(num_rows, self._per_row)
        self._library.route(
            logits_N_E.data_ptr(), None if bias_E is None else bias_E.data_ptr(), ctypes.byref(self._rule), num_rows,
            ids_N_K.data_ptr(), gates_N_K.data_ptr(),
        )  # fmt: skip
        return ids_N_K, gates_N_K


def _error(loaded: Kernel) -> float:
    """Returns the largest difference to torch's loop, for experts without rows, with one and with several, and experts
    of other ranks."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(3, *size, generator=generator) / 4 for size in ((24, 20), (24, 20), (20, 24)))
    x, gates = torch.randn(6, 20, generator=generator), torch.rand(6, 2, generator=generator)
    ids = torch.tensor([[1, 3], [4, 1], [3, 2], [3, 0], [1, 4], [4, 0]])
    experts = ExpertFeedForward((gate, None), (up, None), (down, None), 1, loaded=loaded)
    actual, expected = experts(x, ids, gates), experts._by_torch(x, ids, gates)
    return (actual - expected).abs().max().nan_to_num(torch.inf).item()
