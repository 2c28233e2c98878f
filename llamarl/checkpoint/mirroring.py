"""What a trainer or critic asks of its mirror, copies of its newest states in memory. The part `copies` keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llamarl.checkpoint.keeper import Place
from llamarl.config.errors import ConfigError
from llamarl.config.ref import part

if TYPE_CHECKING:
    from torch import Tensor

    from llamarl.sharding.box import Box
    from llamarl.weight_sync.base import Exchange
    from llamarl.weight_sync.layout import TensorSpec


class MirroredState(Protocol):
    """State of one step, as `load_training_state` reads it."""

    @property
    def step(self) -> int: ...

    @property
    def state(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole tensors, by name."""
        ...

    def read(self, name: str, box: Box, /) -> Tensor: ...


class StateMirror(Protocol):
    """One rank's end. All ranks call every method but `save` together."""

    def choose_keepers(self, keepers: Iterable[Place]) -> None:
        """Chooses which other hosts keep states for this one from now on."""
        ...

    def check_space(self, num_bytes: int) -> None:
        """Raises ConfigError if this rank's states of `num_bytes` do not fit into memory."""
        ...

    def save(self, step: int, shards: Mapping[str, tuple[TensorSpec, Tensor]], state: Mapping[str, Any]) -> None:
        """Copies this rank's tensors and writes them in the background."""
        ...

    def load(self, newest: int) -> MirroredState | None:
        """Returns the newest state up to step `newest`, or None if there is none."""
        ...


def find_mirror() -> Callable[[Path, int, int, Exchange, Iterable[Place]], StateMirror]:
    """Returns the function that opens a mirror, without torch. Raises ConfigError if the part is not installed."""
    try:
        found: Callable[[Path, int, int, Exchange, Iterable[Place]], StateMirror] = part("copies", "open_mirror")
    except ConfigError as error:
        raise ConfigError(f"checkpoint.mirror = true: {error}") from None
    return found
