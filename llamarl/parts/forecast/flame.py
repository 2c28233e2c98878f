"""A flame graph of a running run: where all of its processes on this machine spend their time. py-spy takes the samples
and stops a process while it reads its stack, because line numbers would be wrong otherwise."""

from __future__ import annotations

import html
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from llamarl.cli.options import write_output
from llamarl.config import ConfigError
from llamarl.run.folder import runner

RATE_HZ = 100
"""Samples per second of each process."""
SLACK_S = 60.0
"""Additional seconds to draw the graph."""
_TITLE = re.compile(r"<title>process (\d+):(.*?)( \([\d,]+ samples, [\d.]+%\))</title>", re.DOTALL)
_TEXT = re.compile(r"(<text[^>]*>)process (\d+):[^<]*</text>")
_LOG = re.compile(r"/logs/([\w.-]+)\.log\b")


def record(run: Path, duration_s: float, path: Path) -> None:
    """Samples a run for `duration_s` seconds and writes the graph. Raises ConfigError."""
    sampler = Path(sys.executable).parent / "py-spy"
    program = str(sampler) if sampler.exists() else shutil.which("py-spy")
    if program is None:
        raise ConfigError("--flame needs py-spy; install llamarl[flame]")
    who = runner(run)
    if who is None:
        raise ConfigError(f"--flame: nobody runs in {run}; start the run, and ask while it is under way")
    pid, host = who
    if host != socket.gethostname():
        raise ConfigError(f"--flame: {run} is run on {host}; ask there, where its processes are")
    drawn = run / f".flame-{os.getpid()}.svg"
    command = [
        program, "record", "--pid", str(pid), "--subprocesses", "--duration", f"{max(1, round(duration_s))}", "--rate",
        str(RATE_HZ), "--format", "flamegraph", "--output", str(drawn),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=duration_s + SLACK_S, check=False)
        if not drawn.exists() or done.returncode:
            said = " ".join(done.stderr.split()) or "it says nothing"
            raise ConfigError(
                f"--flame: py-spy has drawn nothing: {said[:300]}; it may look at processes as their owner with "
                "kernel.yama.ptrace_scope = 0, or as root, in a container with SYS_PTRACE"
            )
        write_output(path, named(drawn.read_text(encoding="utf-8"), pid))
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--flame: py-spy has not ended {SLACK_S:.0f} s after its time; look at process {pid}"
        ) from None
    finally:
        drawn.unlink(missing_ok=True)


def named(picture: str, controller: int) -> str:
    """Returns the graph with the names of executors instead of the commands of their processes."""
    names = {str(controller): "controller"}
    for pid, command, _ in _TITLE.findall(picture):
        if found := _LOG.search(html.unescape(command)):
            names[pid] = found[1]
    picture = _TITLE.sub(lambda one: f"<title>{names.get(one[1], 'process')} (pid {one[1]}){one[3]}</title>", picture)
    return _TEXT.sub(lambda one: f"{one[1]}{names.get(one[2], 'process')}</text>", picture)
