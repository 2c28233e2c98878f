"""A Python tool whose code can only compute."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import ConfigError, Ref
from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn
from llamarl.parts.episodes.environments._functions import ToolError, answers, schema
from llamarl.parts.episodes.environments._open_machine import OpenMachine, backend_of, in_thread
from llamarl.parts.episodes.machines import MachineLimits, MachineLost
from llamarl.parts.episodes.machines._base import pack
from llamarl.parts.episodes.sandbox import seccomp
from llamarl.parts.episodes.sandbox.judge import JudgeJob, judge
from llamarl.rewards._base import wrong
from llamarl.types import RewardResult

_BLOCK = re.compile(r".*```(?:python|py)\n(.*?)\n?```\s*\Z", re.DOTALL)
_NO_FILES = pack({})
_LEFT_OUT = "(left out from here on)"
_RUN_BLOCK = """
import ast, io, random, sys, traceback
random.seed(0)
names = {"__name__": "__main__"}

def run_block(block, out):
    try:
        tree = ast.parse(block)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec", dont_inherit=True), names)
        shown = shown and compile(ast.Expression(shown.value), "<code>", "eval", dont_inherit=True)
        if shown and (value := eval(shown, names)) is not None:
            print(repr(value))
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
        out.write(f"line {lines[-1]}: " if lines else "")
        out.write("".join(traceback.format_exception_only(error)))
"""
_AGAIN = """
out = sys.stdout
for block in blocks[:-1]:
    sys.stdout = io.StringIO()
    run_block(block, sys.stdout)
sys.stdout = out
run_block(blocks[-1], out)
"""
_LIVING = """
import os
asked, done = os.fdopen(3, "rb", 0), 4
while asked.read(1):
    with open("/run/shell/text", encoding="utf-8") as file:
        block = file.read()
    try:
        run_block(block, sys.stdout)
        sys.stdout.flush()
    except (KeyboardInterrupt, OSError, ValueError, AttributeError):
        pass
    os.write(done, b".")
"""


@dataclass
class Python(Environment):
    """Replies to a turn that ends with a closed ```` ```python ```` block with the output of the code, the value of its
    last line, or its error. A turn without a block ends the episode.

    Without `backend`, names persist from turn to turn because earlier code runs again first, with the same random seed.
    Code that exceeded a limit is skipped. Code is confined as in the reward `code`: it has no files and no network.

    With `backend`, each episode has a machine with an interpreter that stays alive, with files, processes, and the
    packages that run llamarl, such as numpy and sympy. An episode whose machine exceeds `cpu_s` or `program_bytes`, or
    ends, is WRONG."""

    observation_tokens: Annotated[int, Field(ge=1)] = field(default=1280, kw_only=True)
    """Maximum tokens of an observation. A longer one makes the episode INVALID."""
    stop: list[str] = field(default_factory=lambda: ["\n```\n"], kw_only=True)
    """Strings that end a turn, like a stop token. The token that completes one of them is kept."""
    backend: Ref | None = None
    """What starts machines, such as `bubblewrap`. None means that code can only compute, and runs again each turn."""
    is_tool: bool = False
    """The chat template offers the tool `python`, and code arrives in its calls instead of blocks."""
    cpu_s: Annotated[int, Field(ge=1)] = 5
    """CPU seconds for all code of an episode, also when it runs again."""
    wall_s: Annotated[float, Field(gt=0)] = 7.0
    """Wall-clock seconds for all code of an episode when it runs again, or for the code of a turn in a machine. Less
    than `step_s`, and over all turns less than `episode_s`."""
    program_bytes: Annotated[int, Field(ge=1 << 27)] = 1 << 28
    """Address space of the code in bytes. At most `memory_bytes`."""
    output_bytes: Annotated[int, Field(ge=1)] = 1000
    """Maximum bytes of output; longer output is cut. Less than `observation_tokens`, because a token has at least one
    byte."""

    def __post_init__(self) -> None:
        self._backend = backend_of(self.backend) if self.backend else None
        if self.backend is None and (lacking := seccomp.missing()):
            raise ConfigError(f"programs cannot be confined here: {lacking}; use such a machine, or no `python`")
        for less, more in (
            ("wall_s", "step_s"),
            ("program_bytes", "memory_bytes"),
            ("output_bytes", "observation_tokens"),
        ):
            if getattr(self, less) >= getattr(self, more):
                raise ConfigError(f"{less} = {getattr(self, less)} must be less than {more} = {getattr(self, more)}")
        if (longest_s := self.max_turns * self.wall_s) >= self.episode_s:  # otherwise no verdict
            raise ConfigError(f"max_turns * wall_s = {longest_s:g} must be less than episode_s = {self.episode_s:g}")

    def tools(self) -> list[dict[str, Any]]:
        return [schema(self._runner([]))] if self.is_tool else []

    @property
    def is_stateful(self) -> bool:
        return self._backend is not None

    @property
    def waits(self) -> bool:
        return self._backend is not None

    def open(self, task: Task) -> None:
        if self._backend is not None:
            limits = MachineLimits(cpu_s=self.cpu_s, memory_bytes=self.program_bytes)
            self._open = OpenMachine(self._backend, limits)

    def close(self) -> None:
        self._open.close()

    def reply(  # type: ignore[override]
        self, task: Task, turns: Sequence[Turn]
    ) -> str | Messages | RewardResult | Awaitable[str | Messages | RewardResult | None] | None:
        if self._backend is not None:
            return in_thread(self._in_machine, turns)
        return self._said(turns[-1], self._runner([code for turn in turns[:-1] for code in self._codes(turn)]))

    def _said(self, turn: Turn, run: Callable[[str], str]) -> str | Messages | None:
        """Runs the code of a turn. Returns None if there is none."""
        if self.is_tool:
            return answers(turn.calls, {"python": run}) or None
        try:
            outputs = [run(code) for code in self._codes(turn)]
        except ToolError as error:
            outputs = [f"error: {error}"]
        return f"```output\n{outputs[0].rstrip()}\n```\n" if outputs else None

    def _in_machine(self, turns: Sequence[Turn]) -> str | Messages | RewardResult | None:
        """Replies with the output of the living interpreter."""
        self._until_s, self._lost = time.monotonic() + self.wall_s, None
        said = self._said(turns[-1], self._runner(None))
        return wrong(0.0, self._lost) if self._lost else said

    def _codes(self, turn: Turn) -> list[str]:
        """Returns the programs of a turn."""
        if _LEFT_OUT in (turn.observation or ""):
            return []
        if self.is_tool:
            codes = [call.arguments.get("code") for call in turn.calls if call.name == "python"]
            return [code for code in codes if isinstance(code, str)]
        return _BLOCK.findall(turn.response)

    def _runner(self, codes: list[str] | None) -> Callable[[str], str]:
        """Returns a function that runs code in the machine, or without one after `codes`, to which it adds the code."""

        def python(code: str) -> str:
            """Runs Python code. Names persist from call to call.

            Args:
                code: the program; its output and the value of its last line are returned
            """
            if codes is None:
                return self._living_output(code)
            codes.append(code)
            return self._output(f"{_RUN_BLOCK}\nblocks = {codes!r}\n{_AGAIN}")

        return python

    def _output(self, code: str) -> str:
        """Returns the output. Raises ToolError if the code exceeded a limit or exited."""
        limits = {"cpu_s": self.cpu_s, "memory_bytes": self.program_bytes}
        job = asdict(JudgeJob(code=code, shows=self.output_bytes + 1))
        is_right, said, _ = judge({"limits": limits, "wall_s": self.wall_s, "job": job})
        if not is_right:
            raise ToolError(f"{said} {_LEFT_OUT}")
        return self._cut(said.encode())

    def _living_output(self, code: str) -> str:
        """Returns the output. Raises ToolError if the machine is lost or the interpreter ended."""
        try:
            left_s = max(self._until_s - time.monotonic(), 1e-3)
            done = self._open.started(None, _NO_FILES).ask(
                _RUN_BLOCK + _LIVING, code, left_s, 2 * self.output_bytes + 2
            )
        except MachineLost as lost:
            self._lost = str(lost)
            raise ToolError(self._lost) from None
        said = self._cut(done.output[: self.output_bytes + 1])
        if done.code:
            raise ToolError(f"{said}the interpreter ended; all names are lost")
        if done.is_late:
            raise ToolError(f"{said}over {self.wall_s:g} s")
        return said

    def _cut(self, text: bytes) -> str:
        if len(text) <= self.output_bytes:
            return text.decode(errors="replace")
        return f"{text[: self.output_bytes].decode(errors='ignore')}\n(cut)\n"
