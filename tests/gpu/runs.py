"""A whole run on a pretended GPU, and the same on the CPU. Runs where `guard.begin` has been called."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from llamarl.executors import trainer
from llamarl.models.folder import load_shape
from llamarl.models.hf import HEAD as LM_HEAD
from llamarl.models.hf import load_model, save_tensors
from llamarl.models.tensors import SCORE
from llamarl.run import placement
from tests.end_to_end.tiny import make_model, rows
from tests.executors.runs import tiny_config, train
from tests.gpu.pretend import Ledger, ledger


def run(device: str) -> tuple[list[dict[str, Any]], Ledger]:
    """Two steps with every kind of executor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", std=0.25)
        _make_judge(model, folder / "judge")
        on = {"device": device}
        config = tiny_config(
            model, folder / "runs", steps=2, trainer=on, critic=on, generator=on, reference=on,
            reward={"model": {"path": str(folder / "judge"), "device": device}},
        )  # fmt: skip
        one_device = patch.object(placement, "count_devices", lambda: 1)  # it asks another process
        peak = patch.object(trainer, "peak_flops", lambda *_: 1e12)  # measured with large products
        with ledger() as found, one_device, peak, contextlib.redirect_stdout(io.StringIO()):
            metrics = train(config).metrics
        return [row for row in rows(metrics) if row["kind"] == "step"], found


def _make_judge(model: Path, folder: Path) -> None:
    """A reward model, of a policy."""
    weights = load_model(model, torch.float32, "cpu").state_dict()
    weights.pop(LM_HEAD, None)
    head = torch.randn(1, weights["model.norm.weight"].shape[0], generator=torch.Generator().manual_seed(1))
    save_tensors(weights | {SCORE: head}, load_shape(model), folder, model)
