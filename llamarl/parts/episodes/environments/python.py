"""A Python tool whose code can only compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import ConfigError
from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn
from llamarl.parts.episodes.environments._functions import ToolError, answers, schema
from llamarl.parts.episodes.sandbox import seccomp
from llamarl.parts.episodes.sandbox.judge import JudgeJob, judge

_BLOCK = re.compile(r".*```(?:python|py)\n(.*?)\n?```\s*\Z", re.DOTALL)
_LEFT_OUT = "(left out from here on)"
_SESSION = """
import ast, io, random, sys, traceback
random.seed(0)
out, names, blocks = sys.stdout, {{"__name__": "__main__"}}, {blocks!r}
for number, block in enumerate(blocks):
    sys.stdout = out if number == len(blocks) - 1 else io.StringIO()
    try:
        tree = ast.parse(block)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec", dont_inherit=True), names)
        shown = shown and compile(ast.Expression(shown.value), "<code>", "eval", dont_inherit=True)
        if shown and (value := eval(shown, names)) is not None:
            print(repr(value))
    except BaseException as error:
        if number == len(blocks) - 1:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
            out.write(f"line {{lines[-1]}}: " if lines else "")
            out.write("".join(traceback.format_exception_only(error)))
"""


@dataclass
class Python(Environment):
    """Replies to a turn that ends with a closed ```` ```python ```` block with the output of the code, the value of its
    last line, or its error. A turn without a block ends the episode.

    Names persist from turn to turn, because earlier code runs again first, with the same random seed. Code that
    exceeded a limit is skipped. Code is confined as in the reward `code`: it has no files and no network."""

    observation_tokens: Annotated[int, Field(ge=1)] = field(default=1280, kw_only=True)
    """Maximum tokens of an observation. A longer one makes the episode INVALID."""
    stop: list[str] = field(default_factory=lambda: ["\n```\n"], kw_only=True)
    """Strings that end a turn, like a stop token. The token that completes one of them is kept."""
    is_tool: bool = False
    """The chat template offers the tool `python`, and code arrives in its calls instead of blocks."""
    cpu_s: Annotated[int, Field(ge=1)] = 5
    """CPU seconds for all code of an episode, when it runs again."""
    wall_s: Annotated[float, Field(gt=0)] = 7.0
    """Wall-clock seconds for all code of an episode. Less than `step_s`, and over all turns less than `episode_s`."""
    program_bytes: Annotated[int, Field(ge=1 << 27)] = 1 << 28
    """Address space of the code in bytes. At most `memory_bytes`."""
    output_bytes: Annotated[int, Field(ge=1)] = 1000
    """Maximum bytes of output; longer output is cut. Less than `observation_tokens`, because a token has at least one
    byte."""

    def __post_init__(self) -> None:
        if lacking := seccomp.missing():
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

    def reply(self, task: Task, turns: Sequence[Turn]) -> str | Messages | None:
        run = self._runner([code for turn in turns[:-1] for code in self._codes(turn)])
        if self.is_tool:
            return answers(turns[-1].calls, {"python": run}) or None
        try:
            outputs = [run(code) for code in self._codes(turns[-1])]
        except ToolError as error:
            outputs = [f"error: {error}"]
        return f"```output\n{outputs[0].rstrip()}\n```\n" if outputs else None

    def _codes(self, turn: Turn) -> list[str]:
        """Returns the programs of a turn."""
        if _LEFT_OUT in (turn.observation or ""):
            return []
        if self.is_tool:
            codes = [call.arguments.get("code") for call in turn.calls if call.name == "python"]
            return [code for code in codes if isinstance(code, str)]
        return _BLOCK.findall(turn.response)

    def _runner(self, codes: list[str]) -> Callable[[str], str]:
        """Returns a function that runs code after `codes` and appends it to them."""

        def python(code: str) -> str:
            """Runs Python code. Names persist from call to call.

            Args:
                code: the program; its output and the value of its last line are returned
            """
            codes.append(code)
            return self._output(_SESSION.format(blocks=codes))

        return python

    def _output(self, code: str) -> str:
        """Returns the output. Raises ToolError if the code exceeded a limit or exited."""
        limits = {"cpu_s": self.cpu_s, "memory_bytes": self.program_bytes}
        job = asdict(JudgeJob(code=code, shows=self.output_bytes + 1))
        is_right, said, _ = judge({"limits": limits, "wall_s": self.wall_s, "job": job})
        if not is_right:
            raise ToolError(f"{said} {_LEFT_OUT}")
        text = said.encode()
        if len(text) <= self.output_bytes:
            return said
        return f"{text[: self.output_bytes].decode(errors='ignore')}\n(cut)\n"
