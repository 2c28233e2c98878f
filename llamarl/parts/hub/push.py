"""Puts a model on the Hub, by the process in which its client runs."""

from __future__ import annotations

from pathlib import Path

from llamarl.config import ConfigError, RunConfig
from llamarl.config.hub import HubName, why_offline
from llamarl.parts.hub.card import MARK, model_card
from llamarl.parts.hub.process import Client
from llamarl.parts.hub.progress import shown

PUSH_S = 12 * 3600.0
"""Longest wait in seconds for a push: half a terabyte at 12 MB/s. The client gives up much earlier, if nothing goes."""


def push_model(
    run: Path, config: RunConfig, folder: Path, step: int, name: HubName, *, adapters: bool, private: bool
) -> str:
    """Adds the files in `folder` and a card to a repository, in one commit. What else it holds stays, and so does a
    card by somebody else.

    Args:
        run: folder of the run, which `config` began.
        step: of the checkpoint that was written to `folder`.
        adapters: of a LoRA run are all that is there, in PEFT's format.
        private: of a repository that is made by this; one that is there stays what it is.

    Returns:
        Where it is, at which commit, and who may see it.

    Raises:
        ConfigError: there is no token, or none that may write there; the Hub gives no answer.
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
