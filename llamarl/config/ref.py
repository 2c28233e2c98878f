"""`Ref`: a part named in TOML. The file name is the name; a part outside this package is `package.module:Class`.

Each family is a folder. Its member `some_name` is the class `SomeName` in `some_name.py`, a dataclass whose fields are
its options. Adding a member means adding a file; there is no registry.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from llamarl.config.errors import ConfigError


class Ref(BaseModel):
    """A family member and its options. In TOML `loss = "aipo"` or `loss = {name = "aipo", rho = 4.0}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    """File name in the family's folder, or `package.module:Class`."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def members(family: str) -> list[str]:
    """Names that `family` (for example `llamarl.rewards`) offers, read from its folder."""
    package = importlib.import_module(family)
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def build(ref: Ref, family: str, option: str) -> Any:
    """The object that `ref` names, with its options set and checked.

    Args:
        ref: name and options.
        family: dotted name of the folder, for example `llamarl.rewards`.
        option: where the user wrote it, for the error message, for example `reward`.

    Raises:
        ConfigError: unknown name, unknown option, or an option of the wrong type.
    """
    cls = find(ref.name, family, option, "".join(part.capitalize() for part in ref.name.split("_")))
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"`{option} = {ref.name!r}` must be a dataclass: its fields are its options")
    settable = {field.name for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(ref.options) - settable)
    if unknown:
        near = get_close_matches(unknown[0], settable, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(sorted(settable)) or 'no options'}"
        raise ConfigError(f"`{option}.{unknown[0]}` is not an option of `{ref.name}`; {hint}")
    try:
        return TypeAdapter(cls).validate_python(ref.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (option, *first["loc"]))
        if first["type"] == "missing":
            raise ConfigError(f"`{where}` is missing; `{ref.name}` needs it") from None
        if first["type"] == "value_error":  # raised by the part itself
            raise ConfigError(f"`{where} = {ref.name!r}`: {first['ctx']['error']}") from None
        raise ConfigError(f"`{where} = {first['input']!r}`: {first['msg']}") from None


def find(name: str, family: str, option: str, attribute: str) -> Any:
    """What `name` stands for: `attribute` of that file of the family, or what `package.module:attribute` says.

    Raises ConfigError.
    """
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
            raise ConfigError(f"`{option} = {name!r}` is not of the form `package.module:Class`")
        try:
            return getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"`{option} = {name!r}` cannot be imported: {error}") from error
    known = members(family)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"`{option} = {name!r}` is unknown; {hint}")
    return getattr(importlib.import_module(f"{family}.{name}"), attribute)
