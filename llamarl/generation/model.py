"""`GeneratorModel`: the forward of `models/transformer.py` for generation, in float32, bfloat16, int8 or fp8.

It owns no weights. `specs` lists the tensors that it needs, in order, and `use` sets them. Projections of one input (q,
k, v; gate, up) are neighbors in that order, so the tensors of one flat buffer can serve as one matrix.

The residual stream is float32 everywhere, as in the trainer: nothing is rounded between two layers. Factors of products
are float32 on the CPU, whose kernels accumulate in float32 anyway. On GPUs they are bfloat16 unless the weights are
float32.

In a mixture of experts the router is float32 in every precision, and the experts that it chooses can be recorded.
Tensor-parallel ranks hold columns of every expert, or some experts each (`sharding/tensor_parallel.py` decides).

`AdapterMerger` is for a generator that receives adapters: it merges them into the frozen model. Merging costs a pass
over the weights per version, in the background. Decoding then costs the same as without adapters, in every precision.

Shape suffixes: N packed tokens, D model dim, H query heads, J kv heads, K head dim, V vocabulary, W experts of a token
in all layers; O outputs and I inputs of a projection, R rank of its adapter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.config.roles import LoraConfig
from llamarl.generation.attention import KernelAttention, TorchAttention
from llamarl.generation.network import (
    DeltaHeads,
    ExpertMixture,
    GatedLinears,
    GeneratorLayer,
    Network,
    expert_mixture,
    gated_linears,
    linears_of,
    stack_of,
)
from llamarl.kernels import gpu
from llamarl.kernels.delta import sigmoid_mul
from llamarl.kernels.linear import Linear, QuantizedRows, Workspace, is_exact, products_of_few_rows
from llamarl.kernels.ops import rms_norm, rotate
from llamarl.models.folder import load_shape, loading_text
from llamarl.models.hf import EMBEDDING, HEAD, Read, open_model
from llamarl.models.lora import A, B, adapted_weights, adapter_of, merged
from llamarl.models.masking import UnusedIds
from llamarl.models.quantize import QUANTIZED_DTYPES, quantize_rows
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attend, Mixer, Rope, Rotation, Transformer
from llamarl.models.vocabulary import unused_ids
from llamarl.observability.spans import stage
from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import (
    cuts_by_expert,
    expert_box,
    is_decay,
    is_expert,
    is_quantizable,
    is_router,
    tensor_parallel_box,
)
from llamarl.weight_sync.base import views
from llamarl.weight_sync.layout import TensorSpec, lay_out

Precision = Literal["float32", "bfloat16", "int8", "fp8"]
KvPrecision = Literal["auto", "bfloat16", "fp8"]
_QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}


class TensorParallel(Protocol):
    """The ranks that together hold one model."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks. May overwrite `x`."""
        ...

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        """Returns the ranks' parts of the vocabulary side by side, [N, V]."""
        ...


class GeneratorModel:
    """A model for the engine, like `Transformer`. Its weights are the tensors of the last `use`."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: Precision,
        device: torch.device | str,
        tensor_parallel: TensorParallel | None = None,
        kv_dtype: KvPrecision = "auto",
    ) -> None:
        """
        Args:
            dtype: type of the projections. Embedding and head are float32 for float32, else bfloat16.
            kv_dtype: type of cached keys and values. "auto" means the type of the head.

        Raises:
            ValueError: this device cannot multiply `dtype`, or the ranks cannot share the model evenly.
        """
        self.precision, self.device = dtype, torch.device(device)
        self._check_device(kv_dtype)
        on_cpu, full = self.device.type == "cpu", dtype == "float32"
        self.dtype = torch.float32 if on_cpu or full else torch.bfloat16
        """Type of normed hidden states, queries, keys and values."""
        self.head_dtype = torch.float32 if full else torch.bfloat16
        """Type of embedding and head."""
        self.kv_dtype = self.head_dtype if kv_dtype == "auto" else getattr(torch, _QUANTIZED.get(kv_dtype, kv_dtype))
        """Type of cached keys and values."""
        self._parallel = tensor_parallel if tensor_parallel and tensor_parallel.size > 1 else None
        num_ranks, rank = (self._parallel.size, self._parallel.rank) if self._parallel else (1, 0)
        self._specs = _specs(shape, self._dtype_of, num_ranks, rank)
        self._shapes = {spec.key: spec.shape for spec in self._specs}
        boxes = {spec.name: spec.box for spec in self._specs}
        self.shape = _of_rank(shape, boxes, num_ranks)
        """Sizes of the model, with the heads of this rank."""
        heads = self.shape.num_heads * (2 if shape.is_hybrid else 1), self.shape.num_kv_heads, self.shape.num_kv_heads
        self._qkv_sizes = [count * shape.head_dim for count in heads]
        if (delta := self.shape.delta) is not None:
            self._delta_sizes = [delta.key_size, delta.key_size, delta.value_size, delta.value_size]
        self._first_id, self._first_expert = boxes[EMBEDDING].starts[0], 0
        if shape.moe is not None:
            sparse = _name(shape.moe.sparse_layers[0], "mlp.experts.gate_proj")
            self._first_expert = boxes[sparse].starts[0]
        self._rope, self._unused_ids = Rope(shape), UnusedIds(shape.unused_ids)
        self._head_name = EMBEDDING if shape.tie_embeddings else HEAD
        self._used: Mapping[str, Tensor] = {}
        self._network = Network()
        self._workspaces = [Workspace(), Workspace()]
        self._spare: Mapping[str, Tensor] | None = None
        self._spare_is_whole = False
        self._swapped: torch.Event | torch.cuda.Event | None = None
        """The GPU may read the current spare until this event. None means that it does not."""
        self.merges = False
        """True if adapters are merged into the weights in use, so `sleep` must keep them."""
        self.weights_at = 0
        """A number that changes when the addresses of the weights in use change."""

    @property
    def is_whole(self) -> bool:
        """True if no other rank holds a part of the model."""
        return self._parallel is None

    @property
    def multiplies_by(self) -> str:
        """Text for the log: the paths of `kernels/paths.py` that compute the projections, with the shapes of
        weights."""
        shapes = dict[str, dict[str, None]]()
        for path, shape in self._network.multipliers():
            shapes.setdefault(path, {})[shape] = None
        names = ", ".join(f"{path} ({'; '.join(of_path)})" for path, of_path in shapes.items())
        return names + (f", packed in 2 x {self.packed_bytes / 1e6:.3g} MB" if self.packed_bytes else "")

    @property
    def no_graphs_because(self) -> str:
        """Reason why steps cannot be CUDA graphs; "" means that they can."""
        if any(mixture.experts.reads_counts for mixture in self._network.mixtures()):
            return f"{self.precision} experts are multiplied one by one, and the host reads their numbers of rows"
        if self.shape.delta is not None:
            return "states of delta nets are read by slots that the host chooses"
        return ""

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed copy of the weights. There are at most two copies."""
        return self._network.workspace.num_bytes

    def specs(self) -> tuple[TensorSpec, ...]:
        """Returns the tensors of this rank, in the order in which they must be in one buffer for joined projections."""
        return self._specs

    def load(self, weights: Transformer | Mapping[str, Tensor] | Read) -> None:
        """Fills a new buffer from whole parameters, or from a function that reads parts of them, cast or quantized, and
        uses it.

        Raises:
            NonFiniteWeights: a parameter to be quantized holds NaN or infinity.
        """
        if isinstance(weights, Transformer):
            weights = weights.state_dict()
        read = part_reader(weights) if isinstance(weights, Mapping) else weights
        tensors = self._buffer()
        with torch.no_grad():
            for spec in self._specs:
                if spec.part == "scales":
                    continue
                part = read(spec.name, spec.box)
                if spec.dtype in QUANTIZED_DTYPES:
                    out = tensors[spec.key], tensors[f"{spec.name}.scale"]
                    quantize_rows(part.to(self.device), spec.dtype, out=out)
                else:
                    tensors[spec.key].copy_(part)
        self.use(tensors)

    def hold(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns tensors for `use`, packed for the kernels until the next call.

        They are the given tensors if these are on this model's device, else copies, which stay until the call after the
        next. Another thread may call this while the model computes.
        """
        if not self._are_here(tensors):
            spare = self.spare()
            with device_stream(self.device):
                for key, tensor in tensors.items():
                    spare[key].copy_(tensor)
            tensors = spare
        return self._built(tensors)

    def spare(self, whole: bool = False) -> Mapping[str, Tensor]:
        """Returns tensors that nothing reads any more, to be overwritten and then passed to `use`.

        Args:
            whole: fill them with weights, current or older, for a caller that does not overwrite all of them.
        """
        if self._spare is None:
            self._spare = self._buffer()
        if self._swapped is not None:
            self._swapped.synchronize()  # on the host: other devices may write there
        if whole and not self._spare_is_whole:
            with device_stream(self.device):
                for key, tensor in self._used.items():
                    self._spare[key].copy_(tensor)
            self._spare_is_whole = True
        return self._spare

    def sleep(self) -> None:
        """Frees all weights until `use` sets new ones. Keeps the weights in use if `merges`."""
        if not self.merges:
            self._used, self._network, self._workspaces = {}, Network(), [Workspace(), Workspace()]
        self._spare, self._spare_is_whole, self._swapped = None, False, None

    def room(self, specs: Sequence[TensorSpec]) -> Callable[[], Mapping[str, Tensor]]:
        """Returns a function that gives memory on this device for tensors like `specs`: that of `spare` if they are the
        weights."""
        if tuple(specs) == self._specs:
            return self.spare
        layout = lay_out(specs)
        tensors = views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device))
        return lambda: tensors

    def _are_here(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(tensor.device.type == self.device.type for tensor in tensors.values())

    def _buffer(self) -> dict[str, Tensor]:
        layout = lay_out(self._specs)
        return views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device))

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        """Computes with these tensors (by `TensorSpec.key`) from now on. They must not change. Nothing is copied.

        Views of one flat buffer laid out by `lay_out(specs())` give joined projections. Other tensors are multiplied
        separately.
        """
        network = tensors if isinstance(tensors, Network) else self._built(tensors)
        assert network.built == network.workspace.begun, "later weights took the buffer of these"
        if self._spare is not None and network[EMBEDDING] is self._spare[EMBEDDING]:
            self._spare, self._spare_is_whole = self._used or None, bool(self._used)
            if self.device.type == "cuda":  # launched steps still read them
                self._swapped = torch.cuda.current_stream(self.device).record_event()
        self._used = self._network = network
        self.weights_at = hash(tuple(network[key].data_ptr() for key in self._shapes))

    def _built(self, tensors: Mapping[str, Tensor]) -> Network:
        """Builds a network in the buffer that the weights in use do not occupy."""
        for key, shape in self._shapes.items():
            assert tensors[key].shape == shape, f"{key} is not {shape}"
        network = Network(tensors)
        network.workspace = self._workspaces[bool(self._used) and self._network.workspace is self._workspaces[0]]
        network.built = network.workspace.begin()
        network.layers = [self._layer(network, index) for index in range(self.shape.num_layers)]
        network.stack = stack_of(network.layers, self.shape) if self._parallel is None else None
        final_D = network["model.norm.weight"]
        network.norm_D = 1.0 + final_D.float() if self.shape.is_hybrid else final_D
        network.head = Linear(network[self._head_name], workspace=network.workspace)
        return network

    def __call__(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        routes_N_W: Tensor | None = None,
        fed_R: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states after the final norm, [N, D].

        Args:
            routes_N_W: for a mixture; filled with the experts that each token chooses, layer by layer, the likeliest
                first. Any integer type that can hold them.
            fed_R: tokens to which negative ids refer, -1 to the first.
        """
        products = products_of_few_rows(len(token_ids_N), self.device)
        if products and isinstance(attend, TorchAttention) and self._fuses_layers and attend.rotates:
            return self._by_few_rows(products, token_ids_N, positions_N, attend, fed_R)
        chosen = list[Tensor]()
        x_N_D, delta_N_D, eps = self._embed(token_ids_N, fed_R), None, self.shape.rms_norm_eps
        if (stack := self._network.stack) and isinstance(attend, KernelAttention) and not is_exact():
            stack(x_N_D, self._rope(positions_N, torch.float32), attend.paged, *attend.cached)
            return rms_norm(x_N_D, self._network.norm_D, eps)
        rotates_all = self.shape.rotary_dim == self.shape.head_dim
        paged = attend if isinstance(attend, TorchAttention) and attend.rotates and rotates_all else None
        rotation = self._rope(positions_N, torch.float32)  # as in the trainer, for every kind of attention
        for index, layer in enumerate(self._network.layers):
            if self.shape.is_hybrid:
                mixed_N_I = self._mixed(layer, self._normed(x_N_D, layer.input_norm_D, delta_N_D), rotation, attend)
                delta_N_D = self._add(layer.o, mixed_N_I, x_N_D)
                normed_N_D, mlp = self._normed(x_N_D, layer.post_norm_D, delta_N_D), layer.mlp
            else:
                normed_N_D = rms_norm(x_N_D, layer.input_norm_D, eps, delta_N_D, layer.qkv[0].takes)
                flats = _project(layer.qkv, normed_N_D, self._qkv_sizes)
                q, k, v = (flat.unflatten(-1, (-1, self.shape.head_dim)) for flat in flats)
                if paged:
                    out_N_H_K = paged.rotated(index, q, k, v, rotation, layer.qk_norms, eps)
                else:
                    out_N_H_K = attend(index, *rotate(q, k, rotation, layer.qk_norms, eps), v)
                delta_N_D = self._add(layer.o, out_N_H_K.flatten(-2).contiguous(), x_N_D)
                normed_N_D, mlp = rms_norm(x_N_D, layer.post_norm_D, eps, delta_N_D, layer.mlp.takes), layer.mlp
            if isinstance(mlp, ExpertMixture):
                delta_N_D, ids_N_K = mlp(normed_N_D)
                delta_N_D = self._parallel.all_reduce(delta_N_D) if self._parallel else delta_N_D
                chosen.append(ids_N_K)
            else:
                delta_N_D = self._add(mlp.down, mlp.inner(normed_N_D), x_N_D)
        if routes_N_W is not None:
            routes_N_W.copy_(torch.cat(chosen, 1))
        return self._normed(x_N_D, self._network.norm_D, delta_N_D)

    def _normed(self, x_N_D: Tensor, weight_D: Tensor, delta_N_D: Tensor | None) -> Tensor:
        """Returns the norm in the type of products. Factors of a hybrid model's norms are float32."""
        return rms_norm(x_N_D, weight_D, self.shape.rms_norm_eps, delta_N_D).to(self.dtype)

    def _mixed(self, layer: GeneratorLayer, x_N_D: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Returns the gated outputs of all heads of a hybrid model's attention or delta net, [N, I]."""
        if layer.delta is not None:
            projected = _project(layer.qkv, x_N_D, self._delta_sizes)
            return layer.delta(layer.place, cast(Mixer, attend).recur, x_N_D, projected)
        flats = _project(layer.qkv, x_N_D, self._qkv_sizes)
        q, k, v = (flat.unflatten(-1, (-1, self.shape.head_dim)) for flat in flats)
        q, gate = (x.contiguous() for x in q.unflatten(-2, (-1, 2)).unbind(-2))
        q, k = (x.to(v.dtype) for x in rotate(q, k, rotation, layer.qk_norms, self.shape.rms_norm_eps))
        return sigmoid_mul(attend(layer.place, q, k, v).flatten(-2).contiguous(), gate.flatten(-2))

    def _by_few_rows(
        self, products: Any, token_ids_N: Tensor, positions_N: Tensor, attend: TorchAttention, fed_R: Tensor | None
    ) -> Tensor:
        """Does the same by `parts/cuda/products.py`, five launches a layer. Needs `_fuses_layers`."""
        eps, num_parts = self.shape.rms_norm_eps, products.num_parts(self.shape.hidden_size)
        fed_R = token_ids_N if fed_R is None else fed_R
        x_N_D, squares_Q_N = gpu.kernel("sample", self.device).embed(
            token_ids_N, fed_R, self._used[EMBEDDING], num_parts
        )
        rotation = self._rope(positions_N, torch.float32)
        for index, layer in enumerate(self._network.layers):
            mlp = layer.mlp
            assert isinstance(mlp, GatedLinears)
            qkv = products.normed(x_N_D, squares_Q_N, layer.input_norm_D, eps, *layer.qkv[0].weight_and_bias)
            q, k, v = (x.unflatten(-1, (-1, self.shape.head_dim)) for x in qkv.split_with_sizes(self._qkv_sizes, -1))
            out_N_H_K = attend.rotated(index, q, k, v, rotation, layer.qk_norms, eps)
            products.added(out_N_H_K.flatten(-2), layer.o.weight_and_bias[0], x_N_D, squares_Q_N)
            inner_N_F = products.gated(x_N_D, squares_Q_N, layer.post_norm_D, eps, mlp.gate_up[0].weight_and_bias[0])
            products.added(inner_N_F, mlp.down.weight_and_bias[0], x_N_D, squares_Q_N)
        return rms_norm(x_N_D, self._network.norm_D, eps)

    def multiplies_few(self, num_rows: int) -> bool:
        """Returns whether `parts/cuda/products.py` can compute a part of a decode step of this number of rows."""
        products = gpu.kernel("products", self.device)
        if products is None or num_rows > products.MOST_ROWS:
            return False
        return self._fuses_layers or any(linear.takes for linear in self._network.linears())

    @property
    def _fuses_layers(self) -> bool:
        """Whether all layers are dense, whole and joined, with weights that are not quantized."""
        layers = self._network.layers
        if self._parallel is not None or self.precision in _QUANTIZED or self.shape.rotary_dim != self.shape.head_dim:
            return False
        if self.shape.is_hybrid:
            return False
        return all(
            isinstance(layer.mlp, GatedLinears) and len(layer.qkv) == len(layer.mlp.gate_up) == 1 for layer in layers
        )

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """Returns logits [N, V], float32. Unused ids have probability 0."""
        if self.dtype == torch.bfloat16:  # without `out_dtype` torch rounds the sums of a bfloat16 product
            logits_N_V = torch.mm(hidden_N_D, self._used[self._head_name].t(), out_dtype=torch.float32)
        else:
            logits_N_V = self._network.head(hidden_N_D)
        whole_N_V = self._parallel.all_gather_vocab(logits_N_V) if self._parallel else logits_N_V
        return self._unused_ids.remove(whole_N_V)

    def _check_device(self, kv_dtype: KvPrecision) -> None:
        if self.precision == "fp8" and self.device.type != "cuda":
            raise ValueError(f"fp8 weights need a GPU with float8 units, not `{self.device}`; use int8 or bfloat16")
        in_fp8 = [tensors for tensors, dtype in (("weights", self.precision), ("keys", kv_dtype)) if dtype == "fp8"]
        on_gpu = self.device.type == "cuda"
        if in_fp8 and on_gpu and torch.cuda.get_device_capability(self.device) < (8, 9):
            name = torch.cuda.get_device_name(self.device)
            raise ValueError(f"{name} has no float8 units, which fp8 {in_fp8[0]} need; use int8 or bfloat16")

    def _dtype_of(self, name: str) -> str:
        if is_router(name) or is_decay(name):
            return "float32"
        if is_quantizable(name):
            return _QUANTIZED.get(self.precision, self.precision)
        return _dtype_name(self.head_dtype if name in (EMBEDDING, HEAD) else self.dtype)

    def _layer(self, tensors: Network, index: int) -> GeneratorLayer:
        def get(name: str) -> Tensor:
            return tensors[_name(index, name)]

        def linears(*modules: str) -> tuple[Linear, ...]:
            return linears_of(tensors, [_name(index, module) for module in modules], tensors.workspace)

        def norm(name: str) -> Tensor:
            return 1.0 + get(name).float() if self.shape.is_hybrid else get(name)

        ends: dict[str, Any] = {
            "input_norm_D": norm("input_layernorm.weight"),
            "post_norm_D": norm("post_attention_layernorm.weight"),
            "mlp": self._feed_forward(tensors, index),
        }
        delta, with_delta = self.shape.delta, () if self.shape.delta is None else self.shape.delta.layers
        if delta is not None and index in with_delta:
            return GeneratorLayer(
                qkv=linears(*(f"linear_attn.in_proj_{kind}" for kind in "qkvz")), qk_norms=None,
                o=linears("linear_attn.out_proj")[0], place=with_delta.index(index), **ends,
                delta=DeltaHeads(
                    sizes=delta, ba=linears("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
                    conv_C_W=torch.cat([get(f"linear_attn.conv_{kind}.weight") for kind in "qkv"]).float(),
                    a_log_H=get("linear_attn.A_log"), dt_bias_H=get("linear_attn.dt_bias"),
                    norm_V=get("linear_attn.norm.weight").float(), eps=self.shape.rms_norm_eps,
                ),
            )  # fmt: skip
        return GeneratorLayer(
            qkv=linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norms=(norm("self_attn.q_norm.weight"), norm("self_attn.k_norm.weight")) if self.shape.qk_norm else None,
            o=linears("self_attn.o_proj")[0], place=index - sum(layer < index for layer in with_delta), **ends,
        )  # fmt: skip

    def _feed_forward(self, tensors: Network, index: int) -> GatedLinears | ExpertMixture:
        module, moe = _name(index, "mlp"), self.shape.moe
        if moe is None or index not in moe.sparse_layers:
            return gated_linears(tensors, module, tensors.workspace)
        return expert_mixture(tensors, module, tensors.workspace, moe, self._first_expert)

    def _embed(self, token_ids_N: Tensor, fed_R: Tensor | None) -> Tensor:
        embedding_V_D = self._used[EMBEDDING]
        if self._parallel is None and (kernels := gpu.kernel("sample", self.device)):
            return kernels.embed(token_ids_N, token_ids_N if fed_R is None else fed_R, embedding_V_D)[0]
        if fed_R is not None:
            fed_N = fed_R.index_select(0, (-1 - token_ids_N).clamp_(min=0))
            token_ids_N = torch.where(token_ids_N < 0, fed_N, token_ids_N)
        if self._parallel is None:
            return F.embedding(token_ids_N, embedding_V_D).float()
        local_N = token_ids_N - self._first_id
        elsewhere_N = (local_N < 0) | (local_N >= len(embedding_V_D))
        x_N_D = F.embedding(local_N.masked_fill(elsewhere_N, 0), embedding_V_D).float()
        return self._parallel.all_reduce(x_N_D.masked_fill_(elsewhere_N[:, None], 0.0))

    def _add(self, project: Linear, x: Tensor | QuantizedRows, residual_N_D: Tensor) -> Tensor | None:
        """Adds the product to the residual stream and returns None, or returns it for the next norm to add."""
        if self._parallel is not None:
            return self._parallel.all_reduce(project(x))
        if gpu.kernel("ops", self.device):
            return project(x)
        project(x, residual_N_D)
        return None


@contextmanager
def device_stream(device: torch.device) -> Iterator[None]:
    """Runs work on a GPU in parallel with decoding, and waits for it at the end."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:  # launched work may still use the memory that is written here
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()


def _name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _specs(shape: ModelShape, dtype_of: Callable[[str], str], num_ranks: int, rank: int) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a rank. Projections of one input are adjacent: first their values, then their scales."""
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in Transformer(shape).state_dict().items()}
    specs, moe = list[TensorSpec](), shape.moe
    by_expert = moe is not None and cuts_by_expert(moe.num_experts, moe.expert_size, num_ranks)

    def box_of(name: str) -> Box:
        if by_expert and is_expert(name):
            return expert_box(shapes[name], num_ranks, rank)
        return tensor_parallel_box(name, shapes[name], num_ranks, rank, shape.num_kv_heads)

    for group in _groups(shapes):
        values = [
            TensorSpec(
                name=name,
                global_shape=shapes[name],
                box=box_of(name),
                dtype=dtype_of(name),
            )
            for name in group
        ]
        specs += values
        if values[0].dtype in QUANTIZED_DTYPES:
            specs += [dataclasses.replace(spec, part="scales", dtype="float32") for spec in values]
    return tuple(specs)


def _of_rank(shape: ModelShape, boxes: Mapping[str, Box], num_ranks: int) -> ModelShape:
    """Returns a model's sizes with the heads of one of its ranks. Raises ValueError: they cannot share the heads of
    delta nets."""
    attention = next(layer for layer in range(shape.num_layers) if not shape.has_delta(layer))
    queries = shape.head_dim * (2 if shape.is_hybrid else 1)
    delta = shape.delta
    if delta is not None:
        if delta.num_key_heads % num_ranks:
            raise ValueError(f"{num_ranks} tensor-parallel ranks cannot share {delta.num_key_heads} key heads evenly")
        key_heads, value_heads = delta.num_key_heads // num_ranks, delta.num_value_heads // num_ranks
        delta = dataclasses.replace(delta, num_key_heads=key_heads, num_value_heads=value_heads)
    return dataclasses.replace(
        shape,
        num_heads=boxes[_name(attention, "self_attn.q_proj.weight")].shape[0] // queries,
        num_kv_heads=boxes[_name(attention, "self_attn.k_proj.weight")].shape[0] // shape.head_dim,
        delta=delta,
    )


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Returns parameters in the order of the forward. Weights, or biases, of the same input are one group."""
    groups = dict[str, list[str]]()
    for name in names:
        key = re.sub(r"self_attn\.[qkv]_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))
        key = re.sub(r"in_proj_[ba]\.", "ba.", re.sub(r"in_proj_[qkvz]\.", "qkvz.", key))
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _project(projections: tuple[Linear, ...], x_N_D: Tensor | QuantizedRows, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Applies several projections, or one joined projection whose output is split into `sizes`."""
    if len(projections) > 1:
        return [project(x_N_D) for project in projections]
    return projections[0](x_N_D).split_with_sizes(sizes, -1)


def part_reader(weights: Mapping[str, Tensor]) -> Read:
    """Returns a reader of parts of these whole parameters."""
    return lambda name, box: weights[name].detach()[box.within(Box.whole(weights[name].shape))]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_generator_model(
    folder: str | Path,
    precision: Precision,
    device: torch.device | str,
    tensor_parallel: TensorParallel | None = None,
    kv_dtype: KvPrecision = "auto",
    asleep: bool = False,
    tokens_of: str | Path | None = None,
) -> GeneratorModel:
    """Returns the model in a Hugging Face folder, or this rank's part of it. Reads nothing else.

    Args:
        asleep: return it without weights.
        tokens_of: folder whose tokenizer decides which ids are used; None means `folder`.

    Raises:
        ConfigError: there is no such model, or this machine cannot serve it with these settings.
    """
    try:
        shape = load_shape(folder)
        if tokens_of:
            shape = dataclasses.replace(shape, unused_ids=unused_ids(Path(tokens_of), shape.vocab_size))
        model = GeneratorModel(shape, precision, device, tensor_parallel, kv_dtype)
        if not asleep:
            with stage(loading_text(folder)):
                model.load(open_model(folder)[1].read)
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be served in {precision!r} here: {error}") from None
    return model


class AdapterMerger:
    """Merges adapters on one rank. Replaces `GeneratorModel.specs` and `GeneratorModel.hold`."""

    def __init__(self, model: GeneratorModel, base: Transformer, config: LoraConfig, read: Read | None = None) -> None:
        """
        Args:
            model: the serving model, which has loaded `base`.
            base: the whole frozen model, or one on the meta device with `read` for its weights.
        """
        self._model, self._scale = model, config.scale
        model.merges = True
        self._targets = {spec.name: spec for spec in model.specs() if spec.part == "values"}
        self._frozen, specs = dict[str, Tensor](), list[TensorSpec]()
        """Returns the tensors that this rank receives: its part of each adapter."""
        read = read or part_reader(dict(base.named_parameters()))
        for name, (num_outputs, num_inputs) in adapted_weights(base.shape, config):
            box, rank = self._targets[name].box, config.rank
            self._frozen[name] = _smallest(read(name, box)).to(model.device, copy=True)
            module = name.removesuffix("weight")
            shapes = {A: (rank, num_inputs), B: (num_outputs, rank)}
            boxes = {
                A: Box((0, box.starts[1]), (rank, box.stops[1])),
                B: Box((box.starts[0], 0), (box.stops[0], rank)),
            }
            specs += [
                TensorSpec(name=f"{module}{kind}", global_shape=shapes[kind], box=boxes[kind], dtype="float32")
                for kind in (A, B)
            ]
        self._specs = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors that this rank wants to receive: its part of each adapter."""
        return self._specs

    @torch.no_grad()
    def hold(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the frozen weights with `adapters` merged in, for `GeneratorModel.use`. Raises NonFiniteWeights."""
        spare = self._model.spare(whole=True)
        with device_stream(self._model.device):
            for name, frozen in self._frozen.items():
                a_R_I, b_O_R = (matrix.to(frozen.device) for matrix in adapter_of(adapters, name))
                weight_O_I, spec = merged(frozen, a_R_I, b_O_R, self._scale), self._targets[name]
                if spec.dtype in QUANTIZED_DTYPES:
                    quantize_rows(weight_O_I, spec.dtype, out=(spare[name], spare[f"{name}.scale"]))
                else:
                    spare[name].copy_(weight_O_I)
        return self._model.hold(spare)


def _smallest(weight: Tensor) -> Tensor:
    """Returns the weight in bfloat16 if that is exact, as for checkpoints saved in bfloat16, else the weight."""
    half = weight.bfloat16()
    return half if torch.equal(half.to(weight.dtype), weight) else weight
