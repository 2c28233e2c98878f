"""Serves the newest numbers at `http://127.0.0.1:PORT/metrics` for Prometheus. `examples/grafana.json` is a
dashboard."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from llamarl.net.entrance import PROOF_S, Entrance, Proved, listen
from llamarl.observability.metrics import SOURCES
from llamarl.observability.sinks import Subject
from llamarl.parts.page.trackers._base import Tracker

UNITS = (("_per_s", "_per_second"), ("_s", "_seconds"), ("_share", "_ratio"))
"""Suffixes of metrics, and their Prometheus equivalents."""


class Prometheus(Tracker):
    """Gauges `llamarl_NAME{run=..., executor=...}` or `source=...`, and a counter of steps."""

    PACKAGE: ClassVar[str] = "prometheus_client"

    def __init__(self, subject: Subject) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, MetricsHandler

        self._registry, self._kind, self._run = CollectorRegistry(), Gauge, subject.name
        self._gauges = dict[str, Gauge]()
        self._steps = Counter("llamarl_steps", "Optimizer steps", ["run"], registry=self._registry).labels(subject.name)
        self._step = subject.step
        self._handler: Any = MetricsHandler.factory(self._registry)
        self._handler.timeout = PROOF_S
        self._entrance = Entrance(listen("127.0.0.1", subject.port), self._serve)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._steps.inc(max(step - self._step, 0))
        self._step = max(step, self._step)
        for key, value in values.items():
            name, of_part = exposed(key)
            labels = {"run": self._run} | of_part
            if name not in self._gauges:
                meaning = f"`{key}` of metrics.jsonl"
                self._gauges[name] = self._kind(name, meaning, list(labels), registry=self._registry)
            self._gauges[name].labels(**labels).set(value)

    def close(self) -> None:
        self._entrance.close()

    def _serve(self, accepted: socket.socket, proved: Proved) -> None:
        def answer() -> None:
            try:
                with accepted, suppress(OSError):  # the client sent nothing or disconnected
                    self._handler(accepted, accepted.getpeername(), None)
            finally:
                proved()

        threading.Thread(target=answer, name="prometheus", daemon=True).start()


def exposed(key: str) -> tuple[str, dict[str, str]]:
    """Returns name and labels. `extra.rss_bytes.trainer` is `llamarl_rss_bytes` of the executor `trainer`.
    `extra.expert_load.3` is `llamarl_expert_load` of the `layer` 3. `eval.math/pass_at.4` is `llamarl_eval_pass_at` of
    the set `math` with `k` 4."""
    is_eval = key.startswith("eval.")
    named, _, own = key.removeprefix("eval.").rpartition("/") if is_eval else ("", "", key.removeprefix("extra."))
    name, _, part = own.partition(".")
    for ending, unit in UNITS:
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
            break
    others = "layer" if part.isdecimal() else "executor"
    kind = "k" if is_eval else "source" if own.startswith(SOURCES) else others
    labels = {"set": named, kind: part}
    prefix = "llamarl_eval_" if is_eval else "llamarl_"
    return prefix + re.sub(r"\W", "_", name), {label: value for label, value in labels.items() if value}
