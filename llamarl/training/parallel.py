"""A module over the ranks of a mesh: its pipeline stage, its tensor-parallel part, and FSDP2 over the rest.

`Pipeline` runs the 1F1B schedule (PipeDream-Flush, Narayanan et al., arXiv 2006.09503, section 2.2). Every stage packs
the same microbatches, so each knows the shape of the next hidden states and none is padded.

Tensor parallelism (Megatron-LM, arXiv 1909.08053) always comes with sequence parallelism (arXiv 2205.05198): outside of
attention and feed-forward each rank has some of the rows, which costs no more communication and cuts activations and
norms. `sharding/tensor_parallel.py` decides which weights are cut, for generators too. A weight that is not cut sees a
part of the rows, or of the heads, on each rank. So its gradient is the sum over the ranks: once per step, for all such
weights.

FSDP2 then cuts the rows of a rank's part, over the fsdp and the cp axis together, and sums gradients. The loss has been
divided by the global count before. Routers of a mixture are gathered in their own type, never in bfloat16. If ranks of
the ep axis share its experts, a rank's experts are cut over the ranks with the same experts: these have seen the rows
of all of ep, so the sum is over fewer ranks. There may be fewer experts than such ranks, so the rows of each are cut.

Shape suffixes: N packed tokens of this context rank, M = N / tp rows of this rank, D model dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from llamarl.distributed.mesh import Axis, RankMesh, gather_rows, scatter_rows
from llamarl.models.experts import Experts, Router
from llamarl.models.hf import EMBEDDING, Read
from llamarl.models.lora import A, B
from llamarl.models.scalar import ScalarModel
from llamarl.models.transformer import Decoder, Transformer
from llamarl.observability.metrics import megabytes
from llamarl.observability.spans import stage
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import stage_layers
from llamarl.sharding.tensor_parallel import is_expert, is_router, sharded_dim, tensor_parallel_box
from llamarl.training.optimizer import state_spec
from llamarl.weight_sync.layout import TensorSpec

Forward = Callable[[int, Tensor | None], Tensor]
"""forward(microbatch, hidden states from the stage before): returns hidden states for the next stage, or a loss on the
last."""


class Pipeline:
    """One pipeline stage."""

    def __init__(self, axis: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self._axis = axis
        self._dtype = dtype
        self._device = device

    def train(self, shapes: Sequence[tuple[int, int]], forward: Forward) -> None:
        """Runs forward and backward of microbatches whose hidden states have these shapes [M, D].

        A single stage computes one microbatch after the other. Otherwise a stage holds the activations of at most as
        many microbatches as there are stages from it to the last.
        """
        axis, count = self._axis, len(shapes)
        ahead = min(axis.size - 1 - axis.rank, count)
        begun = deque[tuple[Tensor | None, Tensor]]()
        for index in range(ahead):
            begun.append(self._forward(index, self._pass(receive=shapes[index]), forward))
            self._pass(send=begun[-1][1])
        x = self._pass(receive=shapes[ahead]) if ahead < count else None
        for index in range(ahead, count):
            begun.append(self._forward(index, x, forward))
            grad = self._turn(send=begun[-1][1], receive=shapes[index - ahead])
            following = shapes[index + 1] if index + 1 < count else None
            x = self._pass_back(*begun.popleft(), grad, following)
        for index in range(count - ahead, count):
            grad = self._turn(receive=shapes[index])
            self._pass_back(*begun.popleft(), grad)

    @torch.no_grad()
    def infer(self, shape: tuple[int, int], forward: Forward) -> Tensor:
        """Runs the forward of microbatch 0. Returns the stage's output, which is the result on the last stage."""
        y = forward(0, self._pass(receive=shape))
        self._pass(send=y)
        return y

    def _forward(self, index: int, x: Tensor | None, forward: Forward) -> tuple[Tensor | None, Tensor]:
        if x is not None:
            x.requires_grad_()
        return x, forward(index, x)

    def _pass(self, send: Tensor | None = None, receive: tuple[int, int] | None = None) -> Tensor | None:
        """Sends hidden states to the next stage and receives those of the stage before. A missing neighbor is
        skipped."""
        axis = self._axis
        sends = {axis.rank + 1: send.detach().contiguous()} if send is not None and not axis.is_last else {}
        x = self._empty(receive) if receive and axis.rank else None
        axis.swap(sends, {} if x is None else {axis.rank - 1: x})
        return x

    def _turn(self, receive: tuple[int, int], send: Tensor | None = None) -> Tensor | None:
        """Sends hidden states to the next stage, and receives the gradient of earlier ones."""
        axis = self._axis
        if axis.is_last:
            return None
        grad = self._empty(receive)
        axis.swap({} if send is None else {axis.rank + 1: send.detach().contiguous()}, {axis.rank + 1: grad})
        return grad

    def _pass_back(
        self, x: Tensor | None, y: Tensor, grad: Tensor | None, following: tuple[int, int] | None = None
    ) -> Tensor | None:
        """Runs backward. Sends the gradient to the stage before, and receives the next hidden states."""
        torch.autograd.backward(y, grad)
        if x is None:
            return None
        assert x.grad is not None
        received = self._empty(following) if following else None
        neighbor = self._axis.rank - 1
        self._axis.swap({neighbor: x.grad.contiguous()}, {} if received is None else {neighbor: received})
        return received

    def _empty(self, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


BLOCKS = ("mixer", "mlp")
"""Blocks of each layer. They take the rows of all tensor-parallel ranks, and their outputs are summed."""


class Sharding:
    """This rank's parts of a module's weights and of their gradients, as plain tensors that share their memory."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        fixed: dict[str, Tensor],
        specs: dict[str, TensorSpec],
        mesh: RankMesh,
        is_tied: bool,
    ) -> None:
        self.weights = weights
        """Trained weights, by name. With one rank these are the parameters."""
        self.fixed = fixed
        """Parts of routers that are not trained. Generators and checkpoints have them nevertheless."""
        self.specs = specs
        """Part of the whole weight that each tensor holds."""
        self._mesh = mesh
        self._is_tied = is_tied

    @property
    def held(self) -> dict[str, Tensor]:
        """Trained and fixed weights: everything that is published and saved."""
        return self.weights | self.fixed

    def drop_gradients(self) -> None:
        """Frees the memory of gradients until the next step. FSDP2 keeps its own."""
        for weight in self.weights.values() if self._mesh.shards is None else ():
            weight.grad = None

    def hold_gradients(self) -> None:
        """Gives every weight a gradient, into which backward adds."""
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def finish_gradients(self) -> None:
        """Adds gradients of other ranks that FSDP does not sum, after a step's last backward."""
        mesh = self._mesh
        if mesh.tp.size > 1:
            grads = [self._grad(name) for name in self.weights if sharded_dim(name) is None]
            flat = mesh.tp.sum(torch.cat([grad.flatten() for grad in grads]))
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
        if self._is_tied and mesh.pp.size > 1 and EMBEDDING in self.weights:
            # It is the embedding of the first stage and the head of the last.
            other, grad = mesh.pp.size - 1 - mesh.pp.rank, self._grad(EMBEDDING)
            theirs = torch.empty_like(grad)
            mesh.pp.swap({other: grad.contiguous()}, {other: theirs})
            grad.add_(theirs)

    def clip_gradients(self, max_norm: float) -> float:
        """Scales all gradients so that their norm, over all ranks, is at most `max_norm`. Returns the norm before."""
        mesh = self._mesh
        grads = [self._grad(name) for name in self.weights if self._counts(name)]
        if any(grad.dtype == torch.bfloat16 for grad in grads):  # squares are summed in float32
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))
        else:
            norm = get_total_norm(grads)
        if mesh.world.size > 1:
            norm = mesh.world.sum(norm.square()).sqrt()
        clip_grads_with_norm_(list(self.weights.values()), max_norm, norm)
        return float(norm)

    def _counts(self, name: str) -> bool:
        """Returns whether this rank, among those with the same part, counts it in the norm."""
        mesh = self._mesh
        is_second_copy = self._is_tied and name == EMBEDDING and mesh.pp.rank > 0
        return not is_second_copy and (mesh.tp.rank == 0 or sharded_dim(name) is not None)

    def _grad(self, name: str) -> Tensor:
        grad = self.weights[name].grad
        assert grad is not None
        return grad


def parallelize(
    module: nn.Module,
    transformer: Transformer | ScalarModel,
    mesh: RankMesh,
    device: torch.device,
    read: Read | None = None,
    dtype: torch.dtype | None = None,
) -> Sharding:
    """Reduces `module` to the part that this rank computes with. Its forward must contain all use of its weights.

    Args:
        module: holds `transformer`, under this name. It takes hidden states of this rank's rows from it, and applies
            its other weights to these rows.
        read: for weights on the meta device; reads only the parts that this rank keeps.
        dtype: type in which FSDP2 gathers a layer's weights. None means the type in which they are kept.
    """
    is_tied = isinstance(transformer, Transformer) and transformer.lm_head is None
    kv_heads = transformer.shape.num_kv_heads
    _keep_stage(transformer, mesh.pp, is_tied)
    shapes = {_short(name): tuple(tensor.shape) for name, tensor in _tensors(module)}
    boxes = {
        name: tensor_parallel_box(name, shape, mesh.tp.size, mesh.tp.rank, kv_heads) for name, shape in shapes.items()
    }
    if mesh.ep.size > 1:
        boxes |= {name: _chunk(boxes[name], 0, mesh.ep.size, mesh.ep.rank) for name in boxes if is_expert(name)}
        for experts in _experts(transformer):
            experts.ep = mesh.ep
    if mesh.tp.size * mesh.ep.size > 1:
        _cut(module, boxes)
    if mesh.tp.size > 1:
        _join_blocks(transformer.model, boxes[EMBEDDING].starts[0] if EMBEDDING in boxes else 0, mesh.tp)
    if mesh.shards is not None:
        _shard(module, transformer, mesh, dtype)
        for name in map(_short, dict(module.named_parameters())):
            boxes[name] = _sharded(name, boxes[name], mesh)
    _place(module, boxes, device, read)
    weights, fixed = _trained_weights(module), _fixed(module)
    specs = {
        name: TensorSpec(
            name=name, global_shape=shapes[name], box=boxes[name],
            dtype="bfloat16" if tensor.dtype == torch.bfloat16 else "float32",
        )
        for name, tensor in (weights | fixed).items()
    }  # fmt: skip
    return Sharding(weights, fixed, specs, mesh, is_tied)


def _short(name: str) -> str:
    return name.removeprefix("transformer.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters, and the selection biases of routers, which are buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _keep_stage(transformer: Transformer | ScalarModel, pp: Axis, is_tied: bool) -> None:
    """Keeps consecutive layers: with the embedding on the first stage, norm and head on the last, a tied embedding on
    both."""
    if pp.size == 1:
        return
    decoder, layers = transformer.model, list(transformer.model.layers)
    stage_indices = stage_layers(len(layers), pp.size)[pp.rank]
    decoder.layers = nn.ModuleDict({str(index): layers[index] for index in stage_indices})  # pyrefly: ignore[bad-assignment]
    if pp.rank and not (pp.is_last and is_tied):
        del decoder.embed_tokens
    if not pp.is_last:
        decoder.norm = nn.Identity()  # pyrefly: ignore[bad-assignment]
        setattr(transformer, "score" if isinstance(transformer, ScalarModel) else "lm_head", None)


def _experts(transformer: nn.Module) -> list[Experts]:
    return [module for module in transformer.modules() if isinstance(module, Experts)]


def _sharded(name: str, box: Box, mesh: RankMesh) -> Box:
    """Returns the part that FSDP2 leaves this rank: of the rows, or, if ranks have some of the experts, of the rows of
    each."""
    among, dim = mesh.shards, 0
    if mesh.expert_shards is not None and is_expert(name):
        among, dim = mesh.expert_shards, 1
    assert among is not None
    return _chunk(box, dim, among.size(), among.get_local_rank())


def _cut(module: nn.Module, boxes: dict[str, Box]) -> None:
    for name, weight in list(module.named_parameters()):
        owner, _, kind = name.rpartition(".")
        part = weight.detach()[boxes[_short(name)].within(Box.whole(weight.shape))].clone()
        module.get_submodule(owner).register_parameter(kind, nn.Parameter(part, weight.requires_grad))


def _join_blocks(decoder: Decoder, first_token: int, tp: Axis) -> None:
    for layer in decoder.layers.children():
        for name in BLOCKS:
            block = getattr(layer, name)
            block.register_forward_pre_hook(lambda _, args: (gather_rows(args[0], tp), *args[1:]))
            block.register_forward_hook(lambda _module, _args, output: scatter_rows(output, tp))

    def embed(input: Tensor) -> Tensor:  # noqa: A002 - its name in nn.Embedding
        """Looks up the tokens that this rank has."""
        weight_V_D, local_N = decoder.embed_tokens.weight, input - first_token
        is_here_N = (local_N >= 0) & (local_N < len(weight_V_D))
        x_N_D = F.embedding(local_N.where(is_here_N, 0), weight_V_D).where(is_here_N[:, None], 0)
        return scatter_rows(x_N_D, tp)

    if hasattr(decoder, "embed_tokens"):
        decoder.embed_tokens.forward = embed


def _shard(
    module: nn.Module, transformer: Transformer | ScalarModel, mesh: RankMesh, dtype: torch.dtype | None
) -> None:
    """Applies FSDP2. Layers are gathered in `dtype`.

    Autocast would instead copy each float32 weight, and autograd would keep the copies of the whole model until
    backward. Hidden states between layers keep their type.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # takes half as long as torch
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False)
    for layer in transformer.model.layers.children():
        for router in (module for module in layer.modules() if isinstance(module, Router)):
            fully_shard(router, mesh=mesh.shards)
        for experts in _experts(layer) if mesh.expert_shards is not None else ():
            fully_shard(experts, mesh=mesh.expert_shards, mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=mesh.shards, mp_policy=policy)
    fully_shard(module, mesh=mesh.shards)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Sums, not means. Without the second line gloo fails and NCCL may return zeros (pytorch issue 190745).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _place(module: nn.Module, boxes: Mapping[str, Box], device: torch.device, read: Read | None) -> None:
    """Moves all weights to the device, and reads weights that are on the meta device."""
    unread = [name for name, tensor in _tensors(module) if tensor.is_meta]
    # Like `to_empty`, which would also empty weights that have values. FSDP2 then uses the new tensors.
    module._apply(lambda x: _empty_like(x, device) if x.is_meta else x.to(device))
    placed = dict(_tensors(module))
    with stage(f"loading the model ({megabytes(sum(local(placed[name]).nbytes for name in unread))})"):
        for name in unread:
            weight, box = placed[name], boxes[_short(name)]
            assert read is not None, f"{name} has no values, and there is no reader"
            if box.num_elements:
                local(weight).copy_(read(_short(name), box))


def _empty_like(weight: Tensor, device: torch.device) -> Tensor:
    """Returns memory for a weight, with any values. `empty_like` on a weight that FSDP2 has not cut would import a
    library of mathematics."""
    is_cut = local(weight) is not weight
    return torch.empty_like(weight, device=device) if is_cut else weight.new_empty(weight.shape, device=device)


def local(weight: Tensor) -> Tensor:
    """Returns this rank's part of a weight, if FSDP2 has cut it, else the weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _chunk(box: Box, dim: int, size: int, place: int) -> Box:
    """Returns the rows of a box, or its slice along `dim`, that `torch.chunk` gives rank `place`."""
    rows = box.shape[dim]
    step = -(-rows // size)
    return box.cut(dim, min(place * step, rows), min((place + 1) * step, rows))


def _trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the trained weights. Gives each a gradient of zeros, into which backward adds."""
    weights = dict[str, Tensor]()
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            continue
        weight.grad = torch.zeros_like(weight)
        part: Tensor = weight
        if local(weight) is not weight:
            part = local(weight.detach())
            part.grad = local(weight.grad)
        weights[_short(name)] = part
    return weights


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """Returns parts of routers that are not trained, if whole weights are trained. Adapters are only for ranks with the
    frozen model."""
    if any(name.endswith((A, B)) for name, _ in module.named_parameters()):
        return {}
    routers = {_short(name): tensor for name, tensor in _tensors(module) if is_router(name)}
    return {name: local(tensor.detach()) for name, tensor in routers.items() if not tensor.requires_grad}


def held_tensors(sharding: Sharding, optimizer: torch.optim.Optimizer) -> dict[str, tuple[TensorSpec, Tensor]]:
    """Returns the parts of weights and moments that this rank holds; see `Optimization.shards`."""
    tensors = dict[str, tuple[TensorSpec, Tensor]]()
    for name, weight in sharding.held.items():
        spec = sharding.specs[name]
        tensors[name] = spec, weight.detach()
        for key, value in optimizer.state.get(weight, {}).items():
            kind = state_spec(spec, key) if value.ndim else TensorSpec.whole(f"{name}:{key}", (), "float32")
            tensors[f"{name}:{key}"] = replace(kind, name=f"{name}:{key}"), value
    return tensors
