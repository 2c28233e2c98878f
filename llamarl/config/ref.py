"""`Ref`: a component named in TOML, such as a loss or a reward.

A family is a folder. Its member `some_name` is the class `SomeName` in `some_name.py`, a dataclass whose fields are its
options. A new member is a new file; there is no registry. A component outside this package is `package.module:Class`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError, model_validator

from llamarl.config.errors import ConfigError, did_you_mean
from llamarl.config.section import OPTIONS, resolved_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import CoreSchema

PARTS = "llamarl.parts"
MEMBERS_OF_PARTS = {
    "rewards.code": "episodes", "sources.hub": "hub", "sources.verifiers": "episodes",
    "transports.cuda_ipc": "cuda", "transports.nixl": "cuda",
}  # fmt: skip
"""Members of core families that live in a part, by folder and name. A user who names one without its part gets a
hint."""
T = TypeVar("T", bound="DataclassInstance")


class NotRun(ConfigError):
    """Settings name code outside the package, in a command that runs no such code."""


_NOT_RUN = ContextVar[list[str] | None]("not_run", default=None)


@contextmanager
def nothing_run() -> Iterator[list[str]]:
    """Context in which `may_run` refuses all code that settings name. Yields the growing list of refused settings."""
    token = _NOT_RUN.set(refused := list[str]())
    try:
        yield refused
    finally:
        _NOT_RUN.reset(token)


def may_run(option: str, name: str) -> None:
    """Call this before importing or executing code from outside the package that settings name. Raises NotRun inside of
    `nothing_run`."""
    if (refused := _NOT_RUN.get()) is not None:
        if (said := f"{option} = {name!r}") not in refused:
            refused.append(said)
        raise NotRun(
            f"`{option} = {name!r}` is code that does not come with llamarl, and this command runs no such code; "
            "add --trust if you trust its author"
        )


class Ref(BaseModel):
    """A family member and its options. In TOML `loss = "aipo"` or `loss = {name = "aipo", rho = 4.0}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    """File name in the family's folder, or `package.module:Class`."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return value | {name: resolved_path(value[name]) for name in OPTIONS if name in value}
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A plain name is a member without options."""
        table = handler.resolve_ref_schema(handler(core))
        return {"description": table.pop("description", ""), "anyOf": [{"type": "string"}, table]}

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def members(family: str) -> list[str]:
    """Returns the names of the members of `family`, for example `llamarl.rewards`, read from its folder."""
    return sorted(modules(family))


def modules(family: str) -> dict[str, str]:
    """Returns the modules of a family by name, from its own folder and from folders of the same name in parts."""
    folder, found = family.rpartition(".")[2], [family]
    with suppress(ModuleNotFoundError):  # the core works without parts
        roots = importlib.import_module(PARTS).__path__
        names = sorted(path.parent.name for root in roots for path in Path(root).glob(f"*/{folder}"))
        found += [one for name in names if importlib.util.find_spec(one := f"{PARTS}.{name}.{folder}")]
    files = ((one, file.name) for one in found for file in pkgutil.iter_modules(importlib.import_module(one).__path__))
    return {name: f"{one}.{name}" for one, name in files if not name.startswith("_")}


def check_part(name: str, family: str, option: str) -> None:
    """Raises ConfigError if the member belongs to a part that is not installed."""
    if owner := MEMBERS_OF_PARTS.get(f"{family.rpartition('.')[2]}.{name}"):
        try:
            part_module(owner, "joint")
        except ConfigError as error:
            raise ConfigError(f"`{option} = {name!r}`: {error}") from None


def part(name: str, offer: str) -> Any:
    """Returns an object from the `joint.py` of a part, a folder of `llamarl/parts/` that the core works without.

    Raises:
        ConfigError: the part, or a package that it needs, is not installed.
    """
    return getattr(part_module(name, "joint"), offer)


def part_module(name: str, module: str) -> ModuleType:
    """Imports a module of a part, for example a command. Raises ConfigError as `part` does."""
    whole = f"{PARTS}.{name}.{module}"
    try:
        return importlib.import_module(whole)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if f"{whole}.".startswith(f"{missing}."):
            cause = f"this installation lacks the part `{name}`; install all of llamarl"
            raise ConfigError(cause) from None
        if missing.startswith("llamarl"):
            raise
        cause = f"the part `{name}` needs the package `{missing}`, which is not installed; install it"
        raise ConfigError(cause) from None


def build(ref: Ref, family: str, option: str) -> Any:
    """Creates the object that `ref` names, with its options set and checked.

    Args:
        ref: name and options.
        family: dotted name of the folder, for example `llamarl.rewards`.
    option: where the user wrote it, for error messages, for example `reward`.

    Raises:
        ConfigError: unknown name, unknown option, or an option of the wrong type.
    """
    cls = class_of(ref, family, option)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"`{option} = {ref.name!r}` must be a dataclass: its fields are its options")
    return make_record(cls, ref.options, option, ref.name)


def class_of(ref: Ref, family: str, option: str) -> Any:
    """Returns the class that `ref` names. Raises ConfigError."""
    return find(ref.name, family, option, "".join(part.capitalize() for part in ref.name.split("_")))


def make_record(cls: type[T], values: Mapping[str, Any], where: str, owner: str) -> T:
    """Creates a dataclass from values that a user wrote, checked against its annotations.

    Args:
        where: what the values are, for error messages, for example `reward`.
        owner: who has these options: a component's name, or the file.

    Raises:
        ConfigError: a field is unknown, missing, of the wrong type or out of range.
    """
    settable = sorted(field.name for field in dataclasses.fields(cls) if field.init)
    for name in sorted(set(values) - set(settable)):
        hint = did_you_mean(name, settable, f"it has {', '.join(settable) or 'no options'}")
        raise ConfigError(f"`{where}.{name}` is not an option of `{owner}`; {hint}")
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        # For unions and values with validators, pydantic adds names of internal functions.
        place = ".".join(str(part) for part in (where, *first["loc"]) if not re.search(r"[\[(]", str(part)))
        if first["type"] == "missing":
            raise ConfigError(f"`{place}` is missing; `{owner}` needs it") from None
        if first["type"] == "value_error":  # raised by the component itself
            if isinstance(first["ctx"]["error"], NotRun):
                raise first["ctx"]["error"] from None
            raise ConfigError(f"`{place} = {owner!r}`: {first['ctx']['error']}") from None
        raise ConfigError(f"`{place} = {first['input']!r}` of `{owner}`: {first['msg']}") from None
    except TypeError as error:  # an abstract class
        raise ConfigError(f"`{where} = {owner!r}` cannot be created: {error}") from None
    except (Exception, SystemExit) as error:  # the user's class may raise anything
        if isinstance(error, ConfigError) or cls.__module__.partition(".")[0] == "llamarl":
            raise
        raise ConfigError(f"`{where} = {owner!r}` cannot be created: {type(error).__name__}: {error}") from error


def find(name: str, family: str, option: str, attribute: str) -> Any:
    """Returns the object that `name` refers to: `attribute` in the family's file `name`, or the object at
    `package.module:attribute`. Raises ConfigError."""
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
            raise ConfigError(f"`{option} = {name!r}` is not of the form `package.module:Class`")
        may_run(option, name)
        try:
            return getattr(importlib.import_module(module_name), class_name)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            cause = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
            raise ConfigError(f"`{option} = {name!r}` cannot be imported: {cause}{error}") from error
    known = modules(family)
    if name not in known:
        check_part(name, family, option)
        raise ConfigError(f"`{option} = {name!r}` is unknown; {did_you_mean(name, sorted(known))}")
    return getattr(importlib.import_module(known[name]), attribute)
