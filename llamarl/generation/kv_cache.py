"""`KVCache`: keys and values of all cached tokens, in blocks.

For the C++ kernel keys lie with neighboring tokens next to each other, values with neighboring channels: so both
products of attention, q K and p V, read a block as it is. Elsewhere both lie with neighboring channels, a head of a
block in one piece, and keys are seen through a view. float8 keeps what lies beyond its range as its largest number, and
is moved as bytes, which every device can.

Shape suffixes: L layers, C blocks, J kv heads, S tokens of one block, K head dim, N packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.kernels import attention, gpu
from llamarl.kernels.attention import BLOCK_SIZE
from llamarl.models.memory import kv_token_bytes
from llamarl.models.sizes import DecoderSizes

FP8, FP8_MOST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max


class KVCache:
    """Preallocated storage. Memory of blocks that were never used is not touched."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_blocks, num_kv_heads)
        self.library = None if attention.unusable(dtype, device, head_dim) else attention.kernel().library
        """The kernel that reads this cache; None: torch does, or `decode`."""
        self.decode, self.ops = gpu.kernel("decode", device), gpu.kernel("ops", device)
        """`decode.py` and `ops.py` of `parts/cuda/`; None: torch takes their place."""
        keys = (head_dim, BLOCK_SIZE) if self.library else (BLOCK_SIZE, head_dim)
        self.keys_L_C_J_K_S = torch.empty((*shape, *keys), dtype=dtype, device=device)
        if self.library is None:
            self.keys_L_C_J_K_S = self.keys_L_C_J_K_S.transpose(-1, -2)
        self.values_L_C_J_S_K = torch.empty((*shape, BLOCK_SIZE, head_dim), dtype=dtype, device=device)
        self._stored = tuple(
            one.view(torch.uint8) if dtype == FP8 else one for one in (self.keys_L_C_J_K_S, self.values_L_C_J_S_K)
        )
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device

    @staticmethod
    def block_bytes(shape: DecoderSizes, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values of all layers."""
        return BLOCK_SIZE * int(kv_token_bytes(shape, 1, dtype.itemsize))

    def clear(self, blocks: list[int]) -> None:
        """Zero new blocks for torch, which multiplies what lies behind the last token by 0, and 0 * NaN is NaN."""
        if self.library is None and self.decode is None:
            blocks_C = torch.tensor(blocks, device=self.device)
            for stored in self._stored:
                stored.index_fill_(1, blocks_C, 0)

    def write(self, layer: int, blocks_N: Tensor, offsets_N: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> None:
        """Store the keys and values of packed tokens."""
        keys, values = (stored[layer] for stored in self._stored)
        keys[blocks_N, :, :, offsets_N] = self._rounded(k_N_J_K)
        values[blocks_N, :, offsets_N] = self._rounded(v_N_J_K)

    def read(self, layer: int, blocks_N: Tensor, offsets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of cached tokens, each [J, N, K]."""
        keys, values = (stored[layer] for stored in self._stored)
        found_N_J_K = keys[blocks_N, :, :, offsets_N], values[blocks_N, :, offsets_N]
        keys_J_N_K, values_J_N_K = (one.view(self.dtype).transpose(0, 1) for one in found_N_J_K)
        return keys_J_N_K, values_J_N_K

    def blocks(self, layer: int, table_B_M: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, M, J, K, S] and values [B, M, J, S, K] of the blocks in a table, in float32."""
        keys, values = (
            stored[layer].index_select(0, table_B_M.flatten()).view(self.dtype).unflatten(0, table_B_M.shape).float()
            for stored in self._stored
        )
        return keys, values

    def _rounded(self, x_N_J_K: Tensor) -> Tensor:
        """Keys or values in the type in which they are stored."""
        if self.dtype == FP8:
            return x_N_J_K.clamp(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
        return x_N_J_K.to(self.dtype)
