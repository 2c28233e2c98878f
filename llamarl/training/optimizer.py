"""AdamW with weight decay on matrices only, and the learning rate: linear warm-up, then constant or falling.

`LightAdamW` takes less memory of the device: moments are 8-bit codes or in host memory, and weights may be bfloat16. It
brings a tile of weights and moments to float32 on the device, updates it by the fused kernel of `AdamW`, and puts it
back. So state that is kept exactly has the same bits as in an optimizer that keeps everything on the device.

Shape suffixes: R rows and C columns of a part of a matrix, or of a stack of matrices, K blocks of `BLOCK` columns of a
row, B columns of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from llamarl.config.schema import TrainerConfig
from llamarl.models.memory import BLOCK_COLUMNS
from llamarl.sharding.box import Box
from llamarl.weight_sync.layout import TensorSpec


class Uncompiled(torch.optim.Optimizer):
    """An optimizer whose methods do not import torch's compiler, which is as large as the rest of torch. Torch's
    decorators for compiled code would import it at the first call."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


BLOCK = BLOCK_COLUMNS
"""Columns that share a scale. Blocks follow rows, so ranks that hold other rows of a matrix have the same bits."""
TILE = 1 << 24
"""Elements of each moment that are float32 at a time."""
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"
"""Suffix of the name of a moment's scales, float32 [R, K]."""


@cache
def table(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the values of the 256 codes of a moment, in order, and the bounds between them.

    This is the dynamic tree of arXiv 2110.02861, section 2.2: seven decades, each with twice as many values as the
    decade below. The second moment has no sign and uses that bit for more values.
    """
    is_signed, values = name == "exp_avg", [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if is_signed else 1)) + 1, dtype=torch.float64)
        means = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - 6)
        values += means.tolist() + ((-means).tolist() if is_signed else [])
    codes = torch.tensor(sorted(values), dtype=torch.float64)
    return codes.float().to(device), ((codes[:-1] + codes[1:]) / 2).float().to(device)


def encoded(name: str, moment_R_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes, int8 [R, C], and scales, float32 [R, K], of a moment.

    Codes are the nearest ones, except that a second moment above zero never becomes zero: its root divides the first
    moment, whose codes reach further down.
    """
    _, bounds = table(name, moment_R_C.device)
    blocks_R_K_B = _blocks(moment_R_C.float())
    scale_R_K = blocks_R_K_B.abs().amax(-1)
    unit_R_K_B = blocks_R_K_B / scale_R_K.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    code_R_K_B = torch.bucketize(unit_R_K_B, bounds, out_int32=True)
    if name == "exp_avg_sq":
        code_R_K_B = torch.where(blocks_R_K_B > 0, code_R_K_B.clamp(min=1), code_R_K_B)
    code_R_C = code_R_K_B.flatten(-2)[..., : moment_R_C.shape[-1]]
    return (code_R_C - 128).to(torch.int8), scale_R_K


def decoded(name: str, code_R_C: Tensor, scale_R_K: Tensor) -> Tensor:
    """Returns the moment of these codes and scales, float32 [R, C]."""
    values, _ = table(name, code_R_C.device)
    blocks_R_K_B = _blocks(values[code_R_C.int() + 128])
    return (blocks_R_K_B * scale_R_K[..., None]).flatten(-2)[..., : code_R_C.shape[-1]].contiguous()


def _blocks(matrix_R_C: Tensor) -> Tensor:
    """Returns [R, K, B], with zeros behind the last column."""
    missing = -matrix_R_C.shape[-1] % BLOCK
    padded_R_C = F.pad(matrix_R_C, (0, missing)) if missing else matrix_R_C  # padding by nothing copies too
    return padded_R_C.unflatten(-1, (-1, BLOCK))


def is_coded(weight: Tensor) -> bool:
    """Returns whether moments of this weight may be coded. Moments of vectors are small and stay float32."""
    return weight.ndim >= 2


def state_spec(spec: TensorSpec, moment: str) -> TensorSpec:
    """Returns the place of the part of a moment, or of its scales, that belongs to a part of a weight."""
    if not moment.endswith(SCALE):
        return spec
    *rows, columns = spec.global_shape
    assert spec.box.starts[-1] % BLOCK == 0, f"{spec.name} is cut within a block"
    return replace(spec, global_shape=(*rows, -(-columns // BLOCK)), box=_scales_of(spec.box))


def _scales_of(box: Box) -> Box:
    return _columns(box, box.starts[-1] // BLOCK, -(-box.stops[-1] // BLOCK))


def _columns(box: Box, first: int, last: int) -> Box:
    return Box((*box.starts[:-1], first), (*box.stops[:-1], last))


class Dice:
    """Random numbers that round a part of a weight.

    They depend only on the run, the step, the weight and the position of an element in the whole weight. So all layouts
    and repeated steps round alike.
    """

    def __init__(self, key: str, spec: TensorSpec) -> None:
        self._key = int.from_bytes(xxhash.xxh32_digest(key.encode()), "little", signed=True)
        self._box, self._shape = spec.box, spec.global_shape

    def throw(self, rows: slice, step: Tensor) -> Tensor:
        """Returns int32, uniform in 0 to 65535, for each element of these rows of the part at step number `step`."""
        starts, stops = self._box.starts, self._box.stops
        bounds = [(starts[0] + rows.start, starts[0] + rows.stop), *zip(starts[1:], stops[1:], strict=True)]
        index = torch.zeros((), dtype=torch.int64, device=step.device)
        for size, bound in zip(self._shape, bounds, strict=True):
            index = index[..., None] * size + torch.arange(*bound, device=step.device)
        bits = index.to(torch.int32) + _mixed(step.to(torch.int32) + self._key)  # wraps, as intended
        return _mixed(bits) & 0xFFFF


def _mixed(bits: Tensor) -> Tensor:
    """Returns int32 in which each bit depends on all input bits (C. Wellons' lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits = (bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return bits ^ ((bits >> 16) & 0xFFFF)


def stochastically_rounded(exact: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, up with a probability equal to its relative distance from the lower neighbor.

    Args:
        noise: int32, uniform in 0 to 65535.
    """
    bits = exact.view(torch.int32)  # bfloat16 is the upper half: noise in the lower half carries into it by chance
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return rounded.where(~exact.isnan(), exact).bfloat16()  # a GPU's NaN is all ones, which would carry into a zero


def _exact(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


class LightAdamW(Uncompiled):
    """AdamW (arXiv 1711.05101) with moments as codes or in host memory, or weights in bfloat16.

    The state of a weight is that of fused AdamW, `step`, `exp_avg` and `exp_avg_sq`, plus scales of codes.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, coded: bool,
        on_host: bool, places: Mapping[Tensor, TensorSpec],
    ) -> None:  # fmt: skip
        """
        Args:
            groups: weights, and `weight_decay`.
            coded: whether moments of matrices are 8-bit codes with a scale for each `BLOCK` columns.
            on_host: whether moments are in pinned host memory and visit the device a tile at a time.
            places: places of bfloat16 weights in whole weights. All ranks have seeded torch alike.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.coded, self.on_host = coded, on_host
        seed = torch.initial_seed()
        self._dice = {weight: Dice(f"{seed}:{spec.name}", spec) for weight, spec in places.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Updates all weights that have a gradient."""
        device = None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.numel():
                    self._update(weight, weight.grad, group)
                    device = weight.device
        if self.on_host and device is not None and device.type == "cuda":
            # The last copy may be in flight, and the next reader of the state reads host memory.
            torch.cuda.current_stream(device).synchronize()

    def _update(self, weight: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state, coded = self.state[weight], self.coded and is_coded(weight)
        if not state:
            state |= self._empty(weight, coded)
        state["step"] += 1
        for rows in _tiles(weight):
            first, second = (self._moment(name, state, rows, weight, coded) for name in MOMENTS)
            beta1, beta2 = group["betas"]
            exact, dice = weight[rows], self._dice.get(weight)
            if dice:
                exact = exact.float()
            slope = grad[rows].to(exact.dtype)
            torch._fused_adamw_(
                [exact], [slope], [first], [second], [], [state["step"]], lr=group["lr"], beta1=beta1, beta2=beta2,
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip
            if dice:
                weight[rows].copy_(stochastically_rounded(exact, dice.throw(rows, state["step"])))
            for name, moment in zip(MOMENTS, (first, second), strict=True):
                self._put(name, state, rows, moment, coded)

    def _empty(self, weight: Tensor, coded: bool) -> dict[str, Tensor]:
        """Returns the state before the first step: moments of zeros."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
        for name in MOMENTS:
            state[name] = self._zeros(weight.shape, torch.int8 if coded else _exact(weight), weight.device)
            if coded:  # scales of zero: any code stands for zero
                blocks = (*weight.shape[:-1], -(-weight.shape[-1] // BLOCK))
                state[name + SCALE] = self._zeros(blocks, torch.float32, weight.device)
        return state

    def _zeros(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.on_host:
            return torch.zeros(*shape, dtype=dtype, device=device)
        return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")

    def _moment(self, name: str, state: Mapping[str, Tensor], rows: slice, weight: Tensor, coded: bool) -> Tensor:
        """Returns a tile of a moment on the device, float32 at least: a view of the state if possible."""
        held = state[name][rows].to(weight.device, non_blocking=True)
        if not coded:
            return held
        scales = state[name + SCALE][rows].to(weight.device, non_blocking=True)
        return decoded(name, held, scales).to(_exact(weight))

    def _put(self, name: str, state: Mapping[str, Tensor], rows: slice, moment: Tensor, coded: bool) -> None:
        if coded:
            codes, scales = encoded(name, moment)
            state[name][rows].copy_(codes, non_blocking=True)
            state[name + SCALE][rows].copy_(scales, non_blocking=True)
        elif self.on_host:
            state[name][rows].copy_(moment, non_blocking=True)


def _tiles(weight: Tensor) -> Iterator[slice]:
    """Yields slices of rows of a weight, at most `TILE` elements each. A vector is one tile."""
    rows = max(1, TILE // max(weight[0].numel(), 1)) if weight.ndim > 1 else len(weight)
    for start in range(0, len(weight), rows):
        yield slice(start, min(start + rows, len(weight)))


def read_state(
    names: Iterable[str], spec: TensorSpec, read: Callable[[str, Box], Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Returns the state of a part of a weight from a record, converted to the format of `optimizer`: codes become
    float32, or the reverse. The same format gives the same bits.

    Args:
        names: what the record has of this weight: `step`, moments, scales.
        spec: spec of the part.
        read: returns a box of one of them.
    """
    held, coded = set(names), isinstance(optimizer, LightAdamW) and optimizer.coded
    state = {name: read(name, Box.whole(())) for name in held if name == "step"}
    for name in sorted(held - {"step"}):
        if name.endswith(SCALE):
            continue
        if name + SCALE not in held:
            state[name] = read(name, spec.box)
            if coded and is_coded(state[name]):
                state[name], state[name + SCALE] = encoded(name, state[name])
            continue
        first, last = (-(-edge // BLOCK) * BLOCK for edge in (spec.box.starts[-1] - BLOCK + 1, spec.box.stops[-1]))
        wide = _columns(spec.box, first, min(last, spec.global_shape[-1]))
        codes, scales = read(name, wide), read(name + SCALE, _scales_of(wide))
        if coded:
            state |= {name: codes, name + SCALE: scales}
        else:
            state[name] = decoded(name, codes, scales)[..., spec.box.starts[-1] - first :][..., : spec.box.shape[-1]]
    return state


def in_place(value: Tensor, weight: Tensor, moment: str, optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns the tensor that was read, where `optimizer` keeps it. The count of steps is on the device, as in fused
    AdamW."""
    if moment == "step" or not (isinstance(optimizer, LightAdamW) and optimizer.on_host):
        return value.to(weight.device)
    return value.pin_memory() if weight.is_cuda else value


def build_optimizer(
    weights: Iterable[Tensor], config: TrainerConfig, places: Sequence[TensorSpec] = ()
) -> torch.optim.Optimizer:
    """Returns AdamW (arXiv 1711.05101), which keeps weights and moments as `config` says.

    Norms and biases are not decayed: pulling them to 0 removes what they scale.

    Args:
        places: place of each of `weights` in whole weights. Needed with bfloat16 `config.weights`.
    """
    all_weights = list(weights)
    matrices = [weight for weight in all_weights if weight.ndim >= 2]
    vectors = [weight for weight in all_weights if weight.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    coded, on_host, rounds = config.moments == "8bit", config.moments_on == "host", config.weights == "bfloat16"
    if not (coded or on_host or rounds):
        return AdamW(groups, lr=config.learning_rate, betas=betas, eps=1e-8, fused=True)
    placed = zip(all_weights, places, strict=True) if rounds else ()
    places_of = {weight: place for weight, place in placed if weight.dtype == torch.bfloat16}  # routers never are
    return LightAdamW(
        groups, lr=config.learning_rate, betas=betas, eps=1e-8, coded=coded, on_host=on_host, places=places_of
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainerConfig) -> float:
    """Sets the rate of the step with this number, and returns it."""
    rate = learning_rate_at(step, config)
    for param_group in optimizer.param_groups:
        param_group["lr"] = rate * param_group.get("lr_scale", 1.0)
    return rate


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """Returns the rate of the optimizer step with this number, counted from 0."""
    peak = config.learning_rate * min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.decay == "constant":
        return peak
    done = min(1.0, max(0, step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    # Cosine: SGDR without restarts (arXiv 1608.03983, equation 5).
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.decay_floor + (1 - config.decay_floor) * left)
