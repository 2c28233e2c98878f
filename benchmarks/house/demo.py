"""A plain demo of a few steps in this process, and what it enters, as JSON on the last line of the output.

    python benchmarks/house/demo.py TREE BASE STEPS

A profile function (`sys.setprofile`, `threading.setprofile`) hears of every call of Python code in every thread. A file
is entered when a function of it runs, or a coroutine goes on; what runs while a module is imported does not count.
Other processes are not heard: executors run in threads here (`cluster.kind = "inline"`), and a grader's sandbox does
not. A record type is a dataclass or a named tuple of the package of which a generated `__init__`, or `__new__`, runs.

Counted are three stretches of time, in all threads, with whatever else runs in them, such as the lines of the screen:
`command` is all; `steps` is from the start of the train loop to its end, without the evaluations before and after;
`way`, of a prompt to a gradient, is from the first admission to the end of the first step of a torch optimizer.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BEGINS = {"Controller.train": "steps", "Admission.admit": "way"}
ENDS = {"Telemetry.end_loop": "steps"}
"""What begins and ends a stretch as it is entered. A checkout that calls them otherwise is refused."""
MADE = "<string>"
"""The file of generated methods."""


class Stretch:
    """What is entered while it is open; it opens once."""

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = self.has_opened = is_open
        self.codes, self.records = set[CodeType](), set[str]()

    def open(self) -> None:
        self.is_open, self.has_opened = self.is_open or not self.has_opened, True


class Entries:
    """The profile function. Threads share it: sets are added to under the interpreter's lock."""

    def __init__(self, package: Path) -> None:
        self.stretches = {"command": Stretch(is_open=True), "steps": Stretch(), "way": Stretch()}
        self._package = f"{package}/"
        self._local = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>":
            self._local.depth = getattr(self._local, "depth", 0) + (1 if event == "call" else -1)
        elif event == "call" and not getattr(self._local, "depth", 0):
            if code.co_filename == MADE:
                self._record(frame)
            elif code.co_filename.startswith(self._package):
                self._enter(code)

    def _enter(self, code: CodeType) -> None:
        if code.co_qualname in BEGINS:
            self.stretches[BEGINS[code.co_qualname]].open()
        for stretch in self.stretches.values():
            if stretch.is_open:
                stretch.codes.add(code)
        if code.co_qualname in ENDS:
            self.close(ENDS[code.co_qualname])

    def _record(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_argcount and (code.co_name == "__init__" or code.co_varnames[0] == "_cls"):
            value = frame.f_locals[code.co_varnames[0]]
            made = value if isinstance(value, type) else type(value)
            if made.__module__.startswith("llamarl."):
                for stretch in self.stretches.values():
                    if stretch.is_open:
                        stretch.records.add(f"{made.__module__.removeprefix('llamarl.')}.{made.__qualname__}")

    def close(self, name: str) -> None:
        self.stretches[name].is_open = False

    def found(self) -> dict[str, dict[str, list[str]]]:
        for name, stretch in self.stretches.items():
            assert stretch.has_opened, f"nothing of {BEGINS} began `{name}`"
            assert name == "command" or not stretch.is_open, f"nothing ended `{name}`"
        return {
            name: {
                "files": sorted({code.co_filename.removeprefix(self._package) for code in stretch.codes}),
                "records": sorted(stretch.records),
            }
            for name, stretch in self.stretches.items()
        }


def run(tree: Path, base: str, steps: int) -> dict[str, dict[str, list[str]]]:
    """The command of a newcomer, in this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import llamarl
    from llamarl.cli.main import main

    package = tree / "llamarl"
    assert Path(llamarl.__file__).parent == package, f"{llamarl.__file__} is not of {tree}"
    entries = Entries(package)
    register_optimizer_step_post_hook(lambda *_: entries.close("way"))
    with tempfile.TemporaryDirectory() as output:
        sys.argv = [
            "llamarl", "train", str(tree / "configs" / "demo.toml"), f"--steps={steps}", "--cluster.kind=inline",
            f"--model.path={base}", f"--output={output}",
        ]  # fmt: skip
        threading.setprofile(entries)
        sys.setprofile(entries)
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
    return entries.found()


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]))))
