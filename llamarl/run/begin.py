"""All that comes before a run: its settings become a folder and what `run` needs, or a sentence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from llamarl.cluster.open import check_cluster
from llamarl.config import ConfigError, RunConfig, load_sft_config
from llamarl.config.ref import part
from llamarl.run.folder import RunFolder, check_run_folder, prepare_run_folder
from llamarl.run.memory import MachineMemory
from llamarl.run.names import check_folder, named, resolved
from llamarl.run.prepare import Prepared, check_here, check_parts, each_source, prepare, settle
from llamarl.run.preview import check_functions
from llamarl.run.sources import of_source
from llamarl.run.start_model import with_start_model
from llamarl.run.trust import check_trust, with_trusted
from llamarl.training.base_model import is_made

Delays = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A run that can start."""

    config: RunConfig
    """Settings with commits in the place of names of the Hub."""
    prepared: Prepared
    folder: RunFolder
    """Locked by this process."""


def begin(
    config: RunConfig, *, resume: bool, overwrite: bool, command: str, tell: Callable[[str], None],
    trust: bool = False, delays: Delays = nullcontext,
) -> Begun:  # fmt: skip
    """Checks what can be checked, makes the base model where a warm start makes it, fetches what the Hub has, and takes
    the run's folder.

    Args:
        command: begins lines about the Hub's names, on standard error.
        tell: hears the first prompt.
        trust: what the folder of a run that goes on makes this process execute, the user trusts.
        delays: entered while nothing else says how far this is.

    Raises:
        ConfigError: it cannot start; nothing was written but a base model.
    """
    with delays():
        config = trusted(config, trust, resume=resume, keep=True)
        config = with_start_model(config, command=command)
        run = check_start(config, resume=resume, overwrite=overwrite)
    if not has_base_model(config):
        part("sft", "ensure_base_model")(config)
    written, pinned, prepared = looked_ahead(config, run, command=command, delays=delays)
    tell(prepared.first_prompt)
    folder = prepare_run_folder(written, resume=resume, overwrite=overwrite, pinned=pinned)
    return Begun(config=pinned, prepared=prepared, folder=folder)


def trusted(config: RunConfig, trust: bool, *, resume: bool, keep: bool) -> RunConfig:
    """The settings of a run that may execute what they name; `trust` is what the user says of that.

    Args:
        keep: files of functions that are trusted are kept below the folder of runs.

    Raises:
        ConfigError: the folder of the run that goes on has not been trusted.
    """
    if trust and not resume:
        raise ConfigError("--trust is for --resume, which executes what a run's folder names; leave it out")
    if resume:
        check_trust(Path(config.output, config.name), config, command="--resume", is_trusted=trust)
    return with_trusted(config, Path(config.output) if keep else None) if trust else config


def check_before_folder(config: RunConfig, *, is_here: bool = True) -> None:
    """Checks what needs neither model, data nor the run's folder. `is_here`: this machine is the one that the run is
    for. Raises ConfigError."""
    check_parts(config)
    if is_here and config.cluster.kind != "hosts":
        check_here(config)
    check_cluster(config.cluster)


def check_start(config: RunConfig, *, resume: bool, overwrite: bool) -> Path | None:
    """Checks what needs neither model nor data; the folder of a run that goes on. Raises ConfigError."""
    check_before_folder(config)
    path = check_run_folder(config, resume=resume, overwrite=overwrite)
    return path if resume else None


def looked_ahead(
    config: RunConfig,
    run: Path | None,
    *,
    command: str,
    weights: bool = True,
    machine: MachineMemory | None = None,
    delays: Delays = nullcontext,
) -> tuple[RunConfig, RunConfig, Prepared]:
    """The settings as they are recorded, and as they are used, and what the run needs of its model and data. The model
    exists.

    Args:
        run: folder of the run that goes on.
        command: begins lines about the Hub's names, on standard error.
        weights: are fetched and looked at, too; where hosts compute, they fetch for themselves.
        machine: that the run is for; None: this one.
        delays: entered while nothing else says how far this is.

    Raises:
        ConfigError: the run cannot start.
    """
    pinned = resolved(config, weights=weights and config.cluster.kind != "hosts", run=run, command=command)
    for one in named(pinned):
        if one.name is None:
            check_folder(one.path, one.option)
    with delays():
        written, pinned = settle(config, pinned, resume=run is not None, for_agent=config.rollout.agent is not None)
        prepared = prepare(pinned, weights=weights, machine=machine)
        for label, one, own in each_source(pinned, prepared.problems.train):
            with of_source(label):
                check_functions(one, own)
    return written, pinned, prepared


def has_base_model(config: RunConfig) -> bool:
    """Whether no warm start has to make the model first. Raises ConfigError."""
    return not config.model.warm_start or is_made(config.model.path, load_sft_config(config.model.warm_start))
