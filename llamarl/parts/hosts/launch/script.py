"""`slurm_script` and `kubernetes_manifest`: a run as a scheduler job."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from llamarl.config import ConfigError, RunConfig, dump_toml, load_config
from llamarl.config.load import file_of_run
from llamarl.parts.hosts.certificates import CONTROLLER, make_certificates
from llamarl.parts.hosts.hosting import NoRoom, imagined

POD_PORT = 6700
"""Port of the controller in its pod."""
POD_PKI, POD_PKI_DAYS = "/etc/llamarl/pki", 365
"""Folder of the certificates in a pod, and their validity in days."""
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,43}[a-z0-9])?")
"""Valid run name for Kubernetes. Pod suffixes must also fit."""


def files_folder(config: RunConfig) -> Path:
    """Returns the folder next to the run folder for the job script, its log and the certificates."""
    return Path(os.path.abspath(config.output)) / f"{config.name}.launch"


def several_hosts(path: str, overrides: Sequence[str]) -> RunConfig:
    """Returns the settings of a run file, changed to several hosts. Raises ConfigError."""
    return load_config(path, [*overrides, "--cluster.kind", "hosts", "--cluster.listen", f"0.0.0.0:{POD_PORT}"])


def slurm_script(config: RunConfig, path: str, overrides: Sequence[str]) -> str:
    """Returns a script for `sbatch`. Raises ConfigError."""
    own = {name.replace("_", "-"): value for name, value in config.launch.slurm.items()}
    if fixed := own.keys() & {"nodes", "ntasks", "ntasks-per-node"}:
        raise ConfigError(
            f"launch.slurm.{min(fixed)}: the number of nodes is cluster.num_hosts, with one agent on each"
        )
    if "gpus-per-node" not in own:
        own |= {"gpus-per-node": _gpus_per_host(config, "launch.slurm.gpus_per_node") or False}
    paths = {"folder": str(files_folder(config)), "run": os.path.abspath(f"{config.output}/{config.name}")}
    train = [str(file_of_run(path)), *overrides]
    places = paths | {"working_folder": os.getcwd(), "python": sys.executable}
    return _filled("slurm.sh.jinja", config=config, own=own, train=train, **places)


def kubernetes_manifest(config: RunConfig, secrets: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Returns a manifest for `kubectl apply`, including the Secrets if given. Raises ConfigError."""
    settings, name = config.launch.kubernetes, config.name
    for option in (option for option in ("image", "claim") if not getattr(settings, option)):
        raise ConfigError(f"launch.kubernetes.{option} is missing; give it with --launch.kubernetes.{option} VALUE")
    if not DNS_LABEL.fullmatch(name):
        rule = "small letters, digits and dashes, at most 45, the first a letter"
        raise ConfigError(f"name = {name!r} is not a name for Kubernetes; give --name of {rule}")
    if config.model.warm_start:
        raise ConfigError(
            f"model.warm_start = {config.model.warm_start!r} is a file of this machine, which no pod sees; run llamarl "
            "sft on it, put the model where launch.kubernetes.claim is, and leave model.warm_start empty"
        )
    cluster = config.cluster.model_copy(update={"listen": f"controller.{name}:{POD_PORT}", "pki": POD_PKI})
    gpus = _gpus_per_host(config, "launch.kubernetes.gpus") if settings.gpus is None else settings.gpus
    amounts = {"nvidia.com/gpu": gpus, "cpu": settings.cpu, "memory": settings.memory}
    resources = {resource: amount for resource, amount in amounts.items() if amount}
    requests = {"requests": resources, "limits": resources}
    config = config.model_copy(update={"cluster": cluster})
    pods = [(pod, file) for pod in _pods(config) for file in _files_of(pod)]
    items = [{"key": file, "path": f"{pod}/{file}"} for pod, file in pods]
    values = {"toml": dump_toml(config), "resources": requests, "secrets": secrets or {}, "items": items}
    return _filled("kubernetes.yaml.jinja", config=config, **values)


def kubernetes_secrets(config: RunConfig) -> dict[str, dict[str, str]]:
    """Returns the files of the hosts' Secret and the controller's, created next to the job script. Raises
    ConfigError."""
    pki = files_folder(config) / "pki"
    names = [*_pods(config), CONTROLLER]
    make_certificates(pki, {name: (name, f"{name}.{config.name}") for name in names}, POD_PKI_DAYS)
    files = {
        f"{config.name}-pki": sorted({file for pod in _pods(config) for file in _files_of(pod)}),
        f"{config.name}-pki-{CONTROLLER}": _files_of(CONTROLLER),
    }
    return {name: {file: (pki / file).read_text() for file in own} for name, own in files.items()}


def _files_of(member: str) -> list[str]:
    """Returns the files by which a member authenticates itself and others."""
    return ["ca.crt", f"{member}.crt", f"{member}.key"]


def _pods(config: RunConfig) -> list[str]:
    return [f"{config.name}-host-{i}" for i in range(config.cluster.num_hosts)]


def _gpus_per_host(config: RunConfig, option: str) -> int:
    """Returns the smallest number with which every executor has a place. Raises ConfigError."""
    try:
        return imagined(config, _pods(config))[1]
    except NoRoom as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"how many GPUs each host needs cannot be told ({reason}); set {option}") from None


def _directive(option: str, value: object) -> str:
    """Returns an option in the syntax of sbatch. Raises ConfigError."""
    text = str(value)
    if not re.fullmatch(r"[a-z-]+", option) or not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(f"launch.slurm: `{option} = {text!r}` cannot be written as an option of sbatch; change it")
    if value is True:
        return f"--{option}"
    return f'--{option}="{text}"' if re.search(r"[^\w@%:./+,-]", text) else f"--{option}={text}"


def _filled(template: str, **values: object) -> str:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters |= {"sh": shlex.quote, "directive": _directive}
    return (
        environment.from_string((files("llamarl.parts.hosts.launch") / template).read_text("utf-8"))
        .render(**values)
        .strip()
        + "\n"
    )
