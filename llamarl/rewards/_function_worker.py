"""The worker of the `function` reward: calls a user's function on a response, or on several at once if it is async.

Errors become sentences with the line of the user's code.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import linecache
import pickle
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from llamarl.rewards._text import parse_number

NUMBERS: Mapping[Any, type[int] | type[float]] = {int: int, "int": int, float: float, "float": float}
"""Annotations of a parameter that takes a number."""
Reply = dict[str, Any]
"""`{"value": number}`, `{"value": None}` without an opinion, or `{"error": sentence}`."""
_OURS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of files that are not the user's."""
_MOST_CHARS = 300
"""Characters of an error's text, and of a line, that are shown."""


def call(job: Mapping[str, Any]) -> list[Reply]:
    """Returns the answers of the function `job["target"]` for each of `job["rows"]`."""
    try:
        function = _loaded(job["target"])
    except BaseException as error:
        return [{"error": f"it cannot be loaded: {_sentence(error)}"}] * len(job["rows"])
    if is_coroutine(function):
        return asyncio.run(_together(function, job["rows"], job["item_s"]))
    return [_one(function, row) for row in job["rows"]]


def is_coroutine(function: object) -> bool:
    """Returns whether the function is async, so that several calls can wait in parallel."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - an object with such a method
    )


@lru_cache(maxsize=4)
def _loaded(target: str) -> Callable[..., Any]:
    """Returns the function of `package.module:function`, or of a file that `pickled` wrote."""
    if not target.endswith(".pickle"):
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)
    function, sources = pickle.loads(Path(target).read_bytes())
    for name, text in sources.items():  # tracebacks then have lines of notebook cells
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return function


def _one(function: Callable[..., Any], row: Mapping[str, Any]) -> Reply:
    try:
        return _value(function(**_arguments(function, row)))
    except Exception as error:
        return {"error": _sentence(error)}


async def _together(function: Callable[..., Any], rows: list[Mapping[str, Any]], item_s: float) -> list[Reply]:
    async def one(row: Mapping[str, Any]) -> Reply:
        try:
            async with asyncio.timeout(item_s):
                return _value(await function(**_arguments(function, row)))
        except TimeoutError:
            return {"error": f"no answer after {item_s:g} s (wall_s)"}
        except Exception as error:
            return {"error": _sentence(error)}

    return list(await asyncio.gather(*map(one, rows)))


def _arguments(function: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of a row that the function takes. An `answer` declared as `int` or `float` becomes that
    number."""
    parameters = inspect.signature(function).parameters
    if missing := [name for name, parameter in parameters.items() if _is_needed(parameter) and name not in row]:
        raise _Misfit(_misfit(missing, row))
    kind = NUMBERS.get(parameters["answer"].annotation) if "answer" in parameters else None
    if kind is not None and "answer" in row:
        row = {**row, "answer": _number(row["answer"], kind)}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: row[name] for name in parameters if name in row}


def _number(answer: str, kind: type[int] | type[float]) -> int | float:
    """Returns an answer as this kind of number. Raises ValueError: it is none."""
    number = parse_number(answer)
    if number is None or (kind(number) != number and kind is int):
        raise ValueError(f"the function takes `answer: {kind.__name__}`, and the row's answer is {answer!r:.60}")
    return kind(number)


class _Misfit(Exception):
    """The function has a parameter that no row has."""


def _is_needed(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and not variable


def _misfit(missing: list[str], row: Mapping[str, Any]) -> str:
    if {"completions", "prompts"} & set(missing):
        return (
            f"it takes `{missing[0]}`, a list as in TRL, and rewards here take one response at a time and give one "
            "number: def reward(prompt, response, answer, **row)"
        )
    return f"it takes `{missing[0]}`, which rows do not have; they have {', '.join(row)}"


def _value(result: Any) -> Reply:
    if result is None:
        return {"value": None}
    item = getattr(result, "item", None)  # converts numbers of numpy and torch
    result = item() if callable(item) else result
    if isinstance(result, bool | int | float):
        return {"value": float(result)}
    return {"error": f"it gave {result!r:.100}, which is not a number"}


def _sentence(error: BaseException) -> str:
    """Returns the type and text of an error, and the last line of the user's code that it came through."""
    if isinstance(error, _Misfit):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    users = [frame for frame in frames if not frame.filename.startswith(_OURS)] or frames
    where = ""
    if users:
        line = f": `{users[-1].line[:_MOST_CHARS]}`" if users[-1].line else ""
        where = f" (line {users[-1].lineno} of {users[-1].filename}{line})"
    text = str(error)
    shown = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
    return f"{type(error).__name__}: {shown}{where}"
