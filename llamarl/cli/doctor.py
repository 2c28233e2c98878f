"""`llamarl doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence

from llamarl.cli.options import command_parser, with_settings

MONARCH = "torchmonarch"
LITTLE_BYTES = 5e9
"""Least free disk space for the checkpoints of a small run."""
PACKAGES = (
    "torch", MONARCH, "numpy", "pydantic", "tokenizers", "safetensors", "huggingface_hub", "math-verify",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs the command, which prints details, then one sentence with the verdict. The exit code is 1 if something that
    every run needs is missing."""
    parser = command_parser("doctor", "Check that this machine, or the hosts of a run, can run llamarl.")
    parser.add_argument(
        "--hosts",
        metavar="RUN.toml",
        help="wait for the hosts of this run (settings as for `train`) and check them and the network between them",
    )
    options, overrides = with_settings(parser, arguments)
    if options.hosts:
        return _hosts(options.hosts, overrides)
    parser.parse_args(arguments)
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    lacks = list[str]()
    for name in PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lacks.append(name)
            print(f"{name} is missing")
    if needed := [name for name in lacks if name != MONARCH]:
        print(f"This machine cannot run llamarl; missing: {', '.join(needed)} (pip install llamarl)")
        return 1
    lacks = [f"{name} (executors share one process unless cluster.kind = 'processes')" for name in lacks]

    import torch

    from llamarl.config import ConfigError
    from llamarl.kernels import attention, build, paths, products

    try:
        reason = attention.kernel().reason
    except ConfigError as error:
        print(f"This machine cannot run llamarl: {error}")
        return 1
    print(f"C++ kernels: {reason or 'compiled'}; {build.VARIABLE} can be {', '.join(build.offered())}")
    for kind in paths.KINDS.values():
        print(f"{kind} weights: {paths.reached(kind)}")
    products.chosen(products.LARGEST, products.LARGEST)
    print(products.describe())
    print(f"machines for episodes: {_machines()}")
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none, CPU only'}")
    free_bytes = shutil.disk_usage(".").free
    print(f"free disk here: {free_bytes / 1e9:.0f} GB")
    if reason:
        lacks.append(f"compiled CPU kernels ({reason})")
    if free_bytes < LITTLE_BYTES:
        lacks.append(f"free disk ({free_bytes / 1e9:.1f} GB)")
    print(_verdict(gpus, lacks))
    return 0


def _machines() -> str:
    """Returns which machines for episodes this host can start."""
    from llamarl.config import ConfigError
    from llamarl.config.ref import part

    try:
        return part("episodes", "machines_here")()
    except ConfigError as error:
        return f"none ({error})"


def _verdict(gpus: Sequence[str], lacks: Sequence[str]) -> str:
    """Returns one sentence on whether this machine can run llamarl, and on missing packages."""
    if gpus:
        where = f"on {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({', '.join(dict.fromkeys(gpus))})"
    else:
        where = f"on {os.cpu_count()} CPU cores, which is enough for small models"
        lacks = ["a GPU", *lacks]
    return f"This machine can run llamarl {where}; missing: {', '.join(lacks) or 'nothing'}."


def _hosts(path: str, overrides: Sequence[str]) -> int:
    """Checks which executors would run on which hosts, and how hosts reach each other. Raises ConfigError."""
    from llamarl.config import ConfigError, load_config
    from llamarl.config.ref import part

    config = load_config(path, overrides)
    if config.cluster.kind != "hosts":
        raise ConfigError(f"--hosts {path}: cluster.kind = {config.cluster.kind!r} runs on one machine; set 'hosts'")
    part("hosts", "inspect")(config, lambda line: print(line, flush=True))
    return 0
