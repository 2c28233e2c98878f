"""From a checkpoint, of whatever layout, to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from llamarl.checkpoint.checkpoint import CheckpointError
from llamarl.checkpoint.store import CheckpointStore
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
    store = CheckpointStore(checkpoints, keep=1)
    if step is None:
        checkpoint, damaged = store.load_newest()
        if checkpoint is None:
            raise ConfigError("; ".join([f"{checkpoints} holds no valid checkpoint; let the run save one", *damaged]))
    else:
        try:
            checkpoint = store.load(step)
        except CheckpointError as error:
            raise ConfigError(f"--step {step}: {error}") from None
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors if ":" not in name}
    save_tensors(weights, load_shape(base_model), folder, Path(base_model))
    return checkpoint.step
