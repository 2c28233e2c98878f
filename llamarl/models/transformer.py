"""The decoder of the Llama 3, Mistral, Qwen 2.5 and Qwen 3 families, of mixtures of experts, and of hybrids of
attention and delta nets, on packed tokens, with Hugging Face parameter names. Experts are stacked, and a delta net has
a matrix for each kind of head.

Tokens of many sequences share one dimension, and the caller's `attend` decides which token sees which. So one
definition serves training (packed documents) and generation (paged KV cache). For delta nets `attend` also knows which
token continues which (`Mixer`).

Shape suffixes: N packed tokens, D model dim, H query heads, J kv heads, K head dim, F feed-forward dim, V vocabulary, M
positions, R rotated channels of a head, W experts of a token in all layers, C mixed channels of a delta net.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamarl.kernels.delta import log_decay, wide
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.kernels.half import Rounded
from llamarl.kernels.ops import gate_by_torch, rotate_by_torch
from llamarl.models.delta_rule import Recur
from llamarl.models.experts import MoeFeedForward
from llamarl.models.masking import UnusedIds
from llamarl.models.shape import LinearScaling, Llama3Scaling, ModelShape, YarnScaling

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(place, q_N_H_K, k_N_J_K, v_N_J_K) -> out_N_H_K. It scales the scores by head_dim ** -0.5. `place` is the
layer's number among those with attention."""

Rotation = tuple[Tensor, Tensor]
"""(cos_N_1_R, sin_N_1_R). The first half of the sine is negative, see `rotate_by_torch`."""


class Mixer(Protocol):
    """`Attend` of a hybrid model."""

    recur: Recur
    """Recurrent part of its delta nets."""

    def __call__(self, place: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, /) -> Tensor: ...


_DECAYS = 0.01, 16.0
"""Bounds of the first decay rates of a delta net's heads."""


class Rope:
    """Rotary angles by position: one table per device and dtype. It is computed on the CPU in float32, so all processes
    rotate by the same bits."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, positions_N: Tensor, dtype: torch.dtype) -> Rotation:
        key = (positions_N.device, dtype)
        table_M_2_K = self._tables.get(key)
        if table_M_2_K is None:
            # A table made in inference mode could not serve a later backward pass.
            with torch.inference_mode(False):
                table_M_2_K = self._tables[key] = self._table().to(positions_N.device, dtype)
        cos_sin_N_2_K = table_M_2_K.index_select(0, positions_N)
        return cos_sin_N_2_K[:, :1], cos_sin_N_2_K[:, 1:]

    def _table(self) -> Tensor:
        positions_M = torch.arange(self._shape.max_position_embeddings, dtype=torch.float32, device="cpu")
        angles_M_half = positions_M[:, None] * rope_frequencies(self._shape)
        scaling = self._shape.rope_scaling
        magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0
        cos, sin = angles_M_half.cos() * magnitude, angles_M_half.sin() * magnitude
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Returns radians per position of each pair of rotated channels, float32 [rotary_dim / 2].

    Plain: theta ** (-2i / rotary_dim) (RoFormer, arXiv 2104.09864, section 3.2.2). Linear scaling divides all of them
    (arXiv 2306.15595). Llama 3 and YaRN divide long wavelengths by `factor`, keep short ones and blend those between.
    """
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device="cpu") / shape.rotary_dim
    wavelengths = shape.rope_theta**exponents
    match shape.rope_scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor=factor):
            return 1.0 / wavelengths / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / wavelengths, scaling)
        case YarnScaling() as scaling:
            kept = 1 - _yarn_ramp(scaling, shape.rotary_dim, shape.rope_theta)
            return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Blends by the ratio of context and wavelength (arXiv 2407.21783, section 3.2, and its code)."""
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def _yarn_ramp(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Returns 0 for channels that stay, 1 for channels that are divided, and linear values between (arXiv 2309.00071,
    section 3.2).

    Bounds are those of its reference code, whose `dim - 1` counts channels where the ramp counts pairs.
    """

    def channel(turns: float) -> float:  # the channel with this number of turns in the context of pretraining
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)


class RMSNorm(nn.RMSNorm):
    """A norm of inputs in any type.

    Under autocast the input is bfloat16 and the weight float32, but the fused kernel needs one type for both. On GPUs
    autocast makes both float32, unless training sets another operation.
    """

    normalize: Callable[..., Tensor] = staticmethod(F.rms_norm)
    """Norm with a gradient. Training may replace torch's."""

    def __init__(self, size: int, eps: float, *, is_centered: bool = False) -> None:
        """
        Args:
            is_centered: whether the norm multiplies by 1 + weight.
        """
        super().__init__(size, eps)
        self.is_centered = is_centered

    def forward(self, x: Tensor) -> Tensor:
        factor_D = 1.0 + wide(self.weight) if self.is_centered else self.weight
        weight_D = factor_D.to(x.dtype)
        if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            x, weight_D = (x.float(), factor_D.float()) if self.normalize is F.rms_norm else (x, factor_D)
        return self.normalize(x, self.normalized_shape, weight_D, self.eps)


def _norm(shape: ModelShape, size: int) -> RMSNorm:
    return RMSNorm(size, shape.rms_norm_eps, is_centered=shape.is_hybrid)


class Projection(nn.Linear):
    """A linear layer whose product training may replace."""

    multiply: Callable[..., Tensor] = staticmethod(F.linear)
    """Product of input, weight and bias, with a gradient. Training may replace torch's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in nn.Linear
        return self.multiply(input, self.weight, self.bias)


class Attention(nn.Module):
    """Grouped-query attention. The number of heads follows from the projections' outputs, which tensor parallelism
    cuts. In a hybrid model each head has a gate, whose projection follows that of the head's query."""

    rotate: Callable[[Tensor, Rotation], Tensor] = staticmethod(rotate_by_torch)
    """Rotation of heads. Training may replace torch's."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.index, self.is_gated = index, shape.is_hybrid
        """`index` is the number among the layers with attention."""
        self.head_dim = shape.head_dim
        gates = shape.query_size * self.is_gated
        self.q_proj = Projection(shape.hidden_size, shape.query_size + gates, bias=shape.qkv_bias)
        self.k_proj = Projection(shape.hidden_size, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = Projection(shape.hidden_size, shape.kv_size, bias=shape.qkv_bias)
        self.o_proj = Projection(shape.query_size, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (_norm(shape, shape.head_dim) if shape.qk_norm else None for _ in range(2))

    def project(self, x_N_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns flat queries, keys and values. A generator may replace this by one product with the joined
        weights."""
        return self.q_proj(x_N_D), self.k_proj(x_N_D), self.v_proj(x_N_D)

    def heads(self, x_N_D: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """Returns rotated queries and keys, and values: q_N_H_K, k_N_J_K, v_N_J_K; and gates [N, H, K], if there are
        any."""
        q, k, v = (flat.unflatten(-1, (-1, self.head_dim)) for flat in self.project(x_N_D))
        if self.is_gated:
            q_N_H_2_K = q.unflatten(-2, (-1, 2))
            return *self._turned(q_N_H_2_K.select(-2, 0), k, rotation), v, q_N_H_2_K.select(-2, 1)
        return *self._turned(q, k, rotation), v

    def _turned(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rotate(q, rotation), self.rotate(k, rotation)

    def forward(self, x_N_D: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, k, v, *gates = self.heads(x_N_D, rotation)
        out_N_H_K = attend(self.index, q, k, v)
        for gate_N_H_K in gates:
            out_N_H_K = out_N_H_K * gate_N_H_K.sigmoid()
        return self.o_proj(out_N_H_K.flatten(-2))


class Weight(nn.Module):
    """Weight of a convolution, or of a norm before a gate."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes))


class DeltaNet(nn.Module):
    """A gated delta net (arXiv 2412.06464), in place of attention. The number of heads follows from the weights, which
    tensor parallelism cuts."""

    def __init__(self, shape: ModelShape, delta: DeltaShape, index: int) -> None:
        super().__init__()
        self.place, self.delta, self.eps = delta.layers.index(index), delta, shape.rms_norm_eps
        sizes = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
        heads = {"z": delta.value_size, "b": delta.num_value_heads, "a": delta.num_value_heads}
        for kind, size in (sizes | heads).items():
            setattr(self, f"in_proj_{kind}", Projection(shape.hidden_size, size, bias=False))
        for kind, size in sizes.items():
            setattr(self, f"conv_{kind}", Weight(size, delta.conv_width))
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(delta.num_value_heads)) for _ in range(2))
        self.norm = Weight(delta.value_dim)
        self.out_proj = Projection(delta.value_size, shape.hidden_size, bias=False)

    def forward(self, x_N_D: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        mixed_N_C = torch.cat([self.get_submodule(f"in_proj_{kind}")(x_N_D) for kind in "qkv"], -1)
        conv_C_W = torch.cat([self.get_parameter(f"conv_{kind}.weight") for kind in "qkv"])
        z, b, a = (self.get_submodule(f"in_proj_{kind}")(x_N_D) for kind in "zba")
        decay_N_H = log_decay(a, self.A_log, self.dt_bias)
        recur = cast(Mixer, attend).recur
        out_N_H_V = recur(self.place, self.delta, mixed_N_C, conv_C_W, decay_N_H, wide(b).sigmoid())
        z_N_H_V = wide(z.unflatten(-1, (-1, self.delta.value_dim)))
        return self.out_proj(gated_norm(out_N_H_V, self.norm.weight, z_N_H_V, self.eps).flatten(-2))


def gated_norm(x_N_H_V: Tensor, weight_V: Tensor, gate_N_H_V: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of each head, times silu of its gate."""
    return F.rms_norm(x_N_H_V, weight_V.shape, weight_V.to(x_N_H_V.dtype), eps) * F.silu(gate_N_H_V)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    activate: Callable[[Tensor, Tensor], Tensor] = staticmethod(gate_by_torch)
    """Gated activation. Training may replace torch's."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, width, bias=False)
        self.up_proj = Projection(hidden_size, width, bias=False)
        self.down_proj = Projection(width, hidden_size, bias=False)

    def project(self, x_N_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gate and up. A generator may replace this by one product with the joined weights."""
        return self.gate_proj(x_N_D), self.up_proj(x_N_D)

    def forward(self, x_N_D: Tensor) -> Tensor:
        return self.down_proj(self.activate(*self.project(x_N_D)))


class Layer(nn.Module):
    """Pre-norm attention, or a delta net, and feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(shape, shape.hidden_size)
        if shape.delta is not None and shape.has_delta(index):
            self.linear_attn = DeltaNet(shape, shape.delta, index)
        else:
            with_delta = () if shape.delta is None else shape.delta.layers
            self.self_attn = Attention(shape, index - sum(layer < index for layer in with_delta))
        self.post_attention_layernorm = _norm(shape, shape.hidden_size)
        self.mlp = _feed_forward(shape, index)
        self.columns = None if shape.moe is None else shape.moe.columns(index)
        """Columns of its experts among those of all layers. None means that it has no experts."""
        self.recompute = False
        """Whether to keep only the input for backward (arXiv 1604.06174), inside of the FSDP2 unit."""

    def forward(self, x_N_D: Tensor, rotation: Rotation, attend: Attend, routes_N_W: Tensor | None = None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            options: dict[str, Any] = {
                "use_reentrant": False,
                "preserve_rng_state": False,
            }  # there are no random numbers
            return checkpoint(self._compute, x_N_D, rotation, attend, routes_N_W, **options)
        return self._compute(x_N_D, rotation, attend, routes_N_W)

    @property
    def mixer(self) -> Attention | DeltaNet:
        """Attention, or the delta net in its place."""
        return cast(DeltaNet, self.linear_attn) if hasattr(self, "linear_attn") else cast(Attention, self.self_attn)

    def _compute(self, x_N_D: Tensor, rotation: Rotation, attend: Attend, routes_N_W: Tensor | None) -> Tensor:
        x_N_D = x_N_D + self.mixer(_narrowed(self.input_layernorm(x_N_D)), rotation, attend)
        normed_N_D = _narrowed(self.post_attention_layernorm(x_N_D))
        if routes_N_W is None or self.columns is None:
            return x_N_D + self.mlp(normed_N_D)
        return x_N_D + self.mlp(normed_N_D, routes_N_W[:, self.columns])


def _narrowed(x: Tensor) -> Tensor:
    """Casts a norm that autocast made float32 on a GPU once, so that each product need not."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


def _feed_forward(shape: ModelShape, index: int) -> nn.Module:
    moe, size = shape.moe, shape.hidden_size
    if moe is None or not shape.is_sparse(index):
        return FeedForward(size, shape.intermediate_size)
    return MoeFeedForward(shape, moe, FeedForward(size, moe.shared_size) if moe.shared_size else None)


class Decoder(nn.Module):
    """Everything except the output head: the `model.` of the parameter names."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        size = shape.vocab_size, shape.hidden_size
        self.embed_tokens = nn.Embedding(
            *size, _weight=torch.empty(size)
        )  # random values would import torch's compiler
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_layers))
        self.norm = _norm(shape, shape.hidden_size)
        self.rope = Rope(shape)

    def forward(
        self, inputs_N: Tensor, positions_N: Tensor, attend: Attend, routes_N_W: Tensor | None = None
    ) -> Tensor:
        """Takes token ids, or the hidden states [N, D] of the pipeline stage before; see `Transformer.forward`."""
        x_N_D = inputs_N if inputs_N.is_floating_point() else self._embedded(inputs_N)
        rotation = self.rope(positions_N, x_N_D.dtype)
        for layer in self.layers.children():
            x_N_D = layer(x_N_D, rotation, attend, routes_N_W)
        return self.norm(x_N_D)

    def _embedded(self, token_ids_N: Tensor) -> Tensor:
        """Returns embeddings, [N, D]; under autocast in float32, rounded to bfloat16 as in generators."""
        x_N_D = self.embed_tokens(token_ids_N)
        return Rounded.apply(x_N_D.float()) if torch.is_autocast_enabled(x_N_D.device.type) else x_N_D


class Transformer(nn.Module):
    """A causal language model. New weights are arbitrary: load weights or call `initialize`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.unused_ids = UnusedIds(shape.unused_ids)
        self.model = Decoder(shape)
        # A tied model has no second name for the matrix, so code that rewrites modules cannot untie it.
        self.lm_head = None if shape.tie_embeddings else Projection(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, routes_N_W: Tensor | None = None
    ) -> Tensor:
        """Returns hidden states after the final norm, [N, D]. Positions are below `max_position_embeddings`.

        Args:
            routes_N_W: recorded experts of a mixture, int64, layer after layer; -1 means that the router chooses.
        """
        return self.model(token_ids_N, positions_N, attend, routes_N_W)

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """Returns [N, V], in the dtype of the weights. Unused ids have no probability."""
        return self.unused_ids.remove(F.linear(hidden_N_D, self.head_weight_V_D))

    @property
    def head_weight_V_D(self) -> Tensor:
        """The output head, which is the embedding matrix if they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type in which a generator caches keys and values: that of the weights."""
        return self.head_weight_V_D.dtype

    @property
    def device(self) -> torch.device:
        return self.head_weight_V_D.device

    @torch.no_grad()
    def initialize(self, seed: int, std: float) -> None:
        """Sets matrices to normal numbers of standard deviation `std`, factors of norms to 1, biases to 0, and decays
        of delta nets as transformers does. The bits are the same on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn.normal_(0.0, std, generator=generator))
            elif name.endswith(".A_log"):
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn.uniform_(*_DECAYS, generator=generator).log_())
            else:
                is_zero = name.endswith("bias") and not name.endswith(".dt_bias")
                is_centered = self.shape.is_hybrid and name.endswith("norm.weight") and ".linear_attn." not in name
                parameter.fill_(0.0 if is_zero or is_centered else 1.0)
        for buffer in self.buffers():  # selection biases
            buffer.zero_()
