"""A model that takes milliseconds, and the commands of a newcomer over it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from llamarl.cli.main import main
from llamarl.cluster.fork_server import SWITCH
from llamarl.data.sources.running_total import RunningTotal
from llamarl.run.rollouts import rollout_lines

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LLAMARL = (sys.executable, "-m", "llamarl")

SOMETIME_S = 240.0
"""For what comes sometime, however slow the machine is; no speed is meant. A test has longer (pyproject.toml)."""

TOML = """
name = "tiny"
steps = 4
model = {{path = "{model}"}}

[data]
train = {{name = "running_total", count = 300, first = 100}}
eval = {{name = "running_total", count = 12}}

[rollout]
prompts_per_step = 2
group_size = 3
max_new_tokens = 12
window = 2

[reward]
parts = [{{name = "exact"}}]

[cluster]
timeout_s = {start_s}

[screen]
kind = "lines"
"""


def make_model(folder: Path, context: int = 256, std: float = 0.1, head_dim: int = 8, **others: Any) -> Path:
    """A Hugging Face folder: random weights, and a tokenizer that knows the demo's words. `others`: of its shape."""
    from llamarl.models.hf import new_model, save_model
    from llamarl.models.shape import ModelShape
    from llamarl.parts.sft.bpe import train_byte_bpe

    texts = [f"{row.question}\n{row.metadata['solution']}" for row in RunningTotal(count=100)]
    tokenizer = train_byte_bpe(texts, folder.with_name(folder.name + "-tokenizer"), 300)
    sizes: dict[str, Any] = {
        "family": "llama", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim,
        "intermediate_size": 48, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": context,
        "tie_embeddings": True, "stop_token_ids": tokenizer.eos_token_ids,
    }  # fmt: skip
    save_model(new_model(ModelShape(**sizes | others), seed=1, std=std), folder, tokenizer.folder)
    return folder


def write_toml(folder: Path, model: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(TOML.format(model=model, start_s=SOMETIME_S))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file; a line that is no JSON fails. Of a run's `rollouts.jsonl`, what is derived, where
    nobody has exported it."""
    if path.name == "rollouts.jsonl" and not path.exists():
        return [*map(json.loads, rollout_lines(path.parent))]
    return [json.loads(line) for line in path.read_text().splitlines()]


def llamarl(*arguments: object, timeout_s: float = SOMETIME_S, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    return subprocess.run(
        [*LLAMARL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment()
    )


def llamarl_here(*arguments: object, to: Any = ...) -> subprocess.CompletedProcess[str]:
    """A command in this process, which has loaded torch already; not for Monarch. `to`: in place of `sys.stdout`."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["llamarl", *map(str, arguments)]
    no_server = mock.patch.dict(os.environ, {SWITCH: "0"})  # it would import torch for commands that are refused
    try:
        with redirect_stdout(out if to is ... else to), redirect_stderr(err), no_server:
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "200"}


STARTED = list[subprocess.Popen[str]]()
"""Commands of all tests; a test that fails leaves its own running, beside all those that come after it."""


@dataclass
class Command:
    """A command in a session of its own, as if it had a terminal for itself."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    @classmethod
    def start(cls, folder: Path, *arguments: object, cwd: Path = ROOT) -> Command:
        out, err = folder / "out.txt", folder / "err.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*LLAMARL, *map(str, arguments)], cwd=cwd, stdout=stdout, stderr=stderr, text=True,
                start_new_session=True, env=environment(),
            )  # fmt: skip
        STARTED.append(process)
        return cls(process, out, err)

    def until(self, condition: Callable[[], bool], timeout_s: float = SOMETIME_S) -> None:
        """Waits for a condition while the command runs."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            code = self.process.poll()
            assert code is None, f"ended with {code}: {self.err.read_text()}"
            assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {self.out.read_text()}{self.err.read_text()}"
            time.sleep(0.02)

    def end(self, number: signal.Signals, timeout_s: float = SOMETIME_S) -> tuple[int, str]:
        """Sends a signal to the command alone; its exit code and what it said on stderr."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = SOMETIME_S) -> tuple[int, str]:
        return self.process.wait(timeout_s), self.err.read_text()

    def children(self) -> dict[str, int]:
        """Executors of a run by name, from the log file that is each one's output."""
        found = dict[str, int]()
        for pid in descendants(self.process.pid):
            try:
                target = Path(os.readlink(f"/proc/{pid}/fd/1"))
            except OSError:
                continue
            if target.suffix == ".log":
                found.setdefault(target.stem, pid)
        return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, oldest first."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for parent in found:
        found += sorted(child for child, of in parents.items() if of == parent)
    return found[1:]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = SOMETIME_S) -> list[int]:
    """Those that are still alive after a time; empty as soon as all have ended."""
    deadline_s = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]
