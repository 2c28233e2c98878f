"""A decoder with one output per token: critics, and reward models in the layout of Hugging Face's
`ForSequenceClassification` classes with one label (`model.*`, `score.weight`).

Shape suffixes: N packed tokens, R some of them, D model dim.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.config.hub import folder_of
from llamarl.models.folder import load_shape
from llamarl.models.hf import Weights
from llamarl.models.shape import ModelShape
from llamarl.models.tensors import SCORE
from llamarl.models.transformer import Attend, Decoder


class ScalarModel(nn.Module):
    """A decoder like `Transformer`, with a head of one output instead of a vocabulary."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.score = nn.Linear(shape.hidden_size, 1, bias=False)

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Returns hidden states after the final norm, [N, D]."""
        return self.model(token_ids_N, positions_N, attend)

    def scalars(self, hidden_R_D: Tensor) -> Tensor:
        """Returns outputs of the head for these hidden states, float32 [R] (float64 for float64)."""
        dtype = torch.promote_types(hidden_R_D.dtype, torch.float32)
        return F.linear(hidden_R_D.to(dtype), self.score.weight.to(dtype)).squeeze(1)


def open_scalar_model(folder: str | Path, *, new_head: bool) -> tuple[ScalarModel, Weights]:
    """Returns the model in `folder` on the meta device, and its weights.

    Args:
        new_head: whether a missing head becomes zeros. The head of a language model is ignored.

    Raises:
        ConfigError: a file is missing or damaged, or a tensor is missing, unknown or of the wrong shape.
    """
    with torch.device("meta"):
        model = ScalarModel(load_shape(folder))
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = Weights(folder_of(folder), model.shape, expected, optional=(SCORE,))
    if not new_head:
        weights.check_score()
    return model, weights


def load_scalar_model(folder: str | Path, dtype: torch.dtype, device: torch.device, *, new_head: bool) -> ScalarModel:
    """Returns the whole model in `folder`; see `open_scalar_model`."""
    model, weights = open_scalar_model(folder, new_head=new_head)
    model.load_state_dict(weights.read_all(dtype, device), assign=True)
    return model
