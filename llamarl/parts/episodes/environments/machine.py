"""A machine for each episode, with a shell that the policy uses."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from llamarl.config import ConfigError, Ref
from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn
from llamarl.parts.episodes.environments._functions import ToolError, answers, schema
from llamarl.parts.episodes.environments._machine_check import ANSWER_BYTES, checked, task_of
from llamarl.parts.episodes.environments._open_machine import OpenMachine, backend_of, in_thread
from llamarl.parts.episodes.machines import CommandResult, MachineLimits, MachineLost
from llamarl.rewards._base import wrong
from llamarl.types import RewardResult

_BLOCK = re.compile(r".*```(?:sh|bash|shell)\n(.*?)\n?```\s*\Z", re.DOTALL)
_STOPS = {"block": ["\n```\n"], "line": ["\n"], "tool": list[str]()}


@dataclass
class Machine(Environment):
    """Runs the commands of a turn in the machine of the episode and replies with their output. A turn without a
    command, and the last of `max_turns`, end the episode. A second machine then checks the files that the row names,
    also if the episode runs out of tokens.

    An episode whose machine ends, hangs or exceeds a limit of the whole machine is WRONG. A fault of the host or of the
    row is INVALID."""

    observation_tokens: Annotated[int, Field(ge=1)] = field(default=1280, kw_only=True)
    """Maximum tokens of an observation. A longer one makes the episode INVALID."""
    step_s: Annotated[float, Field(gt=0)] = field(default=120.0, kw_only=True)
    """Maximum seconds for one reply. A slower one makes the episode INVALID."""
    episode_s: Annotated[float, Field(gt=0)] = field(default=600.0, kw_only=True)
    """Maximum seconds for all replies of an episode. A slower episode is INVALID."""
    backend: Ref = field(default_factory=lambda: Ref(name="bubblewrap"))
    """What starts machines: a file of `llamarl/parts/episodes/machines`, or `package.module:Class`."""
    limits: MachineLimits = field(default_factory=MachineLimits)
    """MachineLimits of each machine."""
    form: Literal["block", "line", "tool"] = "block"
    """How the policy writes a command. `block`: a closed ```` ```sh ```` block at the end of the turn. `line`: each
    turn is a command line, `exit` ends the episode, and replies end with `$`. `tool`: calls of the tool `shell` of the
    chat template."""
    command_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for the commands of one turn. Commands that take longer are killed, and the episode continues."""
    check_s: Annotated[float, Field(gt=0)] = 40.0
    """Seconds for the check. A check that takes longer is WRONG."""
    output_bytes: Annotated[int, Field(ge=16)] = 1000
    """Maximum bytes of the output of a command; the middle of a longer one is left out."""

    def __post_init__(self) -> None:
        self.stop = self.stop or _STOPS[self.form]
        if (longest_s := self.command_s + self.check_s) >= self.step_s:
            raise ConfigError(f"command_s + check_s = {longest_s:g} must be less than step_s = {self.step_s:g}")
        if (longest_s := self.max_turns * self.command_s + self.check_s) >= self.episode_s:  # otherwise no verdict
            raise ConfigError(
                f"max_turns * command_s + check_s = {longest_s:g} must be less than episode_s = {self.episode_s:g}"
            )
        if self.limits.memory_bytes > self.memory_bytes:
            raise ConfigError(
                f"limits.memory_bytes = {self.limits.memory_bytes} must be at most memory_bytes = {self.memory_bytes}"
            )
        self._backend = backend_of(self.backend)

    def tools(self) -> list[dict[str, Any]]:
        return [schema(self._shell)] if self.form == "tool" else []

    def open(self, task: Task) -> None:
        self._task = task_of(task)
        self._open = OpenMachine(self._backend, self.limits)

    def close(self) -> None:
        self._open.close()

    async def reply(self, task: Task, turns: Sequence[Turn]) -> str | Messages | RewardResult:  # type: ignore[override]
        return await in_thread(self._reply, turns)

    async def ended(self, task: Task, turns: Sequence[Turn]) -> RewardResult:
        """Checks what an episode that ran out of tokens leaves. A command that was cut does not run."""
        return await in_thread(self._checked)

    def _reply(self, turns: Sequence[Turn]) -> str | Messages | RewardResult:
        self._until_s = time.monotonic() + self.command_s
        self._lost: MachineLost | None = None
        try:
            observation = self._observed(turns[-1])
            if observation is not None and len(turns) < self.max_turns:
                return observation
        except MachineLost as lost:
            return wrong(0.0, str(lost))
        return self._checked()

    def _checked(self) -> RewardResult:
        """Returns the reward for the files in the machine."""
        try:
            machine = self._open.started(self._task.folder, self._task.tar)
            tar = machine.get(self._task.answer_files, ANSWER_BYTES)
            machine.close()
            return checked(self._task, tar, self._backend, self.limits, self.check_s)
        except MachineLost as lost:
            return wrong(0.0, str(lost))

    def _observed(self, turn: Turn) -> str | Messages | None:
        """Runs the commands of a turn. Returns None if there are none. Raises MachineLost."""
        if self.form == "tool":
            messages = answers(turn.calls, {"shell": self._shell})
            if self._lost is not None:
                raise self._lost
            return messages or None
        if self.form == "line":
            command, end, _ = turn.response.partition("\n")  # one token may contain more than the line break
            command = command.strip()
            is_command = end and command not in ("", "exit")
            return f"{self._output(command)}$" if is_command else None
        commands = _BLOCK.findall(turn.response)
        return f"```output\n{self._output(commands[0]).rstrip()}\n```\n" if commands else None

    def _shell(self, command: str) -> str:
        """Runs a command in a shell whose folder and variables persist from call to call.

        Args:
            command: the command; its output is returned
        """
        if self._lost is not None:
            raise ToolError("the machine has ended")
        try:
            return self._output(command)
        except MachineLost as lost:
            self._lost = lost
            raise ToolError(str(lost)) from None

    _shell.__name__ = "shell"

    def _output(self, command: str) -> str:
        """Returns the output of a command as text that ends with a line break. Raises MachineLost."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            return f"(not started: over {self.command_s:g} s)\n"
        machine = self._open.started(self._task.folder, self._task.tar)
        return described(machine.run(command, left_s, self.output_bytes), self.command_s)


def described(done: CommandResult, limit_s: float) -> str:
    """Returns the result of a command as text for the policy."""
    output, left_out = done.output, done.total - len(done.output)
    half = len(output) - len(output) // 2
    parts = [output] if left_out <= 0 else [output[:half], f"\n({left_out} bytes left out)\n".encode(), output[half:]]
    text = b"".join(parts).decode(errors="replace").rstrip("\n")
    notes = [f"(killed after {limit_s:g} s)"] if done.is_late else [f"(exit code {done.code})"] * (done.code != 0)
    return "\n".join([*([text] if text else []), *notes, ""])
