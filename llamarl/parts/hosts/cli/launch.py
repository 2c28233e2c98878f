"""`llamarl launch slurm|kubernetes RUN.toml [--dry-run] [--section.key value ...]`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from llamarl.cli.main import FAILURE
from llamarl.cli.options import command_parser, with_settings, write_output
from llamarl.config import ConfigError

EPILOG = """The run is that of `llamarl train RUN.toml` with the same overrides, on cluster.num_hosts machines;
cluster.kind, cluster.listen and cluster.pki are set for you. Options of sbatch by their long names:
--launch.slurm.partition gpu --launch.slurm.time 24:00:00; of Kubernetes: --launch.kubernetes.image IMAGE
--launch.kubernetes.claim CLAIM. The submitted files are kept in <output>/<name>.launch; see docs/hosts.md."""
SUBMIT_S = 120.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("launch", "Submit a run on several hosts to a scheduler.", EPILOG)
    parser.add_argument("scheduler", choices=("slurm", "kubernetes"))
    parser.add_argument("config", metavar="RUN.toml")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and stop")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="write a base for Kustomize with the certificates, and stop"
    )
    options, overrides = with_settings(parser, arguments)

    from llamarl.parts.hosts.launch import script

    if options.to and options.scheduler == "slurm":
        raise ConfigError("--to is for kubernetes; `llamarl launch slurm ... --dry-run > FILE` writes the script")
    config = script.several_hosts(options.config, overrides)
    is_slurm = options.scheduler == "slurm"
    text = script.slurm_script(config, options.config, overrides) if is_slurm else script.kubernetes_manifest(config)
    if options.dry_run:
        print(text, end="")
        return 0
    if options.to:
        script.write_kustomization(config, options.to)
        print(f"kubectl apply --kustomize {options.to}")
        return 0
    folder = script.files_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --output") from None
    path = folder / ("slurm.sh" if is_slurm else "kubernetes.yaml")
    write_output(path, text)
    if is_slurm:
        return _submitted(["sbatch", str(path)], "")
    with_secret = script.kubernetes_manifest(config, script.kubernetes_secrets(config))
    return _submitted(["kubectl", "apply", "--filename", "-"], with_secret)


def _submitted(command: list[str], text: str) -> int:
    """Submits a job. Returns the exit code. Raises ConfigError if there is no scheduler or no answer."""
    try:
        done = subprocess.run(command, check=False, input=text, text=True, timeout=SUBMIT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{error}; submit where `{command[0]}` works, or use --dry-run") from None
    return FAILURE if done.returncode else 0
