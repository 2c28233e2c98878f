"""Training in bfloat16 with float32 weights: products, and on GPUs norms, rotations and gated activations.

Autocast would cast a weight in each forward, again for recomputed activations, and its gradient to float32 before it is
added: 30 bytes per weight and microbatch. Here a weight is cast when it has changed, and the product for its gradient
adds to the gradient. Each operation between products is one launch (`parts/cuda/train.py`). Weights that FSDP2 has
gathered in bfloat16 are multiplied as they are, and FSDP2 sums their gradients. Torch serves without autocast on a GPU,
and inside of `torch.compile`.

With selective checkpointing products keep how their input was computed instead of the input, if that was a norm or a
gated activation (`Again`): one more launch each in backward, and no product is computed twice.

On CPUs a product rounds its factors to bfloat16 and returns float32, so operations between products stay in float32 and
the kernels of `fused.py` serve.

Shape suffixes: M rows, I inputs, O outputs; N packed tokens, D model dim, H heads, K head dim, F feed-forward dim, R
rotated channels of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.kernels import fused, gpu, ops, train_attention, train_delta
from llamarl.kernels.fused import GateFunction
from llamarl.kernels.products import INPUT, OUTPUT, WEIGHT, multiplies_half, multiply_half


def prepare(device: torch.device, has_delta: bool) -> None:
    """Compiles and checks kernels now instead of inside of the first forward, whose tensors are counted."""
    if device.type == "cpu":
        ops.kernels()
        train_attention.kernels()
        if has_delta:
            train_delta.kernels()
        return
    gpu.kernel("train", device)
    _adds_in_place(device)


def describe(device: torch.device, has_delta: bool) -> str:
    """Returns a line for the log: the kernels that serve in bfloat16."""
    if device.type == "cpu":
        how = "" if multiplies_half() else " by float32, as this processor has no instructions for it"
        return f"products: bfloat16{how}; {fused.describe(has_delta)}"
    reason = gpu.reason("train", device)
    added = "in place" if _adds_in_place(device) else "by a separate sum, as torch has no product for it"
    return f"norms, rotations, activations: {f'torch ({reason})' if reason else 'fused'}; gradients are added {added}"


class Product:
    """x W^T + b for one weight. Keeps a bfloat16 copy of it until `forget`, because torch's fused optimizers change
    weights without changing their version."""

    def __init__(self) -> None:
        self._half_O_I: Tensor | None = None
        self._copied_version: tuple[int, int] | None = None

    def __call__(self, x: Tensor, weight_O_I: Tensor, bias_O: Tensor | None = None) -> Tensor:
        is_narrow = weight_O_I.dtype == torch.bfloat16  # as FSDP2 gathers a layer's weights
        is_known = is_narrow or weight_O_I.dtype == torch.float32
        if not is_known or hasattr(weight_O_I, "placements") or not _is_autocast(x):  # a DTensor has placements
            return F.linear(x, weight_O_I, bias_O)
        x_M_I = x.to(torch.bfloat16).flatten(0, -2)
        half_O_I = weight_O_I if is_narrow else self._half(weight_O_I)
        again = getattr(x, "again", None) if x.ndim == x_M_I.ndim and x.dtype == torch.bfloat16 else None
        y_M_O = _ProductFunction.apply(x_M_I, weight_O_I, half_O_I, bias_O, again)
        return y_M_O.view(*x.shape[:-1], len(weight_O_I))

    def _half(self, weight_O_I: Tensor) -> Tensor:
        version = weight_O_I.data_ptr(), weight_O_I._version
        if self._half_O_I is None or self._copied_version != version:
            # Not in place: kernels of earlier passes may still read the old copy.
            self._half_O_I, self._copied_version = weight_O_I.detach().to(torch.bfloat16), version
        return self._half_O_I

    def forget(self) -> None:
        """Frees the memory of the copy."""
        self._half_O_I = self._copied_version = None


def forget(products: Iterable[Product]) -> None:
    """Frees the memory of the copies, which are made anew when needed."""
    for product in products:
        product.forget()


class Again:
    """An input of products that is computed again in their backward. The first of them computes it, the last one lets
    it go."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._result: Tensor | None = None
        self._num_users = 0

    def use(self) -> Again:
        self._num_users += 1
        return self

    def take(self) -> Tensor:
        assert self._compute is not None, "backward runs once"
        result = self._compute() if self._result is None else self._result
        self._num_users -= 1
        self._result = result if self._num_users else None
        if not self._num_users:
            self._compute = None
        return result


def _with_again(y: Tensor, compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Returns y, which products compute again from these arguments."""
    if torch.is_grad_enabled():
        given = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        y.again = Again(lambda: compute(*given))  # pyrefly: ignore[missing-attribute]
    return y


def rms_norm_again(x: Tensor, shape: tuple[int, ...], weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm`, whose result products do not keep."""
    y, kernels = rms_norm(x, shape, weight_D, eps), gpu.kernel("train", x.device)
    if kernels is None or x.ndim != 2 or x.dtype != torch.float32 or not _is_half(x):
        return y
    return _with_again(y, kernels.rms_norm, x.contiguous(), weight_D, eps, torch.bfloat16)


def silu_mul_again(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_mul`, whose result the product does not keep."""
    y, kernels = silu_mul(gate, up), gpu.kernel("train", gate.device)
    if kernels is None or gate.dtype != torch.bfloat16 or not _is_half(gate) or gate.ndim != 2:
        return y
    return _with_again(y, kernels.silu_mul, gate, up)


def rms_norm(x: Tensor, shape: tuple[int, ...], weight_D: Tensor, eps: float) -> Tensor:
    """Computes `F.rms_norm` in float32 arithmetic. Float32 rows, of the residual stream, are rounded to bfloat16
    once."""
    kernels = gpu.kernel("train", x.device) if x.ndim == 2 and x.dtype == torch.float32 and _is_half(x) else None
    if kernels is None:
        return F.rms_norm(x.float(), shape, weight_D.float(), eps)
    return _HalfNormFunction.apply(x.contiguous(), weight_D, eps, kernels)


def rotate(x_N_H_K: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Computes `ops.rotate_by_torch`, rounded to bfloat16 once."""
    kernels = gpu.kernel("train", x_N_H_K.device) if x_N_H_K.dtype == torch.bfloat16 and _is_half(x_N_H_K) else None
    if kernels is None or rotation[0].dtype != torch.float32:
        return ops.rotate_by_torch(x_N_H_K, rotation)
    return _HalfRotationFunction.apply(x_N_H_K, *rotation, kernels)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, rounded to bfloat16 once."""
    kernels = gpu.kernel("train", gate.device) if gate.dtype == torch.bfloat16 and _is_half(gate) else None
    return ops.gate_by_torch(gate, up) if kernels is None else GateFunction.apply(gate, up, kernels)


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and not torch.compiler.is_compiling()


def _is_half(x: Tensor) -> bool:
    return x.is_cuda and _is_autocast(x)


def add_product(sum_O_I: Tensor, grad_M_O: Tensor, x_M_I: Tensor) -> None:
    """Adds g^T x of bfloat16 factors to a float32 sum, unrounded."""
    if _adds_in_place(sum_O_I.device):
        torch.addmm(sum_O_I, grad_M_O.t(), x_M_I, out_dtype=torch.float32, out=sum_O_I)
    else:
        sum_O_I.add_(torch.mm(grad_M_O.t(), x_M_I, out_dtype=torch.float32))


@functools.cache
def _adds_in_place(device: torch.device) -> bool:
    """Returns whether torch adds such a product in place here, and correctly."""
    generator = torch.Generator().manual_seed(0)
    grad, x, total = (torch.randn(size, generator=generator) for size in ((40, 24), (40, 16), (24, 16)))
    exact = total.double() + grad.bfloat16().double().t() @ x.bfloat16().double()
    result, *factors = total.to(device), grad.t().to(device, torch.bfloat16), x.to(device, torch.bfloat16)
    try:
        torch.addmm(result, *factors, out_dtype=torch.float32, out=result)
        return bool((result.double().cpu() - exact).abs().max() < 1e-4)
    except RuntimeError:
        return False


class _ProductFunction(torch.autograd.Function):
    """Product of bfloat16 factors: on GPUs rounded once, after the bias, on CPUs rounded once and returned in float32.

    Torch has no product of bfloat16 factors with float32 sums on CPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, x_M_I: Tensor, weight_O_I: Tensor, half_O_I: Tensor, bias_O: Tensor | None, again: Again | None
    ) -> Tensor:
        ctx.again = again.use() if again and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x_M_I if ctx.needs_input_grad[1] and ctx.again is None else None, half_O_I)
        ctx.weight, ctx.bias_dtype = weight_O_I, None if bias_O is None else bias_O.dtype
        if x_M_I.is_cuda:
            return F.linear(x_M_I, half_O_I, None if bias_O is None else bias_O.to(half_O_I.dtype))
        y_M_O = multiply_half(OUTPUT, x_M_I, half_O_I).float()
        return y_M_O if bias_O is None else y_M_O.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (grad_M_O,), (x_M_I, half_O_I) = grads, ctx.saved_tensors
        if ctx.again is not None:
            x_M_I, ctx.again = ctx.again.take(), None
        half_M_O = grad_M_O.to(torch.bfloat16)
        grad_O_I = None if x_M_I is None else _add_weight_gradient(ctx.weight, half_M_O, x_M_I)
        grad_O = grad_M_O.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        grad_M_I = _product(INPUT, half_M_O, half_O_I) if ctx.needs_input_grad[0] else None
        return grad_M_I, grad_O_I, None, grad_O, None


def _product(product: str, a: Tensor, b: Tensor) -> Tensor:
    """Returns a product of bfloat16 factors, rounded once."""
    if not a.is_cuda:
        return multiply_half(product, a, b)
    return torch.mm(a.t() if product == WEIGHT else a, b)


def _add_weight_gradient(weight_O_I: Tensor, grad_M_O: Tensor, x_M_I: Tensor) -> Tensor | None:
    """Adds g^T x to the gradient of a float32 weight, without a copy. Returns it for a bfloat16 weight."""
    if grad_M_O.is_cuda and weight_O_I.dtype == torch.float32:
        if weight_O_I.grad is None:
            weight_O_I.grad = torch.mm(grad_M_O.t(), x_M_I, out_dtype=torch.float32)
        else:
            add_product(weight_O_I.grad, grad_M_O, x_M_I)
        return None
    grad_O_I = _product(WEIGHT, grad_M_O, x_M_I)
    if weight_O_I.dtype != torch.float32:
        return grad_O_I
    weight_O_I.grad = grad_O_I.float() if weight_O_I.grad is None else weight_O_I.grad.add_(grad_O_I)
    return None


def rounded(weight: Tensor) -> Tensor:
    """Returns a weight with its values rounded to bfloat16, which training in bfloat16 trains and generators serve."""
    return weight.to(torch.bfloat16).to(weight.dtype)


class Rounded(torch.autograd.Function):
    """`rounded`, with the identity as its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyrefly: ignore[bad-override]
        return grads[0]


class _HalfNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N_D: Tensor, weight_D: Tensor, eps: float, kernels: Any) -> Tensor:
        ctx.save_for_backward(x_N_D, weight_D)
        ctx.eps, ctx.kernels = eps, kernels
        return kernels.rms_norm(x_N_D, weight_D, eps, torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x_N_D, weight_D = ctx.saved_tensors
        return *ctx.kernels.rms_norm_backward(grads[0].contiguous(), x_N_D, weight_D, ctx.eps), None, None


class _HalfRotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N_H_K: Tensor, cos_N_1_R: Tensor, sin_N_1_R: Tensor, kernels: Any) -> Tensor:
        ctx.save_for_backward(cos_N_1_R, sin_N_1_R)
        ctx.kernels = kernels
        return kernels.rotated(x_N_H_K, cos_N_1_R, sin_N_1_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.kernels.rotated(grads[0].contiguous(), *ctx.saved_tensors, back=True), None, None, None
