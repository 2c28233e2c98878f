"""Puts a model on the Hub, by the process in which its client runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from llamarl.config.errors import ConfigError
from llamarl.hub.names import HubName, why_offline
from llamarl.hub.process import Client
from llamarl.hub.progress import shown

PUSH_S = 12 * 3600.0
"""Longest wait in seconds for a push: half a terabyte at 12 MB/s. The client gives up much earlier, if nothing goes."""
MARK = "<!-- Written by llamarl. While this line stays, the next push writes the card anew. -->"


class Pushed(NamedTuple):
    """A model that is on the Hub now."""

    url: str
    commit: str
    is_private: bool
    card: bool
    """Its card was written; False: there was one by somebody else, which stays."""


def pushed(name: HubName, files: Mapping[str, Path], card: str, *, private: bool) -> Pushed:
    """Adds files to a repository, by their paths there, in one commit. What else it holds stays.

    Args:
        card: text of the model card, with `MARK`.
        private: of a repository that is made by this; one that is there stays what it is.

    Raises:
        ConfigError: there is no token, or none that may write there; the Hub gives no answer.
    """
    if offline := why_offline():
        raise ConfigError(f"{offline}, and nothing goes there; unset that")
    rows = {path: str(here.resolve()) for path, here in files.items()}
    with Client() as client, shown(f"{name}: pushing", lines=True) as progress:
        answer = client.ask(
            name, "model", progress, stall_s=PUSH_S, order="push", files=rows, card=card, mark=MARK, private=private
        )
    return Pushed(**{key: answer[key] for key in Pushed._fields})
