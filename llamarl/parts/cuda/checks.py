"""Checks at startup which Triton kernels reproduce torch on this GPU. Only those kernels are used."""

from __future__ import annotations

import functools
import importlib
import subprocess
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import build, copy
from llamarl.kernels.attention import BLOCK_SIZE

FAILURES = (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError)
"""Errors of a Triton that cannot compile, besides its own: its C compiler needs Python's headers and libcuda."""


def load(
    device: torch.device, errors: Mapping[str, Callable[[ModuleType, torch.device], float]]
) -> tuple[dict[str, ModuleType], str]:
    """Returns the kernels `<name>.py` if all errors are within their tolerance, otherwise none and the reason."""
    if build.pinned() == "torch":
        return {}, f"{build.VARIABLE}=torch"
    if not torch.backends.cuda.is_built():
        return {}, "this torch has no CUDA"
    try:
        found = {name: importlib.import_module(f"llamarl.parts.cuda.{name}") for name in errors}
        from triton.errors import TritonError
    except ImportError as error:
        return {}, str(error)
    try:
        with torch.inference_mode(False):  # a caller may be in inference mode, and gradients are checked
            off = {name: errors[name](kernel, device) for name, kernel in found.items()}
    except (*FAILURES, TritonError) as failed:
        return {}, f"{type(failed).__name__}: {failed}"
    wrong = [f"parts/cuda/{name}.py is off by {error:.1g} here" for name, error in off.items() if not error < 1e-2]
    return ({}, "; ".join(wrong)) if wrong else (found, "")


def ops_error(ops: ModuleType, device: torch.device) -> float:
    """Returns the largest difference to torch in float32: norm after an addition, gated activation, quantized row."""
    generator = torch.Generator().manual_seed(0)
    x, delta, gate, up = torch.randn(4, 3, 200, generator=generator)
    weight, added = torch.rand(200, generator=generator), x + delta
    on_device = [one.to(device) for one in (x, weight, delta, gate, up)]
    normed = ops.rms_norm(*on_device[:2], 1e-6, on_device[2], None).cpu()
    activated = ops.silu_mul(*on_device[3:], None).cpu()
    values, scales = (one.cpu().float() for one in ops.quantize(on_device[1][None], torch.int8))
    differences = (
        normed - F.rms_norm(added, (200,), weight, 1e-6), activated - F.silu(gate) * up, on_device[0].cpu() - added,
        ((values * scales - weight).abs() - scales / 2).clamp_min(0), scales - weight.max() / 127,
    )  # fmt: skip
    return max(one.abs().max().item() for one in differences)


def train_error(train: ModuleType, device: torch.device) -> float:
    """Returns the largest difference to torch in float32: norm, gated activation and rotation of some channels, and
    their gradients."""
    generator, apart = torch.Generator().manual_seed(0), list[Tensor]()
    x, up, grad = torch.randn(3, 6, 200, generator=generator)
    weight, angles = torch.rand(200, generator=generator), torch.randn(6, 1, 32, generator=generator)
    turned = [*(one.view(6, 2, 100) for one in (x, grad)), angles.cos(), angles.sin()]

    def compare(exact: Tensor, inputs: tuple[Tensor, ...], found: Iterable[Tensor]) -> None:
        expected = exact, *torch.autograd.grad(exact, inputs, grad.view_as(exact))
        apart.extend(one - other.cpu() for one, other in zip(expected, found, strict=True))

    with torch.enable_grad():
        inputs = [one.clone().requires_grad_() for one in (x, weight, up, turned[0])]
        own = [one.to(device) for one in (grad, x, weight, up)]
        found = train.rms_norm(*own[1:3], 1e-6, torch.float32), *train.rms_norm_backward(*own[:3], 1e-6)
        compare(F.rms_norm(inputs[0], (200,), inputs[1], 1e-6), (inputs[0], inputs[1]), found)
        found = train.silu_mul(own[1], own[3]), *train.silu_mul_backward(own[0], own[1], own[3])
        compare(F.silu(inputs[0]) * inputs[2], (inputs[0], inputs[2]), found)
        heads, grad_heads, *rotation = (one.to(device) for one in turned)
        found = train.rotated(heads, *rotation), train.rotated(grad_heads, *rotation, back=True)
        compare(_rotated(inputs[3], *turned[2:]), (inputs[3],), found)
    return max(one.detach().abs().max().item() for one in apart)


def _rotated(x_N_H_K: Tensor, cos_N_1_R: Tensor, sin_N_1_R: Tensor) -> Tensor:
    """Same as `ops.rotate_by_torch`, which cannot be imported here because that module imports this one."""
    size = cos_N_1_R.shape[-1]
    turned = x_N_H_K[..., :size] * cos_N_1_R + x_N_H_K[..., :size].roll(size // 2, -1) * sin_N_1_R
    return torch.cat((turned, x_N_H_K[..., size:]), -1)


def logprobs_error(logprobs: ModuleType, device: torch.device) -> float:
    """Returns the largest relative difference to torch: log-probabilities in two tiles, and the gradient of the
    second."""
    generator = torch.Generator().manual_seed(0)
    logits_R_V, targets_R = torch.randn(3, 300, generator=generator), torch.tensor([5, 170, 299])
    largest_R, sums_R, logits_R = (torch.full((3,), start, device=device) for start in (-torch.inf, 0.0, 0.0))
    tiles = [one.contiguous().to(device) for one in logits_R_V.split((170, 130), 1)]
    columns = [(targets_R - start).to(device) for start in (0, 170)]
    for tile_R_T, columns_R in zip(tiles, columns, strict=True):
        logprobs.add_tile(tile_R_T, columns_R, largest_R, sums_R, logits_R)
    normalizers_R = largest_R + sums_R.log()
    grad_R_T = logprobs.gradient(tiles[1], columns[1], normalizers_R, torch.ones_like(sums_R), torch.float32)
    exact_R_V = logits_R_V.log_softmax(1)
    exact_R, exact_grad_R_V = exact_R_V.gather(1, targets_R[:, None])[:, 0], F.one_hot(targets_R, 300) - exact_R_V.exp()
    differences = (logits_R - normalizers_R).cpu() - exact_R, grad_R_T.cpu() - exact_grad_R_V[:, 170:]
    return max(one.abs().max().item() for one in differences)


def decode_error(decode: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the largest difference to float64: 2 rows with a shared prefix, 6 heads over 2, and a table with wider
    rows."""
    num_heads, num_kv_heads, head_dim, prefix, width = 6, 2, 64, 300, 30
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, num_kv_heads, BLOCK_SIZE, head_dim, generator=generator).to(dtype)
    q = torch.randn(2, num_heads, head_dim, generator=generator).to(dtype)
    table, own_B = torch.randperm(40, generator=generator)[:width].repeat(2, 1).int(), torch.tensor([1, 170])
    integers = (table.flatten(), torch.tensor([width]), torch.tensor([prefix] * 2), own_B)
    arguments = (x.to(device) for x in (q, keys.transpose(2, 3), values, *(x.int() for x in integers)))
    out = decode.decode_attention(*arguments).double().cpu()
    exact = torch.empty(out.shape, dtype=torch.float64)
    for row, own in enumerate(own_B.tolist()):
        start = -(-prefix // BLOCK_SIZE) * BLOCK_SIZE
        seen = [*range(prefix), *range(start, start + own)]
        key_J_N_K, value_J_N_K = (x[table[row]].transpose(0, 1).flatten(1, 2)[:, seen].double() for x in (keys, values))
        q_J_r_K = q[row].double().unflatten(0, (num_kv_heads, -1))
        weights_J_r_N = torch.softmax(q_J_r_K @ key_J_N_K.transpose(1, 2) * head_dim**-0.5, -1)
        exact[row] = (weights_J_r_N @ value_J_N_K).flatten(0, 1)
    return (out - exact).abs().max().item()


def fingerprint_error(fingerprint: ModuleType, device: torch.device) -> float:
    """Returns 0 if the fingerprint share of a part equals torch's, otherwise 1."""
    sample = torch.arange(5 * 3000, dtype=torch.int32, device=device).view(5, 3000)
    share = copy.share_of(fingerprint, sample, (9, 4001), (2, 70))
    return float(share is None or copy.read([share]) != [copy.share_by_torch(sample, (9, 4001), (2, 70))])


TOGETHER: tuple[dict[str, Callable[[ModuleType, torch.device], float]], ...] = (
    {"decode": decode_error, "ops": ops_error},
    {"logprobs": logprobs_error, "train": train_error},
    {"fingerprint": fingerprint_error},
)
"""Files of kernels with their checks. The files of one line are used together or not at all."""


def checked(name: str, device: torch.device) -> tuple[ModuleType | None, str]:
    """Returns the kernels of one file, or None and the reason why they are not used."""
    found, reason = _loaded(next(number for number, errors in enumerate(TOGETHER) if name in errors), device)
    return found.get(name), reason


@functools.cache
def _loaded(number: int, device: torch.device) -> tuple[dict[str, ModuleType], str]:
    """Compiles the kernels and checks them against torch, at the first call."""
    return load(device, TOGETHER[number])
