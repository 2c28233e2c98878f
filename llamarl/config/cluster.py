"""Section `cluster`: where executors run, and what happens when they die."""

from __future__ import annotations

import re
from importlib import metadata, util
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator

from llamarl.config.section import FilePath, Section

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

OF_HOSTS = ("kind", "listen", "pki", "num_hosts", "min_hosts", "place")
"""Settings that need several hosts."""
MAX_PORT = 65_535
MONARCH = ("0.7", "0.8")
"""The first supported version of Monarch, and the first unsupported one."""


def lack_of_monarch() -> str:
    """Returns why Monarch cannot be used here, with a fix. Empty means that it can. Does not import Monarch."""
    cause = "is not installed"
    if util.find_spec("monarch") is not None:
        try:
            found = metadata.version("torchmonarch")
        except metadata.PackageNotFoundError:  # a build without metadata is accepted
            return ""
        first, end = (tuple(map(int, one.split("."))) for one in MONARCH)
        if first <= tuple(map(int, re.findall(r"\d+", found)[:2])) < end:
            return ""
        cause = f"has version {found}, and {MONARCH[0]} is needed"
    return f"Monarch {cause}: pip install 'llamarl[monarch]'"


def use_processes() -> str:
    """Returns text on how to give executors their own processes."""
    return f"use cluster.kind = '{'processes' if lack_of_monarch() else 'monarch'}'"


def _resolved(kind: str) -> str:
    return ("inline" if lack_of_monarch() else "monarch") if kind == "auto" else kind


Kind = Annotated[Literal["auto", "monarch", "processes", "hosts", "inline"], AfterValidator(_resolved)]
"""Kind of cluster. `auto` becomes the kind that this installation supports, so that records say what was used."""


class PlaceConfig(Section):
    """Names of hosts for each role, or patterns such as `node-*`. Empty means any host."""

    trainer: list[str] = Field(default_factory=list)
    """Default: the first host by name, or as many hosts as its devices need. On the CPU, all named hosts share the
    ranks."""
    critic: list[str] = Field(default_factory=list)
    """Default: the trainer's."""
    generator: list[str] = Field(default_factory=list)
    """Default: hosts without trainer and critic first. CPUs of hosts that have them are used only if there are no other
    hosts. Replicas are dealt in turn."""
    reward: list[str] = Field(default_factory=list)
    """Default: the trainer's first host."""
    reward_model: list[str] = Field(default_factory=list)
    """Default: as `reward`, or any host with a free device."""
    environment: list[str] = Field(default_factory=list)
    """Default: as `reward`."""
    reference: list[str] = Field(default_factory=list)
    """Default: as `reward`, or any host with a free device."""


class OnFailureConfig(Section):
    """Policy by role for executors whose processes die, or do not answer within `timeout_s`. A single word applies
    to all roles: `on_failure = "stop"` ends the run, `"restart"` is the default."""

    generator: Literal["stop", "drop", "respawn"] = "respawn"
    """`drop`: other generators continue its rollouts; `respawn`: they do, and a new generator replaces it."""
    reward: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new executor gets the unanswered calls."""
    reward_model: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new reward model gets the unanswered calls."""
    reference: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new reference model gets the unanswered calls."""
    environment: Literal["stop", "respawn"] = "respawn"
    """`respawn`: a new environment gets the unanswered calls. A reply depends only on the turns before it."""
    critic: Literal["stop", "restart"] = "restart"
    """`restart`: a new critic resumes from the newest checkpoint, or from `checkpoint.mirror`, and repeats later
    steps."""
    trainer: Literal["stop", "restart"] = "restart"
    """`restart`: a new trainer resumes as the critic does. Generators keep running, and no rollout is generated
    again."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A single policy applies to all roles."""
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
    """Place of executors. `monarch`: processes on this machine; `processes`: the same without Monarch; `hosts`:
    processes on hosts that connect; `inline`: all in this process; `auto`: `monarch` if it is installed, else
    `inline`."""
    listen: str = ""
    """Address of this machine, `address:port`, to which `llamarl host` connects; only with `hosts`."""
    pki: FilePath = "pki"
    """Folder of the certificates that `llamarl certs` creates; only with `hosts`."""
    num_hosts: int = Field(default=1, ge=1)
    """Hosts that must connect before the run starts; only with `hosts`."""
    min_hosts: int = Field(default=0, ge=0)
    """Fewest hosts with which the run continues after it loses hosts of trainer or critic, and with which `--resume`
    starts; 0 means `num_hosts`; only with `hosts`."""
    place: PlaceConfig = PlaceConfig()
    """Hosts that each role may use; only with `hosts`."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Separate devices per executor, or (the baseline to beat) the same devices for all executors in turn."""
    on_failure: OnFailureConfig = OnFailureConfig()
    """Policy by role for executors that die. A single word applies to all roles: `"stop"` or `"restart"`."""
    max_restarts: int = Field(default=5, ge=0)
    """Deaths of one role (per replica for generators) that a run survives within 10 minutes. Lost hosts do not
    count."""
    timeout_s: float = Field(default=600, gt=0, le=1e9)
    """Longest wait in seconds for hosts to connect, for an executor to start and load its model, and for its answer to
    a call such as a train step. If no rollout, reward or step finishes for twice as long, the run fails and reports who
    waits for whom."""
    shutdown_timeout_s: float = Field(default=8, gt=0)
    """Longest wait for executors to end by themselves, in seconds. Then they are killed."""

    @property
    def stall_timeout_s(self) -> float:
        """Seconds in which some rollout, reward or step must finish. Longer than a call may take: an executor that
        hangs is restarted first."""
        return 2 * self.timeout_s

    @property
    def fewest_hosts(self) -> int:
        """Fewest hosts with which the run continues."""
        return self.min_hosts or self.num_hosts

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
                    "which the run starts; lower it"
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
