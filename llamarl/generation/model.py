"""`GeneratorModel`: the forward of `models/transformer.py` for generation, in float32, bfloat16, int8 or fp8.

It owns no weights. `specs` says which tensors it wants, in which order; `use` points it to them. Projections of one
input (q, k, v; gate, up) are neighbors in that order, so that the tensors of one flat buffer serve as one matrix.

The residual stream is float32 everywhere, as the trainer's is: no rounding is left between two layers. What is
multiplied is float32 too on the CPU, as its kernels accumulate in float32 anyway; on GPUs it is bfloat16 unless the
weights are float32.

In a mixture of experts the router is float32 in every precision, what it chooses can be recorded, and tensor-parallel
ranks have columns of every expert, or some experts each (`sharding/tensor_parallel.py` says which).

Shape suffixes: N packed tokens, D model dim, H query heads, J kv heads, K head dim, V vocabulary, W experts of a token
in all layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.generation.attention import KernelAttention
from llamarl.generation.network import (
    ExpertMixture,
    GatedLinears,
    GeneratorLayer,
    Network,
    expert_mixture,
    gated_linears,
    linears_of,
    stack_of,
)
from llamarl.generation.torch_attention import TorchAttention
from llamarl.kernels import gpu
from llamarl.kernels.linear import Linear, QuantizedRows, Room, is_exact
from llamarl.kernels.ops import rms_norm, rotate
from llamarl.models.folder import load_shape, loading_text
from llamarl.models.hf import EMBEDDING, HEAD, Read, open_model
from llamarl.models.masking import UnusedIds
from llamarl.models.quantize import QUANTIZED_DTYPES, quantize_rows
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attend, Rope, Transformer
from llamarl.observability.spans import stage
from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import (
    cuts_by_expert,
    expert_box,
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
        """The sum over all ranks; may overwrite `x`."""
        ...

    def all_gather_vocab(self, logits_N_V: Tensor) -> Tensor:
        """The ranks' parts of the vocabulary side by side, [N, V]."""
        ...


class GeneratorModel:
    """Runs in the engine like `Transformer`; its weights are wherever `use` last said."""

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
            dtype: of the projections. Embedding and head are float32 for float32, else bfloat16.
            kv_dtype: of cached keys and values; "auto": as the head.

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
        """Type in which keys and values are cached."""
        self._parallel = tensor_parallel if tensor_parallel and tensor_parallel.size > 1 else None
        num_ranks, rank = (self._parallel.size, self._parallel.rank) if self._parallel else (1, 0)
        self._specs = _specs(shape, self._dtype_of, num_ranks, rank)
        self._shapes = {spec.key: spec.shape for spec in self._specs}
        boxes = {spec.name: spec.box for spec in self._specs}
        self.shape = dataclasses.replace(
            shape,
            num_heads=boxes[_name(0, "self_attn.q_proj.weight")].shape[0] // shape.head_dim,
            num_kv_heads=boxes[_name(0, "self_attn.k_proj.weight")].shape[0] // shape.head_dim,
        )
        """Sizes of the model with the heads of this rank."""
        heads = self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads
        self._qkv_sizes = [count * shape.head_dim for count in heads]
        self._first_id, self._first_expert = boxes[EMBEDDING].starts[0], 0
        if shape.moe is not None:
            sparse = _name(shape.moe.sparse_layers[0], "mlp.experts.gate_proj")
            self._first_expert = boxes[sparse].starts[0]
        self._rope, self._unused_ids = Rope(shape), UnusedIds(shape.unused_ids)
        self._head_name = EMBEDDING if shape.tie_embeddings else HEAD
        self._used: Mapping[str, Tensor] = {}
        self._network = Network()
        self._rooms = [Room(), Room()]
        self._spare: Mapping[str, Tensor] | None = None
        self._spare_is_whole = False
        self._swapped: torch.Event | torch.cuda.Event | None = None
        """Until then the GPU may read what is the spare now."""
        self.merges = False
        """Adapters are merged into weights that it has, so it keeps them asleep."""
        self.weights_at = 0
        """Another number when the weights in use lie elsewhere."""

    @property
    def is_whole(self) -> bool:
        """No other rank holds a part of it."""
        return self._parallel is None

    @property
    def multiplies_by(self) -> str:
        """Names for the log of what computes the projections: paths of `kernels/paths.py` and the shapes of weights."""
        shapes = dict[str, dict[str, None]]()
        for path, shape in self._network.multipliers():
            shapes.setdefault(path, {})[shape] = None
        names = ", ".join(f"{path} ({'; '.join(of_it)})" for path, of_it in shapes.items())
        return names + (f", packed in 2 x {self.packed_bytes / 1e6:.3g} MB" if self.packed_bytes else "")

    @property
    def no_graphs_because(self) -> str:
        """Reason why steps cannot be CUDA graphs; empty: they can."""
        if any(one.experts.reads_counts for one in self._network.mixtures()):
            return f"the host reads how many rows each expert has, as {self.precision} ones are multiplied one by one"
        return ""

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed copy of the weights; there are two at most."""
        return self._network.room.num_bytes

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of this rank, in the order in which they must lie in one buffer to be used as they are."""
        return self._specs

    def load(self, weights: Transformer | Mapping[str, Tensor] | Read) -> None:
        """Fill a new buffer from whole parameters, or from what reads parts of them, cast or quantized, and use it.

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
        """Tensors for `use`: the same where they are on this model's device, else copies, which stay until the next
        call but one; packed as the kernels want them, until the next call. Another thread may call this while the model
        computes."""
        if not self._are_here(tensors):
            spare = self.spare()
            with device_stream(self.device):
                for key, tensor in tensors.items():
                    spare[key].copy_(tensor)
            tensors = spare
        return self._built(tensors)

    def spare(self, whole: bool = False) -> Mapping[str, Tensor]:
        """Tensors to write into and then to `use`, which nobody reads any more.

        Args:
            whole: they hold weights, of now or of before, for who will not overwrite all of them.
        """
        if self._spare is None:
            self._spare = self._buffer()
        if self._swapped is not None:
            self._swapped.synchronize()  # on the host: others than this GPU may write there
        if whole and not self._spare_is_whole:
            with device_stream(self.device):
                for key, tensor in self._used.items():
                    self._spare[key].copy_(tensor)
            self._spare_is_whole = True
        return self._spare

    def sleep(self) -> None:
        """Lets go of all weights until `use` gives others; of those in use only where `merges` does not need them."""
        if not self.merges:
            self._used, self._network, self._rooms = {}, Network(), [Room(), Room()]
        self._spare, self._spare_is_whole, self._swapped = None, False, None

    def room(self, specs: Sequence[TensorSpec]) -> Callable[[], Mapping[str, Tensor]]:
        """Gives memory on this device to write tensors like `specs` into: that of `spare`, if they are the weights."""
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
        """Compute with these tensors (by `TensorSpec.key`) from now on; they must stay as they are. Nothing is copied.

        Views of one flat buffer laid out by `lay_out(specs())` give joined projections; others are multiplied one by
        one.
        """
        network = tensors if isinstance(tensors, Network) else self._built(tensors)
        assert network.built == network.room.begun, "later weights took the room of these"
        if self._spare is not None and network[EMBEDDING] is self._spare[EMBEDDING]:
            self._spare, self._spare_is_whole = self._used or None, bool(self._used)
            if self.device.type == "cuda":  # steps that were launched read on
                self._swapped = torch.cuda.current_stream(self.device).record_event()
        self._used = self._network = network
        self.weights_at = hash(tuple(network[key].data_ptr() for key in self._shapes))

    def _built(self, tensors: Mapping[str, Tensor]) -> Network:
        """Builds a network in the room that the weights in use do not have."""
        for key, shape in self._shapes.items():
            assert tensors[key].shape == shape, f"{key} is not {shape}"
        network = Network(tensors)
        network.room = self._rooms[bool(self._used) and self._network.room is self._rooms[0]]
        network.built = network.room.begin()
        network.layers = [self._layer(network, index) for index in range(self.shape.num_layers)]
        network.stack = stack_of(network.layers, self.shape) if self._parallel is None else None
        network.head = Linear(network[self._head_name], room=network.room)
        return network

    def __call__(
        self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend, routes_N_W: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [N, D].

        Args:
            routes_N_W: of a mixture, filled with the experts that each token chooses, layer by layer, the likeliest
                first; of any integer type that holds them.
        """
        chosen = list[Tensor]()
        x_N_D, delta_N_D, eps = self._embed(token_ids_N), None, self.shape.rms_norm_eps
        if (stack := self._network.stack) and isinstance(attend, KernelAttention) and not is_exact():
            stack(x_N_D, self._rope(positions_N, torch.float32), attend.paged, *attend.cached)
            return rms_norm(x_N_D, self._used["model.norm.weight"], eps)
        rotates_all = self.shape.rotary_dim == self.shape.head_dim
        paged = attend if isinstance(attend, TorchAttention) and attend.rotates and rotates_all else None
        rotation = self._rope(positions_N, torch.float32)  # as the trainer, whatever attends
        for index, layer in enumerate(self._network.layers):
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
        return rms_norm(x_N_D, self._used["model.norm.weight"], eps, delta_N_D)

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """[N, V], float32; unused ids have no probability."""
        if self.dtype == torch.bfloat16:  # torch rounds the sums of a bfloat16 product unless told otherwise
            logits_N_V = torch.mm(hidden_N_D, self._used[self._head_name].t(), out_dtype=torch.float32)
        else:
            logits_N_V = self._network.head(hidden_N_D)
        whole_N_V = self._parallel.all_gather_vocab(logits_N_V) if self._parallel else logits_N_V
        return self._unused_ids.remove(whole_N_V)

    def _check_device(self, kv_dtype: KvPrecision) -> None:
        if self.precision == "fp8" and self.device.type != "cuda":
            raise ValueError(f"fp8 weights need a GPU with float8 units, not `{self.device}`; use int8 or bfloat16")
        wanted = [what for what, dtype in (("weights", self.precision), ("keys", kv_dtype)) if dtype == "fp8"]
        on_gpu = self.device.type == "cuda"
        if wanted and on_gpu and torch.cuda.get_device_capability(self.device) < (8, 9):
            name = torch.cuda.get_device_name(self.device)
            raise ValueError(f"{name} has no float8 units, which fp8 {wanted[0]} need; use int8 or bfloat16")

    def _dtype_of(self, name: str) -> str:
        if is_router(name):
            return "float32"
        if is_quantizable(name):
            return _QUANTIZED.get(self.precision, self.precision)
        return _dtype_name(self.head_dtype if name in (EMBEDDING, HEAD) else self.dtype)

    def _layer(self, tensors: Network, index: int) -> GeneratorLayer:
        def get(name: str) -> Tensor:
            return tensors[_name(index, name)]

        def linears(*modules: str) -> tuple[Linear, ...]:
            return linears_of(tensors, [_name(index, module) for module in modules], tensors.room)

        return GeneratorLayer(
            input_norm_D=get("input_layernorm.weight"),
            qkv=linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norms=(get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")) if self.shape.qk_norm else None,
            o=linears("self_attn.o_proj")[0],
            post_norm_D=get("post_attention_layernorm.weight"),
            mlp=self._feed_forward(tensors, index),
        )

    def _feed_forward(self, tensors: Network, index: int) -> GatedLinears | ExpertMixture:
        module, moe = _name(index, "mlp"), self.shape.moe
        if moe is None or index not in moe.sparse_layers:
            return gated_linears(tensors, module, tensors.room)
        return expert_mixture(tensors, module, tensors.room, moe, self._first_expert)

    def _embed(self, token_ids_N: Tensor) -> Tensor:
        embedding_V_D = self._used[EMBEDDING]
        if self._parallel is None:
            return F.embedding(token_ids_N, embedding_V_D).float()
        local_N = token_ids_N - self._first_id
        elsewhere_N = (local_N < 0) | (local_N >= len(embedding_V_D))
        x_N_D = F.embedding(local_N.masked_fill(elsewhere_N, 0), embedding_V_D).float()
        return self._parallel.all_reduce(x_N_D.masked_fill_(elsewhere_N[:, None], 0.0))

    def _add(self, project: Linear, x: Tensor | QuantizedRows, residual_N_D: Tensor) -> Tensor | None:
        """Adds the product to the residual stream, or returns it for the next norm to add."""
        if self._parallel is not None:
            return self._parallel.all_reduce(project(x))
        if gpu.kernel("ops", self.device):
            return project(x)
        project(x, residual_N_D)
        return None


@contextmanager
def device_stream(device: torch.device) -> Iterator[None]:
    """Work on a GPU beside the decoding; done at the end."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:  # what was launched before may still use the memory that is written here
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()


def _name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _specs(shape: ModelShape, dtype_of: Callable[[str], str], num_ranks: int, rank: int) -> tuple[TensorSpec, ...]:
    """Projections of one input follow each other, first their values and then their scales."""
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in Transformer(shape).state_dict().items()}
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


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Parameters in the order of the forward; weights, or biases, that are applied to the same input are one group."""
    groups = dict[str, list[str]]()
    for name in names:
        key = re.sub(r"self_attn\.[qkv]_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _project(projections: tuple[Linear, ...], x_N_D: Tensor | QuantizedRows, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The outputs, of `sizes`, of what is computed as one or one by one."""
    if len(projections) > 1:
        return [project(x_N_D) for project in projections]
    return projections[0](x_N_D).split_with_sizes(sizes, -1)


def part_reader(weights: Mapping[str, Tensor]) -> Read:
    """A reader of parts of these whole parameters."""
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
    """The model in a Hugging Face folder, or this rank's part of it, of which no more is read; asleep without weights.

    Args:
        tokens_of: folder whose tokenizer decides which ids are used; None means `folder`.

    Raises:
        ConfigError: no such model, or this machine cannot serve it in this way.
    """
    try:
        shape = load_shape(folder)
        if tokens_of:
            shape = dataclasses.replace(shape, unused_ids=load_shape(tokens_of).unused_ids)
        model = GeneratorModel(shape, precision, device, tensor_parallel, kv_dtype)
        if not asleep:
            with stage(loading_text(folder)):
                model.load(open_model(folder)[1].read)
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be served in {precision!r} here: {error}") from None
    return model
