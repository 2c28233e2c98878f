"""Uploads a model to the Hub, through the process of its client."""

from __future__ import annotations

from pathlib import Path

from llamarl.config import ConfigError, RunConfig
from llamarl.config.hub import HubName, why_offline
from llamarl.parts.hub.card import MARK, model_card
from llamarl.parts.hub.process import Client
from llamarl.parts.hub.progress import shown

PUSH_S = 12 * 3600.0
"""Maximum seconds of a push: half a terabyte at 12 MB/s. The client gives up much earlier without progress."""


def push_model(
    run: Path, config: RunConfig, folder: Path, step: int, name: HubName, *, adapters: bool, private: bool
) -> str:
    """Adds the files in `folder` and a card to a repository, in one commit. Other files stay, and so does a card
    written by a person.

    Args:
        run: folder of the run.
        step: step of the checkpoint in `folder`.
        adapters: `folder` contains only LoRA adapters, in PEFT's format.
        private: creates a private repository. An existing repository keeps its visibility.

    Returns:
        Address, commit and visibility.

    Raises:
        ConfigError: there is no token with write access, or the Hub does not answer.
    """
    card = model_card(run, config, step, name.repo.partition("/")[2], adapters=adapters)
    if offline := why_offline():
        raise ConfigError(f"{offline}, and nothing goes there; unset that")
    rows = {path.name: str(path.resolve()) for path in sorted(folder.iterdir()) if path.name != "README.md"}
    with Client() as client, shown(f"{name}: pushing", lines=True) as progress:
        found = client.ask(
            name, "model", progress, stall_s=PUSH_S, order="push", files=rows, card=card, mark=MARK, private=private
        )
    kept = "" if found["card"] else "; its README.md is somebody's own and stays"
    return f"{found['url']} at commit {found['commit']} ({'private' if found['is_private'] else 'public'}{kept})"
