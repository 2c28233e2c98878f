"""Records a W&B run, configured by the variables of W&B: `WANDB_PROJECT`, `WANDB_MODE=offline` and so on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import ClassVar

from llamarl.config import open_own
from llamarl.observability.sinks import Subject
from llamarl.parts.page.trackers._base import Tracker


class Wandb(Tracker):
    """Records metrics in W&B. A resumed run keeps its id, and W&B ignores steps that it already has."""

    PACKAGE: ClassVar[str] = "wandb"

    def __init__(self, subject: Subject) -> None:
        import wandb  # pyrefly: ignore

        # The id is in the run folder, so that a resumed run continues and an overwritten run gets another id.
        (kept := subject.folder / "wandb" / "id").parent.mkdir(exist_ok=True)
        if not kept.exists():
            with open_own(kept, "x") as file:
                file.write(secrets.token_hex(4))
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "llamarl"),
            name=subject.name,
            id=kept.read_text(encoding="utf-8"),
            dir=str(subject.folder.resolve()),
            config=dict(subject.settings),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # its own process would stay as long as this one
