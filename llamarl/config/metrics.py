"""Sections `metrics` and `record`: who gets what is measured, and what is kept of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from llamarl.config.section import Section


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["jsonl"])
    """Who gets the metrics: always `metrics.jsonl`, and any of `tensorboard`, `wandb`, `mlflow`, `prometheus`."""
    port: int = Field(default=9464, ge=1, lt=1 << 16)
    """Port of `prometheus`, on this machine alone; each run on it needs one of its own."""


class RecordConfig(Section):
    max_bytes: int = Field(default=1 << 28, ge=1 << 16)
    """Size from which `metrics.jsonl` and `events.jsonl` become pieces, `metrics-00001.jsonl.gz`; all are kept."""
    kind: Literal["resume", "all"] = "all"
    """`all` keeps what was generated and learnt from for good, so that rollouts can be shown and exported and `llamarl
    replay` can repeat the run from any checkpoint (16 bytes a token, compressed); `resume` only what was generated,
    while a kept checkpoint needs it to go on without losing anything."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        if isinstance(values, dict) and "journal" in values:
            raise ValueError(
                "record.journal is record.kind now; write 'resume' for 'needed', or leave it out for 'all'"
            )
        return values
