"""Where executors run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from llamarl.config.section import Section

OF_HOSTS = ("kind", "listen", "pki", "num_hosts", "host_timeout_s", "place")
"""Settings of several hosts."""
MAX_PORT = 65_535


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
    reference: list[str] = Field(default_factory=list)
    """Default: as `reward`, or wherever a device is free."""


class ClusterConfig(Section):
    kind: Literal["monarch", "hosts", "inline"] = "monarch"
    """Where executors run: processes on this machine, processes on the hosts that call, or all in this process."""
    listen: str = Field(default="", pattern=r"^(|[^\s:/]+:\d{1,5})$")
    """With `hosts`: `address:port` of this machine that `llamarl host` calls on the others."""
    pki: str = "pki"
    """With `hosts`: folder of the certificates that `llamarl certs` makes."""
    num_hosts: int = Field(default=1, ge=1)
    """With `hosts`: the run starts when so many have called."""
    host_timeout_s: float = Field(default=300, gt=0)
    """With `hosts`: longest wait for them."""
    place: PlaceConfig = PlaceConfig()
    """With `hosts`: which of them each role may run on."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Own devices per executor, or (the baseline to beat) the same devices for all, phases in turn."""
    on_generator_failure: Literal["stop", "drop", "respawn"] = "stop"
    """A generator whose processes die ends the run, or is left out, or is replaced by a new one; in the last two cases
    the others generate its unfinished groups again, from their prompts."""
    start_timeout_s: float = Field(default=120, gt=0)
    """Longest wait for an executor to start and load its model."""
    call_timeout_s: float = Field(default=600, gt=0)
    """Longest wait for one call to an executor, for example a train step."""
    stall_timeout_s: float = Field(default=300, gt=0)
    """No rollout, reward or train step finished for so long: the run says who waits for whom, and ends."""
    shutdown_timeout_s: float = Field(default=8, gt=0)
    """Longest wait for executors to end by themselves; then they are killed."""

    @model_validator(mode="after")
    def _hosts(self) -> ClusterConfig:
        if self.kind == "hosts":
            if not self.listen:
                raise ValueError(
                    "cluster.kind = 'hosts' needs cluster.listen, an address and port of this machine that the others "
                    "can reach, for example '10.0.0.1:6700'"
                )
            if int(self.listen.rpartition(":")[2]) > MAX_PORT:
                raise ValueError(f"cluster.listen = {self.listen!r}: ports end at {MAX_PORT}; choose a free one below")
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
