"""`ExpertLoad`: how many rows each expert of a mixture computes in a step.

Shape suffixes: N packed tokens of this rank, K experts of a token, L sparse layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from llamarl.distributed.mesh import RankMesh
from llamarl.models.transformer import Layer, Transformer


class ExpertLoad:
    """Counts on the device, without waiting for it, the experts that routers of this rank's layers choose or replay."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._moe, self._num_tokens = model.shape.moe, 0
        sizes = (len(self._moe.sparse_layers), self._moe.num_experts) if self._moe else (0, 0)
        self._counts_L_E = torch.zeros(sizes, dtype=torch.int64, device=device)
        for layer in cast(list[Layer], [*model.model.layers.children()]):
            if self._moe and layer.columns is not None:
                gate = cast(nn.Module, layer.mlp.gate)
                gate.register_forward_hook(partial(self._add, layer.columns.start // self._moe.experts_per_token))

    @contextmanager
    def counting(self, num_tokens: int) -> Iterator[None]:
        """Counts in a forward whose first `num_tokens` rows are tokens. Recomputation for backward does not count."""
        self._num_tokens = num_tokens
        try:
            yield
        finally:
            self._num_tokens = 0

    def _add(self, place: int, _router: nn.Module, _given: Any, answer: tuple[Tensor, ...]) -> None:
        ids_N_K = answer[0].detach()[: self._num_tokens]
        self._counts_L_E[place].scatter_add_(0, ids_N_K.flatten(), torch.ones_like(ids_N_K).flatten())

    def begin(self) -> None:
        """Resets all counts."""
        self._counts_L_E.zero_()

    def metrics(self, mesh: RankMesh) -> dict[str, float]:
        """Returns the rows of the busiest expert over the mean of all experts, and the number of idle experts, by layer
        number.

        They are over all ranks, each of which calls this. Returns nothing for a dense model. Waits for the device once.
        """
        if self._moe is None:
            return {}
        counts_L_E = self._counts_L_E
        for axis in (mesh.fsdp, mesh.cp, mesh.pp):  # tensor-parallel ranks have the same rows
            counts_L_E = axis.sum(counts_L_E)
        metrics = dict[str, float]()
        for number, counts_E in zip(self._moe.sparse_layers, counts_L_E.cpu().double(), strict=True):
            if total := float(counts_E.sum()):
                metrics[f"expert_load.{number}"] = float(counts_E.max()) * len(counts_E) / total
                metrics[f"idle_experts.{number}"] = float((counts_E == 0).sum())
        return metrics
