"""The model of a run as a Hugging Face folder, wherever the run lies."""

from __future__ import annotations

from pathlib import Path

from llamarl.config import ConfigError, RunConfig
from llamarl.run.names import base_model, resolved_path


def export(
    run: Path, config: RunConfig, folder: str | Path | None, step: int | None, merge: bool, *, command: str
) -> tuple[int, Path]:
    """Writes a checkpoint of a run; its step, and where it is.

    Args:
        config: the run's own.
        folder: to write; None: `export` in the run's folder, `merged` with `merge`.
        step: of the checkpoint; None: the newest valid one.
        merge: adapters into the base model, rather than write them alone.
        command: that tells which commit of the Hub is read.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, nothing is to be merged, or `folder` holds something
            else.
    """
    from llamarl.checkpoint.export import export_checkpoint

    lora = config.trainer.lora
    if merge and not lora:
        raise ConfigError("--merge is for adapters, and this run trained all weights; leave it out")
    base = resolved_path(
        base_model(run, config.model.path, config.output), "model.path", weights=merge, command=command
    )
    to = Path(folder) if folder else run / ("merged" if merge else "export")
    return export_checkpoint(run / "checkpoints", base, to, step, lora, merge), to
