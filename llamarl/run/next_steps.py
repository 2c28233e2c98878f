"""Commands that make sense after a run, for its last lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from llamarl.config import RunConfig
from llamarl.run.folder import RunFolder


def next_commands(config: RunConfig, folder: RunFolder, *, of_sft: bool = False) -> list[str]:
    """Returns one or two lines that name commands for a run that has finished. Commands for its model are named only
    if the run has saved a checkpoint."""
    run = shlex.quote(str(folder.path))
    lines = [f"next: `llamarl report {run}` shows the run as one HTML file"]
    if folder.saved_steps():
        asks = ", ".join(f"`{one}`" for one in _asks(config, run, of_sft=of_sft))
        lines.append(f"the model: {asks}; `llamarl export {run}` writes it as a Hugging Face folder")
    return lines


def _asks(config: RunConfig, run: str, *, of_sft: bool) -> Iterator[str]:
    if config.data.eval is not None and not of_sft:
        yield f"llamarl eval {run}"
    if not config.has_episodes:
        yield f"llamarl generate {run} --prompts FILE"
    yield f"llamarl serve {run}"
