"""`Policy`: a transformer that returns log-probabilities of given tokens, for any layout. `RankModel` is shared with
the critic.

`target_logprobs` computes log-probabilities in float32 at least, without ever holding all logits. `set_compute` sets
what a model in training keeps for backward, and which operations are fused.

Shape suffixes: N packed tokens of this context rank, M rows of this rank, R targets, O targets that this context rank's
tokens predict, D model dim, V (this rank's part of the) vocabulary, T tokens of the vocabulary in one tile, or of one
sample, W experts of a token in all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE, Axis, RankMesh, gather_rows, summed
from llamarl.kernels import fused, gpu, half, products, train_attention
from llamarl.kernels.half import Rounded
from llamarl.kernels.linear import Workspace, multiply_rounded, rounds_activations
from llamarl.kernels.products import INPUT, OUTPUT, WEIGHT, multiply, multiply_half
from llamarl.models.attention import PackedAttend, own_index, packed_attend
from llamarl.models.lora import LoraLinear
from llamarl.models.masking import UnusedIds
from llamarl.models.memory import TILE_LOGITS, gpu_tile_logits
from llamarl.models.scalar import ScalarModel
from llamarl.models.transformer import Attention, FeedForward, Layer, Projection, RMSNorm, Transformer
from llamarl.training.packing import EMPTY, Microbatch, SampleGroup, pack, padded
from llamarl.types import TrainSample

_ROWS = 1024
"""Rows whose targets' rows of the head are copied at once."""
ALL_USED = UnusedIds(())


def target_logprobs(
    hidden_R_D: Tensor,
    head_V_D: Tensor,
    targets_R: Tensor,
    temperature: float,
    tp: Axis = ALONE.tp,
    cutoffs_R: Tensor | None = None,
    unused_ids: UnusedIds = ALL_USED,
    *,
    rounds: bool = False,
) -> Tensor:
    """Returns log softmax(hidden @ head.T / temperature)[target], [R], differentiable in `hidden` and `head`.

    Float32, and float64 for float64 inputs. Unused ids have no probability and no gradient, and are never targets.

    With `cutoffs` the softmax is over the candidates only: the target, and all tokens whose logit over the temperature
    is at least the target's plus the cutoff, 0 or less. Other tokens get no gradient.

    Forward and backward go through the vocabulary in tiles and compute each tile's logits twice instead of keeping
    them, so memory is O(tile) instead of O(R * V). Forward keeps a running maximum and sum (online softmax, arXiv
    1805.02867). Tiles are of the vocabulary, not of the tokens: so each reads its rows of the head, and writes their
    gradient, once.

    Each rank of `tp` has an equal part of the head, in rank order. All ranks get the same log-probs, and the gradient
    of `hidden` is this rank's part of a sum over the ranks.

    Args:
        rounds: whether the factors of all products are rounded to bfloat16, on a CPU with float32 inputs. Logits are
            float32 sums, by the kernel that generators use. Gradients are those of the unrounded inputs.
    """
    return _TargetLogprobs.apply(hidden_R_D, head_V_D, targets_R, temperature, tp, cutoffs_R, unused_ids, rounds)


class _Tiles:
    """Tiles of logits, one after the other. On CPUs they reuse the same memory: fresh pages for each would take a tenth
    of the time."""

    def __init__(
        self,
        hidden_R_D: Tensor,
        head_V_D: Tensor,
        temperature: float,
        unused_ids: UnusedIds = ALL_USED,
        first: int = 0,
    ) -> None:
        """
        Args:
            first: token id of the first row of the head.
        """
        self._unused_ids, self._first = unused_ids, first
        self.dtype = torch.promote_types(hidden_R_D.dtype, torch.float32)
        self._hidden_R_D, self._head_V_D, self._temperature = hidden_R_D, head_V_D, temperature
        # A power of two: oneDNN keeps code for every size that it has multiplied.
        most = 1 << (max(1, tile_logits(hidden_R_D) // max(1, len(hidden_R_D))).bit_length() - 1)
        self._size, self._buffer = min(most, len(head_V_D)), None
        self._packed = Workspace()
        if not hidden_R_D.is_cuda:
            self._buffer = hidden_R_D.new_empty(len(hidden_R_D) * self._size, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields the first token, rows of the head, and their logits over the temperature [R, T], valid until the next
        tile."""
        num_rows = len(self._hidden_R_D)
        for start in range(0, len(self._head_V_D), self._size):
            head_T_D = self._head_V_D[start : start + self._size]
            if self._buffer is None:
                logits_R_T = wide_product(self._hidden_R_D, head_T_D.T)
            else:
                logits_R_T = self._buffer[: num_rows * len(head_T_D)].view(num_rows, len(head_T_D))
                if head_T_D.dtype != self._hidden_R_D.dtype:
                    multiply_rounded(self._hidden_R_D, head_T_D, self._packed, logits_R_T)
                elif self._hidden_R_D.dtype == self.dtype:
                    multiply(OUTPUT, self._hidden_R_D, head_T_D, logits_R_T)
                else:
                    logits_R_T.copy_(wide_product(self._hidden_R_D, head_T_D.T))
            logits_R_T = logits_R_T if self._temperature == 1 else logits_R_T.div_(self._temperature)
            yield start, head_T_D, self._unused_ids.remove(logits_R_T, self._first + start)


def tile_logits(hidden_R_D: Tensor) -> int:
    """Returns the largest number of logits of a tile; see `models/memory.py: gpu_tile_logits`."""
    num_rows, width = hidden_R_D.shape
    return int(gpu_tile_logits(num_rows, width)) if hidden_R_D.is_cuda else TILE_LOGITS


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of bfloat16 factors, on GPUs as unrounded float32 sums: rounded logits are off by 0.02 nats.
    Torch has no such product on CPUs."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else multiply_half(INPUT, a, b)


def _place(targets_R: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each target in a tile, [R, 1], and whether the target is in the tile, [R, 1]. The column is
    0 if not."""
    columns_R_1 = (targets_R - start)[:, None]
    is_here_R_1 = (columns_R_1 >= 0) & (columns_R_1 < size)
    return columns_R_1.where(is_here_R_1, 0), is_here_R_1


def _target_logits(hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, tp: Axis, dtype: torch.dtype) -> Tensor:
    """Returns the logits of the targets, [R, 1], the same on all ranks. A rank adds 0 for targets that are not rows of
    its head."""
    there_R = (targets_R >= 0) & (targets_R < len(head_V_D))
    parts = (
        torch.linalg.vecdot(hidden_C_D.to(dtype), head_V_D[targets_C].to(dtype))
        for hidden_C_D, targets_C in zip(hidden_R_D.split(_ROWS), targets_R.where(there_R, 0).split(_ROWS), strict=True)
    )
    logits_R_1 = torch.cat([*parts, hidden_R_D.new_empty(0, dtype=dtype)]).where(there_R, 0)[:, None]
    return tp.sum(logits_R_1) if tp.size > 1 else logits_R_1


def _leave_out(logits_R_T: Tensor, floors_R_1: Tensor | None, columns_R_1: Tensor, there_R_1: Tensor) -> None:
    """Sets logits below the floors to -inf, except those of targets."""
    if floors_R_1 is not None:
        is_out_R_T = logits_R_T < floors_R_1
        is_out_R_T.scatter_(1, columns_R_1, is_out_R_T.gather(1, columns_R_1) & ~there_R_1)
        logits_R_T.masked_fill_(is_out_R_T, -torch.inf)


def _kernels(x_R_D: Tensor, cutoffs_R: Tensor | None) -> Any:
    """Returns `parts/cuda/logprobs.py` on a GPU, or None if torch computes."""
    return gpu.kernel("logprobs", x_R_D.device) if cutoffs_R is None and x_R_D.dtype != torch.float64 else None


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_R_D: Tensor,
        head_V_D: Tensor,
        targets_R: Tensor,
        temperature: float,
        tp: Axis,
        cutoffs_R: Tensor | None,
        unused_ids: UnusedIds,
        rounds: bool,
    ) -> Tensor:
        if rounds:
            hidden_R_D, head_V_D = hidden_R_D.bfloat16().float(), head_V_D.bfloat16()
        first = tp.rank * len(head_V_D)
        targets_R, ctx.kernels = targets_R - first, _kernels(hidden_R_D, cutoffs_R)
        tiles = _Tiles(hidden_R_D, head_V_D, temperature, unused_ids, first)
        logits_R_1, floors_R_1 = hidden_R_D.new_zeros(len(hidden_R_D), 1, dtype=tiles.dtype), None
        largest_R_1, sums_R_1 = torch.full_like(logits_R_1, -torch.inf), torch.zeros_like(logits_R_1)
        if cutoffs_R is not None:
            largest_R_1 = (
                _target_logits(hidden_R_D, head_V_D, targets_R, tp, tiles.dtype) / temperature
            )  # the target is a candidate
            floors_R_1 = largest_R_1 + cutoffs_R[:, None]
        for start, _, logits_R_T in tiles:
            if ctx.kernels:
                ctx.kernels.add_tile(logits_R_T, targets_R - start, largest_R_1, sums_R_1, logits_R_1)
                continue
            columns_R_1, there_R_1 = _place(targets_R, start, logits_R_T.shape[1])
            logits_R_1 += logits_R_T.gather(1, columns_R_1).where(there_R_1, 0)
            _leave_out(logits_R_T, floors_R_1, columns_R_1, there_R_1)
            before_R_1, largest_R_1 = largest_R_1, torch.maximum(largest_R_1, logits_R_T.amax(1, keepdim=True))
            sums_R_1 *= (before_R_1 - largest_R_1).exp_()
            sums_R_1 += logits_R_T.sub_(largest_R_1).exp_().sum(1, keepdim=True)
        normalizers_R, logits_R = (sums_R_1.log_() + largest_R_1).squeeze(1), logits_R_1.squeeze(1)
        if tp.size > 1:
            parts_2_R = torch.stack((normalizers_R, logits_R))
            normalizers_tp_R, logits_tp_R = tp.gather(parts_2_R).unflatten(0, (-1, 2)).unbind(1)
            normalizers_R, logits_R = normalizers_tp_R.logsumexp(0), logits_tp_R.sum(0)
        ctx.save_for_backward(hidden_R_D, head_V_D, targets_R, normalizers_R, floors_R_1)
        ctx.temperature, ctx.unused = temperature, (unused_ids, first)
        return logits_R - normalizers_R

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None, None]:
        (grad_R,) = grad_outputs
        hidden_R_D, head_V_D, targets_R, normalizers_R, floors_R_1 = ctx.saved_tensors
        tiles = _Tiles(hidden_R_D, head_V_D, ctx.temperature, *ctx.unused)
        grad_hidden_R_D = torch.zeros_like(hidden_R_D, dtype=tiles.dtype)
        rounds = head_V_D.dtype != hidden_R_D.dtype
        head_dtype = hidden_R_D.dtype if rounds else head_V_D.dtype
        grad_head_V_D = torch.empty_like(head_V_D, dtype=head_dtype) if ctx.needs_input_grad[1] else None
        half_R_D = hidden_R_D.bfloat16() if rounds else hidden_R_D
        scale_R_1 = (grad_R / ctx.temperature)[:, None]
        for start, head_T_D, logits_R_T in tiles:
            if ctx.kernels:
                dtype = hidden_R_D.dtype
                grad_R_T = ctx.kernels.gradient(logits_R_T, targets_R - start, normalizers_R, scale_R_1, dtype)
            else:
                columns_R_1, there_R_1 = _place(targets_R, start, len(head_T_D))
                _leave_out(logits_R_T, floors_R_1, columns_R_1, there_R_1)
                # d logprob / d logits = onehot(target) - probs, over the temperature
                grad_R_T = logits_R_T.sub_(normalizers_R[:, None]).exp_().mul_(-scale_R_1)
                grad_R_T.scatter_add_(1, columns_R_1, scale_R_1.where(there_R_1, 0))
            if head_T_D.dtype == tiles.dtype:
                multiply(INPUT, grad_R_T, head_T_D, grad_hidden_R_D, add=True)
            else:
                grad_R_T = grad_R_T.to(head_T_D.dtype)
                grad_hidden_R_D += wide_product(grad_R_T, head_T_D)
            if grad_head_V_D is not None:
                rows = slice(start, start + len(head_T_D))
                if rounds:
                    grad_head_V_D[rows] = multiply_half(WEIGHT, grad_R_T, half_R_D)
                else:
                    multiply(WEIGHT, grad_R_T, hidden_R_D, grad_head_V_D[rows])
        return grad_hidden_R_D.to(hidden_R_D.dtype), grad_head_V_D, None, None, None, None, None, None


def set_compute(model: Transformer | ScalarModel, config: TrainerConfig, device: torch.device) -> bool:
    """Applies the trainer's settings to a whole model, before it is cut. Returns whether kernels of this package may
    serve attention."""
    on_cpu = device.type == "cpu"
    if on_cpu and config.dtype == "float32":
        _set_products(model, lambda: products.linear)
        if not config.compile:  # the compiler cannot see into them
            _set_operations(model, fused)
        _measure_products(model)
    elif uses_halves(config, device):
        half.prepare(device, model.shape.delta is not None)
        _set_products(model, half.Product)
        if on_cpu:
            products.bound_caches()
            if not products.multiplies_half():
                _measure_products(model)
            _set_operations(model, fused)
        else:
            _set_operations(model.model.layers, half)  # the head of a critic needs an unrounded norm
            _keep_products(model.model.layers, config)
    for layer in model.model.layers.children():
        assert isinstance(layer, Layer)
        layer.recompute = config.activation_checkpointing is True
        if config.compile:
            # Compiles neither attention, whose plan differs with every microbatch, nor the hooks of tensor parallelism.
            assert isinstance(layer.mixer, Attention), "the checks at start refuse delta nets"
            layer.mixer.heads = torch.compile(layer.mixer.heads, dynamic=True)
            if isinstance(layer.mlp, FeedForward):  # the number of an expert's rows also varies
                layer.mlp.forward = torch.compile(layer.mlp.forward, dynamic=True)
    return on_cpu and (config.dtype == "float32" or uses_halves(config, device))


def uses_halves(config: TrainerConfig, device: torch.device) -> bool:
    """Returns whether the operations of `kernels/half.py` serve."""
    return device.type in ("cpu", "cuda") and config.dtype == "bfloat16" and not config.compile


def _measure_products(model: nn.Module) -> None:
    """Chooses the paths of float32 products now instead of in the first step."""
    for module in model.modules():
        if isinstance(module, Projection | LoraLinear):
            products.chosen(*module.weight.shape)


def _set_products(model: nn.Module, multiply: Callable[[], Callable[..., Tensor]]) -> None:
    for module in model.modules():
        if isinstance(module, Projection | LoraLinear):
            module.multiply = multiply()


def _set_operations(model: nn.Module, operations: ModuleType) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.normalize = operations.rms_norm
        elif isinstance(module, Attention):
            module.rotate = operations.rotate
        elif isinstance(module, FeedForward):
            module.activate = operations.silu_mul


def _keep_products(layers: nn.Module, config: TrainerConfig) -> None:
    """Lets products compute normed rows and gated activations again in backward, with selective checkpointing."""
    for module in layers.modules() if config.activation_checkpointing == "selective" else ():
        if isinstance(module, Layer):
            for norm in (module.input_layernorm, module.post_attention_layernorm):
                norm.normalize = half.rms_norm_again
        elif isinstance(module, FeedForward):
            module.activate = half.silu_mul_again


def copying(model: Transformer | ScalarModel) -> list[half.Product]:
    """Returns the products that keep copies of weights. `half.forget` must drop these after every optimizer step."""
    products = [module.multiply for module in model.modules() if isinstance(module, Projection | LoraLinear)]
    return [product for product in products if isinstance(product, half.Product)]


LARGE = 8
"""A microbatch of this many steps of padding is large enough for padding to cost little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One microbatch, as a rank computes it."""

    token_ids_N: Tensor
    positions_N: Tensor
    attend: PackedAttend
    predictors_O: Tensor
    """Index in N."""
    targets_O: Tensor
    index_O: Tensor
    """Index in R."""
    num_targets: int
    num_tokens: int
    """Rows of N that are tokens. Later rows are padding, so that all ranks have as many."""
    routes_N_W: Tensor | None = None
    """Recorded experts, int64, -1 if there are none. None means that each router chooses itself."""
    cutoffs_O: Tensor | None = None
    """Cutoffs as in `llamarl.types.COLUMNS`. None means that all tokens were candidates."""


Model = TypeVar("Model", Transformer, ScalarModel)


class RankModel(nn.Module, Generic[Model]):
    """Module that FSDP2 wraps: its forward contains all use of the weights."""

    def __init__(self, transformer: Model, mesh: RankMesh) -> None:
        super().__init__()
        self.transformer = transformer
        self.mesh = mesh
        self.hidden_size = transformer.shape.hidden_size
        self.multiple = mesh.tp.size * (2 * mesh.cp.size if mesh.cp.size > 1 else 1)
        """The ranks can share any multiple of this number of tokens evenly."""
        self.even = 1
        """A rank's part of a large microbatch is a multiple of this number of tokens."""
        self.fused = False
        """Whether attention may be a kernel of this package."""

    @property
    def shares_beginnings(self) -> bool:
        """True if a microbatch may hold a common beginning of its prompts once, because attention here supports
        that."""
        return self.fused and self.mesh.cp.size == 1 and train_attention.serves()

    def hidden_shape(self, microbatch: Microbatch) -> tuple[int, int]:
        """Returns the shape of the hidden states between pipeline stages, [M, D]."""
        num_tokens = len(self._padded(microbatch).token_ids_N)
        return num_tokens // (self.mesh.cp.size * self.mesh.tp.size), self.hidden_size

    def _padded(self, microbatch: Microbatch) -> Microbatch:
        even = self.multiple * self.even
        return padded(microbatch, even if len(microbatch.token_ids_N) >= LARGE * even else self.multiple)

    def place(self, microbatch: Microbatch, device: torch.device) -> Inputs:
        """Returns this rank's part of a microbatch."""
        cp, whole = self.mesh.cp, self._padded(microbatch)
        rows_N = own_index(num_tokens := len(whole.token_ids_N), cp)
        place_of = torch.full((num_tokens,), -1).index_copy(0, rows_N, torch.arange(len(rows_N)))
        predictors_R = place_of[torch.from_numpy(whole.predictors_R)]
        index_O = (predictors_R >= 0).nonzero().squeeze(1)
        cutoffs_R = microbatch.columns_R.get("cutoffs")
        is_cut = cutoffs_R is not None and len(cutoffs_R) > 0
        return Inputs(
            token_ids_N=torch.from_numpy(whole.token_ids_N)[rows_N].to(device, non_blocking=True),
            positions_N=torch.from_numpy(whole.positions_N)[rows_N].to(device, non_blocking=True),
            attend=packed_attend(
                whole.prompt_lengths, whole.response_lengths, device, cp, fused=self.fused, shared=whole.shared_tokens
            ),
            predictors_O=predictors_R[index_O].to(device, non_blocking=True),
            targets_O=torch.from_numpy(whole.targets_R)[index_O].to(device, non_blocking=True),
            index_O=index_O.to(device, non_blocking=True),
            num_targets=len(whole.targets_R),
            num_tokens=int((rows_N < len(microbatch.token_ids_N)).sum()),
            routes_N_W=self._routes(whole, rows_N, device),
            cutoffs_O=torch.from_numpy(cutoffs_R)[index_O].to(device, non_blocking=True) if is_cut else None,
        )

    def _routes(self, whole: Microbatch, rows_N: Tensor, device: torch.device) -> Tensor | None:
        """Returns the recorded experts. None here: the critic and the reference choose for themselves."""
        return None

    def hidden(self, inputs: Inputs, hidden_M_D: Tensor | None, bfloat16: bool) -> Tensor:
        """Returns hidden states of this stage, from those of the stage before, [M, D]."""
        x = inputs.token_ids_N if hidden_M_D is None else hidden_M_D
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bfloat16):
            replayed = () if inputs.routes_N_W is None else (inputs.routes_N_W,)
            return self.transformer(x, inputs.positions_N, inputs.attend, *replayed)


class Policy(RankModel[Transformer]):
    """Computes log-probabilities of given tokens. A mixture uses the experts that sampled them, if these were recorded
    (router replay, arXiv 2510.11370). Gates are the trainer's, so a gradient reaches the router."""

    def _routes(self, whole: Microbatch, rows_N: Tensor, device: torch.device) -> Tensor | None:
        if whole.routes_N_W is None:
            return None
        return torch.from_numpy(whole.routes_N_W)[rows_N].to(device, non_blocking=True)

    def forward(self, inputs: Inputs, hidden_M_D: Tensor | None, temperature: float, bfloat16: bool) -> Tensor:
        """Returns log-probs [R] of all targets, the same on all tensor and context ranks; before the last stage, [M,
        D]."""
        output_M_D = self.hidden(inputs, hidden_M_D, bfloat16)
        if not self.mesh.pp.is_last:
            return output_M_D
        hidden_O_D = gather_rows(output_M_D, self.mesh.tp).index_select(0, inputs.predictors_O)
        if bfloat16 and hidden_O_D.device.type == "cuda":
            hidden_O_D = hidden_O_D.bfloat16()  # the head's product has float32 sums of bfloat16 factors
        weight_V_D = self.transformer.head_weight_V_D
        head_V_D = weight_V_D.to(hidden_O_D.dtype)
        rounds = bfloat16 and hidden_O_D.device.type == "cpu" and weight_V_D.dtype == torch.float32
        if rounds and not rounds_activations():
            head_V_D, rounds = Rounded.apply(head_V_D), False  # as in generators; activations stay float32
        targets = inputs.targets_O, temperature, self.mesh.tp, inputs.cutoffs_O, self.transformer.unused_ids
        logprobs_O = target_logprobs(hidden_O_D, head_V_D, *targets, rounds=rounds)
        if self.mesh.cp.size == 1:
            return logprobs_O
        logprobs_R = logprobs_O.new_zeros(inputs.num_targets).index_copy(0, inputs.index_O, logprobs_O)
        return summed(logprobs_R, self.mesh.cp)


def outputs_of(samples: Sequence[TrainSample], outputs: Mapping[int, Tensor]) -> list[np.ndarray]:
    """Returns float32 [T] for each sample of this data-parallel rank's share, in order, from [R] of each of its
    microbatches. Waits for the device once."""
    if not samples:
        return []
    ends = np.cumsum([sample.num_tokens for sample in samples])
    return np.split(
        torch.cat([outputs[index] for index in sorted(outputs)]).float().cpu().numpy()[: ends[-1]], ends[:-1]
    )


def rank_share(
    groups: Sequence[SampleGroup], mesh: RankMesh, microbatch_tokens: int, *, shares_beginnings: bool = False
) -> list[Microbatch]:
    """Returns the microbatches that this data-parallel rank computes in a step.

    All ranks have the same number, because they take part in each collective. The last ones may be empty.
    """
    share = pack(shares(groups, mesh.fsdp.size)[mesh.fsdp.rank], microbatch_tokens, shares=shares_beginnings)
    return share + [EMPTY] * (max(mesh.exchange(len(share))) - len(share))


def shares(groups: Sequence[SampleGroup], num: int) -> list[list[SampleGroup]]:
    """Deals `groups` to `num` ranks with about as many tokens each, the largest first, to the rank with the fewest."""
    tokens = [
        len(group.prompt_token_ids_T) + sum(len(sample.token_ids_T) for sample in group.samples) for group in groups
    ]
    loads, dealt = [0] * num, [list[int]() for _ in range(num)]
    for index in sorted(range(len(groups)), key=lambda index: -tokens[index]):
        rank = loads.index(min(loads))
        loads[rank] += tokens[index]
        dealt[rank].append(index)
    return [[groups[index] for index in sorted(indexes)] for indexes in dealt]
