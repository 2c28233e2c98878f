"""Ranks of a model that FSDP2 has cut, which save a checkpoint together."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checkpoint_processes import DEADLINE_S, Shards
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from llamarl.checkpoint.store import CheckpointStore
from llamarl.distributed.links import Rendezvous
from llamarl.parts.forecast.layouts import Shard as Cut
from llamarl.parts.forecast.layouts import mesh_boxes
from llamarl.sharding.parallel_layout import make_box
from llamarl.weight_sync.layout import TensorSpec
from tests.distributed.ranks import join


def train_and_save(connection: Connection, folder: Path, where: Rendezvous, rank: int, size: int) -> None:
    """FSDP2 with AdamW; sends all of it, gathered by FSDP itself. The optimizer goes on while files are written."""
    mesh = join(where, rank, {"fsdp": size}, timeout_s=DEADLINE_S)
    try:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7, bias=False))
        fully_shard(model, mesh=mesh.shards)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step(model, optimizer, rank)
        shards, whole = sharded(model, optimizer, size, rank)
        store = CheckpointStore(folder, 2, rank, size, mesh.exchange)
        written = store.save(1, shards, {})
        step(model, optimizer, rank + 1)
        written.result(DEADLINE_S)
        if committed := store.commit():
            committed.result(DEADLINE_S)
        later = sharded(model, optimizer, size, rank)[1]
        assert not torch.equal(later["0.weight"], whole["0.weight"])
        connection.send({name: tensor.numpy() for name, tensor in whole.items()})
    finally:
        mesh.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def sharded(model: nn.Module, optimizer: Any, size: int, rank: int) -> tuple[Shards, dict[str, Tensor]]:
    """What this rank holds, and what all hold together."""
    shards, whole = Shards(), dict[str, Tensor]()
    for name, weight in model.named_parameters():
        for key, value in {"": weight, **optimizer.state[weight]}.items():
            full_name = f"{name}:{key}" if key else name
            local, full = (value.to_local(), value.full_tensor()) if isinstance(value, DTensor) else (value, value)
            boxes = mesh_boxes(value.shape, (size,), (Cut(0) if value.ndim else None,))
            box = make_box(boxes.starts_R_N[rank].tolist(), boxes.stops_R_N[rank].tolist(), value.shape)
            assert box.shape == tuple(local.shape)
            spec = TensorSpec(name=full_name, global_shape=tuple(value.shape), box=box, dtype="float32")
            shards[full_name], whole[full_name] = (spec, local.detach()), full.detach().clone()
    return shards, whole
