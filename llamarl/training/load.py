"""Load of a mixture's experts: how many rows each of them computes in a step.

Shape suffixes: L sparse layers of this rank, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from llamarl.distributed.mesh import RankMesh
from llamarl.models.transformer import Layer, Transformer


class ExpertLoad:
    """Counts on the device, without waiting for it, whatever the routers of this rank's layers choose or are given."""

    def __init__(self, model: Transformer) -> None:
        self._moe, self._counts = model.shape.moe, dict[int, Tensor]()
        for layer in cast(list[Layer], [*model.model.layers.children()]):
            if self._moe and layer.columns is not None:
                number = self._moe.sparse_layers[layer.columns.start // self._moe.experts_per_token]
                gate = cast(nn.Module, layer.mlp.gate)
                gate.register_forward_hook(partial(self._add, number, self._moe.num_experts))

    def _add(self, number: int, num_experts: int, _router: nn.Module, _given: Any, answer: tuple[Tensor, ...]) -> None:
        ids = answer[0].detach().flatten()
        counts_E = self._counts.setdefault(number, ids.new_zeros(num_experts))
        counts_E.scatter_add_(0, ids, torch.ones_like(ids))

    def begin(self) -> None:
        """Forgets what was computed so far."""
        self._counts.clear()

    def metrics(self, mesh: RankMesh) -> dict[str, float]:
        """Rows of the busiest expert over the mean of all, and how many have none, by the number of the layer, over all
        ranks; nothing of a dense model. Waits for the device, once."""
        if self._moe is None:
            return {}
        counts_L_E = torch.stack([*self._counts.values()]).cpu().numpy() if self._counts else ()
        sums = dict[int, np.ndarray]()
        for own in mesh.exchange(dict(zip(self._counts, counts_L_E, strict=True))):
            for number, counts_E in own.items():
                sums[number] = sums.get(number, 0) + counts_E
        found = dict[str, float]()
        for number, counts_E in sorted(sums.items()):
            found[f"expert_load.{number}"] = float(counts_E.max() / counts_E.mean())
            found[f"idle_experts.{number}"] = float((counts_E == 0).sum())
        return found
