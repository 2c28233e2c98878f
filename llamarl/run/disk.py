"""Disk space that a run needs for checkpoints and journal, compared with the free space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.models.fit import WIDTHS, adapter_parameters, longest
from llamarl.models.folder import load_shape
from llamarl.models.memory import MOMENTS_BYTES
from llamarl.models.sizes import DecoderSizes
from llamarl.run.placement import models_in_use

JOURNAL_TOKEN_BYTES = 16
"""Bytes per token in the journal, compressed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskNeed:
    """Most bytes that a run writes."""

    checkpoint: float
    """Bytes of one checkpoint of trainer and critic."""
    num_checkpoints: int
    """Most checkpoints at a time: the kept ones, and one that is being written."""
    journal: float
    """Bytes if all responses have maximum length."""
    free: float
    """Free bytes on the disk of the run's folder."""
    place: Path

    @property
    def total(self) -> float:
        return self.num_checkpoints * self.checkpoint + self.journal

    @property
    def lack(self) -> str:
        """Sentence for the user if the checkpoints do not fit; empty means that they fit."""
        needed = self.num_checkpoints * self.checkpoint
        if needed <= self.free:
            return ""
        return (
            f"the disk of {self.place} has {gigabytes(self.free)} free, and {self.num_checkpoints} checkpoints take "
            f"{gigabytes(needed)}; free space, lower checkpoint.keep, or set output to a folder on "
            "another disk"
        )

    def lines(self) -> list[str]:
        """Lines for people."""
        return [
            f"checkpoints: {self.num_checkpoints} of {gigabytes(self.checkpoint)} each, at most at a time",
            f"journal: up to {gigabytes(self.journal)}",
            f"{gigabytes(self.total)} at most, and {gigabytes(self.free)} are free in {self.place}",
        ]


def gigabytes(num_bytes: float) -> str:
    """Returns text such as `2.4 GB`."""
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e11 else f"{num_bytes / 1e9:.2g} GB"


def disk_need(config: RunConfig, shape: DecoderSizes) -> DiskNeed:
    """Returns the disk space that a run needs. Raises ConfigError if a critic's model cannot be read."""
    trainer, settings = config.trainer, config.checkpoint
    each = WIDTHS[trainer.weights] + MOMENTS_BYTES[trainer.moments]
    if trainer.lora:
        checkpoint = adapter_parameters(shape, trainer.lora) * (4 + MOMENTS_BYTES[trainer.moments])
    else:
        checkpoint = shape.num_parameters * each
    critic = models_in_use(config).get("critic")
    if critic is not None:
        checkpoint += (load_shape(critic.path) if critic.path else shape).num_parameters * each
    every = settings.every_steps or config.steps
    saved = -(-config.steps // every)
    kept = min(saved, settings.keep) + (config.steps // settings.keep_every if settings.keep_every else 0)
    steps = config.steps if config.record.kind == "all" else min(config.steps, settings.keep * every)
    _, response = longest(config, shape)
    tokens = steps * config.rollout.prompts_per_step * config.rollout.group_size * response
    place = Path(config.output).absolute()
    place = next(one for one in (place, *place.parents) if one.is_dir())
    return DiskNeed(
        checkpoint=checkpoint, num_checkpoints=min(kept, saved) + (saved > kept), place=place,
        journal=tokens * JOURNAL_TOKEN_BYTES, free=shutil.disk_usage(place).free,
    )  # fmt: skip
