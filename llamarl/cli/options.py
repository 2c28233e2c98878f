"""What commands share: their parsers, checks of options, files that they write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from llamarl.config import ConfigError
from llamarl.config.section import Section
from llamarl.observability.files import write_atomically

S = TypeVar("S", bound=Section)


def command_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Of one command. An epilog of several lines keeps them."""
    keeps_lines = argparse.RawDescriptionHelpFormatter if "\n" in epilog else argparse.HelpFormatter
    return argparse.ArgumentParser(
        prog=f"llamarl {command}",
        description=description,
        epilog=epilog,
        formatter_class=keeps_lines,
        allow_abbrev=False,
    )


def checked(section: type[S], **values: object) -> S:
    """A config section from options of the same names. Raises ConfigError, which names the option."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option} {first['input']}: {first['msg'].lower()}") from None


def write_output(path: Path, text: str) -> None:
    """The file of --output, whole or not at all. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path, text)
    except OSError as error:
        cause = f"cannot write {path}: {error.strerror}"
        raise ConfigError(f"{cause}; give --output a path in an existing folder") from None
