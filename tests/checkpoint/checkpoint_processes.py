"""Ranks that save checkpoints, as threads, and processes that are killed while they do."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from llamarl.checkpoint import store as store_module
from llamarl.checkpoint.store import CheckpointStore
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Exchange
from llamarl.weight_sync.layout import TensorSpec

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events (PEP 578) of operations that change files, or stand between two that do."""
DEADLINE_S = 240.0
T = TypeVar("T")
Shards = dict[str, tuple[TensorSpec, Tensor]]


def together(num_ranks: int, function: Callable[[int, Exchange], T]) -> list[T]:
    """What function(rank, exchange) gives on each rank; a thread stands in for each process."""
    barrier, values = threading.Barrier(num_ranks, timeout=DEADLINE_S), list[Any]([None] * num_ranks)

    def run(rank: int) -> T:
        def exchange(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        try:
            return function(rank, exchange)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return [done.result() for done in [pool.submit(run, rank) for rank in range(num_ranks)]]


def tensors(step: int, numel: int = 1000) -> dict[str, Tensor]:
    """Every element is the step."""
    return {
        "w": torch.full((numel,), float(step)),
        "b": torch.full((3,), step, dtype=torch.bfloat16),
        "w:exp_avg": torch.full((numel,), float(step)),
        "w:step": torch.tensor(float(step)),
    }


def state(step: int) -> dict[str, Any]:
    return {"policy_version": step, "controller": {"step": step, "unconsumed": [[3, 1], [4, step]]}}


def shards(whole: Mapping[str, Tensor], rank: int = 0, num_ranks: int = 1) -> Shards:
    """Long vectors are cut, the others are whole on each rank."""
    found = Shards()
    for name, tensor in whole.items():
        box = Box.whole(tensor.shape)
        if tensor.ndim and len(tensor) > 10:
            box = box.cut(0, len(tensor) * rank // num_ranks, len(tensor) * (rank + 1) // num_ranks)
        spec = TensorSpec(name=name, global_shape=tuple(tensor.shape), box=box, dtype="float32")
        found[name] = spec, tensor[box.within(Box.whole(tensor.shape))]
    return found


def save_whole(store: CheckpointStore, step: int, whole: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """By a single rank."""
    store.save(step, shards(whole), state).result(DEADLINE_S)
    committed = store.commit()
    assert committed is not None
    return Path(committed.result(DEADLINE_S))


def save(folder: Path, step: int, keep: int, numel: int = 1000, num_ranks: int = 2) -> Path:
    def save_rank(rank: int, exchange: Exchange) -> str:
        store = CheckpointStore(folder, keep, rank, num_ranks, exchange)
        store.save(step, shards(tensors(step, numel), rank, num_ranks), state(step)).result(DEADLINE_S)
        committed = store.commit()
        return committed.result(DEADLINE_S) if committed else ""

    return Path(together(num_ranks, save_rank)[0])


def save_and_die(connection: Connection, folder: Path, step: int, keep: int, block_bytes: int, last_event: int) -> None:
    """Killed at the file operation, or block of a file, with this number; sends True if it lived to the end."""
    seen, blocks = 0, store_module._blocks

    def count(event: str, _: Any) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            if seen == last_event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    def counted(whole: Mapping[str, Tensor]) -> Iterator[memoryview]:
        for block in blocks(whole):
            count("open", None)
            yield block

    os.fsync = lambda _: None  # a killed process loses nothing that it has written; only waiting for the disk is saved
    store_module._blocks, store_module.BLOCK_BYTES = counted, block_bytes
    sys.addaudithook(count)
    save(folder, step, keep)
    connection.send(True)


def save_for_ever(connection: Connection, folder: Path, numel: int) -> None:
    """Saves step after step; sends each before it begins with the next."""
    for step in range(1, 10_000):
        save(folder, step, keep=2, numel=numel)
        connection.send(step)
