"""`port`: an executor's handle as its role, a Protocol whose async methods are the calls. A type checker sees them all.

class RewardPort(Protocol):
    async def score(self, groups: Sequence[...]) -> list[...]: ...

reward = port(RewardPort, handle, timeout_s)
results = await reward.score(groups)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TypeVar, cast

from llamarl.cluster.api import ExecutorHandle

Role = TypeVar("Role")
Method = TypeVar("Method", bound=Callable[..., object])
_EACH = "is_answered_by_each_rank"


def each_rank(method: Method) -> Method:
    """Marks a call of a role that gives the answers of all ranks, in a list, in place of rank 0's."""
    setattr(method, _EACH, True)
    return method


def calls_of(role: type) -> dict[str, bool]:
    """The calls of a role; whether each rank answers."""
    return {
        name: hasattr(method, _EACH)
        for base in reversed(role.__mro__)
        for name, method in vars(base).items()
        if callable(method) and not name.startswith("_")
    }


def port(role: type[Role], handle: ExecutorHandle, timeout_s: float) -> Role:
    """`handle` as a `role`; no call waits for its answer longer than `timeout_s`.

    A call raises RemoteError, MeshFailed, CallTimeout or PayloadTooLarge.
    """
    calls = {
        name: partial(handle.call_each if each else handle.call, name, timeout_s=timeout_s)
        for name, each in calls_of(role).items()
    }
    return cast(Role, SimpleNamespace(**calls))
