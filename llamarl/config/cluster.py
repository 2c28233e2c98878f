"""Section `cluster`: where executors run, and what follows when they die."""

from __future__ import annotations

import re
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator

from llamarl.config.path import FilePath
from llamarl.config.section import Section

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

OF_HOSTS = ("kind", "listen", "pki", "num_hosts", "min_hosts", "host_timeout_s", "place")
"""Settings of several hosts."""
MAX_PORT = 65_535
MONARCH = ("0.7", "0.8")
"""First version of Monarch that runs this, and the first that may not."""


def lack_of_monarch() -> str:
    """Text: why Monarch cannot be used here, and what mends it; empty: it can. Imports nothing of it."""
    cause = "is not installed"
    if util.find_spec("monarch") is not None:
        try:
            found = metadata.version("torchmonarch")
        except metadata.PackageNotFoundError:  # built by somebody, who knows
            return ""
        first, end = (tuple(map(int, one.split("."))) for one in MONARCH)
        if first <= tuple(map(int, re.findall(r"\d+", found)[:2])) < end:
            return ""
        cause = f"is here in version {found}, and {MONARCH[0]} is needed"
    return f"Monarch {cause}: pip install 'llamarl[monarch]'"


def use_processes() -> str:
    """Text of how executors get processes of their own."""
    lack = lack_of_monarch()
    return "use cluster.kind = 'monarch'" + f" ({lack})" * bool(lack)


def _settled(kind: str) -> str:
    return ("inline" if lack_of_monarch() else "monarch") if kind == "auto" else kind


Kind = Annotated[Literal["auto", "monarch", "hosts", "inline"], AfterValidator(_settled)]
"""Kind of cluster; `auto` becomes what this installation has, so that records say what was used."""


class PlaceConfig(Section):
    """Names of hosts for each role, or patterns such as `node-*`; none: any host."""

    trainer: list[str] = Field(default_factory=list)
    """Default: the first host by name, or as many as its devices need; all that are named share the
    ranks where it computes on the CPU."""
    critic: list[str] = Field(default_factory=list)
    """Default: the trainer's."""
    generator: list[str] = Field(default_factory=list)
    """Default: those without trainer and critic first, and CPUs of the others only if there are none; replicas are
    dealt in turn."""
    reward: list[str] = Field(default_factory=list)
    """Default: the trainer's first host."""
    reward_model: list[str] = Field(default_factory=list)
    """Default: as `reward`, or wherever a device is free."""
    environment: list[str] = Field(default_factory=list)
    """Default: as `reward`."""
    reference: list[str] = Field(default_factory=list)
    """Default: as `reward`, or wherever a device is free."""


class OnFailureConfig(Section):
    """Policy by role for when the processes of an executor die, or do not answer within `call_timeout_s`. One word for
    all: `on_failure = "stop"` ends the run, `"restart"` is the default."""

    generator: Literal["stop", "drop", "respawn"] = "respawn"
    """`drop`: the others go on without it, from what it had decoded; `respawn`: so they do, and a new one comes."""
    reward: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new one is asked again what was not answered."""
    reward_model: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new reward model is asked again what was not answered."""
    reference: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new reference is asked again what was not answered."""
    environment: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new one is asked again what was not answered: a reply is a function of the turns before it."""
    critic: Literal["stop", "restart"] = "restart"
    """`restart`: a new one goes on from the newest checkpoint, or from `checkpoint.mirror`, and learns again what was
    learnt since then."""
    trainer: Literal["stop", "restart"] = "restart"
    """`restart`: a new one goes on as the critic does. Generators go on meanwhile; no rollout is generated again."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A policy alone is that of all executors."""
        return {"anyOf": [{"enum": ["stop", "respawn", "restart"]}, handler.resolve_ref_schema(handler(core))]}

    @model_validator(mode="before")
    @classmethod
    def _of_all(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value == "stop":
            return dict.fromkeys(cls.model_fields, "stop")
        if value in ("respawn", "restart"):
            return {}
        raise ValueError(
            f"cluster.on_failure = {value!r} is not a policy for all roles; use 'stop' or 'restart', or name roles: "
            "cluster.on_failure.generator = 'drop'"
        )


class ClusterConfig(Section):
    kind: Kind = Field(default="auto", validate_default=True)
    """Place of executors: `monarch`, processes on this machine; `hosts`, processes on those that call; `inline`, all in
    this process; `auto`: `monarch` where it is installed, else `inline`."""
    listen: str = ""
    """Address, `address:port`, of this machine that `llamarl host` calls on the others; only with `hosts`."""
    pki: FilePath = "pki"
    """Folder of the certificates that `llamarl certs` makes; only with `hosts`."""
    num_hosts: int = Field(default=1, ge=1)
    """Hosts that must have called before the run starts; only with `hosts`."""
    min_hosts: int = Field(default=0, ge=0)
    """Hosts with which the run goes on when it has lost those of trainer or critic, and with which `--resume` begins;
    0: `num_hosts`; only with `hosts`."""
    host_timeout_s: float = Field(default=300, gt=0)
    """Longest wait for the hosts to call, in seconds; only with `hosts`."""
    place: PlaceConfig = PlaceConfig()
    """Hosts that each role may run on; only with `hosts`."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Own devices per executor, or (the baseline to beat) the same devices for all, phases in turn."""
    on_failure: OnFailureConfig = OnFailureConfig()
    """Policy for when an executor dies, by its role; one word for all: `"stop"` or `"restart"`."""
    max_restarts: int = Field(default=5, ge=0)
    """Deaths of one role, of a generator's replicas each, within `restart_window_s`; one more ends the run. Lost hosts
    do not count."""
    restart_window_s: float = Field(default=600, gt=0)
    """Deaths that are longer ago are forgiven."""
    start_timeout_s: float = Field(default=120, gt=0)
    """Longest wait for an executor to start and load its model."""
    call_timeout_s: float = Field(default=600, gt=0)
    """Longest wait for one call to an executor, for example a train step."""
    stall_timeout_s: float = Field(default=300, gt=0)
    """No rollout, reward or train step finished for so long: the run says who waits for whom, and ends."""
    shutdown_timeout_s: float = Field(default=8, gt=0)
    """Longest wait for executors to end by themselves; then they are killed."""

    @property
    def fewest_hosts(self) -> int:
        """Hosts without which the run does not go on."""
        return self.min_hosts or self.num_hosts

    @model_validator(mode="before")
    @classmethod
    def _successors(cls, value: object) -> object:
        if isinstance(value, dict) and "on_generator_failure" in value:
            raise ValueError(
                "cluster.on_generator_failure is cluster.on_failure.generator now; write "
                f"cluster.on_failure.generator = {value['on_generator_failure']!r}"
            )
        return value

    @model_validator(mode="after")
    def _hosts(self) -> ClusterConfig:
        if self.kind == "hosts":
            if not self.listen:
                raise ValueError(
                    "cluster.kind = 'hosts' needs cluster.listen, an address and port of this machine that the others "
                    "can reach, for example '10.0.0.1:6700'"
                )
            if not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", self.listen):
                raise ValueError(
                    f"cluster.listen = {self.listen!r} is not address:port; give an IPv4 address or a name (no "
                    "IPv6), for example '10.0.0.1:6700'"
                )
            if int(self.listen.rpartition(":")[2]) > MAX_PORT:
                raise ValueError(f"cluster.listen = {self.listen!r}: ports end at {MAX_PORT}; choose a free one below")
            if self.min_hosts > self.num_hosts:
                raise ValueError(
                    f"cluster.min_hosts = {self.min_hosts} is more than cluster.num_hosts = {self.num_hosts}, with "
                    "which the run begins; lower it"
                )
            if self.placement == "colocated":
                raise ValueError(
                    "cluster.placement = 'colocated' shares the devices of one machine; with cluster.kind = 'hosts' "
                    "use 'disaggregated'"
                )
            return self
        for name in OF_HOSTS[1:]:
            if getattr(self, name) != ClusterConfig.model_fields[name].default:
                raise ValueError(f"cluster.{name} is for several hosts; leave it out, or set cluster.kind = 'hosts'")
        return self
