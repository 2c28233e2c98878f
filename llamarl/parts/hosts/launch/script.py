"""`slurm_script` and `kubernetes_manifest`: a run as a scheduler job."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError

from llamarl.config import ConfigError, RunConfig, dump_toml, load_config, read_text
from llamarl.config.load import file_of_run
from llamarl.parts.hosts.certificates import CONTROLLER, make_certificates
from llamarl.parts.hosts.hosting import NoRoom, imagined

POD_PORT = 6700
"""Port of the controller in its pod."""
POD_PKI, POD_PKI_DAYS = "/etc/llamarl/pki", 365
"""Folder in which the pods see their certificates, and days of validity."""
MANIFEST = "run.yaml"
"""Name of the manifest in a base for Kustomize."""
CONTROLLER_RESOURCES = {"requests": {"cpu": 1, "memory": "4Gi"}, "limits": {"memory": "32Gi"}}
"""Of the controller's pod, which holds the rollouts in flight and no model."""
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,43}[a-z0-9])?")
"""Valid run name for Kubernetes. Pod suffixes must also fit."""


def files_folder(config: RunConfig) -> Path:
    """Returns the folder next to the run folder for the job script, its log and the certificates."""
    return Path(os.path.abspath(config.output)) / f"{config.name}.launch"


def several_hosts(path: str, overrides: Sequence[str]) -> RunConfig:
    """Returns the settings of a run file, changed to several hosts. Raises ConfigError."""
    return load_config(path, [*overrides, "--cluster.kind", "hosts", "--cluster.listen", f"0.0.0.0:{POD_PORT}"])


def slurm_script(config: RunConfig, path: str, overrides: Sequence[str]) -> str:
    """Returns the script for `sbatch`. Raises ConfigError."""
    settings = dict(config.launch.slurm)
    setup, template = settings.pop("setup", []), settings.pop("template", "")
    generators = settings.pop("generators", {})
    setup = [setup] if isinstance(setup, str) else setup
    if not (isinstance(setup, list) and isinstance(template, str) and isinstance(generators, dict)):
        raise ConfigError(
            "launch.slurm: `setup` is a list of lines of a shell, `template` the path of a file, and `generators` a "
            "table of options of sbatch with `nodes`"
        )
    folder = files_folder(config)
    trained, components = _components(config, settings, generators, folder)
    paths = {"folder": str(folder), "run": os.path.abspath(f"{config.output}/{config.name}")}
    train = [str(file_of_run(path)), *overrides]
    values = paths | {"setup": setup, "python": sys.executable, "train": train, "components": components}
    return _filled("slurm.sh.jinja", template, config=config, places=trained, **values)


def _components(
    config: RunConfig, own: Mapping[str, Any], of_generators: Mapping[str, Any], folder: Path
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Returns the component of each role that has one, and the options of each component of the job. Raises
    ConfigError."""
    own, others = _dashed(own, ()), _dashed(of_generators, ("nodes",))
    num_hosts, roles = config.cluster.num_hosts, dict[str, int]()
    if of_generators:
        nodes = others.get("nodes")
        if type(nodes) is not int or not 1 <= nodes < num_hosts:
            raise ConfigError(
                f"launch.slurm.generators.nodes = {nodes!r}: name 1 to {num_hosts - 1} of the cluster.num_hosts = "
                f"{num_hosts} nodes; the others run controller and trainer"
            )
        place, names = config.cluster.place, _hosts(config)
        roles = {role: i for i, role in enumerate(("trainer", "generator")) if not getattr(place, role)}
        parts = {"trainer": names[: num_hosts - nodes], "generator": names[num_hosts - nodes :]}
        place = place.model_copy(update={role: parts[role] for role in roles})
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"place": place})})
        own["nodes"], others["nodes"] = num_hosts - nodes, nodes
    found = [own, others] if of_generators else [own]
    if any("gpus-per-node" not in options for options in found):
        gpus = _gpus_per_host(config, "launch.slurm.gpus_per_node") or False
        found = [{"gpus-per-node": gpus} | options for options in found]
    first = {
        "job-name": config.name,
        "chdir": os.getcwd(),
        "output": f"{folder}/slurm-%j.log",
        "open-mode": "append",
        "requeue": True,
        "signal": "B:USR1@120",
    }
    return roles, [_component(options, num_hosts, first if i == 0 else {}) for i, options in enumerate(found)]


def _component(own: Mapping[str, Any], num_hosts: int, first: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a component, with those of the whole job for the first one."""
    return {
        **first,
        "nodes": num_hosts,
        "ntasks-per-node": 1,
        "exclusive": True,
        "mem": 0 if own.get("exclusive", True) else False,
        "no-kill": True,
        **own,
    }


def _dashed(options: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Returns options of sbatch by their names. Raises ConfigError: llamarl sets one of them."""
    found = {name.replace("_", "-"): value for name, value in options.items()}
    if fixed := found.keys() & {"nodes", "ntasks", "ntasks-per-node"} - {*allowed}:
        raise ConfigError(
            f"launch.slurm.{min(fixed)}: the number of nodes is cluster.num_hosts, with one agent on each"
        )
    return found


def kubernetes_manifest(config: RunConfig, secrets: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Returns the manifest for `kubectl apply`, with the Secrets if their files are given. Raises ConfigError."""
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
    amounts = {resource: amount for resource, amount in amounts.items() if amount}
    resources = {"resources": {"requests": amounts, "limits": amounts}, "of_controller": CONTROLLER_RESOURCES}
    config = config.model_copy(update={"cluster": cluster})
    values = {"toml": dump_toml(config), "secrets": secrets or {}, "hosts": _hosts(config)} | resources
    return _filled("kubernetes.yaml.jinja", "", config=config, **values)


def kubernetes_secrets(config: RunConfig, folder: Path | None = None) -> dict[str, dict[str, str]]:
    """Makes the certificates, by default in the folder of the submitted files. Returns the files of each pod's Secret
    by its name. Raises ConfigError."""
    pki = (folder or files_folder(config)) / "pki"
    names = [*_hosts(config), CONTROLLER]
    make_certificates(pki, {name: (name, f"{name}.{config.name}") for name in names}, POD_PKI_DAYS)
    return {
        secret: {file: (pki / own).read_text() for file, own in files.items()}
        for secret, files in _secret_files(config).items()
    }


def _secret_files(config: RunConfig) -> dict[str, dict[str, str]]:
    """Returns the Secret of each pod: name of a file in the pod -> name of the file in the folder of certificates."""
    names = {f"{host}-pki": host for host in _hosts(config)} | {f"{config.name}-{CONTROLLER}-pki": CONTROLLER}
    return {secret: {file: file for file in _files_of(name)} for secret, name in names.items()}


def write_kustomization(config: RunConfig, folder: Path) -> None:
    """Writes a base for Kustomize: manifest, certificates, and the Secrets that they become. Raises ConfigError."""
    text = kubernetes_manifest(config)
    folder.mkdir(parents=True, exist_ok=True)
    kubernetes_secrets(config, folder)
    generated = [
        {"name": secret, "files": [f"pki/{file}" for file in files]} for secret, files in _secret_files(config).items()
    ]
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.launch.kubernetes.namespace,
        "resources": [MANIFEST],
        "secretGenerator": generated,
        "generatorOptions": {
            "disableNameSuffixHash": True,
            "labels": {"app.kubernetes.io/name": "llamarl", "app.kubernetes.io/instance": config.name},
        },
    }
    (folder / MANIFEST).write_text(text, "utf-8")
    (folder / "kustomization.yaml").write_text(json.dumps(base, indent=2) + "\n", "utf-8")  # JSON is YAML


def _files_of(member: str) -> list[str]:
    """Returns the files by which a member authenticates itself and others."""
    return ["ca.crt", f"{member}.crt", f"{member}.key"]


def _hosts(config: RunConfig) -> list[str]:
    return [f"{config.name}-host-{i}" for i in range(config.cluster.num_hosts)]


def _gpus_per_host(config: RunConfig, option: str) -> int:
    """Returns the smallest number with which every executor has a place. Raises ConfigError."""
    try:
        return imagined(config, _hosts(config))[1]
    except NoRoom as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"how many GPUs each host needs cannot be told ({reason}); set {option}") from None


def _directive(option: str, value: object) -> str:
    """Returns an option in the syntax of sbatch. Raises ConfigError."""
    text = str(value)
    if (
        isinstance(value, list | dict)
        or not re.fullmatch(r"[a-z-]+", option)
        or not text.isprintable()
        or '"' in text
        or "\\" in text
    ):
        raise ConfigError(f"launch.slurm: `{option} = {text!r}` cannot be written as an option of sbatch; change it")
    if value is True:
        return f"--{option}"
    return f'--{option}="{text}"' if re.search(r"[^\w@%:./+,-]", text) else f"--{option}={text}"


def _filled(template: str, own: str, **values: object) -> str:
    """Returns a filled template of this folder, or of the file `own`, which may extend one of this folder. Raises
    ConfigError."""
    loader = PackageLoader("llamarl.parts.hosts", "launch")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False, loader=loader
    )
    environment.filters |= {"sh": shlex.quote, "directive": _directive}
    try:
        found = (
            environment.from_string(read_text(own, "correct launch.slurm.template"))
            if own
            else environment.get_template(template)
        )
        return found.render(**values).strip() + "\n"
    except TemplateError as error:
        raise ConfigError(f"launch.slurm.template = {own!r}: {error}; correct that file") from None
