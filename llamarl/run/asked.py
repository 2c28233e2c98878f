"""A model to ask, whatever names it: a run, an export, adapters, a model's folder, a name of the Hub."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, from_home, load_recorded
from llamarl.data.chat_format import of_run
from llamarl.models.folder import is_adapter
from llamarl.run.names import resolved_path

OF_GENERATOR = {"device", "dtype", "kv_dtype", "threads", "max_running", "prefill_tokens", "cuda_graphs"}
"""Settings of a run's generators with which its model is served: they decide what is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """A model that can be opened."""

    path: str
    """Folder, or `owner/name@commit` of the Hub."""
    run: RunConfig | None = None
    """Settings of the run that it is the newest checkpoint of; None means that it is not named by a run."""
    place: Path | None = None
    """File of these settings."""

    @property
    def settings(self) -> dict[str, Any]:
        """Tables by which the run formats prompts, ends responses and serves its model. Empty without a run."""
        if self.run is None:
            return {}
        run = self.run
        return {
            "data": of_run(run.data, for_agent=run.rollout.agent is not None),
            "rollout": run.rollout.model_dump(mode="json", include={"max_new_tokens", "stop_strings"}),
            "generator": run.generator.model_dump(mode="json", exclude_none=True, include=OF_GENERATOR),
        }


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run that has, or may have, checkpoints."""
    folder = Path(from_home(path))
    return (folder / "config.toml").is_file() and not (folder / "config.json").is_file()


def run_settings(path: str | Path) -> RunConfig:
    """Settings of the run in a folder. Raises ConfigError."""
    return load_recorded(Path(from_home(path)) / "config.toml")


@contextmanager
def asked_model(given: str | Path, option: str, *, command: str) -> Iterator[AskedModel]:
    """Opens what a command names as its model. Checkpoints of a run and adapters become a folder that lasts as long as
    the context.

    Args:
        option: names the argument in messages.
        command: begins lines on standard error about what is read.

    Raises:
        ConfigError: there is no such model, no valid checkpoint, or no base model of an adapter.
    """
    path = Path(from_home(given))
    if not is_run(path) and not is_adapter(path):
        yield AskedModel(path=resolved_path(str(from_home(given)), option, command=command))
        return
    with tempfile.TemporaryDirectory(prefix="llamarl-", ignore_cleanup_errors=True) as folder:
        to = Path(folder, "model")
        if is_run(path):
            from llamarl.run.export import export_values

            config = run_settings(path)
            step = export_values(path, config, to, command=command)
            sys.stderr.write(f"{command}: step {step} of {given}\n")
            yield AskedModel(path=str(to), run=config, place=path / "config.toml")
            return
        from llamarl.models.peft import Adapter

        adapter = Adapter.of(path)
        base = resolved_path(adapter.base, f"base_model_name_or_path of {given}", command=command)
        sys.stderr.write(f"{command}: adapters in {given}, merged into {base}\n")
        adapter.merge(base, to)
        yield AskedModel(path=str(to))
