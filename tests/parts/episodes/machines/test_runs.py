"""Runs whose episodes have machines, and whose processes are killed: no machine is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from examples.repair import make_data
from tests.end_to_end.tiny import Command, make_model, rows
from tests.nightly import also, nightly
from tests.parts.episodes.machines.here import below, needs_machines
from tests.parts.episodes.machines.test_bubblewrap import running
from tests.sandbox.test_pool import until

pytestmark = needs_machines
MARK = 987_650
"""CPU seconds of a machine: its agent has them in its command line, by which it is found."""


@nightly("killed owners of machines are in test_bubblewrap.py")
@pytest.mark.parametrize("victim", ["_async_worker", *also("machines._starter", "llamarl", "signal")])
def test_a_run_leaves_no_machine(victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill of the worker that has the machines, or of the process that starts them, the run trains to its end.
    A random model writes lines that are no commands."""
    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    monkeypatch.setattr(make_data, "ROWS", {"train": 20, "test": 4})
    make_data.main()
    environment = f"{{name = 'machine', form = 'line', max_turns = 4, limits = {{cpu_s = {MARK + len(victim)}}}}}"
    command = Command.start(
        tmp_path, "train", "examples/repair/run.toml", "--model.warm_start=", "--output", tmp_path, "--steps", 3,
        "--model.path", make_model(tmp_path / "model", context=2048), "--cluster.kind", "inline",
        "--data.train", f"{{name = 'file', path = '{tmp_path}/train.jsonl'}}",
        "--data.eval", f"{{name = 'file', path = '{tmp_path}/test.jsonl'}}",
        "--rollout.environment", environment, "--rollout.prompts_per_step", 2, "--rollout.group_size", 3,
        "--rollout.window", 2, "--rollout.max_new_tokens", 250, "--screen.kind", "lines",
        "--reward.max_invalid_share", 1.0,
    )  # fmt: skip
    mark = f'"RLIMIT_CPU": {MARK + len(victim)}'
    command.until(lambda: running(mark))
    if victim in ("llamarl", "signal"):
        command.end(signal.SIGKILL if victim == "llamarl" else signal.SIGTERM)
    else:
        for pid in below(command.process.pid, victim.encode()):
            os.kill(pid, signal.SIGKILL)
        code, error = command.wait()
        assert code == 0, error
        steps = [row for row in rows(tmp_path / "repair" / "metrics.jsonl") if row["kind"] == "step"]
        assert [row["step"] for row in steps] == [1, 2, 3]
    until(lambda: not running(mark), "all machines end")
