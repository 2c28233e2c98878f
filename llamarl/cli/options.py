"""Helpers of commands: parsers, checks of options, and output files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from llamarl.cli.main import USER_ERROR
from llamarl.config import ConfigError, RunConfig, from_home, resolved
from llamarl.config.errors import known_hint, near_hint
from llamarl.config.load import last_names
from llamarl.config.ref import Ref
from llamarl.config.schema import GeneratorConfig
from llamarl.config.section import FilePath, Section
from llamarl.observability.files import write_atomically
from llamarl.observability.spans import report_delays

RENAMED = {
    "data.max_prompt_tokens": "prompt-tokens",
    "reward.parts": "reward",
    "rollout.max_new_tokens": "response-tokens",
    "rollout.stop_strings": "stop",
}
"""Former names of options that differ from the setting's name."""
MODEL_HELP = "Hugging Face folder, or a model on the Hub: owner/name or owner/name@revision"
ASKED_HELP = f"run folder (its newest checkpoint), export, or {MODEL_HELP}"
ENGINE = tuple(f"generator.{name}" for name in GeneratorConfig.model_fields if name not in ("backend", "vllm"))
"""Settings of a generator's engine without a run."""
__all__ = ["report_delays"]  # which commands import from here, with the rest of this file
MOST_LETTERS = 80
"""Longer words are not misspelled options."""
TRUST = "run the code that the settings name, even if it does not come with llamarl"


class ParserAsked(Exception):
    """Raised by the parser of a command inside of `asking_for_parser`, instead of reading the arguments."""

    def __init__(self, parser: argparse.ArgumentParser, *, takes_settings: bool) -> None:
        super().__init__(parser.prog)
        self.parser, self.takes_settings = parser, takes_settings


_is_asked = ContextVar("_is_asked", default=False)


@contextmanager
def asking_for_parser() -> Iterator[None]:
    """Context in which a command raises ParserAsked as soon as it has created its parser."""
    token = _is_asked.set(True)
    try:
        yield
    finally:
        _is_asked.reset(token)


class _Parser(argparse.ArgumentParser):
    """Prints errors as one line, with similar names for an unknown option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if _is_asked.get():
            raise ParserAsked(self, takes_settings=False)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown:
            hint = _near_option(self, unknown[1]) or f"`{self.prog} -h` lists all options"
            message = f"unknown option `{unknown[1]}`; {hint}"
        self.exit(USER_ERROR, f"{self.prog}: {message}\n")


def _near_option(parser: argparse.ArgumentParser, word: str, schema: type[Section] | None = None) -> str:
    """Returns the end of a message on an unknown option, with similar options and settings. Empty means none."""
    known = {name: [f"--{one}" for one in dotted] for name, dotted in last_names(schema).items()} if schema else {}
    for action in parser._actions:
        for option in action.option_strings if action.help != argparse.SUPPRESS else ():
            known.setdefault(option.lstrip("-").rpartition(".")[2].replace("-", "_"), []).append(option)
    name, full = word.lstrip("-"), {last: [*dict.fromkeys(names)] for last, names in known.items()}
    return known_hint(name, full) or near_hint(name, full)


def with_settings(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *others: type[Section]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns the command's options, and the other words, which override settings of a run or of `others`. Raises
    ConfigError for a word that is neither."""
    if _is_asked.get():
        raise ParserAsked(parser, takes_settings=True)
    known = {name for schema in (RunConfig, *others) for name in schema.model_fields}
    options, overrides = parser.parse_known_args(arguments)
    words = iter(overrides)
    for word in words:
        name, equals, _ = word[2:].partition("=")
        if not word.startswith("--") or name.partition(".")[0].replace("-", "_") in known:
            if not equals:
                next(words, None)
            continue
        if len(name) < MOST_LETTERS and (hint := _near_option(parser, name, RunConfig)):
            raise ConfigError(f"unknown option `--{name}`; {hint}")
        raise ConfigError(f"unknown option `--{name}`; `{parser.prog} -h` and docs/commands.md list all")
    return options, overrides


def setting_options() -> list[str]:
    """Returns the option of each setting of a run, such as `--trainer.learning_rate`."""
    return [f"--{name}" for names in last_names(RunConfig).values() for name in names]


def command_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a command. An epilog with several lines keeps them. Arguments without a type are paths.
    They may begin with `~`, which shells do not expand in quotes and after `=`."""
    keeps_lines = argparse.RawDescriptionHelpFormatter if "\n" in epilog else argparse.HelpFormatter
    parser = _Parser(
        prog=f"llamarl {command}",
        description=description,
        epilog=epilog,
        formatter_class=keeps_lines,
        allow_abbrev=False,
    )
    parser.register("type", None, from_home)
    return parser


class _Renamed(argparse.Action):
    """A former option. `dest` is the name of today's setting."""

    def __call__(self, parser: object, namespace: object, values: object, option: str | None = None) -> None:
        raise ConfigError(f"{option} is now --{self.dest}")


KINDS = {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT"}
"""Type names in help texts, by Python type."""


def kind_of(annotation: Any) -> str:
    """Returns the type of a setting for a help text: `INT`, `PATH`, `{auto,cpu}`, `NAME`, `LIST` or `TABLE`."""
    if annotation in KINDS:
        return KINDS[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"{{{','.join(map(str, inner))}}}"
    if origin is Annotated:
        return "PATH" if annotation == FilePath else kind_of(inner[0])
    if origin in (list, tuple, dict):
        return "TABLE" if origin is dict else "LIST"
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(kind_of(one) for one in inner if one is not NoneType))
    return "NAME" if annotation is Ref else "TABLE"


def add_settings(parser: argparse.ArgumentParser, base: Mapping[str, Any], *names: str) -> None:
    """Adds `--section.key TYPE` for settings of a run. Given ones are appended to `overrides`, as `resolved` expects.

    Args:
        base: settings of the command, as parsed TOML.
        names: dotted names.
    """
    config, group = resolved(base), parser.add_argument_group("settings, named as in a run file")
    for name in names:
        *sections, last = name.split(".")
        section = reduce(getattr, sections, config)
        field = type(section).model_fields[last]
        meaning = " ".join((field.description or "").split())
        group.add_argument(
            f"--{name}", dest="overrides", action="append", default=[], metavar=kind_of(field.annotation),
            type=f"--{name}={{}}".format, help=f"{meaning} ({section.model_dump()[last]!r})".replace("%", "%%"),
        )  # fmt: skip
        for old in (last.replace("_", "-"), RENAMED.get(name)):
            if sections and old:
                parser.add_argument(f"--{old}", dest=name, action=_Renamed, help=argparse.SUPPRESS)


def check_output(path: str | Path, *read: str | None, option: str = "--output") -> Path:
    """Returns the file that an output option names, before any work starts. Raises ConfigError if it cannot be written,
    or if it would replace a file that the command reads, or a run's record."""
    from llamarl.run.folder import run_of_record

    path = Path(path)
    if run := run_of_record(path):
        raise ConfigError(f"{option} {path} belongs to the record of run {run}; give {option} another path")
    if any(one and Path(one).exists() and path.exists() and path.samefile(one) for one in read):
        raise ConfigError(f"{option} {path} is a file that this command reads; give {option} another path")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; give {option} one that exists")
    return path


def write_into_run(path: Path, text: str | Iterable[str]) -> None:
    """Writes a file in a run's folder atomically. Replaces an existing file, but writes through no link or pipe,
    because another user may have created the folder. Raises ConfigError."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --output another path") from None


def write_output(path: Path, text: str | Iterable[str], option: str = "--output") -> None:
    """Writes the file of an option atomically, from a text or its parts. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            with path.open("w", encoding="utf-8") as file:
                file.writelines([text] if isinstance(text, str) else text)
        else:
            write_atomically(path, text)
    except OSError as error:
        cause = f"cannot write {path}: {error.strerror}"
        raise ConfigError(f"{cause}; give {option} a path in an existing folder") from None
