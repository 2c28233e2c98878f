"""Helpers that commands share: their parsers, checks of options, files that they write."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, from_home, settled
from llamarl.config.schema import GeneratorConfig
from llamarl.observability.files import write_atomically
from llamarl.observability.stages import stage_here

RENAMED = {
    "data.max_prompt_tokens": "prompt-tokens",
    "reward.parts": "reward",
    "rollout.max_new_tokens": "response-tokens",
    "rollout.stop_strings": "stop",
}
"""Options of before that were not called as the setting is."""
MODEL_HELP = "Hugging Face folder, or a name of the Hub: owner/name, owner/name@revision"
ASKED_HELP = f"run folder (its newest checkpoint), export, or {MODEL_HELP}"
ENGINE = tuple(f"generator.{name}" for name in GeneratorConfig.model_fields if name not in ("backend", "vllm"))
"""Settings of an engine alone, without a run around it."""
DELAY_S = 8.0
"""Nothing that a user has written keeps a command silent for longer."""


@contextmanager
def told_of_delay(command: str, work: str = "checking the settings") -> Iterator[Callable[[], None]]:
    """Prints a line on stderr from time to time that names what the command is doing, until the end of the block or the
    first call of the function that it yields. `work` is named where no stage is known."""
    thread, is_over = threading.get_ident(), threading.Event()

    def tell() -> None:
        while not is_over.wait(DELAY_S):
            doing = stage_here(thread) or work
            print(f"llamarl {command}: still {doing}; Ctrl-C ends it", file=sys.stderr, flush=True)

    threading.Thread(target=tell, name="delay", daemon=True).start()
    try:
        yield is_over.set
    finally:
        is_over.set()


TRUST = "import and run what the settings name that does not come with llamarl"


def command_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """The parser of one command. An epilog of several lines keeps them. An argument without a type may begin with `~`,
    as paths do: a shell leaves that as it is in quotes and behind `=`."""
    keeps_lines = argparse.RawDescriptionHelpFormatter if "\n" in epilog else argparse.HelpFormatter
    parser = argparse.ArgumentParser(
        prog=f"llamarl {command}",
        description=description,
        epilog=epilog,
        formatter_class=keeps_lines,
        allow_abbrev=False,
    )
    parser.register("type", None, from_home)
    return parser


class _Renamed(argparse.Action):
    """An option of before; its `dest` is the setting that it is now."""

    def __call__(self, parser: object, namespace: object, values: object, option: str | None = None) -> None:
        raise ConfigError(f"{option} is now --{self.dest}")


def add_settings(parser: argparse.ArgumentParser, base: Mapping[str, Any], *names: str) -> None:
    """Adds `--section.key VALUE` for these settings of a run. Those that are given are in `overrides`, as `settled`
    takes them.

    Args:
        base: settings of the command itself, as parsed TOML.
        names: dotted.
    """
    config, group = settled(base), parser.add_argument_group("settings, as in the TOML of a run")
    for name in names:
        *sections, last = name.split(".")
        section = reduce(getattr, sections, config)
        meaning = " ".join((type(section).model_fields[last].description or "").split())
        group.add_argument(
            f"--{name}", dest="overrides", action="append", default=[], metavar="VALUE",
            type=f"--{name}={{}}".format, help=f"{meaning} ({section.model_dump()[last]!r})".replace("%", "%%"),
        )  # fmt: skip
        for old in (last.replace("_", "-"), RENAMED.get(name)):
            if sections and old:
                parser.add_argument(f"--{old}", dest=name, action=_Renamed, help=argparse.SUPPRESS)


def check_output(path: str | Path, *read: str | None, option: str = "--output") -> Path:
    """The file of an option that names one to write, before anything takes time. Raises ConfigError: it cannot be made,
    or it would take the place of what the command reads, or of what no command can make again."""
    from llamarl.run.folder import run_of_record

    path = Path(path)
    if run := run_of_record(path):
        raise ConfigError(f"{option} {path} is what the run {run} has on record; give {option} another path")
    if any(one and Path(one).exists() and path.exists() and path.samefile(one) for one in read):
        raise ConfigError(f"{option} {path} is a file that this command reads; give {option} another path")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; give {option} one that exists")
    return path


def write_into_run(path: Path, text: str | Iterable[str]) -> None:
    """Writes a file in a run's folder, whole or not at all. It takes the place of what is there, and writes through no
    link or pipe, as somebody else may have made the folder. Raises ConfigError."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --output a path of your own") from None


def write_output(path: Path, text: str | Iterable[str], option: str = "--output") -> None:
    """The file of an option, whole or not at all, from a text or pieces of it. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            with path.open("w", encoding="utf-8") as file:
                file.writelines([text] if isinstance(text, str) else text)
        else:
            write_atomically(path, text)
    except OSError as error:
        cause = f"cannot write {path}: {error.strerror}"
        raise ConfigError(f"{cause}; give {option} a path in an existing folder") from None
