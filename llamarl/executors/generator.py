"""The generator: an engine that decodes between calls, and weights that change between two of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import ClassVar

import torch

from llamarl.cluster.api import chunks
from llamarl.cluster.executor import Executor
from llamarl.config.schema import GeneratorConfig
from llamarl.distributed.runtime import set_up_device
from llamarl.executors.replies import Collected, DecodingWork
from llamarl.generation.engine import Engine
from llamarl.models.hf import load_model
from llamarl.types import GenerationRequest, Rollout
from llamarl.weight_sync.layout import SegmentAddress, TensorSpec
from llamarl.weight_sync.shared_memory import SharedMemorySubscriber

REPLY_INTERVAL_S = 0.02
"""Finished rollouts are handed over at most this often: one message carries many."""


class GeneratorExecutor(Executor):
    """Decodes whenever requests are there; `submit`, `adopt` and `abort` run between two engine steps."""

    SPANS: ClassVar[dict[str, str]] = {"work": "generate", "adopt": "weight_sync"}

    def __init__(self, model_path: str, config: GeneratorConfig) -> None:
        device = set_up_device(config.device, config.threads, "generator.device")
        self._model = load_model(model_path, getattr(torch, config.dtype), device)
        self._weights = dict(self._model.named_parameters())
        self._standby = {name: torch.empty_like(weight) for name, weight in self._weights.items()}
        self._engine = Engine(
            self._model, max_running=config.max_running, prefill_tokens=config.prefill_tokens, kv_bytes=None
        )
        self._subscriber: SharedMemorySubscriber | None = None
        self._finished = list[Rollout]()
        self._reply: Future[Collected] | None = None
        self._replied_s = 0.0
        self._work = DecodingWork()
        self._work_clock = time.thread_time if device.type == "cpu" else time.monotonic

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """What this generator wants to receive."""
        return tuple(
            TensorSpec.whole(name, weight.shape, str(weight.dtype).removeprefix("torch."))
            for name, weight in self._weights.items()
        )

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests; their rollouts come out of `collect`."""
        self._engine.submit(requests)

    def abort(self, group_ids: Iterable[int]) -> None:
        """Ends these groups; their partial rollouts come out of `collect`."""
        self._finished += self._engine.abort(group_ids)
        self._hand_over()

    def collect(self) -> Future[Collected]:
        """The next finished rollouts, as soon as there are some."""
        assert self._reply is None, "one collect at a time"
        self._reply = reply = Future[Collected]()
        self._hand_over()
        return reply

    def adopt(self, version: int, address: SegmentAddress) -> float:
        """Takes over published weights and returns the seconds that decoding stood still.

        Weights are copied and checked beside the ones in use and then change places with them, so no step ever sees a
        mixture; tokens sampled before keep their version, the KV cache stays.
        """
        start = time.monotonic()
        if self._subscriber is None:
            self._subscriber = SharedMemorySubscriber(address)
        self._subscriber.fetch(version, self._standby)
        for name, weight in self._weights.items():
            weight.data, self._standby[name] = self._standby[name], weight.data
        self._engine.set_version(version)
        return time.monotonic() - start

    def work(self) -> bool:
        if not self._engine.has_work:
            return False
        before, start_s = self._engine.stats(), self._work_clock()
        self._finished += self._engine.step()
        self._hand_over()
        after, end_s = self._engine.stats(), self._work_clock()
        self._work = self._work.forward(
            after.decode_tokens - before.decode_tokens, after.prefill_tokens - before.prefill_tokens, end_s - start_s
        )
        return True

    def _hand_over(self) -> None:
        now = time.monotonic()
        due = now - self._replied_s >= REPLY_INTERVAL_S or not self._engine.has_work
        if self._reply is None or not self._finished or not due:
            return
        reply, self._reply, self._replied_s = self._reply, None, now
        if reply.set_running_or_notify_cancel():  # a caller that gave up gets nothing, and nothing is lost
            rollouts = next(chunks(self._finished))
            self._finished = self._finished[len(rollouts) :]
            stats = self._engine.stats()
            reply.set_result(
                Collected(
                    rollouts=rollouts,
                    num_running=stats.running,
                    num_waiting=stats.waiting,
                    generated_tokens=stats.decode_tokens,
                    work=self._work._replace(background_s=time.process_time() - time.thread_time()),
                )
            )
