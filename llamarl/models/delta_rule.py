"""The gated delta rule (arXiv 2412.06464) on packed sequences, in its chunked form.

`Chunks` computes what `kernels/delta.py: step` computes token by token, for whole sequences in chunks of up to
64 tokens: within a chunk as products of matrices (arXiv 2406.06484, section 3.2), from chunk to chunk by the state.
Both round differently.

`Branches` says where sequences begin. A sequence begins with zeros, or where another one ends: a response continues its
prompt, and a prompt the beginning that all prompts share. So a packed batch is computed level after level, and neither
a state nor an input of the convolution crosses from one sequence to the next.

States are float32 (float64 for float64), also under autocast.

Shape suffixes: N packed tokens, C mixed channels (queries, keys and values), W conv width, J key heads, H value heads,
K key dim, V value dim, B sequences, P chunks, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.kernels import train_delta
from llamarl.kernels.delta import convolved, heads, recur, wide
from llamarl.kernels.delta_shape import DeltaShape

ROOT = -1
"""Parent of a sequence that begins with zeros."""


class Recur(Protocol):
    """The recurrent part of a delta net: convolution and delta rule, over sequences that the callee knows."""

    def __call__(
        self,
        place: int,
        delta: DeltaShape,
        mixed_N_C: Tensor,
        conv_C_W: Tensor,
        decay_N_H: Tensor,
        strength_N_H: Tensor,
    ) -> Tensor:
        """Returns outputs [N, H, V], float32 at least.

        Args:
            place: number of the delta net among those of the whole model.
            mixed_N_C: queries, keys and values of all heads before the convolution.
            decay_N_H: log decays, at most 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Level:
    """Sequences of a packed batch whose parents belong to earlier levels, the longest first."""

    starts: list[int]
    """First packed token of each."""
    lengths: list[int]
    """Tokens of each, at least 1."""
    parents: list[int]
    """Number of each one's parent among all sequences, or `ROOT`."""


class Branches:
    """Sequences of a packed batch, and how they continue each other."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], parents: Sequence[int]) -> None:
        """
        Args:
            parents: number of the sequence that each one continues, which comes before it, or `ROOT`. A sequence
                without tokens stands for its parent.
        """
        resolved, depths, numbers = list[int](), list[int](), dict[int, int]()
        for number, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
            own = parent if parent == ROOT else resolved[parent]
            depths.append(0 if own == ROOT else depths[own] + 1)
            resolved.append(number if length else own)
        self.levels = list[Level]()
        deepest = max((depth for depth, length in zip(depths, lengths, strict=True) if length), default=-1)
        for depth in range(deepest + 1):
            chosen = [number for number, length in enumerate(lengths) if length and depths[number] == depth]
            chosen.sort(key=lambda number: -lengths[number])
            numbers |= {number: len(numbers) + place for place, number in enumerate(chosen)}
            owners = [ROOT if parents[number] == ROOT else resolved[parents[number]] for number in chosen]
            self.levels.append(
                Level(
                    [starts[number] for number in chosen], [lengths[number] for number in chosen],
                    [ROOT if owner == ROOT else numbers[owner] for owner in owners],
                )
            )  # fmt: skip

    @classmethod
    def of_groups(
        cls, prompt_lengths: Sequence[int], response_lengths: Sequence[tuple[int, ...]], shared: int = 0
    ) -> Branches:
        """Returns the branches of a microbatch: `shared` tokens that each prompt continues, then group after group a
        prompt and its responses."""
        lengths, parents = [shared], [ROOT]
        for prompt, responses in zip(prompt_lengths, response_lengths, strict=True):
            own = len(lengths)
            lengths += [prompt, *responses]
            parents += [0, *[own] * len(responses)]
        return cls([0, *accumulate(lengths[:-1])], lengths, parents)


class Recomputed(torch.autograd.Function):
    """A function of tensors that keeps only its inputs for backward and is computed again there. What the delta rule
    keeps inside of its chunks is tens of times as large."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.compute = compute
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        with torch.enable_grad():
            inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
            output = ctx.compute(*inputs)
        return None, *torch.autograd.grad(output, inputs, grads[0])


class Packed:
    """`Recur` over whole packed sequences, differentiable, in chunks."""

    def __init__(
        self, branches: Callable[[], Branches], num_tokens: int, device: torch.device, fused: bool = False
    ) -> None:
        """
        Args:
            branches: called once, if the model has delta nets.
            fused: whether a kernel of this package computes float32 on CPUs. Its bits differ from torch's.
        """
        self._num_tokens, self._device, self._fused = num_tokens, device, fused
        self._levels = cache(lambda: branches().levels)
        self._chunks = cache(lambda most: [Chunks(level, num_tokens, device, most) for level in self._levels()])
        self._windows = dict[int, Tensor]()

    def __call__(
        self,
        place: int,
        delta: DeltaShape,
        mixed_N_C: Tensor,
        conv_C_W: Tensor,
        decay_N_H: Tensor,
        strength_N_H: Tensor,
    ) -> Tensor:
        if self._fused and train_delta.can_serve(decay_N_H, strength_N_H):
            sequences_B_3, size = _sequences(self._levels()), delta.chunk_tokens(False)
            return train_delta.apply(sequences_B_3, delta, size, mixed_N_C, conv_C_W, decay_N_H, strength_N_H)

        def compute(mixed_N_C: Tensor, conv_C_W: Tensor, decay_N_H: Tensor, strength_N_H: Tensor) -> Tensor:
            with torch.autocast(mixed_N_C.device.type, enabled=False):
                padded = F.pad(wide(mixed_N_C), (0, 0, 0, 1))
                # An embedding, because the gradient of its rows is summed in a fixed order, on GPUs too.
                seen = [F.embedding(index_N, padded) for index_N in self._windows_of(conv_C_W.shape[1])]
                q, k, v = heads(convolved(seen, wide(conv_C_W)), delta)
                chunks = self._chunks(delta.chunk_tokens(mixed_N_C.is_cuda))
                return self._rule(chunks, q, k, v, wide(decay_N_H), wide(strength_N_H))

        return Recomputed.apply(compute, mixed_N_C, conv_C_W, decay_N_H, strength_N_H)

    def recurrent_form(self) -> RecurrentForm:
        """Returns the recurrent form of the same sequences."""
        return RecurrentForm(self._levels)

    def _rule(
        self, of_levels: list[Chunks], q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
    ) -> Tensor:
        outputs, ends, states = list[Tensor](), list[Tensor](), None
        for level, chunks in zip(self._levels(), of_levels, strict=True):
            if states is not None:
                parents_B = torch.tensor(level.parents, device=self._device)
                states = F.embedding(parents_B, torch.cat(ends).flatten(1)).unflatten(1, states.shape[1:])
            output, states = chunks(q, k, v, decay, strength, states)
            outputs.append(output)
            ends.append(states)
        order_N = torch.cat([chunks.tokens_N for chunks in of_levels]).argsort()
        return torch.cat(outputs).index_select(0, order_N)

    def _windows_of(self, width: int) -> Tensor:
        """Returns the tokens that each token's convolution sees, the oldest first, int64 [W, N]. `num_tokens` stands
        for zeros before the beginning."""
        if width not in self._windows:
            found = np.full((width, self._num_tokens + 1), self._num_tokens)
            found[-1, :-1] = np.arange(self._num_tokens)
            before_N, lasts = np.full(self._num_tokens + 1, self._num_tokens), list[int]()
            for level in self._levels():
                for start, length, parent in zip(level.starts, level.lengths, level.parents, strict=True):
                    before_N[start + 1 : start + length] = np.arange(start, start + length - 1)
                    before_N[start] = self._num_tokens if parent == ROOT else lasts[parent]
                lasts += [start + length - 1 for start, length in zip(level.starts, level.lengths, strict=True)]
            for place in reversed(range(width - 1)):
                found[place] = before_N[found[place + 1]]
            self._windows[width] = torch.from_numpy(found[:, :-1].copy()).to(self._device)
        return self._windows[width]


class RecurrentForm:
    """`Recur` over whole packed sequences in the form of generators: token by token, without gradients."""

    def __init__(self, levels: Callable[[], Sequence[Level]]) -> None:
        self._levels = levels

    def __call__(
        self,
        place: int,
        delta: DeltaShape,
        mixed_N_C: Tensor,
        conv_C_W: Tensor,
        decay_N_H: Tensor,
        strength_N_H: Tensor,
    ) -> Tensor:
        sequences_B_3 = _sequences(self._levels())
        slots_B = 1 + np.arange(len(sequences_B_3))  # slot 0 holds zeros, where sequences without a parent begin
        runs_R_4 = np.column_stack((sequences_B_3[:, :2], sequences_B_3[:, 2] + 1, slots_B))
        ranks = delta.mixed_size // mixed_N_C.shape[1]
        own = replace(delta, num_key_heads=delta.num_key_heads // ranks, num_value_heads=delta.num_value_heads // ranks)
        mixed_N_C, conv_C_W, decay_N_H, strength_N_H = (
            wide(x.detach()) for x in (mixed_N_C, conv_C_W, decay_N_H, strength_N_H)
        )
        states_S_H_K_V = mixed_N_C.new_zeros(len(runs_R_4) + 1, own.num_value_heads, own.key_dim, own.value_dim)
        inputs_S_D_C = mixed_N_C.new_zeros(len(runs_R_4) + 1, own.conv_width - 1, own.mixed_size)
        return recur(runs_R_4, own, mixed_N_C, conv_C_W, decay_N_H, strength_N_H, states_S_H_K_V, inputs_S_D_C)


def _sequences(levels: Sequence[Level]) -> np.ndarray:
    """Returns first token, number of tokens and parent of all sequences, int64 [B, 3]."""
    columns = (
        sum((getattr(level, name) for level in levels), list[int]()) for name in ("starts", "lengths", "parents")
    )
    return np.ascontiguousarray(np.array([*columns], np.int64).T)


class Chunks:
    """The chunked form for the sequences of one level.

    Chunks are ordered by their number within the sequence. As the longest sequence comes first, the sequences that have
    a chunk of a number are the first ones.
    """

    def __init__(self, level: Level, num_tokens: int, device: torch.device, most: int) -> None:
        """
        Args:
            most: the most tokens of a chunk.
        """
        longest = max(level.lengths)
        self.size = min(most, 1 << (longest - 1).bit_length())
        self._counts = [sum(length > first for length in level.lengths) for first in range(0, longest, self.size)]
        index = np.full((sum(self._counts), self.size), num_tokens)
        row = 0
        for number, count in enumerate(self._counts):
            for start, length in zip(level.starts[:count], level.lengths, strict=False):
                first = number * self.size
                here = min(self.size, length - first)
                index[row, :here] = np.arange(start + first, start + first + here)
                row += 1
        valid = np.flatnonzero(index.reshape(-1) < num_tokens)
        self.tokens_N = torch.from_numpy(index.reshape(-1)[valid]).to(device)
        """Packed tokens in the order of the outputs."""
        self._index_PT, self._valid = (torch.from_numpy(one).to(device) for one in (index.reshape(-1), valid))

    def __call__(
        self, q_N_J_K: Tensor, k_N_J_K: Tensor, v_N_H_V: Tensor, decay_N_H: Tensor, strength_N_H: Tensor,
        states_B_H_K_V: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns outputs in the order of `tokens_N`, [N, H, V], and the states after each sequence, [B, H, K, V]."""
        q, k, v, decay, strength = (
            self._chunked(x) for x in (q_N_J_K, k_N_J_K, v_N_H_V, decay_N_H[..., None], strength_N_H[..., None])
        )
        each, size = v.shape[1] // k.shape[1], self.size
        sums_P_H_T = decay.squeeze(-1).cumsum(-1)
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        # Masked before `exp`: later tokens would overflow.
        between = (sums_P_H_T[..., :, None] - sums_P_H_T[..., None, :]).masked_fill(later, -torch.inf).exp()
        kk, qk = ((x @ k.transpose(-1, -2)).repeat_interleave(each, 1) * between for x in (k, q))
        q, k = (x.repeat_interleave(each, 1) for x in (q, k))
        grown = sums_P_H_T.exp()[..., None]
        right = torch.cat((v * strength, k * (strength * grown)), -1)
        solved = torch.linalg.solve_triangular(kk * strength, right, upper=False, unitriangular=True)
        values, keys = solved.split_with_sizes([v.shape[-1], k.shape[-1]], -1)
        left = k * (sums_P_H_T[..., -1:] - sums_P_H_T).exp()[..., None]
        passed = sums_P_H_T[..., -1].exp()[..., None, None]
        outputs, states = self._scan((q * grown, qk, values, keys, left, passed), states_B_H_K_V)
        return outputs.transpose(1, 2).flatten(0, 1).index_select(0, self._valid), states

    def _scan(self, chunks: tuple[Tensor, ...], states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Passes the states from chunk to chunk. Returns outputs [P, H, T, V] and the last states."""
        parts = zip(*(x.split(self._counts) for x in chunks), strict=True)
        counts, outputs, ended = [*self._counts[1:], 0], list[Tensor](), list[Tensor]()
        for count, (q, qk, values, keys, left, passed) in zip(counts, parts, strict=True):
            if states is None:
                outputs.append(qk @ values)
                states = left.transpose(-1, -2) @ values
            else:
                new = values - keys @ states
                outputs.append(q @ states + qk @ new)
                states = states * passed + left.transpose(-1, -2) @ new
            states, done = states.split_with_sizes([count, len(states) - count])
            ended.append(done)
        return torch.cat(outputs), torch.cat(ended[::-1])

    def _chunked(self, x_N_H_X: Tensor) -> Tensor:
        """Returns tokens in chunks, [P, H, T, X]; zeros where a sequence has ended, which change no state."""
        padded = F.pad(x_N_H_X, (0, 0, 0, 0, 0, 1))
        return padded.index_select(0, self._index_PT).unflatten(0, (-1, self.size)).transpose(1, 2)
