"""Checks that commands share."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from llamarl.config import ConfigError
from llamarl.config.schema import Section

S = TypeVar("S", bound=Section)


def checked(section: type[S], **values: object) -> S:
    """A config section from options of the same names. Raises ConfigError, which names the option."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option} {first['input']}: {first['msg'].lower()}") from None
