"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from llamarl.checkpoint.store import CheckpointError, CheckpointStore, load_checkpoint
from llamarl.config import ConfigError
from llamarl.models.folder import load_shape
from llamarl.models.hf import save_tensors


def export_checkpoint(checkpoints: Path, base_model: str, folder: Path, step: int | None) -> int:
    """Writes the checkpoint of `step` (None: the newest valid one) with the base model's shape and tokenizer.

    Returns:
        The step that was exported.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or `folder` holds something else.
    """
    if step is None:
        checkpoint, damaged = CheckpointStore(checkpoints, keep=1).load_newest()
        if checkpoint is None:
            raise ConfigError("; ".join([f"{checkpoints} holds no valid checkpoint; let the run save one", *damaged]))
    else:
        try:
            checkpoint = load_checkpoint(checkpoints / f"step-{step:08d}")
        except CheckpointError as error:
            raise ConfigError(f"--step {step}: {error}") from None
    save_tensors(checkpoint.tensors["model"], load_shape(base_model), folder, Path(base_model))
    return checkpoint.step
