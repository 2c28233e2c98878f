"""Rows and functions that a run gets from Python, written to files below the folder of runs, where settings name
them."""

from __future__ import annotations

import base64
import hashlib
import importlib
import inspect
import io
import json
import linecache
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from llamarl.config import ConfigError, Ref
from llamarl.config.load import MAX_ROW_BYTES
from llamarl.config.schema import RewardConfig
from llamarl.data.files import GIVEN, suffix
from llamarl.observability.files import write_atomically
from llamarl.rewards._function_worker import is_coroutine
from llamarl.rewards._given import given_bytes

MAX_SOURCE_CHARS = 1 << 20
SPAWNED = "__mp_main__"
"""Name of the script's module in a process that `multiprocessing` spawned. Other processes do not know this name."""
_OF_CODE = (
    "name", "argcount", "posonlyargcount", "kwonlyargcount", "flags", "names", "varnames", "freevars", "cellvars",
    "consts", "code", "exceptiontable",
)  # fmt: skip
"""Attributes of code, without file and lines."""
_TABLES = ("file", "hub", "jsonl")
"""Sources with options that are named like fields of a row."""
RewardFunction = Callable[..., Any]
Rewards = RewardFunction | str | Mapping[Any, float] | Sequence[Any] | None
Rows = Any
"""Rows, a DataFrame, a `datasets.Dataset`, a source as in a TOML file, or several of these."""


def sources_of(data: Rows, output: Path, option: str) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns the source, or the sources of a mixture or of several sets, that `data` describes.

    Args:
        data: rows, or several of them by label or in a list. Each may be plain rows, a table such as `{"data": rows,
        "weight": 2.0, "reward": function}`, or an entry of a TOML file.

    Raises:
        ConfigError: `data` is something else.
    """
    if type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):  # a mixture would include the test split
        raise ConfigError(
            f"{option} is a {type(data).__name__} of the splits {', '.join(map(str, data))}; give one of them"
        )
    if isinstance(data, Mapping) and data and "name" not in data:
        if not any(isinstance(one, str | int | float | None) for one in data.values()):
            return [_entry({"label": str(label)}, one, output, f"{option}.{label}") for label, one in data.items()]
    elif isinstance(data, Sequence) and not isinstance(data, str) and data and all(map(_is_set, data)):
        return [
            _entry({} if _is_flat(one) else {"label": f"data-{number}"}, one, output, f"{option}.{number}")
            for number, one in enumerate(data, start=1)
        ]
    return source_of(data, output, option)


def _is_set(one: Any) -> bool:
    """Returns whether an item of a list is a set of rows, not a row."""
    if isinstance(one, Mapping):
        names_columns = one.get("name") in _TABLES and "path" in one
        is_row = bool({"question", "prompt", "messages"} & one.keys()) and not names_columns
        return not is_row and ("data" in one or _is_flat(one))
    return not isinstance(one, str | int | float | None)


def _is_flat(one: Any) -> bool:
    """Returns whether an item is an entry of a TOML file: name and options of a source, with settings next to them."""
    return isinstance(one, Mapping) and "name" in one


def _entry(label: dict[str, str], one: Any, output: Path, option: str) -> dict[str, Any]:
    """Returns one source of a mixture. Raises ConfigError."""
    if _is_flat(one):
        entry = label | dict(one)
    else:
        given = label | (dict(one) if isinstance(one, Mapping) and "data" in one else {"data": one})
        entry = {"source": source_of(given.pop("data"), output, option)} | given
    if "reward" in entry and not (isinstance(entry["reward"], Mapping) and "parts" in entry["reward"]):
        entry["reward"] = reward_settings(entry["reward"], output)
    return entry


def source_of(rows: Rows, output: Path, option: str) -> dict[str, Any]:
    """Returns a source of prompts for rows. Raises ConfigError for other objects."""
    if isinstance(rows, str) and suffix(rows):
        raise ConfigError(f"{option} = {rows!r} is a file; give {{'name': 'file', 'path': {rows!r}}}")
    if isinstance(rows, str):
        return {"name": rows}
    if isinstance(rows, Mapping) and "name" not in rows:
        raise ConfigError(
            f"{option} has neither `data`, for rows, nor `name`, for a source; it has {', '.join(map(str, rows))}"
        )
    if isinstance(rows, Mapping):
        return dict(rows)
    for name in ("to_list", "to_dict"):  # a Dataset, a DataFrame
        if (convert := getattr(rows, name, None)) and not isinstance(rows, Sequence):
            rows = convert() if name == "to_list" else convert("records")
            break
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{option} is a {type(rows).__name__}; give rows (dicts), a DataFrame, or a source's name")
    text = "".join(_line(row, f"{option}, row {number}") for number, row in enumerate(rows))
    if not text:
        raise ConfigError(f"{option} has no rows; give at least one")
    data = text.encode()
    return {"name": "jsonl", "path": str(_kept(data, output, f"{hashlib.sha256(data).hexdigest()[:32]}.jsonl"))}


def _line(row: Any, where: str) -> str:
    """Returns a row as a JSON line. Raises ConfigError."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {row!r:.60}; each row is a dict with `question` and `answer`")
    try:
        line = json.dumps(_without_nan(dict(row)), ensure_ascii=False, default=_plain, allow_nan=False) + "\n"
        size = len(line.encode())
    except RecursionError:
        raise ConfigError(f"{where} contains itself, or is nested too deeply; leave it out, or make it text") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} has a value that JSON lacks: {error}; leave it out, or make it text") from None
    if size > MAX_ROW_BYTES:
        raise ConfigError(f"{where} is too long: a row may have {MAX_ROW_BYTES:,} bytes; shorten it")
    return line


def _without_nan(value: Any) -> Any:
    """Replaces NaN, by which tables represent missing values, by null."""
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124


def _plain(value: Any) -> Any:
    if callable(convert := getattr(value, "tolist", None)):  # NumPy
        return convert()
    raise TypeError(f"{value!r:.60}, a {type(value).__name__}")


def reward_settings(reward: Rewards, output: Path) -> dict[str, Any]:
    """Returns settings of section `reward` for functions or names, with or without weights. Raises ConfigError."""
    if isinstance(reward, Mapping) and "name" not in reward:
        weights = list(reward.values())
        if not all(isinstance(one, int | float) for one in weights):
            raise ConfigError(
                f"reward = {reward!r:.100}: give functions or names, with a number for the weight of each"
            )
        return {"parts": [_part(one, output) for one in reward], "weights": [float(one) for one in weights]}
    several = reward if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    return {"parts": [_part(one, output) for one in several]}


def _part(reward: Any, output: Path) -> dict[str, Any]:
    """Returns one part of the reward. Raises ConfigError."""
    if isinstance(reward, str | Mapping | Ref):
        return Ref.model_validate(reward).model_dump()
    if not callable(reward):
        raise ConfigError(
            f"reward = {reward!r:.60} is not a function; give `def reward(prompt, response, answer, **row)`"
        )
    own = {"name": "function", "is_async": is_coroutine(reward)}
    own["curve"] = getattr(reward, "__name__", type(reward).__name__)
    if place := _importable(reward):
        return own | {"call": place}
    data = pickled(reward)
    path = kept_function(data, hashlib.sha256(what_it_does(reward)).hexdigest()[:32], output)
    write_atomically(path.with_suffix(".py"), _source(reward))
    return own | {"file": str(path), "digest": hashlib.sha256(data).hexdigest()}


def _importable(function: Any) -> str:
    """Returns `package.module:function` if other processes can import the function like this, and else an empty
    text."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module in ("__main__", SPAWNED) or not name.isidentifier():
        return ""
    try:
        return f"{module}:{name}" if getattr(importlib.import_module(module), name, None) is function else ""
    except ImportError:
        return ""


def pickled(function: Any) -> bytes:
    """Pickles a function with what it needs from its notebook or script, and its source. Raises ConfigError."""
    import cloudpickle

    try:
        file = inspect.getsourcefile(function) or ""
        text = "".join(linecache.getlines(file))[:MAX_SOURCE_CHARS]
    except (TypeError, OSError):
        file = text = ""
    try:
        with _script_by_value():
            return cloudpickle.dumps((function, {file: text} if text else {}))
    except Exception as error:  # an object that the function refers to may raise anything
        name = getattr(function, "__name__", "reward")
        cause = f"{type(error).__name__}: {error}"
        cause = f"{cause}; remove that reference"
        raise ConfigError(f"the reward {name} cannot go to another process: {cause}") from error


@contextmanager
def _script_by_value() -> Iterator[None]:
    """Makes cloudpickle treat a spawned process's script like `__main__`."""
    import cloudpickle

    script = sys.modules.get(SPAWNED)
    if script is None or SPAWNED in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(script)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def what_it_does(function: Any) -> bytes:
    """Returns bytes that identify a function by its behavior, in every process: with everything that it refers to, and
    without its position. Lines above it, later calls, or a kernel restart do not change them, so that a resumed run
    keeps its rewards. They are never unpickled."""
    import cloudpickle

    class Bare(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                return tuple, tuple(_in_order(getattr(obj, f"co_{name}")) for name in _OF_CODE)
            reduced = super().reducer_override(obj)
            if not isinstance(reduced, tuple):  # pickled by name
                return reduced
            make, given, state, *rest = map(_of_script, reduced)
            if isinstance(obj, FunctionType):
                inner, slots = state
                held = {name: _in_order(one) for name, one in slots["__globals__"].items() if name != "__loader__"}
                slots = _of_script(slots) | {"__globals__": held}
                return make, given[:1], (inner, slots), *rest  # the loader is Monarch's
            # cloudpickle adds a random name to classes, which differs by process.
            given = tuple(one for one in given if not (isinstance(one, str) and re.fullmatch("[0-9a-f]{32}", one)))
            return make, given, state, *rest

    file = io.BytesIO()
    with _script_by_value():
        Bare(file).dump(function)
    return file.getvalue()


def _of_script(value: Any) -> Any:
    """Replaces the script's module name by `__main__`, so that it is the same in all processes."""
    if isinstance(value, tuple):
        return tuple(map(_of_script, value))
    if type(value) is dict and any(isinstance(one, str) and one == SPAWNED for one in value.values()):
        return {name: _of_script(one) if isinstance(one, str) else one for name, one in value.items()}
    return "__main__" if isinstance(value, str) and value == SPAWNED else value


def _in_order(value: Any) -> Any:
    """Replaces sets, also in constants, by sorted lists, because the order of sets differs by process."""
    if isinstance(value, tuple):
        return tuple(map(_in_order, value))
    return [type(value).__name__, *sorted(map(repr, value))] if isinstance(value, set | frozenset) else value


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (TypeError, OSError):
        return f"# the source of {function!r} is unknown\n"


def kept_function(data: bytes, what: str, output: Path) -> Path:
    """Writes a pickled function below the folder of runs.

    Args:
        what: digest of the function's behavior, which identifies it in a journal. Its pickles may differ in line
        numbers.

    Raises:
        ConfigError: the file cannot be written.
    """
    return _kept(data, output, f"{what}-{hashlib.sha256(data).hexdigest()[:16]}.pickle")


_OF_CONTENT = re.compile(r"-[0-9a-f]{16}(?=\.pickle$)")


def by_what_it_does(value: Any) -> Any:
    """Returns settings that identify functions by their behavior instead of the bytes of their pickles."""
    if isinstance(value, Mapping):
        found = {name: by_what_it_does(one) for name, one in value.items()}
        if found.get("name") == "function" and isinstance(file := found.get("file"), str):
            found = {name: one for name, one in found.items() if name not in ("digest", "content")}
            found["file"] = _OF_CONTENT.sub("", file)
        return found
    return [by_what_it_does(one) for one in value] if isinstance(value, list) else value


def _kept(data: bytes, output: Path, name: str) -> Path:
    """Writes a file below the folder of runs. Raises ConfigError if that fails, or if other users could change it."""
    folder = output / GIVEN
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{folder} is a link, or belongs to another user, who could change code; remove it")
        write_atomically(folder / name, data)  # replaces an existing file, which another user may have written
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another output") from None
    return folder / name


def with_content(reward: RewardConfig) -> RewardConfig:
    """Returns settings of rewards that contain the files of functions, for use on any machine. Raises ConfigError."""

    def carried(ref: Ref) -> Ref:
        if ref.name != "function" or ref.options.get("content") or not (file := ref.options.get("file")):
            return ref
        try:
            data = given_bytes(file, str(ref.options.get("digest", "")))
        except ValueError as error:
            raise ConfigError(f"reward.parts: {error}") from None
        content = base64.b64encode(data).decode()
        return Ref.model_validate({"name": ref.name} | ref.options | {"file": "", "content": content})

    return reward.model_copy(update={"parts": [carried(ref) for ref in reward.parts]})
