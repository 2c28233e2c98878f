"""Processes for the tests. A fork server has torch loaded, so that each starts in milliseconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = (
    # FSDP2 imports torch's compiler, which takes seconds.
    "pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor",
    "llamarl.checkpoint.store", "llamarl.training.critic", "llamarl.training.preflight", "llamarl.parts.sft.supervised",
    "llamarl.generation.engine", "llamarl.generation.tensor_parallel", "llamarl.weight_sync.select",
    *(f"llamarl.weight_sync.transports.{name}" for name in ("shared_memory", "p2p", "file")),
)  # fmt: skip


def fork_server() -> ForkServerContext:
    """There is one in a process, which loads what the first to ask has named: so all name the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
