"""Section `metrics`: who gets them."""

from __future__ import annotations

from pydantic import Field

from llamarl.config.section import Section


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["jsonl"])
    """Who gets the metrics: always `metrics.jsonl`, and any of `tensorboard`, `wandb`, `mlflow`, `prometheus`."""
    port: int = Field(default=9464, ge=1, lt=1 << 16)
    """Of `prometheus`, on this machine alone; each run on it needs one of its own."""
