"""Arguments and results as bytes: what crosses between controller and executor, on every backend.

The only place that knows how large one message may be: longer arguments and results travel as several.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from llamarl.cluster.api import MAX_PAYLOAD_BYTES, ExecutorError, MeshFailed, PayloadTooLarge, RemoteError
from llamarl.config.errors import RanksLost

MAX_MESSAGE_BYTES = 1 << 20
"""Upper bound of one message of a backend; short messages pass between the parts of a long one."""
DEALT_BYTES = 64 << 10
"""Size of arguments from which on ranks that can share them are dealt parts, each of which leaves the caller once."""
MAX_DEALT_RANKS = 16
"""Most ranks that are dealt parts of one call."""


class Deal(NamedTuple):
    """A call whose arguments were dealt to its ranks in parts."""

    number: int
    """Number of the deal, from 1."""
    num_bytes: int
    """Size of the arguments in bytes."""
    method: str

    def owners(self, num_ranks: int) -> list[int]:
        """The rank that gets each part: few, far from each other, so on many hosts."""
        num_parts = -(-self.num_bytes // MAX_MESSAGE_BYTES)
        dealt = min(MAX_DEALT_RANKS, num_ranks, num_parts)
        return [part % dealt * num_ranks // dealt for part in range(num_parts)]

    def parts(self, data: bytes, num_ranks: int) -> list[tuple[int, bytes]]:
        """Each part of the arguments, about as large as the others, behind its owner."""
        owners = self.owners(num_ranks)
        return list(zip(owners, parts(data, -(-self.num_bytes // len(owners))), strict=True))


class Reply(NamedTuple):
    """Answer of one rank to one call."""

    value: bytes = b""
    """The pickled result, or its first part; empty after an error."""
    rest_of: int = 0
    """The call whose result goes on after this part; 0: this is all of it."""
    method: str = ""
    """Method that raised: the one called, or `work` when the executor has failed."""
    remote_traceback: str = ""
    """Text of the traceback; empty for a result."""
    exception: bytes = b""
    """The pickled exception; empty when it cannot be pickled."""
    rank: int | None = None
    """The rank that raised; None: there is just one."""
    expired: bool = False
    """The call's deadline passed at the host, before its turn or before its deferred reply."""


def pickled(value: Any, executor: str, what: str) -> bytes:
    """Pickles `value`. Raises PayloadTooLarge, which says `what` it is."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(executor, what, len(data))
    return data


def parts(data: bytes, size: int = MAX_MESSAGE_BYTES) -> list[bytes]:
    """`data` in pieces that fit into a message each; at least one, which may be empty."""
    starts = range(0, len(data), size) or (0,)
    return [data[start : start + size] for start in starts]


def error_reply(error: BaseException, method: str, rank: int | None, caught: bool = True) -> Reply:
    """An exception as data. A `caught` one has the catching frame first, which is left out of the traceback."""
    trace = error.__traceback__
    if caught and trace is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, _from_theirs(trace)))
    return Reply(method=method, remote_traceback=text, exception=_pickled_exception(error), rank=rank)


def _from_theirs(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from where a part of the user's own begins, such as a reward; all of it where there is none."""
    first = trace
    while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith("llamarl."):
        first = first.tb_next
    is_theirs = first is not None and not first.tb_frame.f_code.co_filename.startswith((sys.prefix, sys.base_prefix))
    return first if is_theirs else trace


def value_of(reply: Reply, executor: str) -> Any:
    """The result. Raises what the reply reports, as `error_of` has it."""
    if not reply.remote_traceback:
        return pickle.loads(reply.value)
    raise error_of(reply, executor)


def error_of(reply: Reply, executor: str) -> ExecutorError:
    """The exception that an error reply stands for: PayloadTooLarge as it is, MeshFailed where a rank has but lost
    others, anything else as RemoteError."""
    cause = _unpickled_exception(reply.exception)
    if isinstance(cause, PayloadTooLarge):
        return cause
    if isinstance(cause, RanksLost):
        return MeshFailed(executor, (reply.rank or 0,), str(cause))
    error = RemoteError(executor, reply.method, reply.remote_traceback, reply.rank)
    error.__cause__ = cause
    return error


def _pickled_exception(error: BaseException) -> bytes:
    # An exception with its own constructor may pickle and still not unpickle, so the way back is tried here.
    try:
        data = pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)
    except Exception:
        return b""
    return data if len(data) <= MAX_PAYLOAD_BYTES else b""


def _unpickled_exception(data: bytes) -> BaseException | None:
    # The class may live in a module that only the executor can import; the traceback text still says everything.
    try:
        return pickle.loads(data) if data else None
    except Exception:
        return None
