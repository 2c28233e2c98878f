"""`StepInputs`: all that a step on a GPU reads of its rows, in one array, so that one copy brings it.

Shape suffixes: N packed tokens, B rows, M blocks of one row, W experts of a token in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.kv_cache import BLOCK_SIZE
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import settings
from llamarl.models.shape import ModelShape

_OF_TOKEN, _OF_ROW = 4, 7
"""Numbers before the table: of each token, of each row."""


def num_inputs(num_tokens: int, num_rows: int, width: int) -> int:
    """Length of the array of a step's inputs, with `width` blocks of each row."""
    return _OF_TOKEN * num_tokens + _OF_ROW * num_rows + 1 + num_rows * width


class StepInputs:
    """Views of the array."""

    def __init__(self, array: Tensor, num_tokens: int, num_rows: int, routes_N_W: Tensor | None = None) -> None:
        self.routes_N_W = routes_N_W
        """Experts that each token chooses, which the forward fills in; None: nobody asks."""
        rows = _OF_TOKEN * num_tokens
        end = rows + _OF_ROW * num_rows
        self.token_N, self.position_N, self.block_N, self.offset_N = array[:rows].view(_OF_TOKEN, num_tokens)
        """`block_N` is where each token's keys and values go, `offset_N` their place in it."""
        rows_7_B = array[rows:end].view(_OF_ROW, num_rows)
        self.prefix_B, self.own_B = rows_7_B[:2]
        """Tokens of the prefix, and others, this step's included."""
        self.settings_5_B = rows_7_B[2:].view(torch.float32)
        """Sampling settings of each row, float32 [5, B]; see `sampler.settings`."""
        self.width, self.table = array[end : end + 1], array[end + 1 :]
        """Blocks of each row: those of its prefix and then its own; the next row's begin `width` further."""

    def table_B_M(self) -> Tensor:
        """Block table with equal rows, as wide as the array has room for; the last column is repeated. It waits for no
        word of the device."""
        num_rows = len(self.own_B)
        column_M = torch.arange(len(self.table) // max(num_rows, 1), device=self.table.device)
        row_B = torch.arange(num_rows, device=self.table.device)
        return self.table[row_B[:, None] * self.width + torch.minimum(column_M, self.width - 1)]


def new_routes(shape: ModelShape, num_tokens: int, device: torch.device) -> Tensor | None:
    """Memory for the experts of so many tokens; None: the model is no mixture."""
    if shape.moe is None:
        return None
    dtype = torch.uint8 if shape.moe.route_bytes == 1 else torch.uint16
    return torch.empty(num_tokens, shape.moe.route_width, dtype=dtype, device=device)


def gather_inputs(
    rows: Rows, of_tokens: Sequence[np.ndarray], device: torch.device, padded: int = 0, spare_block: int = 0
) -> Tensor:
    """The array on the host, int32; pinned for a GPU.

    Args:
        of_tokens: ids, positions, and blocks and places in them for keys and values.
        padded: to so many rows, which read and write a block that nobody else reads.
    """
    count, num_fed = len(rows), len(of_tokens[0])
    size = max(padded, count)
    num_tokens = num_fed + size - count
    own_B = rows.length_R[:count] + 1
    width = int((rows.start_R[:count] - -own_B // BLOCK_SIZE).max(initial=1))
    is_pinned = device.type == "cuda" and torch.backends.cuda.is_built()
    host = torch.zeros(num_inputs(num_tokens, size, width), dtype=torch.int32, pin_memory=is_pinned)
    inputs = StepInputs(host, num_tokens, size)
    for target_N, source_N in zip(
        (inputs.token_N, inputs.position_N, inputs.block_N, inputs.offset_N), of_tokens, strict=True
    ):
        target_N.numpy()[:num_fed] = source_N
    inputs.block_N.numpy()[num_fed:] = spare_block
    inputs.prefix_B.numpy()[:count], inputs.own_B.numpy()[:] = rows.prefix_R[:count], 1
    inputs.own_B.numpy()[:count], inputs.width[0] = own_B, width
    inputs.settings_5_B.numpy()[:, :count] = settings(rows.sampling, rows.length_R[:count])
    table_B_M = inputs.table.view(size, width).numpy()
    table_B_M[:count], table_B_M[count:] = rows.table_R_M[:count, :width], spare_block
    return host
