"""`Routes`: records the experts of computed tokens, from the forward to the columns of rollouts. No torch.

A row of the column `routes` belongs to the position that predicts the token. A rollout's first own token is the last of
its prompt, so its own token t predicts its response token t: the row has the index of the token that was fed. Routes of
a prefix are kept with it, once for all rollouts that share it.

Routes recorded when a token was sampled stay: the token's log-probability was computed with them. A prefill only fills
places with unknown routes, such as those of tokens that an environment wrote.

Shape suffixes: N packed tokens, B running rows, T tokens of one sequence, W experts of a token in all layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llamarl.generation.rows import Rows
from llamarl.generation.scheduler import Chunk, Group, Sequence
from llamarl.models.shape import MoeShape
from llamarl.types import Rollout, unknown_routes


class Routes:
    """The routes of one engine."""

    def __init__(self, moe: MoeShape) -> None:
        self.width = moe.route_width
        self.dtype = np.dtype(np.uint8 if moe.route_bytes == 1 else np.uint16)

    def sequence(self, group: Group, start: Rollout) -> Sequence:
        """Returns a rollout that continues from `start`, with a new array of routes; unrecorded ones are unknown.

        Raises:
            ValueError: `start` was recorded with another model.
        """
        sequence, known = Sequence.of(group, start), start.columns.get("routes")
        if known is None:
            known = unknown_routes(start.num_tokens, self.width, self.dtype)
        prompt = start.prompt_routes
        for routes in (known,) if prompt is None else (known, prompt):
            if routes.shape[1] != self.width or routes.dtype != self.dtype:
                raise ValueError(
                    f"the rollout has {routes.shape[1]} experts of each token in {routes.dtype}, and this model "
                    f"{self.width} in {self.dtype}"
                )
        sequence.columns = sequence.columns | {"routes": known.copy()}
        return sequence

    def prefilled(self, rows: Rows, chunks: Iterable[Chunk], routes_N_W: np.ndarray) -> None:
        """Records the routes of the chunks of a step, which are consecutive."""
        done = 0
        for chunk in chunks:
            count = chunk.stop - chunk.start
            self._keep(rows, chunk, routes_N_W[done : done + count])
            done += count

    def _keep(self, rows: Rows, chunk: Chunk, routes_T_W: np.ndarray) -> None:
        sequence, prefix, places = chunk.sequence, chunk.group.prefix, slice(chunk.start, chunk.stop)
        if sequence is not None:
            columns = sequence.columns if sequence.row < 0 else rows.of(sequence)
            kept_T_W = columns["routes"][places]
            np.copyto(kept_T_W, routes_T_W, where=kept_T_W == np.iinfo(self.dtype).max)
            return
        if not chunk.start:  # rollouts that have left may hold what an older prefill computed
            prefix.routes_T_W = unknown_routes(chunk.group.prefix_tokens, self.width, self.dtype)
        assert prefix.routes_T_W is not None
        prefix.routes_T_W[places] = routes_T_W

    def begun(self, joined: Iterable[Sequence]) -> None:
        """Gives these rollouts, whose prefix is complete, the routes of their prefix."""
        for sequence in joined:
            if sequence.prompt_routes is None:
                whole = sequence.group.prefix.routes_T_W
                sequence.prompt_routes = unknown_routes(0, self.width, self.dtype) if whole is None else whole
