"""`llamarl doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence

from llamarl.cli.options import command_parser

PACKAGES = (
    "torch", "torchmonarch", "numpy", "pydantic", "tokenizers", "safetensors", "huggingface_hub", "math-verify",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs the command; the exit code is 1 when something that a run needs is missing."""
    parser = command_parser("doctor", "Check that this machine, or the hosts of a run, can run llamarl.")
    parser.add_argument(
        "--hosts",
        metavar="RUN.toml",
        help="wait for the hosts of this run, with settings as for `train`, and check them and the wires between them",
    )
    options, overrides = parser.parse_known_args(arguments)
    if options.hosts:
        return _hosts(options.hosts, overrides)
    parser.parse_args(arguments)
    print(f"python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    missing = False
    for name in PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing |= name != "torchmonarch"
            print(f"{name} is missing" + ("; only cluster.kind = 'inline' works" if name == "torchmonarch" else ""))
    if missing:
        return 1

    import torch

    from llamarl.config import ConfigError
    from llamarl.kernels import attention, build, paths, products

    try:
        reason = attention.kernel().reason
    except ConfigError as error:
        print(error)
        return 1
    print(f"C++ kernels: {reason or 'compiled'}; {build.VARIABLE} can be {', '.join(build.offered())}")
    for kind in paths.KINDS.values():
        print(f"{kind} weights: {paths.reached(kind)}")
    products.chosen(products.LARGEST, products.LARGEST)
    print(products.describe())
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(f"GPUs: {', '.join(gpus) or 'none, CPU only'}")
    print(f"free disk here: {shutil.disk_usage('.').free / 1e9:.0f} GB")
    return 0


def _hosts(path: str, overrides: Sequence[str]) -> int:
    """Who would be where, and how they reach each other. Raises ConfigError."""
    from llamarl.config import ConfigError, load_config
    from llamarl.config.ref import part

    config = load_config(path, overrides)
    if config.cluster.kind != "hosts":
        raise ConfigError(f"--hosts {path}: cluster.kind = {config.cluster.kind!r} has one machine; set 'hosts'")
    part("hosts", "inspect")(config, lambda line: print(line, flush=True))
    return 0
