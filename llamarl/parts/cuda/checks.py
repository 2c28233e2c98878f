"""Selects the Triton kernels of a GPU. Only kernels that reproduce torch's results on it are used."""

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
from llamarl.kernels.delta import difference

FAILURES = (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError)
"""Errors of Triton, beside its own, where it cannot compile: its C compiler needs Python's headers and libcuda."""


def load(
    device: torch.device, errors: Mapping[str, Callable[[ModuleType, torch.device], float]]
) -> tuple[dict[str, ModuleType], str]:
    """The kernels `<name>.py` of which each is off by so little; else none, and why."""
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
        with torch.inference_mode(False):  # which a first caller may be in, and gradients are checked
            off = {name: errors[name](kernel, device) for name, kernel in found.items()}
    except (*FAILURES, TritonError) as failed:
        return {}, f"{type(failed).__name__}: {failed}"
    wrong = [f"parts/cuda/{name}.py is off by {error:.1g} here" for name, error in off.items() if not error < 1e-2]
    return ({}, "; ".join(wrong)) if wrong else (found, "")


def ops_error(ops: ModuleType, device: torch.device) -> float:
    """Largest difference to torch in float32: a norm after an addition, a gated activation and a quantized row."""
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
    """Largest difference to torch in float32: a norm, a gated activation and a rotation of a part of the channels, and
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
    """The rotation of `ops.rotate_by_torch`, a file that asks this one for kernels."""
    size = cos_N_1_R.shape[-1]
    turned = x_N_H_K[..., :size] * cos_N_1_R + x_N_H_K[..., :size].roll(size // 2, -1) * sin_N_1_R
    return torch.cat((turned, x_N_H_K[..., size:]), -1)


def logprobs_error(logprobs: ModuleType, device: torch.device) -> float:
    """Largest difference to torch, relative: log-probabilities in two tiles, and the second one's gradient."""
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
    """Largest difference to float64: 2 rows over a shared prefix, 6 heads over 2, and a table with wider rows; of
    attention alone, and of attention that rotates and writes the newest keys and values too."""
    num_heads, num_kv_heads, head_dim, prefix, width = 6, 2, 64, 300, 30
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, num_kv_heads, BLOCK_SIZE, head_dim, generator=generator).to(dtype)
    q = torch.randn(2, num_heads, head_dim, generator=generator).to(dtype)
    row = torch.randperm(40, generator=generator)[:width]
    own_B, table = torch.tensor([1, 170]), torch.stack((row, torch.cat((row[:-11], row[-11:].flip(0)))))
    rows = [one.int().to(device) for one in (table.flatten(), torch.tensor([width]), torch.tensor([prefix] * 2), own_B)]
    given = (one.to(device) for one in (q, keys.transpose(2, 3), values))
    exact = _attended(q, keys, values, table, prefix, own_B)
    apart = [(decode.decode_attention(*given, *rows).double().cpu() - exact).abs().max()]
    k, v = torch.randn(2, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
    angles = torch.rand(2, 1, head_dim // 2, generator=generator).repeat(1, 1, 2)
    rotation = angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(head_dim // 2)
    turned_q, turned_k = (_rotated(x.float(), *rotation).to(dtype) for x in (q, k))
    caches = [one.to(device, copy=True) for one in (keys, values)]
    on_device = [one.to(device) for one in (q, k, v, *rotation)]
    cached = caches[0].transpose(2, 3), caches[1]
    found = decode.attend_rotated(*on_device[:3], tuple(on_device[3:]), None, 0.0, cached, tuple(rows))
    start = -(-prefix // BLOCK_SIZE) * BLOCK_SIZE
    for place in range(2):
        block, offset = divmod(start + int(own_B[place]) - 1, BLOCK_SIZE)
        keys[table[place, block], :, offset], values[table[place, block], :, offset] = turned_k[place], v[place]
    for one, other in zip(caches, (keys, values), strict=True):  # a rotated key may round to a neighbor
        apart.append(((one.cpu().double() - other.double()).abs() / other.double().abs().clamp(min=1)).max())
    exact = _attended(turned_q, keys, values, table, prefix, own_B)
    return max(one.item() for one in (*apart, (found.double().cpu() - exact).abs().max()))


def _attended(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, prefix: int, own_B: Tensor) -> Tensor:
    """Attention in float64."""
    exact, num_kv_heads = torch.empty(q.shape, dtype=torch.float64), keys.shape[1]
    start = -(-prefix // BLOCK_SIZE) * BLOCK_SIZE
    for row, own in enumerate(own_B.tolist()):
        seen = [*range(prefix), *range(start, start + own)]
        key_J_N_K, value_J_N_K = (x[table[row]].transpose(0, 1).flatten(1, 2)[:, seen].double() for x in (keys, values))
        q_J_r_K = q[row].double().unflatten(0, (num_kv_heads, -1))
        weights_J_r_N = torch.softmax(q_J_r_K @ key_J_N_K.transpose(1, 2) * q.shape[-1] ** -0.5, -1)
        exact[row] = (weights_J_r_N @ value_J_N_K).flatten(0, 1)
    return exact


def fingerprint_error(fingerprint: ModuleType, device: torch.device) -> float:
    """Whether the share of a part in rows differs from torch's: 0 or 1."""
    sample = torch.arange(5 * 3000, dtype=torch.int32, device=device).view(5, 3000)
    share = copy.share_of(fingerprint, sample, (9, 4001), (2, 70))
    return float(share is None or copy.read([share]) != [copy.share_by_torch(sample, (9, 4001), (2, 70))])


def sample_error(sample: ModuleType, device: torch.device) -> float:
    """Largest difference to float64: log-probabilities of drawn tokens, and embeddings. 1 if a token is not the one at
    its share of the sums."""
    generator = torch.Generator().manual_seed(0)
    logits_B_V, noise_B = torch.randn(4, 5000, generator=generator) * 3, torch.tensor([0.0, 0.3, 0.999, 0.5])
    temperature_B = torch.tensor([1.0, 0.7, 1.3, 0.0])
    fed_R = torch.zeros(4, dtype=torch.int32, device=device)
    drawn = sample.draw(*(one.to(device) for one in (logits_B_V, noise_B, temperature_B)), fed_R).cpu()
    scaled_B_V = logits_B_V.double() / temperature_B.where(temperature_B > 0, 1.0)[:, None]
    ends_B_V = scaled_B_V.softmax(1).cumsum(1)
    tokens_B = drawn[:, 0].long()
    below_B, at_B = (ends_B_V.gather(1, (tokens_B - step).clamp(min=0)[:, None])[:, 0] for step in (1, 0))
    is_right = (below_B.where(tokens_B > 0, 0) <= noise_B + 1e-6) & (noise_B - 1e-6 <= at_B)
    is_right[3] = tokens_B[3] == logits_B_V[3].argmax()
    exact_B = scaled_B_V.log_softmax(1).gather(1, tokens_B[:, None])[:, 0]
    x_B_D, squares_Q_B = sample.embed(
        torch.tensor([-2, 7, -1], dtype=torch.int32, device=device), fed_R, logits_B_V.t().contiguous().to(device), 2
    )
    rows = [int(fed_R[1]), 7, int(fed_R[0])]
    apart = x_B_D.cpu() - logits_B_V.t()[rows], squares_Q_B.sum(0).cpu() - logits_B_V.t()[rows].square().sum(1)
    differences = (
        *apart,
        (drawn[:, 1].contiguous().view(torch.float32) - exact_B),
        (~is_right).float(),
        fed_R.cpu() - tokens_B,
    )
    return max(one.abs().max().item() for one in differences)


def products_error(products: ModuleType, device: torch.device) -> float:
    """Largest difference to torch, relative: all kinds of products, with the weights of `device`'s tests of types."""
    generator, apart = torch.Generator().manual_seed(0), list[float]()
    half = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def compare(found: Tensor, exact: Tensor) -> None:
        apart.append(((found.cpu().double() - exact).norm() / exact.norm()).item())

    x_M_K, norm_K, weight_N_K, bias_N = (
        drawn(5, 320),
        drawn(320).to(half),
        drawn(136, 320).to(half),
        drawn(136).to(half),
    )
    squares_Q_M = torch.zeros(5, 5)
    squares_Q_M[1] = x_M_K.square().sum(1)
    rows_M_K = F.rms_norm(x_M_K.double(), (320,), norm_K.double(), 1e-6)
    on_device = [one.to(device) for one in (x_M_K, squares_Q_M, norm_K)]
    exact_M_N = rows_M_K @ weight_N_K.double().t()
    compare(products.normed(*on_device, 1e-6, weight_N_K.to(device), bias_N.to(device)), exact_M_N + bias_N.double())
    gate_M_N, up_M_N = exact_M_N.chunk(2, 1)
    compare(products.gated(*on_device, 1e-6, weight_N_K.to(device)), F.silu(gate_M_N) * up_M_N)
    a_M_K, long_N_K = drawn(5, 4096).to(half), (drawn(136, 4096) / 16).to(half)
    stream_M_N, sums_Q_M = drawn(5, 136), torch.zeros(products.num_parts(136), 5, device=device)
    exact_M_N, found = stream_M_N + a_M_K.double() @ long_N_K.double().t(), stream_M_N.to(device)
    products.added(a_M_K.to(device), long_N_K.to(device), found, sums_Q_M)
    compare(found, exact_M_N)
    compare(sums_Q_M.sum(0), exact_M_N.square().sum(1))
    for dtype in (torch.int8, torch.float8_e4m3fn) if device.type == "cuda" else (torch.int8,):
        rows, values = ((drawn(size, 4096) * 20).round().clamp(-100, 100).to(dtype) for size in (5, 136))
        scales = torch.rand(5, 1, generator=generator), torch.rand(136, generator=generator)
        exact_M_N = rows.double() @ values.double().t() * scales[0] * scales[1] + bias_N.double()
        given = (one.to(device) for one in (rows, scales[0], values, scales[1], bias_N))
        compare(products.scaled(*given, half), exact_M_N)
    return max(apart)


def delta_error(delta: ModuleType, device: torch.device) -> float:
    """Largest difference to float64: outputs, states and inputs of runs that continue each other."""
    return difference(delta.recur, device)


TOGETHER: tuple[dict[str, Callable[[ModuleType, torch.device], float]], ...] = (
    {"decode": decode_error, "ops": ops_error},
    {"sample": sample_error},
    {"products": products_error},
    {"logprobs": logprobs_error, "train": train_error},
    {"fingerprint": fingerprint_error},
    {"delta": delta_error},
)
"""Files of kernels, with their checks; those of one line serve together, or not at all."""


def checked(name: str, device: torch.device) -> tuple[ModuleType | None, str]:
    """The kernels of one file, or why they do not serve."""
    found, reason = _loaded(next(number for number, errors in enumerate(TOGETHER) if name in errors), device)
    return found.get(name), reason


@functools.cache
def _loaded(number: int, device: torch.device) -> tuple[dict[str, ModuleType], str]:
    """Compiled, and checked against torch, at the first call."""
    return load(device, TOGETHER[number])
