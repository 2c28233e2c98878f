"""States of the delta nets of a hybrid model, next to the KV cache.

A sequence's keys and values grow with its tokens, but its state does not: it has one slot, which each computed token
changes. The prefix of a group has a slot too. A rollout reads it at its first own token, and writes its own slot from
then on, so the samples of a prompt fork without a copy. Slot `EMPTY` holds zeros, where prefixes begin. Further slots
hold states behind beginnings that prompts share (`scheduler.py: SharedStates`).

`StepStates` is the recurrent part of one step: the tokens of each chunk of prefill, then one token of each running
rollout, which may be of a prefix that this step completes. All of them use the recurrent form. So a token's bits do not
depend on whether it was decoded or prefilled, as in attention, and `replay` can compute many tokens at once.

Shape suffixes: N packed tokens, L delta nets, S slots, C mixed channels, W conv width (D: without the newest token), H
value heads, K key dim, V value dim, R runs of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.rows import Rows
from llamarl.generation.scheduler import EMPTY, Chunk
from llamarl.kernels.delta import recur, wide
from llamarl.kernels.delta_shape import DeltaShape


class StateCache:
    """Preallocated slots, in float32. Memory of slots that were never used is not touched."""

    def __init__(self, delta: DeltaShape, num_slots: int, device: torch.device) -> None:
        num = len(delta.layers), num_slots
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.states_L_S_H_K_V = torch.empty(*num, delta.num_value_heads, delta.key_dim, delta.value_dim, **options)
        self.inputs_L_S_D_C = torch.empty(*num, delta.conv_width - 1, delta.mixed_size, **options)
        self.states_L_S_H_K_V[:, EMPTY] = 0
        self.inputs_L_S_D_C[:, EMPTY] = 0

    def widen(self, count: int) -> None:
        """Adds slots. Copies the slots that exist."""
        self.states_L_S_H_K_V, self.inputs_L_S_D_C = (
            torch.cat((x, x.new_empty(len(x), count, *x.shape[2:])), 1)
            for x in (self.states_L_S_H_K_V, self.inputs_L_S_D_C)
        )


class StepStates:
    """`Recur` of one step. Packed are one token of each row, then the tokens of each chunk."""

    def __init__(self, cache: StateCache, rows: Rows, chunks: list[Chunk]) -> None:
        self._cache = cache
        runs, start = list[tuple[int, ...]](), len(rows)
        for chunk in chunks:
            for count, read, write in _parts_of(chunk):
                runs.append((start, count, read, write))
                start += count
        lengths = rows.length_R[: len(rows)].tolist()
        for row, (sequence, length) in enumerate(zip(rows.sequences, lengths, strict=True)):
            runs.append((row, 1, *_slots(sequence.group.prefix.slot, sequence.own.slot, length)))
        self._runs_R_4 = np.array(runs, np.int64).reshape(-1, 4)

    def __call__(
        self,
        place: int,
        delta: DeltaShape,
        mixed_N_C: Tensor,
        conv_C_W: Tensor,
        decay_N_H: Tensor,
        strength_N_H: Tensor,
    ) -> Tensor:
        slots = self._cache.states_L_S_H_K_V[place], self._cache.inputs_L_S_D_C[place]
        given = wide(mixed_N_C), wide(conv_C_W), wide(decay_N_H), wide(strength_N_H)
        return recur(self._runs_R_4, delta, *given, *slots)


def _slots(prefix: int, own: int, num_own: int) -> tuple[int, int]:
    """Returns the slots that a token reads and writes, behind `num_own` own tokens."""
    return (own if num_own else prefix), own


def _parts_of(chunk: Chunk) -> list[tuple[int, int, int]]:
    """Returns number of tokens, slot to read and slot to write, of a chunk's parts: it is cut where its state is
    kept."""
    prefix, count = chunk.group.prefix, chunk.stop - chunk.start
    if chunk.sequence is not None:
        return [(count, *_slots(prefix.slot, chunk.sequence.own.slot, chunk.start))]
    read = chunk.state if chunk.state != EMPTY or not chunk.start else prefix.slot
    border, kept = chunk.kept
    if kept == EMPTY:
        return [(count, read, prefix.slot)]
    return [(border - chunk.start, read, kept), (chunk.stop - border, kept, prefix.slot)]
