"""Section `launch`: what a scheduler is asked for."""

from __future__ import annotations

from datetime import time

from pydantic import Field

from llamarl.config.section import Section


class KubernetesConfig(Section):
    image: str = ""
    """Container image with llamarl; it must be named."""
    claim: str = Field(default="", pattern=r"^(|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)$")
    """PersistentVolumeClaim that all pods can write to (ReadWriteMany), with the model, the data and the runs."""
    mount: str = Field(default="/work", pattern=r"^/[^\s:]*$")
    """Path where the pods see `claim`; relative paths of the run begin there."""
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Kubernetes namespace of everything that is made."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of each host; by default the fewest with which every executor has a place."""
    cpu: int | str = ""
    """Processors of each host, for example `16`; empty: what the cluster gives."""
    memory: int | str = ""
    """Memory of each host, for example `128Gi`; empty: what the cluster gives."""


class LaunchConfig(Section):
    slurm: dict[str, bool | int | str | time | list[str] | dict[str, bool | int | str | time]] = Field(
        default_factory=dict
    )
    """Options of `sbatch` by their long names, for example `partition`, `account`, `time`, `gpus_per_node`; and `setup`
    (lines before the first command), `template` (path of an own script), `generators` (a table: `nodes` and options of
    a second component for the generators)."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Settings of `llamarl launch kubernetes`."""
