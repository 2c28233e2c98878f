"""`DeltaShape`: the sizes of delta nets. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config.errors import ConfigError

CHUNK_TOKENS = 64
"""Tokens of a chunk of the delta rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Sizes of the gated delta nets (arXiv 2412.06464) that replace attention in some layers of a hybrid decoder."""

    layers: tuple[int, ...]
    """Numbers of the layers with a delta net, counted through the whole model, ascending."""
    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    """Heads of values, a multiple of the key heads. Each has its own state."""
    key_dim: int
    """Channels of a query or key head: rows of a state."""
    value_dim: int
    """Channels of a value head: columns of a state."""
    conv_width: int = 4
    """Tokens that the causal convolution sees."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a hybrid model without a delta net; use the family that has only attention")
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads = {self.num_value_heads} is no multiple of linear_num_key_heads = "
                f"{self.num_key_heads}; copy config.json again"
            )

    @property
    def key_size(self) -> int:
        """Scalars of all heads' keys of one token. Queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Scalars of all heads' values of one token."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_scalars(self) -> int:
        """Scalars that a layer keeps of a sequence: a state per value head, and the last inputs of the
        convolution."""
        return self.num_value_heads * self.key_dim * self.value_dim + (self.conv_width - 1) * self.mixed_size

    @property
    def rule_flops(self) -> float:
        """FLOPs of the delta rule of one layer per token, in chunks (arXiv 2406.06484, section 3.2)."""
        of_states = 6 * self.key_dim * self.value_dim
        within = CHUNK_TOKENS * (5 * self.key_dim + 3 * self.value_dim)
        return self.num_value_heads * (of_states + within)
