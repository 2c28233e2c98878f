"""Scores by a user's Python function."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import FilePath
from llamarl.config.ref import may_run
from llamarl.rewards._base import MAX_REWARD, Reward, absent, invalid
from llamarl.rewards._given import given_bytes
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.types import Outcome, RewardItem, RewardResult

TOGETHER = 32
"""Responses that a worker gets at a time for an async function, which can await all at once."""


@dataclass
class Function(Reward):
    """Reward by `def reward(prompt, response, answer, **row) -> float | bool`, or `async def`.

    The function gets its parameters from the row. A response is right if the value is above 0. None means that the
    function has no opinion about the row, and other parts decide. An error, a value that is not a number, and an
    exceeded limit are INVALID, with the line of the function. The function runs in worker processes.
    """

    call: str = ""
    """Name of the function, `package.module:function`."""
    file: FilePath = ""
    """Instead of `call`: a file into which `llamarl.train` wrote a function that no module has."""
    digest: str = ""
    """SHA-256 of that file, in hexadecimal. Other content is not loaded."""
    content: str = ""
    """The same file in base64, for a process that cannot read it."""
    curve: str = ""
    """Name of its curve, also used in messages."""
    is_async: bool = False
    """Whether the function is `async def`, so that a worker gets several responses at once."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that score at the same time."""
    cpu_s: Annotated[int, Field(ge=1)] = 10
    """CPU seconds for the responses that a worker gets at a time."""
    wall_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one response."""
    memory_bytes: Annotated[int, Field(ge=1 << 28)] = 1 << 34
    """Address space of one worker; importing torch takes 8 GiB of it."""
    batch_s: Annotated[float, Field(gt=0)] = 240.0
    """Seconds for one call of `score`. Responses that are not judged by then are INVALID."""

    def __post_init__(self) -> None:
        if bool(self.call) == bool(self.file or self.content):
            raise ValueError("give one of `call`, `package.module:function`, and `file`")
        if self.file:
            may_run("reward.parts.file", self.file)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._target = self.call or self._unpacked()
        self._pool = WorkerPool(
            "llamarl.rewards._function_worker:call",
            Limits(
                num_workers=self.workers,
                cpu_s=self.cpu_s,
                wall_s=self.wall_s,
                slack_s=self.wall_s * 0.1 + 1,
                memory_bytes=self.memory_bytes,
            ),
            keeps_environment=True,
            warm_up=[{"target": self._target, "rows": [], "item_s": self.wall_s}],
        )

    def _unpacked(self) -> str:
        """Returns the path of a copy of the pickle that no other user can change. Raises ValueError: it is not the file
        on record."""
        data = base64.b64decode(self.content) if self.content else given_bytes(self.file, self.digest)
        self._folder = tempfile.TemporaryDirectory(prefix="llamarl-")
        path = Path(self._folder.name, f"{hashlib.sha256(data).hexdigest()}.pickle")
        path.write_bytes(data)
        return str(path)

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        rows = [
            {**item.metadata, "prompt": item.prompt, "response": item.response, "answer": item.answer}
            for item in items
        ]  # fmt: skip
        size = TOGETHER if self.is_async else 1
        jobs = [
            {"target": self._target, "rows": rows[first : first + size], "item_s": self.wall_s}
            for first in range(0, len(rows), size)
        ]  # fmt: skip
        results = list[RewardResult]()
        for job, reply in zip(jobs, self._pool.map(jobs, self.batch_s), strict=True):
            replies: list[Any] = [{"error": reply.reason}] * len(job["rows"]) if isinstance(reply, Failure) else reply
            results += [self._result(reply) for reply in replies]
        return results

    def _result(self, reply: dict[str, Any]) -> RewardResult:
        label = self.curve or self.call or "the reward function"
        if "error" in reply:
            return invalid(f"{label}: {reply['error']}")
        if reply["value"] is None:
            return absent(f"{label} gave None: no opinion about this row")
        value = float(reply["value"])
        if not abs(value) <= MAX_REWARD:  # refuses NaN too
            return invalid(f"{label} gave {value}; give a number of at most {MAX_REWARD:g}, either way")
        return RewardResult(outcome=Outcome.SCORE if value > 0 else Outcome.WRONG, value=value)

    def close(self) -> None:
        self._pool.close()
        if self._folder is not None:
            self._folder.cleanup()
