"""States of the delta nets of a hybrid model, next to the KV cache.

A sequence's keys and values grow with its tokens, but its state does not: it has one slot, which each computed token
changes. The prefix of a group has a slot too. A rollout reads it at its first own token, and writes its own slot from
then on, so the samples of a prompt fork without a copy. Slot `EMPTY` holds zeros, where prefixes begin.

`StepStates` is the recurrent part of one step: one token of each running rollout in the recurrent form, then the tokens
of each chunk of prefill in the chunked form. States and the last inputs of the convolution are float32.

Shape suffixes: B decode rows, N packed tokens, L delta nets, S slots, C mixed channels, W conv width (D: without the
newest token), H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.generation.rows import Rows
from llamarl.generation.scheduler import EMPTY, Chunk
from llamarl.models.delta_rule import ROOT, Chunks, Level, convolved, heads, step, wide
from llamarl.models.sizes import DeltaShape


class StateCache:
    """Preallocated slots. Memory of slots that were never used is not touched."""

    def __init__(self, delta: DeltaShape, num_slots: int, device: torch.device) -> None:
        num = len(delta.layers), num_slots
        heads_K_V = delta.num_value_heads, delta.key_dim, delta.value_dim
        self.states_L_S_H_K_V = torch.empty(*num, *heads_K_V, dtype=torch.float32, device=device)
        self.inputs_L_S_D_C = torch.empty(
            *num, delta.conv_width - 1, delta.mixed_size, dtype=torch.float32, device=device
        )
        self.states_L_S_H_K_V[:, EMPTY] = 0
        self.inputs_L_S_D_C[:, EMPTY] = 0


class StepStates:
    """`Recur` of one step."""

    def __init__(self, cache: StateCache, rows: Rows, chunks: list[Chunk]) -> None:
        """Packed are one token of each row, then the tokens of each chunk."""
        self._cache, device = cache, cache.states_L_S_H_K_V.device
        slots = [_slots(sequence.group.prefix.slot, sequence.own.slot, int(length)) for sequence, length in zip(
            rows.sequences, rows.length_R[: len(rows)], strict=True
        )]  # fmt: skip
        self._count = len(slots)
        self._reads_B, self._writes_B = torch.tensor(slots, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        self._runs = [_run(chunk) for chunk in chunks]
        self._chunks = [Chunks(Level([0], [size], [ROOT]), size, device) for _, _, size in self._runs]

    def __call__(
        self, place: int, delta: DeltaShape, mixed_N_C: Tensor, conv_C_W: Tensor, decay_N_H: Tensor, strength_N_H: Tensor
    ) -> Tensor:
        mixed_N_C, conv_C_W = wide(mixed_N_C), wide(conv_C_W)
        given = mixed_N_C, wide(decay_N_H), wide(strength_N_H)
        outputs, start = list[Tensor](), self._count
        for run, chunks in zip(self._runs, self._chunks, strict=True):
            tokens = slice(start, start + run[2])
            outputs.append(self._prefilled(place, delta, run, chunks, conv_C_W, *(x[tokens] for x in given)))
            start = tokens.stop
        # A rollout may decode in the step that completes its prefix, so the chunks come first.
        decoded = [self._decoded(place, delta, conv_C_W, *(x[: self._count] for x in given))] if self._count else []
        return torch.cat(decoded + outputs)

    def _decoded(
        self, place: int, delta: DeltaShape, conv_C_W: Tensor, mixed_B_C: Tensor, decay_B_H: Tensor,
        strength_B_H: Tensor,
    ) -> Tensor:  # fmt: skip
        states, inputs = self._cache.states_L_S_H_K_V[place], self._cache.inputs_L_S_D_C[place]
        window_B_W_C = torch.cat((inputs.index_select(0, self._reads_B), mixed_B_C[:, None]), 1)
        q, k, v = heads(convolved(window_B_W_C.unbind(1), conv_C_W), delta)
        output, state = step(q, k, v, decay_B_H, strength_B_H, states.index_select(0, self._reads_B))
        states.index_copy_(0, self._writes_B, state)
        inputs.index_copy_(0, self._writes_B, window_B_W_C[:, 1:])
        return output

    def _prefilled(
        self, place: int, delta: DeltaShape, run: tuple[int, int, int], chunks: Chunks, conv_C_W: Tensor,
        mixed_N_C: Tensor, decay_N_H: Tensor, strength_N_H: Tensor,
    ) -> Tensor:  # fmt: skip
        (read, write, size), states = run, self._cache.states_L_S_H_K_V[place]
        inputs = self._cache.inputs_L_S_D_C[place]
        seen = torch.cat((inputs[read], mixed_N_C))
        windows = [seen[first : first + size] for first in range(conv_C_W.shape[1])]
        q, k, v = heads(convolved(windows, conv_C_W), delta)
        output, state = chunks(q, k, v, decay_N_H, strength_N_H, states[read : read + 1])
        states[write], inputs[write] = state[0], seen[size:]
        return output


def _slots(prefix: int, own: int, num_own: int) -> tuple[int, int]:
    """Returns the slots that a token reads and writes, behind `num_own` own tokens."""
    return (own if num_own else prefix), own


def _run(chunk: Chunk) -> tuple[int, int, int]:
    """Returns the slots that a chunk reads and writes, and its number of tokens."""
    prefix, size = chunk.group.prefix, chunk.stop - chunk.start
    if chunk.sequence is None:
        return prefix.slot if chunk.start else EMPTY, prefix.slot, size
    return *_slots(prefix.slot, chunk.sequence.own.slot, chunk.start), size
