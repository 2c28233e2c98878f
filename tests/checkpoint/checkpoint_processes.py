"""Processes that save checkpoints and are killed while they do."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarl.checkpoint.store import CheckpointStore

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events (PEP 578) of operations that change files, or stand between two that do."""


def tensors(step: int, numel: int = 1000) -> dict[str, dict[str, Tensor]]:
    """Every element is the step."""
    return {
        "model": {"w": torch.full((numel,), float(step)), "b": torch.full((3,), step, dtype=torch.bfloat16)},
        "optimizer": {"w:exp_avg": torch.full((numel,), float(step)), "w:step": torch.tensor(float(step))},
    }


def state(step: int) -> dict[str, Any]:
    return {"policy_version": step, "controller": {"step": step, "unconsumed_prompts": [3, 1, step]}}


def save(folder: Path, step: int, keep: int, numel: int = 1000) -> Path:
    return CheckpointStore(folder, keep).save(step, tensors(step, numel), state(step))


def save_and_die(connection: Connection, folder: Path, step: int, keep: int, last_event: int) -> None:
    """Killed at the file operation with this number; sends True if it lived to the end."""
    seen = 0

    def count(event: str, _: Any) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            if seen == last_event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    os.fsync = lambda _: None  # a killed process loses nothing that it has written; only waiting for the disk is saved
    sys.addaudithook(count)
    save(folder, step, keep)
    connection.send(True)


def save_for_ever(connection: Connection, folder: Path, numel: int) -> None:
    """Saves step after step; sends each before it begins with the next."""
    for step in range(1, 10_000):
        save(folder, step, keep=2, numel=numel)
        connection.send(step)
