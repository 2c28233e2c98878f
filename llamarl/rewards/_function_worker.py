"""Work of a worker of the `function` reward: a user's function on a response, or on several at once where it is async.

Errors become sentences with the user's own line.
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
GIVEN = ("prompt", "response", "answer")
Said = dict[str, Any]
"""`{"value": number}`, `{"value": None}` of one without an opinion, or `{"error": sentence}`."""
_OURS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of files that are not the user's own."""
_MOST_CHARS = 300
"""Characters of an error's text, and of a line, that are shown."""


def call(job: Mapping[str, Any]) -> list[Said]:
    """Answers of the function of `job["target"]` about each of `job["rows"]`."""
    try:
        function = _loaded(job["target"])
    except BaseException as error:
        return [{"error": f"it cannot be loaded: {_sentence(error)}"}] * len(job["rows"])
    if is_coroutine(function):
        return asyncio.run(_together(function, job["rows"], job["item_s"]))
    return [_one(function, row) for row in job["rows"]]


def is_coroutine(function: object) -> bool:
    """Whether calling it gives something to wait for, so that several calls can wait side by side."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - an object with such a method
    )


@lru_cache(maxsize=4)
def _loaded(target: str) -> Callable[..., Any]:
    """`package.module:function`, or the path of a file that `pickled` wrote."""
    if not target.endswith(".pickle"):
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)
    function, sources = pickle.loads(Path(target).read_bytes())
    for name, text in sources.items():  # so that a traceback has lines of a cell, too
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return function


def _one(function: Callable[..., Any], row: Mapping[str, Any]) -> Said:
    try:
        return _value(function(**_wanted(function, row)))
    except Exception as error:
        return {"error": _sentence(error)}


async def _together(function: Callable[..., Any], rows: list[Mapping[str, Any]], item_s: float) -> list[Said]:
    async def one(row: Mapping[str, Any]) -> Said:
        try:
            async with asyncio.timeout(item_s):
                return _value(await function(**_wanted(function, row)))
        except TimeoutError:
            return {"error": f"no answer after {item_s:g} s (wall_s)"}
        except Exception as error:
            return {"error": _sentence(error)}

    return list(await asyncio.gather(*map(one, rows)))


def _wanted(function: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of a row that the function takes. An `answer` that it declares as `int` or `float` is that number."""
    parameters = inspect.signature(function).parameters
    if missing := [name for name, one in parameters.items() if _is_needed(one) and name not in row]:
        raise _Misfit(_misfit(missing, row))
    wanted = NUMBERS.get(parameters["answer"].annotation) if "answer" in parameters else None
    if wanted is not None and "answer" in row:
        row = {**row, "answer": _number(row["answer"], wanted)}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return row
    return {name: row[name] for name in parameters if name in row}


def _number(answer: str, kind: type[int] | type[float]) -> int | float:
    """Raises ValueError: it is none of this kind."""
    found = parse_number(answer)
    if found is None or (kind(found) != found and kind is int):
        raise ValueError(f"the function takes `answer: {kind.__name__}`, and the row's answer is {answer!r:.60}")
    return kind(found)


class _Misfit(Exception):
    """The function takes something that no row has."""


def _is_needed(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and not variable


def _misfit(missing: list[str], row: Mapping[str, Any]) -> str:
    """Sentence on parameters that no row has."""
    if {"completions", "prompts"} & set(missing):
        return (
            f"it takes `{missing[0]}`, a list as in TRL, and rewards here take one response at a time and give one "
            "number: def reward(prompt, response, answer, **row)"
        )
    return f"it takes `{missing[0]}`, which rows do not have; they have {', '.join(row)}"


def _value(said: Any) -> Said:
    if said is None:
        return {"value": None}
    item = getattr(said, "item", None)  # a number of numpy or torch
    said = item() if callable(item) else said
    if isinstance(said, bool | int | float):
        return {"value": float(said)}
    return {"error": f"it gave {said!r:.100}, which is not a number"}


def _sentence(error: BaseException) -> str:
    """Kind and text of an error, and the user's last line that it came through."""
    if isinstance(error, _Misfit):
        return str(error)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    own = [one for one in frames if not one.filename.startswith(_OURS)] or frames
    where = ""
    if own:
        line = f": `{own[-1].line[:_MOST_CHARS]}`" if own[-1].line else ""
        where = f" (line {own[-1].lineno} of {own[-1].filename}{line})"
    text = str(error)
    shown = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
    return f"{type(error).__name__}: {shown}{where}"
