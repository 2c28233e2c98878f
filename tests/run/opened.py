"""A process that opens a run's folder as read-only commands do, and tells what it imported, wrote, started and read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

_INTO = ("os.rename", "os.link", "os.symlink", "shutil.copyfile", "shutil.move")
"""Events whose second argument is what changes."""
Seen = list[tuple[str, str]]
_STARTS = {
    "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.system", "os.startfile",
}  # fmt: skip
CHANGES = {
    "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.mkdir",
    "shutil.rmtree", "shutil.copyfile", "shutil.move",
}  # fmt: skip


def record(seen: Seen, python: str) -> None:
    """From now on `seen` gets what this process does. `python`: a program that a folder names."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) and isinstance(name, str):
                seen.append(("write", os.path.abspath(name)))
        elif event == "import" and arguments[0].partition(".")[0].startswith("evil"):
            seen.append(("import", arguments[0]))
        elif event in ("pickle.find_class", "marshal.loads") and "evil" in repr(arguments):
            seen.append(("pickle", repr(arguments)))
        elif event in _STARTS and python in repr(arguments):
            seen.append(("start", repr(arguments)))
        elif event in _STARTS:
            seen.append(("other start", repr(arguments)[:200]))
        elif event in CHANGES:
            seen.append((event, os.path.abspath(str(arguments[event in _INTO]))))

    sys.addaudithook(hear)


def command(*arguments: str) -> int:
    """Exit code of a command, in this process."""
    from llamarl.cli.main import main

    sys.argv = ["llamarl", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err := io.StringIO()):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            err.write(repr(error))
            code = -1
    sys.__stderr__.write(err.getvalue())  # type: ignore[union-attr]
    return code


def look(run: Path) -> dict[str, int]:
    """Opens the folder in every way that is said to execute nothing; exit codes by command."""
    import llamarl

    name = str(run)
    codes = {
        "report": command("report", name),
        "explain": command("explain", f"{name}/config.toml"),
        "export --rollouts": command("export", name, "--rollouts"),
        "export": command("export", name),
        "plan --rollouts": command("plan", "--model", "qwen3-1.7b", "--gpus", "8", "--rollouts", name),
        "plan --config": command("plan", "--config", f"{name}/config.toml", "--model", "qwen3-1.7b", "--gpus", "8"),
        "replay --against": command("replay", name, "--against", name),
    }
    record = llamarl.open_run(run)
    codes["open_run"] = len(record.metrics()) - 1
    assert record.config.name and record.summary is not None and list(record.rollouts())
    from llamarl.parts.page.cli.report import decoder
    from llamarl.parts.page.live import Watched, build_app

    build_app([watched := Watched(run, decoder(run))], "token")
    watched.data.read_all()
    assert watched.data.settings()
    return codes


if __name__ == "__main__":
    import torch  # noqa: F401 - loads much that is nobody's folder

    sys.path.append(os.getcwd())
    happened: Seen = []
    record(happened, sys.argv[1])
    results = dict[str, Any]()
    for folder in sys.argv[2:]:
        happened.clear()
        codes = look(Path(folder))
        results[folder] = {"codes": codes, "seen": happened.copy()}
    sys.stdout.write(json.dumps(results) + "\n")
