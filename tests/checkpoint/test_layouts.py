"""What ranks in one layout save, ranks in any other load, bit for bit; each reads no more than it needs.

Not covered: several hosts, GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import checkpoint_processes as processes
import pytest
import sharded_processes
import torch
from torch import Tensor

from llamarl.checkpoint.folder import MANIFEST, CheckpointError, digest_of
from llamarl.checkpoint.store import CheckpointStore, load_checkpoint
from llamarl.parts.forecast.layouts import trainer_layout
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError, ShardLayout
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec
from tests.distributed.ranks import rendezvous
from tests.nightly import nightly, some

DEADLINE_S = processes.DEADLINE_S
PARAMETERS = {
    "model.embed_tokens.weight": (22, 12),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in {
            "self_attn.q_proj.weight": (16, 12),
            "self_attn.q_proj.bias": (16,),
            "self_attn.o_proj.weight": (12, 16),
            "mlp.down_proj.weight": (12, 30),
            "input_layernorm.weight": (12,),
        }.items()
    },
    "model.norm.weight": (12,),
}
"""Tied embeddings, which two pipeline stages hold; rows that 3 and 4 ranks cannot share evenly."""
LAYOUTS = [{"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"pp": 2}, {"replicate": 2, "fsdp": 3}, {"pp": 3, "tp": 2}, {}]


def named(sizes: Mapping[str, int]) -> str:
    return "x".join(f"{axis}{size}" for axis, size in sizes.items()) or "alone"


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """Weights and moments, with bits that are no number and some that are none of float32's."""
    torch.manual_seed(1)
    tensors = dict[str, Tensor]()
    for name, shape in PARAMETERS.items():
        tensors[name] = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).view(torch.float32)
        tensors[f"{name}:exp_avg"] = torch.randn(shape, dtype=torch.bfloat16)
        tensors[f"{name}:step"] = torch.tensor(7.0)
    return tensors


def held(layout: ShardLayout, rank: int, whole: Mapping[str, Tensor]) -> processes.Shards:
    """What a rank has of weights and moments: copies, as it would."""
    found = processes.Shards()
    for name, box in layout.boxes(rank).items():
        for key in (name, f"{name}:exp_avg", f"{name}:step"):
            tensor = whole[key]
            part = box if tensor.ndim else Box.whole(())
            spec = TensorSpec(name=key, global_shape=tuple(tensor.shape), box=part, dtype="float32")
            found[key] = spec, tensor[part.within(Box.whole(tensor.shape))].clone()
    return found


def save(folder: Path, sizes: Mapping[str, int], whole: Mapping[str, Tensor]) -> Path:
    layout = trainer_layout(PARAMETERS, **sizes)

    def save_rank(rank: int, exchange: Exchange) -> str:
        store = CheckpointStore(folder, 2, rank, layout.num_ranks, exchange)
        store.save(1, held(layout, rank, whole), {"step": 1}).result(DEADLINE_S)
        committed = store.commit()
        return committed.result(DEADLINE_S) if committed else ""

    return Path(processes.together(layout.num_ranks, save_rank)[0])


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("sizes", some(LAYOUTS, 3), ids=named)
def test_every_layout_reads_what_every_layout_wrote(tmp_path: Path, whole: dict[str, Tensor], sizes: dict) -> None:
    folder = save(tmp_path, sizes, whole)
    # Each element is on the disk once, however many ranks hold it.
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors")) - headers
    assert stored == sum(tensor.nbytes for tensor in whole.values())
    for others in LAYOUTS:
        layout = trainer_layout(PARAMETERS, **others)

        def load_rank(rank: int, exchange: Exchange, layout: ShardLayout = layout) -> int:
            checkpoint, damaged = CheckpointStore(tmp_path, 2, rank, layout.num_ranks, exchange).load_newest()
            assert checkpoint is not None and not damaged
            assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}
            own = held(layout, rank, whole)
            for name, (spec, tensor) in own.items():
                found = checkpoint.read(name, spec.box)
                assert found.dtype is tensor.dtype
                assert bits(found) == bits(tensor), f"{name} on rank {rank} of {layout.num_ranks}"
            return len(own)

        assert min(processes.together(layout.num_ranks, load_rank)) > 10


def test_ranks_that_hold_the_same_share_the_writing(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    folder = save(tmp_path, {"replicate": 4}, whole)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def test_a_rank_reads_only_what_it_needs(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    """The other files can be gone, and what is around its rows destroyed, once all has been verified."""
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = save(tmp_path, {"fsdp": 2}, whole)
    checkpoint = load_checkpoint(folder)
    other, mine = sorted(folder.glob("*.safetensors"))
    other.unlink()
    data = bytearray(mine.read_bytes())
    start = data.index(bits(whole[name][8:]))
    data[start : start + 12 * 4] = bytes(48)  # row 8
    mine.write_bytes(data)
    assert bits(checkpoint.read(name, Box((9, 2), (14, 12)))) == bits(whole[name][9:14, 2:])
    with pytest.raises(FileNotFoundError):
        checkpoint.read(name)


def test_damage_that_one_rank_sees_is_known_to_all(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    """Each verifies some files; all take the same older checkpoint."""
    save(tmp_path, {"fsdp": 4}, whole)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    path = tmp_path / "step-00000002" / "shard-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    def load_rank(rank: int, exchange: Exchange) -> tuple[int, list[str]]:
        checkpoint, damaged = CheckpointStore(tmp_path, 2, rank, 3, exchange).load_newest()
        assert checkpoint is not None
        return checkpoint.step, damaged

    found = processes.together(3, load_rank)
    assert found == [(1, [f"{path} differs from its manifest (truncated or changed)"])] * 3


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda spec: Box((1, *spec.box.starts[1:]), spec.box.stops), "the ranks hold 252 of its 264 elements"),
        (lambda spec: None, "the ranks hold 132 of its 264 elements"),
    ],
    ids=["a row is missing", "a rank has none of it"],
)
def test_parts_that_are_no_whole_are_refused_by_name(
    tmp_path: Path, whole: dict[str, Tensor], change: Callable[[TensorSpec], Box | None], cause: str
) -> None:
    layout = trainer_layout(PARAMETERS, fsdp=2)
    name = "model.embed_tokens.weight"

    def save_rank(rank: int, exchange: Exchange) -> None:
        shards = held(layout, rank, whole)
        spec, tensor = shards.pop(name)
        if rank or (box := change(spec)):
            box = spec.box if rank else box
            shards[name] = TensorSpec(name=name, global_shape=spec.global_shape, box=box, dtype="float32"), tensor
        with pytest.raises(LayoutError, match=rf"{name}: ({cause})"):
            CheckpointStore(tmp_path, 2, rank, 2, exchange).save(1, shards, {})

    processes.together(2, save_rank)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_missing_on_the_disk_is_an_error(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    name, folder = "model.embed_tokens.weight", save(tmp_path, {"fsdp": 2}, whole)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["xxh3_128"], manifest["tensors"][name][2][0]
    (folder / MANIFEST).write_text(json.dumps({"xxh3_128": digest_of(manifest), **manifest}))
    with pytest.raises(CheckpointError, match="holds 132 of the 264 elements"):
        load_checkpoint(folder).read(name)


def test_one_rank_that_cannot_write_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, and nothing of the new checkpoint stays."""
    processes.save(tmp_path, 1, keep=2)
    fsync = os.fsync

    def full(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "shard-00001" in path:
            raise OSError(28, "No space left on device", path)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)

    def save_rank(rank: int, exchange: Exchange) -> str:
        store = CheckpointStore(tmp_path, 2, rank, 2, exchange)
        store.save(2, processes.shards(processes.tensors(2), rank, 2), {}).result(DEADLINE_S)
        with pytest.raises(OSError, match=r"No space left on device.*shard-00001") as caught:
            store.commit()
        return str(caught.value)

    assert len(set(processes.together(2, save_rank))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (tmp_path / "step-00000001" / MANIFEST).exists()


@nightly("several processes; by day each layout reads what every layout wrote in one")
def test_fully_sharded_ranks_save_what_they_hold_together(start, tmp_path: Path) -> None:
    """Four processes on gloo; 10 and 7 rows, which they cannot share evenly; read by one, by columns and by rows."""
    folder = tmp_path / "checkpoints"
    with rendezvous() as where:
        started = [start(sharded_processes.train_and_save, folder, where, rank, 4) for rank in range(4)]
        for _, connection in started:
            assert connection.poll(2 * DEADLINE_S)
    whole = {name: torch.from_numpy(array) for name, array in started[0][1].recv().items()}
    checkpoint, damaged = CheckpointStore(folder, 2).load_newest()
    assert checkpoint is not None and not damaged
    assert checkpoint.tensors.keys() == whole.keys()
    assert "0.weight:exp_avg_sq" in whole
    for name, tensor in whole.items():
        assert bits(checkpoint.read(name)) == bits(tensor)
        for dim in range(tensor.ndim):
            for bounds in ((0, 3), (3, tensor.shape[dim])):
                box = Box.whole(tensor.shape).cut(dim, *bounds)
                assert bits(checkpoint.read(name, box)) == bits(tensor[box.within(Box.whole(tensor.shape))])
