"""A module over the ranks of a mesh: its pipeline stage, its tensor-parallel part, and FSDP2 over what is left.

Tensor parallelism (Megatron-LM, arXiv 1909.08053) always comes with sequence parallelism (arXiv 2205.05198): outside of
attention and feed-forward each rank has its own rows, which costs no more communication and cuts activations and norms.
What is cut is decided in `sharding/tensor_parallel.py`, for generators too. A weight that is not cut sees a part of
the rows, or of the heads, on each rank, so its gradient is the sum over them: once per step, for all such weights.

FSDP2 then cuts the rows of what a rank has, over the fsdp and the cp axis together, and sums gradients; the loss has
been divided by the global count before. Routers of a mixture are gathered as they are kept, never in bfloat16. Where
ranks of the ep axis share its experts, those of one rank are cut over the ranks that have the same ones: they have seen
the rows of all of ep, so the sum is over fewer ranks. Experts are then fewer than what cuts them, perhaps, and it is
the rows of each that are cut.

Shape suffixes: N packed tokens of this context rank, M = N / tp rows of this rank, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from llamarl.distributed.collectives import gather_rows, scatter_rows
from llamarl.distributed.mesh import Axis, RankMesh
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
from llamarl.training.light import state_spec
from llamarl.weight_sync.layout import TensorSpec

BLOCKS = ("self_attn", "mlp")
"""Blocks of each layer: they take the rows of all tensor-parallel ranks, and what these put out is added up."""


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
        """Weights that are trained, by name; with one rank the parameters themselves."""
        self.fixed = fixed
        """Parts of routers that are not trained, which generators and checkpoints have all the same."""
        self.specs = specs
        """Which part of the whole weight each is."""
        self._mesh = mesh
        self._is_tied = is_tied

    @property
    def held(self) -> dict[str, Tensor]:
        """Both: what is published and saved."""
        return self.weights | self.fixed

    def drop_gradients(self) -> None:
        """Gives the memory of gradients back until the next step; FSDP2 keeps its own."""
        for weight in self.weights.values() if self._mesh.shards is None else ():
            weight.grad = None

    def hold_gradients(self) -> None:
        """Every weight has a gradient, into which backward adds."""
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def finish_gradients(self) -> None:
        """Adds to the gradients, after a step's last backward, what lies on other ranks beside FSDP's own sum."""
        mesh = self._mesh
        if mesh.tp.size > 1:
            grads = [self._grad(name) for name in self.weights if sharded_dim(name) is None]
            flat = mesh.tp.sum(torch.cat([grad.flatten() for grad in grads]))
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
        if self._is_tied and mesh.pp.size > 1 and EMBEDDING in self.weights:
            # The first stage embeds with it, the last has it as its head.
            other, grad = mesh.pp.size - 1 - mesh.pp.rank, self._grad(EMBEDDING)
            theirs = torch.empty_like(grad)
            mesh.pp.swap({other: grad.contiguous()}, {other: theirs})
            grad.add_(theirs)

    def clip_gradients(self, max_norm: float) -> float:
        """Scales all gradients so that their norm, over all ranks, is at most `max_norm`; returns what it was."""
        mesh = self._mesh
        grads = [self._grad(name) for name in self.weights if self._counts(name)]
        if any(grad.dtype == torch.bfloat16 for grad in grads):  # squares are added up in float32, and kept so
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))
        else:
            norm = get_total_norm(grads)
        if mesh.world.size > 1:
            norm = mesh.world.sum(norm.square()).sqrt()
        clip_grads_with_norm_(list(self.weights.values()), max_norm, norm)
        return float(norm)

    def _counts(self, name: str) -> bool:
        """This rank, of those that have the same part, has it in the norm."""
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
    """Leaves of `module` what this rank computes with. Its own forward must contain all use of its weights.

    Args:
        module: holds `transformer`, under this name. It takes hidden states of this rank's own rows from it, and what
            it computes with weights of its own, it computes on these rows.
        read: for weights on the meta device: only what this rank keeps of them is read.
        dtype: in which FSDP2 gathers a layer's weights; None: as they are kept.
    """
    is_tied = isinstance(transformer, Transformer) and transformer.lm_head is None
    kv_heads = transformer.shape.num_kv_heads
    _keep_stage(transformer, mesh.pp, is_tied)
    shapes = {_short(name): tuple(one.shape) for name, one in _tensors(module)}
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
    weights, fixed = _own_weights(module), _fixed(module)
    specs = {
        name: TensorSpec(
            name=name, global_shape=shapes[name], box=boxes[name],
            dtype="bfloat16" if one.dtype == torch.bfloat16 else "float32",
        )
        for name, one in (weights | fixed).items()
    }  # fmt: skip
    return Sharding(weights, fixed, specs, mesh, is_tied)


def _short(name: str) -> str:
    return name.removeprefix("transformer.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the selection biases of routers, which are buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _keep_stage(transformer: Transformer | ScalarModel, pp: Axis, is_tied: bool) -> None:
    """Consecutive layers; the embedding on the first stage, norm and head on the last, a tied embedding on both."""
    if pp.size == 1:
        return
    decoder, layers = transformer.model, list(transformer.model.layers)
    own = stage_layers(len(layers), pp.size)[pp.rank]
    decoder.layers = nn.ModuleDict({str(index): layers[index] for index in own})  # pyrefly: ignore[bad-assignment]
    if pp.rank and not (pp.is_last and is_tied):
        del decoder.embed_tokens
    if not pp.is_last:
        decoder.norm = nn.Identity()  # pyrefly: ignore[bad-assignment]
        setattr(transformer, "score" if isinstance(transformer, ScalarModel) else "lm_head", None)


def _experts(transformer: nn.Module) -> list[Experts]:
    return [one for one in transformer.modules() if isinstance(one, Experts)]


def _sharded(name: str, box: Box, mesh: RankMesh) -> Box:
    """Part that FSDP2 leaves this rank: of the rows, or, where ranks have some of the experts, of the rows of each."""
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
            block = layer.get_submodule(name)
            block.register_forward_pre_hook(lambda _, args: (gather_rows(args[0], tp), *args[1:]))
            block.register_forward_hook(lambda _module, _args, output: scatter_rows(output, tp))

    def embed(input: Tensor) -> Tensor:  # noqa: A002 - so is it named in nn.Embedding
        """Each rank looks up the tokens that it has."""
        weight_V_D, local_N = decoder.embed_tokens.weight, input - first_token
        own_N = (local_N >= 0) & (local_N < len(weight_V_D))
        x_N_D = F.embedding(local_N.where(own_N, 0), weight_V_D).where(own_N[:, None], 0)
        return scatter_rows(x_N_D, tp)

    if hasattr(decoder, "embed_tokens"):
        decoder.embed_tokens.forward = embed


def _shard(
    module: nn.Module, transformer: Transformer | ScalarModel, mesh: RankMesh, dtype: torch.dtype | None
) -> None:
    """Layers are gathered in `dtype`: of float32 ones autocast would make, and autograd keep, a copy of each until
    backward, which for all layers is the whole model. Hidden states between layers stay what they are."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # takes half as long as torch
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False)
    for layer in transformer.model.layers.children():
        for router in (one for one in layer.modules() if isinstance(one, Router)):
            fully_shard(router, mesh=mesh.shards)
        for experts in _experts(layer) if mesh.expert_shards is not None else ():
            fully_shard(experts, mesh=mesh.expert_shards, mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=mesh.shards, mp_policy=policy)
    fully_shard(module, mesh=mesh.shards)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Sums, not means. Without the second line gloo refuses and NCCL may give zeros (pytorch issue 190745).
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _place(module: nn.Module, boxes: Mapping[str, Box], device: torch.device, read: Read | None) -> None:
    """Brings all weights to the device; those that are nowhere yet, trainable or not, are read."""
    unread = [name for name, one in _tensors(module) if one.is_meta]
    # As `to_empty`, which would also empty the weights that are somewhere; FSDP2 then takes the new ones.
    module._apply(lambda x: _room(x, device) if x.is_meta else x.to(device))
    placed = dict(_tensors(module))
    with stage(f"loading the model ({megabytes(sum(local(placed[name]).nbytes for name in unread))})"):
        for name in unread:
            weight, box = placed[name], boxes[_short(name)]
            assert read is not None, f"{name} has no values, and nothing to read them from"
            if box.num_elements:
                local(weight).copy_(read(_short(name), box))


def _room(weight: Tensor, device: torch.device) -> Tensor:
    """Memory for a weight, any values. Of one that FSDP2 has not cut, `empty_like` imports a library of mathematics."""
    is_cut = local(weight) is not weight
    return torch.empty_like(weight, device=device) if is_cut else weight.new_empty(weight.shape, device=device)


def local(weight: Tensor) -> Tensor:
    """Part of a weight that this rank has, where FSDP2 has cut it."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _chunk(box: Box, dim: int, size: int, place: int) -> Box:
    """Rows of a box, or what there is in another dim, that `torch.chunk` gives rank `place`."""
    rows = box.shape[dim]
    step = -(-rows // size)
    return box.cut(dim, min(place * step, rows), min((place + 1) * step, rows))


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights that are trained, with a gradient of zeros each, into which backward adds."""
    weights = dict[str, Tensor]()
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            continue
        weight.grad = torch.zeros_like(weight)
        own: Tensor = weight
        if local(weight) is not weight:
            own = local(weight.detach())
            own.grad = local(weight.grad)
        weights[_short(name)] = own
    return weights


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """Parts of routers that are not trained, where weights are; adapters go to whoever has the frozen model."""
    if any(name.endswith((A, B)) for name, _ in module.named_parameters()):
        return {}
    found = {_short(name): one for name, one in _tensors(module) if is_router(name) and not one.requires_grad}
    return {name: local(one.detach()) for name, one in found.items()}


def held_tensors(sharding: Sharding, optimizer: torch.optim.Optimizer) -> dict[str, tuple[TensorSpec, Tensor]]:
    """Parts that this rank holds of weights and moments; see `Optimization.shards`."""
    found = dict[str, tuple[TensorSpec, Tensor]]()
    for name, weight in sharding.held.items():
        spec = sharding.specs[name]
        found[name] = spec, weight.detach()
        for key, value in optimizer.state.get(weight, {}).items():
            kind = state_spec(spec, key) if value.ndim else TensorSpec.whole(f"{name}:{key}", (), "float32")
            found[f"{name}:{key}"] = replace(kind, name=f"{name}:{key}"), value
    return found
