"""Environments that misbehave, in every way that a user's may."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.parts.episodes.environments._base import Environment, RewardedReply, Task, Turn
from llamarl.rewards._base import right


@dataclass
class Bad(Environment):
    """Does what the last turn says."""

    def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        what = turns[-1].response
        if what == "raise":
            raise ValueError("no such thing")
        if what == "exit":
            os._exit(3)
        if what == "hang":
            time.sleep(100)
        if what == "spin":
            while True:
                pass
        answers = {
            "flood": "x" * (1 << 21), "long": "word " * 100, "fits": "7" * 60, "empty": "", "number": 7,
            "reward": right(0.5), "huge": right(-1e308),
            "messages": [{"role": "user", "content": "and now?"}], "history": f"{len(turns)} {turns[0].observation}",
            "scored": RewardedReply("more", 0.5), "scored end": RewardedReply(None, 0.5),
            "scored messages": RewardedReply([{"role": "user", "content": "more"}], -1),
            "scored nan": RewardedReply("more", math.nan), "scored text": RewardedReply("more", "1"),
            "task": f"{task.prompt}|{task.answer}|{task.metadata['level']}",
        }  # fmt: skip
        return answers.get(what)


@dataclass
class Counting(Environment):
    """Has a state, and a file while it is open; does what the last turn says."""

    def open(self, task: Task) -> None:
        self.said = list[str]()
        self.file = Path(task.metadata["folder"]) / f"{os.getpid()}-{id(self)}"
        self.file.touch()

    def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        what = turns[-1].response
        self.said.append(what)
        if what == "nap":
            time.sleep(0.5)
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise ValueError("no such thing")
        return None if what == "nothing" else f"{len(self.said)} of {len(turns)}"

    def close(self) -> None:
        self.file.unlink()
        if "stuck" in self.said:
            raise RuntimeError("it does not close")


@dataclass
class Slow(Environment):
    """Waits like a service, and does what the last turn says."""

    def open(self, task: Task) -> None:
        self.said = list[str]()
        self.file = Path(task.metadata["folder"]) / f"{os.getpid()}-{id(self)}"
        self.file.touch()

    async def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        what = turns[-1].response
        self.said.append(what)
        await asyncio.sleep(0.5)
        if what == "hang":
            await asyncio.sleep(100)
        if what == "spin":
            while True:
                pass
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise ValueError("no such thing")
        return None if what == "nothing" else f"{len(self.said)} of {len(turns)}"

    def close(self) -> None:
        self.file.unlink()


@dataclass
class Paid(Environment):
    """Rewards turns of odd length, three times."""

    stop: list[str] = field(default_factory=lambda: [" ", "e", "a", "1"], kw_only=True)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        return RewardedReply("1+2\n", float(len(turns[-1].response) % 2)) if len(turns) < 4 else None


@dataclass
class Chatty(Environment):
    """Says something three times, whatever it hears."""

    def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        return "1+2\n" if len(turns) < 4 else None


@dataclass
class Judging(Environment):
    """Counts its replies, and judges episodes that end by length by their number."""

    def open(self, task: Task) -> None:
        self.num_replies = 0

    def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        self.num_replies += 1
        return "more"

    def ended(self, task: Task, turns: Sequence[Turn]) -> Any:
        if turns[-1].response == "raise":
            raise ValueError("no such thing")
        return "7" if turns[-1].response == "text" else right(100.0 * self.num_replies + len(turns))


@dataclass
class Waiting(Environment):
    """As `Judging`, with coroutines and without a state."""

    async def reply(self, task: Task, turns: Sequence[Turn]) -> Any:
        return "more"

    async def ended(self, task: Task, turns: Sequence[Turn]) -> Any:
        await asyncio.sleep(0.01)
        return right(float(len(turns))) if turns[-1].response != "nothing" else None
