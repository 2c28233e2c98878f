"""`RunRecord`: what a run has left, or leaves while it goes on, as rows for pandas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llamarl.config import RunConfig, from_home, load_recorded, read_json
from llamarl.config.errors import told_in_python
from llamarl.config.load import flat_settings
from llamarl.config.path import not_a_run
from llamarl.observability.files import pieces, read_run_rows
from llamarl.run.folder import RunFolder
from llamarl.run.rollouts import rollout_rows


class RunRecord:
    """The folder of a run, read anew at each call."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: there is no run."""
        self.path = path.resolve()
        self._folder = RunFolder(self.path)
        if not self._folder.config.exists():
            raise not_a_run(path)

    def __repr__(self) -> str:
        return f"RunRecord({str(self.path)!r}, {self._folder.recorded_steps()} steps)"

    @property
    def config(self) -> RunConfig:
        """All settings. Raises ConfigError: its file is damaged."""
        return load_recorded(self._folder.config)

    @property
    def summary(self) -> dict[str, Any]:
        """Numbers at the end; empty before. Raises ConfigError: its file is damaged."""
        return read_json(self._folder.summary, "start again") if self._folder.summary.exists() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """A flat row for each step: numbers by name, what is nested behind dots; NaN where there is none. Raises
        ConfigError: a row is damaged."""
        return [_flat(row) for row in self._rows("step")]

    def evals(self) -> list[dict[str, Any]]:
        """A row for each evaluation, as `metrics`. Raises ConfigError."""
        return [_flat(row) for row in self._rows("eval")]

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """A row for each rollout that was trained on: step, prompt, response, reward, advantage and more. Raises
        ConfigError: there are none."""
        return rollout_rows(self.path)

    @told_in_python
    def export(
        self,
        folder: str | Path | None = None,
        *,
        step: int | None = None,
        merge: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> Path:
        """Writes a checkpoint as a Hugging Face folder, or adapters as PEFT's, as `llamarl export` does.

        Args:
            folder: to write; None: `export` in the run's folder, `merged` with `merge`.
            step: of the checkpoint; None: the newest valid one.
            merge: adapters into the base model.
            dtype: type of the weights. None means the type that the run trained with, and float32 for adapters.

        Returns:
            The folder.

        Raises:
            ConfigError: there is no such checkpoint, it is damaged, or `folder` holds something else.
        """
        from llamarl.run.export import export

        to = None if folder is None else from_home(folder)
        return export(self.path, self.config, to, step, merge, command="llamarl", dtype=dtype).folder

    def _rows(self, kind: str) -> Iterator[dict[str, Any]]:
        if not any(one.stat().st_size for one in pieces(self._folder.metrics) if one.exists()):
            return  # it has just begun
        for _, row in read_run_rows(self._folder.metrics, "start again"):
            if row.get("kind") == kind:
                yield {name: value for name, value in row.items() if name != "kind"}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found = flat_settings(row)
    return {name: math.nan if value is None else value for name, value in found if value != {}}
