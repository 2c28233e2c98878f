"""Loads and writes settings: TOML + overrides -> a validated config. Every error names the option and the fix."""

from __future__ import annotations

import gzip
import json
import os
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from llamarl.config.data import ONE, SEVERAL
from llamarl.config.elsewhere import DROPPED
from llamarl.config.errors import ConfigError, did_you_mean, known_hint, near_hint, one_of
from llamarl.config.files import open_file
from llamarl.config.ref import Ref, find
from llamarl.config.schema import RunConfig
from llamarl.config.section import NO_TEXT, Section, checked_path, from_home, near_path
from llamarl.config.sft import SftConfig

S = TypeVar("S", bound=Section)
MAX_ROW_BYTES = 1 << 20
"""Longest line of a data file, in bytes. A longer prompt fits no context, and rows travel in messages."""
RECORD = "config.toml"
"""Name of the file in a run's folder with the resolved settings."""
MOST_LEVELS = 4
"""Maximum depth of nested sections."""
PACKAGED = Path(__file__).parents[1] / "configs"
"""Run files that come with the package. `llamarl train` accepts them by name: `demo`."""


def load_config(
    path: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    recorded: bool = False,
) -> RunConfig:
    """Loads a run's settings, with overrides such as `["--trainer.learning_rate", "1e-5", "--steps=10"]`.

    Args:
        path: a TOML file, the name of a packaged one, or the tables of such a file.
        overrides: None means that the caller takes no overrides, so messages do not mention them.
        settings: override the file. A section is a table, or its settings have dotted names.
        recorded: True if the tables come from a file for which `is_record` is true. Its recipe is not applied again.

    Raises:
        ConfigError: a file, key, type or combination is wrong.
    """
    _check_once(settings)
    data = deepcopy(dict(path)) if isinstance(path, Mapping) else tables(path)
    is_recorded = recorded or is_record(path)
    was = data.get("recipe") if is_recorded else None
    if is_recorded and (lost := _translate(data)):
        raise ConfigError(f"the run was recorded with `{lost[0]}`, which llamarl no longer has; start a new run")
    data = _with(data, settings)
    config = validated(_overridden(data, overrides or ()), RunConfig, overrides is not None)
    if config.recipe and config.recipe != was:
        recipe = find(config.recipe, "llamarl.recipes", "recipe", config.recipe)
        try:
            config = recipe(config)
        except ValidationError as error:
            raise ConfigError(f"recipe = {config.recipe!r}: {_explain(error, RunConfig)}") from None
    if config.model.warm_start:  # relative to the TOML file that names it
        folder = Path() if isinstance(path, Mapping) else _place(path).parent
        warm_start = str((folder / config.model.warm_start).resolve())
        config = config.model_copy(update={"model": config.model.model_copy(update={"warm_start": warm_start})})
    return config


def load_recorded(
    path: str | Path, overrides: Sequence[str] = (), settings: Mapping[str, Any] = MappingProxyType({})
) -> RunConfig:
    """Loads recorded settings of a run as they are. They are complete: no recipe is applied, and nothing that they name
    is imported. Settings that llamarl no longer has are left out. Other arguments are as for `load_config`. Raises
    ConfigError."""
    _translate(data := _parsed(path, ()))
    data = _with(data, settings)
    try:
        return validated(_overridden(data, overrides), RunConfig)
    except ConfigError as error:
        own = {key for key, _ in _pairs(overrides)} | {name for name, _ in flat_settings(settings)}
        if any(f"`{key}" in str(error) for key in own):
            raise
        raise ConfigError(f"{path}: {error}") from None


def is_record(path: str | Path | Mapping[str, Any]) -> bool:
    """Returns whether a file is the recorded configuration in a run's folder."""
    if isinstance(path, Mapping) or Path(path).name != RECORD:
        return False
    return any(Path(from_home(path)).with_name(name).exists() for name in (".lock", "journal", "metrics.jsonl"))


def _translate(data: dict[str, Any]) -> list[str]:
    """Removes dropped settings from recorded tables, or gives their values to the settings that replace them. Returns
    `name = value` of those whose value today's code cannot follow."""
    lost = []
    for name, dropped in DROPPED.items():
        section, _, last = name.rpartition(".")
        for table in _tables_at(data, section.split(".")):
            if last not in table:
                continue
            value = table.pop(last)
            if dropped.successor:
                _set(data, dropped.successor, dropped.values.get(str(value), value))
            elif value != dropped.default and not dropped.has_no_results:
                lost.append(f"{name} = {value!r}")
    return lost


def _tables_at(data: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the tables at a place, in which `*` means every entry of a list."""
    here = [data]
    for name in names:
        if name == "*":
            here = [entry for one in here if isinstance(one, list) for entry in one]
        else:
            here = [one[name] for one in here if isinstance(one, dict) and name in one]
    return [one for one in here if isinstance(one, dict)]


def translated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns recorded settings by dotted names, without the dropped ones. Names without a dot stay as they are."""
    tables, whole = dict[str, Any](), dict[str, Any]()
    for name, value in deepcopy(dict(settings)).items():
        if "." in name:
            _set(tables, name, value)
        else:
            whole[name] = value
    _translate(tables)
    return whole | {name: value for name, value in flat_settings(tables) if value != {}}


def tables(path: str | Path) -> dict[str, Any]:
    """Returns the tables of a run file, with an absolute path of the warm start. Raises ConfigError."""
    path = _place(path)
    data = _parsed(path, ())
    model = data.get("model")
    if isinstance(model, dict) and isinstance(warm_start := model.get("warm_start"), str) and warm_start:
        data["model"] = model | {"warm_start": str((path.parent / from_home(warm_start)).resolve())}
    return data


def _check_once(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if a setting is given both in a table and by a dotted name."""
    seen = dict[str, str]()
    try:
        given = [(name, place) for name, value in settings.items() for place, _ in flat_settings({str(name): value})]
    except RecursionError:
        raise ConfigError("the settings are nested too deeply; none needs more than four levels") from None
    for name, place in given:
        if place in seen:
            raise ConfigError(f"`{place}` is given twice, by {seen[place]!r} and by {name!r}; give one of them")
        seen[place] = name


def _with(data: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merges settings into `data`, table by table. The name of a component is set before its options, in any order of
    `settings`. Raises ConfigError."""
    for name, value in sorted(_by_part(settings), key=lambda one: one[0].count(".")):
        first, _, rest = name.partition(".")
        if rest or (isinstance(value, Mapping) and "name" not in value):
            below, given = data.get(first) or {}, {rest: value} if rest else value
            if isinstance(below, list):  # entries are addressed by number, as on the command line
                numbers = [_place_in(below, str(one).partition(".")[0], name) for one in given]
                entries = _with({str(number): below[int(number)] for number in numbers}, given)
                data[first] = [entries.get(str(number), one) for number, one in enumerate(below)]
                continue
            data[first] = _with(below if isinstance(below, dict) else {"name": below}, given)
        else:  # a named component replaces the options, too
            data[first] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return data


def _by_part(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each setting. A part that is named is one value, with its options."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value and "name" not in value:
            yield from _by_part(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def resolved(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the settings of a command that needs no file, from parsed TOML and overrides. Raises ConfigError."""
    return validated(_overridden(deepcopy(dict(data)), overrides), RunConfig)


def given(path: str | Path, overrides: Sequence[str] = ()) -> tuple[set[str], set[str]]:
    """Returns the dotted names that are set in the file, and on the command line. Raises ConfigError."""

    def names(data: dict[str, Any], where: str = "") -> Iterator[str]:
        for name, value in data.items():
            yield from names(value, f"{where}{name}.") if isinstance(value, dict) else (where + name,)

    return set(names(_parsed(path, ()))), {key for key, _ in _pairs(overrides)}


def load_sft_config(path: str | Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Loads the settings of a warm start. Raises ConfigError."""
    return validated(_parsed(path, overrides), SftConfig)


def load_sft(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig | SftConfig:
    """Loads a run, which has a section `model`, or a warm start. Raises ConfigError."""
    is_run = "model" in _parsed(path, overrides)
    return load_config(path, overrides) if is_run else load_sft_config(path, overrides)


def _place(path: str | Path) -> Path:
    """Returns the file at a path, or the packaged file of that name."""
    own = PACKAGED / f"{path}.toml"
    given = checked_path(path, "the run file")
    return own if "/" not in str(path) and not given.is_file() and own.is_file() else given


def packaged_names() -> list[str]:
    """Returns the names of the packaged run files, sorted."""
    return sorted(one.stem for one in PACKAGED.glob("*.toml"))


def file_of_run(path: str | Path) -> Path:
    """Returns the absolute path of a run file, which may be named by path or by the name of a packaged file."""
    return _place(path).absolute()


def _parsed(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    text = read_text(path := _place(path), _meant(path))
    try:
        return _overridden(tomllib.loads(text), overrides)
    except RecursionError:
        raise ConfigError(f"{path}: the settings are nested too deeply; none needs more than four levels") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _meant(path: Path) -> str:
    """Returns the fix for a path that may be no file: the one that it may mean, or all names of packaged files."""
    if path.is_file():
        return "give the path of a TOML file"
    for found in (path, Path(near_path(path))):
        if found.name and (near := found / RECORD if found.is_dir() else found).is_file():
            return one_of([str(near)])
    names = packaged_names()
    known = f"give the path of a TOML file, or one of {', '.join(names)}"
    return did_you_mean(path.stem, names, known) if path.name == str(path) else known


def _overridden(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    try:
        for key, value in _pairs(overrides):
            _set(data, key, value)
        _check_values(data)
    except RecursionError:
        raise ConfigError("the settings are nested too deeply; none needs more than four levels") from None
    return data


def _check_values(data: dict[str, Any] | list[Any], where: str = "") -> None:
    """Raises ConfigError for a value that no setting can have."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        place = f"{where}{name}" if isinstance(name, str) else where.removesuffix(".")
        if isinstance(value, dict | list):
            _check_values(value, f"{place}.")
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"`{place}` is a number of {value.bit_length()} bits; give one of at most 63")
        elif isinstance(value, str) and NO_TEXT.search(value):
            raise ConfigError(f"`{place} = {value!r}` contains NUL or a lone surrogate; remove it")


def validated(data: dict[str, Any], schema: type[S], has_options: bool = True) -> S:
    """Returns validated settings from parsed TOML. Raises ConfigError."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, schema, has_options)) from None


def read_text(path: str | Path, fix: str) -> str:
    """Reads a text file. Raises ConfigError with `fix` at its end."""
    try:
        with open_file(path) as file:
            return file.read().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {fix}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None


def read_json(path: str | Path, fix: str) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ConfigError with `fix` at its end."""
    try:
        data = json.loads(read_text(path, fix), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid JSON ({error}); {fix}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object; {fix}")
    return data


def read_rows(path: str | Path, fix: str, most_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields `file:line` and the object of each non-blank line of a JSON Lines file. Raises ConfigError, also for lines
    longer than `most_bytes`."""
    is_empty = True
    try:
        with open_file(path) as raw, gzip.open(raw) if Path(path).suffix == ".gz" else nullcontext(raw) as file:
            for number, line in enumerate(iter(lambda: file.readline(most_bytes + 1), b""), start=1):
                if line.strip():
                    is_empty = False
                    if len(line) > most_bytes:
                        said = f"is too long: a row may have {most_bytes:,} bytes; shorten it"
                        raise ConfigError(f"{path}:{number}: {said}")
                    yield f"{path}:{number}", _parse_row(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {fix}") from None
    if is_empty:
        raise ConfigError(f"{path}:1: the file is empty; it needs one JSON object per line")


def parse_json(text: str) -> Any:
    """Parses strict JSON: no NaN, and no duplicate keys. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode("utf-8") if b"\\u" in line else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is not UTF-8 (byte {error.start} of the line); save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: contains a lone surrogate such as \\ud800; remove it") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: malformed JSON ({error.msg}, column {error.colno}); one object per line") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{place}: cannot be read ({error}); write long numbers as text and nest less deeply"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: holds a JSON {type(row).__name__}, not an object; one object per line")
    return row


def _pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns [("a.b", 1)] for `--a.b 1` and `--a.b=1`. Values are TOML; a value that is not TOML is a string. The name
    of a component precedes its options, because it would replace them."""
    pairs, rest = [], list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"`{word}` is not an override; write --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"`{word}` has no value; write {word} VALUE")
            text = rest.pop(0)
        pairs.append((key.replace("-", "_"), _parse_value(text)))
    return sorted(pairs, key=lambda pair: pair[0].count("."))


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # text of several lines may contain other keys


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    here: dict[str, Any] | list[Any] = data
    names = key.split(".")
    for depth, name in enumerate(names):
        place = _place_in(here, name, key)
        if depth == len(names) - 1:
            here[place] = value  # type: ignore[index]  # names of a table, numbers of a list
            return
        child = here.setdefault(name, {}) if isinstance(here, dict) else here[place]  # type: ignore[index]
        if isinstance(child, str):  # a Ref given by name: `loss = "aipo"` and `--trainer.loss.rho 8`
            child = here[place] = {"name": child}  # type: ignore[index]
        if not isinstance(child, dict | list):
            raise ConfigError(f"`--{key}`: `{name}` is a value, not a section")
        here = child


def _place_in(here: dict[str, Any] | list[Any], name: str, key: str) -> str | int:
    """Returns the key of `name` in a table, or its index in a list."""
    if isinstance(here, dict):
        return name
    if not (name.isascii() and name.isdecimal()) or int(name) >= len(here):
        raise ConfigError(f"`--{key}`: the list has no entry {name!r}; it has {len(here)}, counted from 0")
    return int(name)


def _explain(error: ValidationError, schema: type[Section], has_options: bool = True) -> str:
    for one in error.errors():
        place = tuple(part for part in one["loc"] if part not in (ONE, SEVERAL))
        dropped = DROPPED.get(".".join("*" if isinstance(part, int) else part for part in place))
        if dropped and one["type"] == "extra_forbidden":
            return f"`{'.'.join(map(str, place))}` is not a setting any more; {dropped.fix}"
    first = error.errors()[0]
    place = tuple(part for part in first["loc"] if part not in (ONE, SEVERAL))
    where = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        known, name = list(_section_at(schema, place[:-1]).model_fields), str(place[-1])
        names, below = last_names(schema), _below(first["input"])
        listed = known_hint(below, names) or near_hint(name, names) or f"known here: {', '.join(known)}"
        return f"unknown option `{where}`; {known_hint(name, names) or did_you_mean(name, known, listed)}"
    if first["type"] == "missing":
        # No option sets a section, so the message names its first setting.
        for section in _sections(schema.model_fields[where].annotation) if len(place) == 1 else ():
            where += f".{next(iter(section.model_fields))}"
        return f"`{where}` is missing; set it" + f" in the file or with --{where} VALUE" * has_options
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return said if where in said else f"`{where}`: {said}"
    if first["type"] == "model_type":
        return f"`{where} = {first['input']!r:.100}` {_no_table(first, place, schema)}"
    if first["type"] == "string_pattern_mismatch" and "A-Za-z0-9._-" in first["ctx"]["pattern"]:
        fix = "begin with a letter (a to z) or a digit, and use only letters, digits, `.`, `_` and `-`"
        return f"`{where} = {first['input']!r}`: it names files and curves; {fix}"
    hint = "; put quotes around it" if first["type"] == "string_type" and not isinstance(first["input"], dict) else ""
    return f"`{where} = {first['input']!r}`: {first['msg'][0].lower()}{first['msg'][1:]}{hint}"


def _below(value: Any) -> str:
    """Returns the names of tables within each other that lead to one value, each behind a dot: `.optim.lr`."""
    names = ""
    while isinstance(value, dict) and len(value) == 1:
        ((name, value),) = value.items()
        names += f".{name}"
    return names


def last_names(schema: type[Section]) -> dict[str, list[str]]:
    """Returns the dotted names of all settings by their last part, without settings in lists, which have numbers."""
    found = dict[str, list[str]]()

    def add(section: type[Section], prefix: str, depth: int) -> None:
        for name, field in section.model_fields.items():
            inner = [] if get_origin(field.annotation) in (list, dict) else [*_sections(field.annotation)]
            for one in inner if depth < MOST_LEVELS else ():
                add(one, f"{prefix}{name}.", depth + 1)
            names = found.setdefault(name, [])
            if f"{prefix}{name}" not in names:
                names.append(f"{prefix}{name}")

    add(schema, "", 1)
    return found


def _no_table(error: Any, place: tuple[int | str, ...], schema: type[Section]) -> str:
    """Returns the end of the message about a value in the place of a section or of a component with options."""
    if error["ctx"]["class_name"] == Ref.__name__:
        return "does not name a component; give its name as text, or a table with its `name` and options"
    value, where = error["input"], ".".join(map(str, place))
    name, field = next(iter(_section_at(schema, place).model_fields.items()))
    kind = field.annotation if field.annotation in (int, float) else str
    fits = isinstance(value, kind) and get_origin(field.annotation) not in (list, dict)
    example = json.dumps(value) if fits else "..."
    of_python = f', in Python {where} = {{"{name}": {example}}}' * (len(place) == 1)
    return f"is a section, not a value; set its settings, as {where}.{name} = {example}{of_python}"


def _section_at(schema: type[Section], location: tuple[int | str, ...]) -> type[Section]:
    for part in (part for part in location if isinstance(part, str)):  # all entries of a list have one type
        schema = next(_sections(schema.model_fields[part].annotation))
    return schema


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yields the sections in the annotation of a setting, also in lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def dump_toml(config: Section) -> str:
    """Returns the resolved settings as TOML that loads to the same settings."""
    import tomli_w  # not installed in vLLM's environment, which only reads settings

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the plain value of each setting."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
