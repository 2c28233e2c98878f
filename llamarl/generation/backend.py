"""`GenerationBackend`: what the generator asks of an engine, whoever computes. No torch at run time.

Every backend runs `tests/generation/conformance.py`.

Shape suffixes: T tokens of one sequence, N packed tokens, B rows of a step, D model dim, V vocabulary, W experts of a
token in all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llamarl.models.shape import ModelShape
from llamarl.types import CandidateSets, GenerationRequest, Rollout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llamarl.generation.rows import Rows
    from llamarl.models.transformer import Attend


class EngineModel(Protocol):
    """A decoder that the native engine can run: `Transformer`, or one made for generation."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type in which keys and values are cached."""
        ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, D]."""
        ...

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """[N, V]."""
        ...


class StepGraphs(Protocol):
    """Decode steps that were captured on a device: the part `cuda` has some."""

    routes_B_W: Tensor | None
    """Experts of the rows of the last step, until the next; None: the model is no mixture."""

    def __call__(self, rows: Rows, of_tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Hidden states of the rows, until the next step, and how they are sampled; see `gather_inputs`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """State of an engine in numbers. Counters start at 0 with the engine."""

    running: int
    """Rollouts that decode."""
    waiting: int
    """Rollouts that have no blocks: not admitted yet, or parked."""
    kv_use: float
    """Share of KV blocks in use, 0 to 1."""
    decode_tokens: int
    """Tokens sampled."""
    prefill_tokens: int
    """Tokens prefilled, those of resumed and recomputed rollouts included."""
    steps: int
    """Forwards."""
    parked: int = 0
    """Times that a rollout lost its blocks to an older one."""
    recomputed_tokens: int = 0
    """Tokens prefilled again because the weights had changed."""
    recompute_s: float = 0.0
    """Wall seconds of the steps that did so, times the share of their tokens that these were."""
    slot_steps: int = 0
    """Sum over the steps with rollouts waiting of the rollouts that could decode at once."""
    filled_slot_steps: int = 0
    """Sum over the same steps of those that did."""


class RolloutEngine(Protocol):
    """Turns requests into rollouts. Not thread-safe; `step` is called again and again while `has_work`."""

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to return."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests. Those that cannot run come out of `step` as FAILED rollouts, and the others go on.

        Raises:
            ValueError: a group id is in the engine already; nothing was queued.
        """
        ...

    def step(self) -> list[Rollout]:
        """Go on; returns rollouts that finished, failed, or were parked after `segment_tokens`."""
        ...

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Take groups back: their unfinished rollouts, with the tokens so far, come now or from `step`. Ids not in the
        engine are ignored."""
        ...

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Rollouts of these groups that decode now, as they are; none where the engine cannot tell."""
        ...

    def stats(self) -> EngineStats:
        """State of the engine now, in numbers."""
        ...


class GenerationBackend(RolloutEngine, Protocol):
    """An engine whose weights change, and which says how likely tokens are by them."""

    @property
    def keyed_sampling(self) -> bool:
        """A sampled rollout depends only on its seed, group id, index and the weights, not on what runs beside it."""
        ...

    def sleep(self) -> None:
        """Gives the memory of weights, keys and values back until weights are replaced; there is no work."""
        ...

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        """Rollouts, by group and index, that stopped in a request with `has_turns` and do not come back."""
        ...

    def set_version(self, version: int) -> None:
        """The weights were replaced, between two steps; tokens sampled from now on carry `version`."""
        ...

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        """Natural log-probability of each token given those before, at temperature 1, by the current weights.

        Running rollouts are not disturbed.

        Args:
            sequences: token ids, int [T] each, T >= 1.
            candidates: tells log-probabilities by their causes, if this is the native engine.

        Returns:
            float32 [T - 1] each: of all tokens but the first. With `candidates` [3, T - 1], at their temperature: by
            these weights in float32 arithmetic (NaN: not known here), by the engine's own, and by that among candidates
            alone.

        Raises:
            ValueError: a sequence is empty, longer than the context, or has unknown ids.
        """
        ...
