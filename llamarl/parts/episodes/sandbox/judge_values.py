"""Values between the judged program and its tests: JSON that is rebuilt as exact builtins.

The tests receive an exact `int`, `str`, `list`, ... or a `Handle`, which contains only a number: no method, operator or
destructor of the program ever runs in the tests' process.
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

MAX_MESSAGE_BYTES = 1 << 24
_MAX_ITEMS = 1_000_000
_MAX_JSON_INT = 1 << 62
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
_VIEWS = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_TIMES = (datetime, date, time)
_WHOLE = (tuple, Counter, dict, set, frozenset, bytes, bytearray, complex, range, deque, Decimal, Fraction, timedelta)
_KINDS = (*_WHOLE, *_TIMES, *_VIEWS)
_named = functools.cache(lambda name, *fields: namedtuple(name, fields))
_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (tuple, dict, set, frozenset, bytes, bytearray, deque)},
    **{kind.__name__: lambda parts, kind=kind: kind(*parts) for kind in (complex, range, Decimal, Fraction, timedelta)},
    **{kind.__name__: lambda parts, kind=kind: kind.fromisoformat(*parts) for kind in _TIMES},
    "Counter": lambda parts: Counter(dict(parts)),
    "namedtuple": lambda parts: _named(*parts[0])(*parts[1]),
    "int": lambda parts: int(parts[0], 16),
    "dict_keys": lambda parts: dict.fromkeys(parts).keys(),
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
    "dict_items": lambda parts: dict(parts).items(),
    "iterator": iter,
    "type": lambda parts: _TYPES[parts[0]],
}


def send(descriptor: int, message: Any) -> None:
    """Sends one line of JSON. Raises ValueError if it is too long or not a plain value."""
    data = json.dumps(message).encode() + b"\n"
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a value of {len(data):,} bytes is too long to be handed over")
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Iterator[Any]:
    """Yields messages of the other side until it closes. Raises ValueError for a message that is not JSON or too
    long."""
    parts, size = [b""], 0
    while data := os.read(descriptor, 1 << 16):
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield json.loads(b"".join([*parts, end]))
            parts, size = [b""], 0
        parts.append(rest)
        size += len(rest)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError("the message is too long")


def pack(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Returns a JSON form of a value. `refer` returns the number of a value that stays in its process, or raises
    TypeError."""

    def packed(items: Any) -> list[Any]:
        items = list(islice(items, _MAX_ITEMS + 1))
        if len(items) > _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_ITEMS:,} values cannot be handed over")
        return [pack(item, refer) for item in items]

    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return int(value) if -_MAX_JSON_INT < value < _MAX_JSON_INT else {"int": [hex(value)]}
    if isinstance(value, list):
        return packed(value)
    if isinstance(value, type) and (packed_class := _packed_class(value)):
        return packed_class
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": [packed((type(value).__name__, *value._fields)), packed(value)]}
    for kind in _KINDS:
        if isinstance(value, kind):
            return {kind.__name__: packed(_parts(value))}
    return {"iterator": packed(value)} if isinstance(value, Iterator) else {"handle": [refer(value)]}


def _packed_class(value: type) -> dict[str, list[str]] | None:
    if _TYPES.get(value.__name__) is value:
        return {"type": [value.__name__]}
    return {"exception": [kind.__name__ for kind in value.__mro__]} if issubclass(value, Exception) else None


def _parts(value: Any) -> Any:
    """Returns the constructor arguments that rebuild the value."""
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, range):
        return value.start, value.stop, value.step
    if isinstance(value, Fraction):
        return value.numerator, value.denominator
    if isinstance(value, timedelta):
        return value.days, value.seconds, value.microseconds
    if isinstance(value, (Decimal, *_TIMES)):
        return [str(value) if isinstance(value, Decimal) else value.isoformat()]
    return value.items() if isinstance(value, dict) else value


def unpack(value: Any, resolve: Callable[[int], Any]) -> Any:
    """Returns the value that `pack` packed. `resolve` returns the value of a number. Raises ValueError, TypeError."""
    if isinstance(value, list):
        if len(value) > _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_ITEMS:,} values cannot be handed back")
        return [unpack(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if not isinstance(parts, list):
        raise TypeError("not a packed value")
    if kind == "handle":
        return resolve(parts[0])
    return _BUILDERS[kind](unpack(parts, resolve))


_ALONE = {f"__{use.__name__}__": use for use in (str, repr, len, iter, bool, hash)}
_WITH_OTHERS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__sub__", "__mul__")
USES: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("__getitem__", *_WITH_OTHERS)},
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    **_ALONE,
}
"""Operations that a `Handle` forwards, in addition to calls and attributes."""


class Handle:
    """A value that stays in the program's process. The tests can pass it back, call it, read its attributes, and apply
    the operations in `USES`.

    Operations accept only other handles. Comparing with a value of the tests, which could be the answer, would let the
    program decide whether they are equal."""

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._ask("call", self, arguments, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)


def _use(name: str) -> Callable[..., Any]:
    def use(self: Handle, *others: Any) -> Any:
        if name in _WITH_OTHERS and not isinstance(others[0], Handle):
            return NotImplemented
        return self._ask("use", name, self, *others)

    return use


for _name in USES:
    setattr(Handle, _name, _use(_name))
