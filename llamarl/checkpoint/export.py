"""Export of a checkpoint, of whatever layout, to a Hugging Face folder: a model, or adapters as PEFT reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from llamarl.checkpoint.folder import CheckpointError
from llamarl.checkpoint.store import CheckpointStore
from llamarl.config import ConfigError
from llamarl.config.roles import LoraConfig
from llamarl.models.folder import load_shape
from llamarl.models.hf import load_model, save_tensors
from llamarl.models.lora import adapted_weights, adapter_of, merged, save_adapters

Texts = Callable[[int], Mapping[str, str]]
"""Contents of further files by name, for the checkpoint of a step."""


def export_checkpoint(
    checkpoints: Path,
    base_model: str,
    folder: Path,
    step: int | None,
    lora: LoraConfig | None,
    merge: bool,
    *,
    dtype: torch.dtype = torch.float32,
    texts: Texts = lambda step: {},
) -> int:
    """Writes the checkpoint of `step` (None: the newest valid one) with the base model's small files and settings.

    Args:
        lora: of the run; the checkpoint then holds adapters.
        merge: them into the base model, rather than write them alone.
        dtype: type of the matrices, or of adapters that are not merged. Adapters are merged in float32 and the sum is
            rounded once, as generators do.
        texts: called with the step that is exported.

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
        if step not in (known := store.steps()):
            raise ConfigError(
                f"step {step} has no checkpoint in {checkpoints}; there are {', '.join(map(str, known)) or 'none'}"
            )
        try:
            checkpoint = store.load(step)
        except CheckpointError as error:
            raise ConfigError(f"--step {step}: {error}") from None
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors if ":" not in name}
    if lora and not merge:
        save_adapters(weights, lora, base_model, folder, dtype=dtype, texts=texts(checkpoint.step))
        return checkpoint.step
    if lora:
        model = load_model(base_model, torch.float32, "cpu").state_dict()
        for name, _ in adapted_weights(load_shape(base_model), lora):
            model[name].copy_(merged(model[name], *adapter_of(weights, name), lora.scale))
        weights = model
    save_tensors(
        weights, load_shape(base_model), folder, base_model, base=base_model, dtype=dtype, texts=texts(checkpoint.step)
    )
    return checkpoint.step
