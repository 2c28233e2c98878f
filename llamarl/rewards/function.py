"""Scores by a Python function of the user's."""

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
from llamarl.sandbox.pool import Failure, WorkerPool
from llamarl.types import Outcome, RewardItem, RewardResult

TOGETHER = 32
"""Responses that one worker gets at a time of an async function, which may wait for all of them at once."""


@dataclass
class Function(Reward):
    """Reward by `def reward(prompt, response, answer, **row) -> float | bool`, or `async def`.

    It gets those of its parameters that the row has. A response is right when the value is above 0. None means that the
    function has no opinion about the row, and other parts decide. An error, a value that is no number, and what a limit
    ends is INVALID, and says the function's own line. It runs in worker processes.
    """

    call: str = ""
    """Place of the function, `package.module:function`."""
    file: FilePath = ""
    """In place of `call`: a file into which `llamarl.train` wrote a function that no module has."""
    digest: str = ""
    """SHA-256 of that file, in hexadecimal: another one is not loaded."""
    content: str = ""
    """The same file in base64, for a process that cannot read it."""
    curve: str = ""
    """Name of its curve, and in sentences about it."""
    is_async: bool = False
    """The function is `async def`: a worker gets several responses at once."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that score at the same time."""
    cpu_s: Annotated[int, Field(ge=1)] = 10
    """CPU seconds for what a worker gets at a time."""
    wall_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one response."""
    memory_bytes: Annotated[int, Field(ge=1 << 28)] = 1 << 34
    """Address space of one worker; importing torch takes 8 GiB of it."""
    batch_s: Annotated[float, Field(gt=0)] = 240.0
    """Seconds for one call of `score`; what is not judged by then is INVALID."""

    def __post_init__(self) -> None:
        if bool(self.call) == bool(self.file or self.content):
            raise ValueError("give one of `call`, `package.module:function`, and `file`")
        if self.file:
            may_run("reward.parts.file", self.file)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._target = self.call or self._unpacked()
        self._pool = WorkerPool(
            "llamarl.rewards._function_worker:call", num_workers=self.workers, cpu_s=self.cpu_s,
            wall_s=self.wall_s, slack_s=self.wall_s * 0.1 + 1, memory_bytes=self.memory_bytes, keeps_environment=True,
            warm_up=[{"target": self._target, "rows": [], "item_s": self.wall_s}],
        )  # fmt: skip

    def _unpacked(self) -> str:
        """Path of a copy of the pickle that nobody else can change. Raises ValueError: it is not the one on record."""
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
        for job, said in zip(jobs, self._pool.map(jobs, self.batch_s), strict=True):
            found: list[Any] = [{"error": said.reason}] * len(job["rows"]) if isinstance(said, Failure) else said
            results += [self._result(one) for one in found]
        return results

    def _result(self, said: dict[str, Any]) -> RewardResult:
        label = self.curve or self.call or "the reward function"
        if "error" in said:
            return invalid(f"{label}: {said['error']}")
        if said["value"] is None:
            return absent(f"{label} gave None: no opinion about this row")
        value = float(said["value"])
        if not abs(value) <= MAX_REWARD:  # NaN, too
            return invalid(f"{label} gave {value}; give a number of at most {MAX_REWARD:g}, either way")
        return RewardResult(outcome=Outcome.SCORE if value > 0 else Outcome.WRONG, value=value)

    def close(self) -> None:
        self._pool.close()
        if self._folder is not None:
            self._folder.cleanup()
