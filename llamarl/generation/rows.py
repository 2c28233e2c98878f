"""`Rows`: the running rollouts as arrays, one row each, without gaps.

Shape suffixes: R rows (capacity), B running rows, T response tokens, M blocks of one rollout, W experts of a token in
all layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamarl.generation.sampler import Drawn, SamplingRows, noise_key
from llamarl.generation.scheduler import Group, Sequence
from llamarl.types import COLUMNS, Columns, continued, filled


class Rows:
    """The arrays that a decode step reads and writes."""

    def __init__(self, capacity: int, block_size: int, routes: tuple[int, np.dtype] | None = None) -> None:
        """
        Args:
            routes: number and type of a token's experts in all layers. None means that experts are not recorded.
        """
        self.block_size = block_size
        self.sequences: list[Sequence] = []
        # The token that the next step feeds, its position in the context, response tokens so far, their limit, tokens
        # of the prefix, blocks of the prefix.
        self._numbers_6_R = np.zeros((6, capacity), np.int64)
        self.input_R, self.position_R, self.length_R, self.limit_R, self.prefix_R, self.start_R = self._numbers_6_R
        self.sampling = SamplingRows(capacity)
        self.blocks_R_M = np.full((capacity, 1), -1, np.int64)
        # Blocks of the prefix, then own blocks. Later entries repeat an own block: it is masked, but a kernel may
        # multiply its values by 0, which would keep NaN from a foreign block.
        self.table_R_M = np.zeros((capacity, 1), np.int32)
        self.columns_R_T = {
            column.name: np.zeros((capacity, 1), column.dtype)
            for column in COLUMNS.values()
            if column.filled_by == "generator" and not column.is_wide
        }
        if routes is not None:
            self.columns_R_T["routes"] = np.zeros((capacity, 1, routes[0]), routes[1])
        self.stop_R_S = np.full((capacity, 1), -1, np.int64)
        self.passed: list[set[int] | None] = []  # tokens that end no stop string; None: no stop strings

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a rollout, fresh or resumed."""
        row, group = len(self.sequences), sequence.group
        request, length = group.request, len(sequence.token_ids_T)
        prefix, own = group.prefix.blocks, sequence.own.blocks
        self._widen(sequence.limit, len(prefix), len(request.sampling.stop_token_ids))
        sequence.row = row
        self.sequences.append(sequence)
        newest = sequence.token_ids_T[-1] if length else group.prompt_T[-1]
        prefix_tokens = group.prefix_tokens
        numbers = newest, prefix_tokens + length, length, sequence.limit, prefix_tokens, len(prefix)
        self._numbers_6_R[:, row] = numbers
        rollout_id = 0 if request.sampling.is_repeatable else request.group_id
        self.sampling.set(row, request.sampling, noise_key(request.sampling.seed, rollout_id, sequence.index))
        self.stop_R_S[row] = -1
        self.stop_R_S[row, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
        self.passed.append(group.stop_strings.passed if group.stop_strings else None)
        self.blocks_R_M[row] = -1
        self.blocks_R_M[row, : len(own)] = own
        self.table_R_M[row] = own[0]
        self.table_R_M[row, : len(prefix) + len(own)] = prefix + own
        for name, values_R_T in self.columns_R_T.items():
            values_R_T[row, :length] = filled(sequence.columns, name, length, values_R_T[row])

    def remove(self, sequence: Sequence) -> None:
        """Removes a rollout and stores its tokens in it. The last row takes its place."""
        row, last = sequence.row, len(self.sequences) - 1
        has_others = not sequence.columns.keys() <= self.columns_R_T.keys()
        columns = self.so_far(sequence, len(sequence.token_ids_T) if has_others else 0)
        sequence.columns = continued(sequence.columns, columns) if has_others else columns
        sequence.row = -1
        moved, passed = self.sequences.pop(), self.passed.pop()
        if row == last:
            return
        self.sequences[row], self.passed[row] = moved, passed
        moved.row = row
        length = self.length_R[last]
        self._numbers_6_R[:, row] = self._numbers_6_R[:, last]
        for array_R_M in (self.blocks_R_M, self.stop_R_S, self.table_R_M):
            array_R_M[row] = array_R_M[last]
        for values_R_T in self.columns_R_T.values():
            values_R_T[row, :length] = values_R_T[last, :length]
        self.sampling.move(last, row)

    def so_far(self, sequence: Sequence, start: int = 0) -> Columns:
        """Returns copies of a rollout's columns from token `start` on, without columns that hold only their default."""
        row, length = sequence.row, self.length_R[sequence.row]
        views = {name: values_R_T[row, start:length] for name, values_R_T in self.columns_R_T.items()}
        return {
            name: values_T.copy()
            for name, values_T in views.items()
            if (default := COLUMNS[name].default) is None or (values_T != default).any()
        }

    def of_groups(self) -> dict[Group, list[int]]:
        """Returns the rows of each group, which share a prefix."""
        members: dict[Group, list[int]] = {}
        for row, sequence in enumerate(self.sequences):
            members.setdefault(sequence.group, []).append(row)
        return members

    def of(self, sequence: Sequence) -> Columns:
        """Returns views of a rollout's columns, which are longer than its tokens."""
        return {name: values_R_T[sequence.row] for name, values_R_T in self.columns_R_T.items()}

    def grow(self, sequence: Sequence) -> None:
        """Enters the newest block of a rollout."""
        blocks = sequence.own.blocks
        self.blocks_R_M[sequence.row, len(blocks) - 1] = blocks[-1]
        self.table_R_M[sequence.row, self.start_R[sequence.row] + len(blocks) - 1] = blocks[-1]

    def append(self, drawn: Drawn, version: int, routes_B_W: np.ndarray | None = None) -> np.ndarray:
        """Appends the sampled token to each row. Returns which rows are done, bool [B, 2]: (stop token or string,
        limit)."""
        count = len(self.sequences)
        rows_B, length_B = np.arange(count), self.length_R[:count]
        token_ids_B = drawn.token_ids_B
        columns = {"cutoffs": drawn.cutoffs_B, "routes": routes_B_W}
        sampled: dict[str, Any] = {
            "token_ids": token_ids_B, "behavior_logprobs": drawn.logprobs_B, "policy_versions": version,
        } | {name: values_B for name, values_B in columns.items() if values_B is not None}  # fmt: skip
        for name, values_R_T in self.columns_R_T.items():
            values_R_T[rows_B, length_B] = sampled.get(name, COLUMNS[name].default)
        self.input_R[:count] = token_ids_B
        self.position_R[:count] += 1
        length_B += 1
        stopped_B = (self.stop_R_S[:count] == token_ids_B[:, None]).any(axis=1)
        newest = zip(token_ids_B.tolist(), self.passed, strict=True)
        for row in [row for row, (token, passed) in enumerate(newest) if passed is not None and token not in passed]:
            stop_strings = self.sequences[row].group.stop_strings
            assert stop_strings is not None
            stopped_B[row] |= stop_strings.completed(self.columns_R_T["token_ids"][row, : length_B[row]])
        return np.stack((stopped_B, length_B >= self.limit_R[:count]), axis=1)

    def _widen(self, limit: int, num_prefix: int, num_stop: int) -> None:
        """Widens the arrays for `limit` response tokens, which need as many own tokens, `num_prefix` prefix blocks and
        `num_stop` stop tokens."""
        num_blocks = -(-limit // self.block_size)
        self.columns_R_T = {name: _widened(values_R_T, limit, 0) for name, values_R_T in self.columns_R_T.items()}
        self.blocks_R_M = _widened(self.blocks_R_M, num_blocks, -1)
        self.stop_R_S = _widened(self.stop_R_S, num_stop, -1)
        more = max(0, num_prefix + num_blocks - self.table_R_M.shape[1])
        self.table_R_M = np.pad(self.table_R_M, ((0, 0), (0, more)), mode="edge") if more else self.table_R_M


def _widened(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    if width <= array.shape[1]:
        return array
    others = ((0, 0),) * (array.ndim - 2)
    return np.pad(array, ((0, 0), (0, width - array.shape[1]), *others), constant_values=fill)
