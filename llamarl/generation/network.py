"""The network that a `GeneratorModel` computes with: matrices over its tensors, joined if they are adjacent in memory.

Shape suffixes: N packed tokens (in `Linear`'s arguments: outputs), K inputs of a matrix, or experts of a token; E
experts, D model dim, F feed-forward dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from llamarl.kernels import experts
from llamarl.kernels.delta import gates, sigmoid_mul, wide
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.kernels.experts import ExpertFeedForward, RouteKernel
from llamarl.kernels.linear import Linear, QuantizedRows, Workspace, is_exact
from llamarl.kernels.ops import rms_norm, silu_mul
from llamarl.kernels.stack import NUM_LINEARS, LayerStack, Norms, can_stack
from llamarl.models.delta_rule import Recur
from llamarl.models.experts import route
from llamarl.models.shape import ModelShape, MoeShape

_ARGUMENTS = {"weight": "values_N_K", "weight.scale": "scales_N", "bias": "bias_N"}
"""Argument of `Linear` by the name of a module's tensor."""
_HALVES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedLinears:
    """A dense feed-forward, or the shared expert of a mixture."""

    gate_up: tuple[Linear, ...]
    """One joined matrix, or two."""
    down: Linear

    @property
    def takes(self) -> torch.dtype | None:
        """Type of quantized rows, see `Linear.takes`."""
        return self.gate_up[0].takes

    def inner(self, x_N_D: Tensor | QuantizedRows) -> Tensor | QuantizedRows:
        """Returns silu(gate(x)) * up(x), the input of `down`."""
        gate_N_F, up_N_F = _parts([linear(x_N_D) for linear in self.gate_up])
        return silu_mul(gate_N_F, up_N_F, self.down.takes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMixture:
    """A feed-forward in which a float32 router chooses the experts of each token."""

    moe: MoeShape
    router: Linear
    """[E, D], float32."""
    selection_bias_E: Tensor | None
    experts: ExpertFeedForward
    shared: GatedLinears | None
    """Expert that serves every token."""
    shared_gate: Linear | None
    """Gate of that expert's output."""
    kernel: RouteKernel | None
    """Kernel that replaces `route`; None means that torch chooses."""

    @property
    def takes(self) -> torch.dtype | None:
        """None: the router needs rows that are not quantized."""

    def multipliers(self) -> list[tuple[str, str]]:
        """Returns (path, shape) of the experts' products and of the choice of experts, for the log."""
        chooses = "choice in torch" if self.kernel is None else "choice in c++"
        return [*self.experts.multipliers(), (chooses, f"{self.moe.experts_per_token} of {self.moe.num_experts}")]

    def __call__(self, x_N_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the outputs of each token's experts, [N, D], and the ids of these experts, int64
        [N, K]."""
        logits_N_E = self.router(x_N_D.float())
        if self.kernel is None or is_exact():
            ids_N_K, gates_N_K = route(logits_N_E, self.selection_bias_E, self.moe)
        else:
            ids_N_K, gates_N_K = self.kernel(logits_N_E, self.selection_bias_E)
        y_N_D = self.experts(x_N_D, ids_N_K, gates_N_K)
        if self.shared is not None:
            shared_N_D = self.shared.down(self.shared.inner(x_N_D))
            y_N_D += shared_N_D if self.shared_gate is None else sigmoid_mul(shared_N_D, self.shared_gate(x_N_D))
        return y_N_D, ids_N_K


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """The part of a delta net between its projections."""

    sizes: DeltaShape
    """With the heads of this rank."""
    ba: tuple[Linear, ...]
    """Projections to strengths and decays of each head: one joined matrix, or two."""
    conv_C_W: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor
    eps: float

    def __call__(self, place: int, recur: Recur, x_N_D: Tensor, projected: Sequence[Tensor]) -> Tensor:
        """Returns the gated outputs of all heads, [N, H * V].

        Args:
            projected: queries, keys, values and gates of all heads.
        """
        *qkv, z = projected
        b, a = _parts([linear(x_N_D) for linear in self.ba])
        decays = gates(b, a, self.a_log_H, self.dt_bias_H)
        out_N_H_V = recur(place, self.sizes, torch.cat(qkv, -1), self.conv_C_W, *decays)
        normed = rms_norm(out_N_H_V.flatten(0, 1), self.norm_V, self.eps).view(len(x_N_D), -1)
        return silu_mul(wide(z), normed).to(x_N_D.dtype)


def _parts(products: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the halves of one product, or two products."""
    return products if len(products) == _HALVES else products[0].chunk(_HALVES, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorLayer:
    input_norm_D: Tensor
    qkv: tuple[Linear, ...]
    """One joined matrix, or three; four in a delta net, the last one of gates."""
    qk_norms: tuple[Tensor, Tensor] | None
    """Norms of queries and keys of each head."""
    o: Linear
    post_norm_D: Tensor
    mlp: GatedLinears | ExpertMixture
    place: int
    """Number among the layers with attention, or with a delta net."""
    delta: DeltaHeads | None = None
    """Delta net in place of attention, whose projections are `qkv`. None means attention."""

    def norms(self) -> Norms:
        q_norm_K, k_norm_K = self.qk_norms or (None, None)
        return self.input_norm_D, q_norm_K, k_norm_K, self.post_norm_D

    def linears(self) -> Iterator[Linear]:
        yield from (*self.qkv, *(() if self.delta is None else self.delta.ba), self.o)
        gated = self.mlp
        if isinstance(gated, ExpertMixture):
            yield gated.router
            yield from () if gated.shared_gate is None else (gated.shared_gate,)
            gated = gated.shared
        if gated is not None:
            yield from (*gated.gate_up, gated.down)


class Network(dict[str, Tensor]):
    """Tensors by name, and the layers that compute with them."""

    layers: Sequence[GeneratorLayer] = ()
    stack: LayerStack | None = None
    """All layers in one call; None if that is not possible."""
    norm_D: Tensor
    """Factors of the final norm."""
    head: Linear
    workspace: Workspace
    """Buffer of the packed copies."""
    built: int
    """Number of the use of `workspace`, from `workspace.begin`."""

    def linears(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer.linears()), self.head]

    def mixtures(self) -> list[ExpertMixture]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertMixture)]

    def multipliers(self) -> list[tuple[str, str]]:
        """Returns (path, shape of weights), for the log."""
        linears = [(linear.path, linear.describe()) for linear in self.linears()]
        return [*linears, *(pair for mixture in self.mixtures() for pair in mixture.multipliers())]


@functools.cache
def route_kernel(moe: MoeShape) -> RouteKernel | None:
    """Returns a kernel that chooses like `route`, which the first call verifies, or None if there is no kernel."""
    kernel = RouteKernel(
        moe.num_experts, moe.experts_per_token, moe.num_groups, moe.groups_per_token, moe.scoring == "sigmoid",
        moe.normalized, moe.scaling,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    logits_N_E = torch.randn(9, moe.num_experts, generator=generator)
    logits_N_E[0], bias_E = 0.0, torch.randn(moe.num_experts, generator=generator) / 4  # the first row is a tie
    for bias in (None, bias_E):
        (ids, gates), (kernel_ids, kernel_gates) = route(logits_N_E, bias, moe), kernel(logits_N_E, bias)
        if not (torch.equal(ids, kernel_ids) and torch.allclose(gates, kernel_gates, 1e-5, 1e-6)):
            return None
    return kernel


def linears_of(tensors: Mapping[str, Tensor], modules: Sequence[str], workspace: Workspace) -> tuple[Linear, ...]:
    """Returns one `Linear` for all modules if their tensors are adjacent in memory, else one for each module."""
    kinds = [kind for kind in _ARGUMENTS if f"{modules[0]}.{kind}" in tensors]
    parts = {_ARGUMENTS[kind]: [tensors[f"{module}.{kind}"] for module in modules] for kind in kinds}
    joined = {argument: whole for argument, tensors in parts.items() if (whole := _joined(tensors)) is not None}
    if len(joined) == len(parts):
        return (Linear(**joined, workspace=workspace),)
    by_module = zip(*parts.values(), strict=True)
    return tuple(Linear(**dict(zip(parts, tensors, strict=True)), workspace=workspace) for tensors in by_module)


def stack_of(layers: Sequence[GeneratorLayer], shape: ModelShape) -> LayerStack | None:
    """Returns all layers as one call, or None unless they are dense, joined, and multiplied by C++ kernels.

    Args:
        shape: with the heads of this rank.
    """
    if shape.is_hybrid:
        return None
    linears = [tuple(layer.linears()) for layer in layers]
    is_dense = all(isinstance(layer.mlp, GatedLinears) for layer in layers)
    if not (
        is_dense and all(len(of_layer) == NUM_LINEARS for of_layer in linears) and can_stack(list(chain(*linears)))
    ):
        return None
    return LayerStack(
        [(layer.norms(), of_layer) for layer, of_layer in zip(layers, linears, strict=True)], num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, rotary_dim=shape.rotary_dim, eps=shape.rms_norm_eps,
    )  # fmt: skip


def gated_linears(tensors: Mapping[str, Tensor], module: str, workspace: Workspace) -> GatedLinears:
    return GatedLinears(
        gate_up=linears_of(tensors, [f"{module}.gate_proj", f"{module}.up_proj"], workspace),
        down=linears_of(tensors, [f"{module}.down_proj"], workspace)[0],
    )


def expert_mixture(
    tensors: Mapping[str, Tensor], module: str, workspace: Workspace, moe: MoeShape, first: int
) -> ExpertMixture:
    """Returns the mixture of this name.

    Args:
        first: number of the first expert that this rank holds.
    """
    names = (f"{module}.experts.{kind}_proj" for kind in ("gate", "up", "down"))
    gate, up, down = ((tensors[name], tensors.get(f"{name}.scale")) for name in names)
    return ExpertMixture(
        moe=moe,
        router=linears_of(tensors, [f"{module}.gate"], workspace)[0],
        selection_bias_E=tensors.get(f"{module}.gate.e_score_correction_bias"),
        experts=ExpertFeedForward(gate, up, down, first, workspace),
        shared=gated_linears(tensors, f"{module}.shared_experts", workspace) if moe.shared_size else None,
        shared_gate=linears_of(tensors, [f"{module}.shared_expert_gate"], workspace)[0] if moe.gates_shared else None,
        kernel=route_kernel(moe) if gate[0].device.type == "cpu" and experts.kernels().library is not None else None,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns one view over tensors that follow each other in one buffer, or None if they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
