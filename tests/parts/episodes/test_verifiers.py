"""A client that others wrote: an environment of the package `verifiers` asks `llamarl serve`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.tiny import ROOT
from tests.nightly import nightly
from tests.parts.episodes.test_serve import TEMPLATE, served

PYTHON = Path(os.environ.get("LLAMARL_VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))
TASKS = """
import verifiers.v1 as vf


class Sum(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def has_answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        return [Sum(vf.TaskData(idx=n, prompt=f"{n} + {n}"), self.config.task) for n in range(4)]


__all__ = ["Sums"]
"""


@nightly("a server and a client that others wrote")
@pytest.mark.skipif(not PYTHON.exists(), reason=f"no verifiers at {PYTHON}; `make verifiers` installs it")
def test_an_environment_of_verifiers(model: Path, tmp_path: Path) -> None:
    """Four episodes at a time, each in the package's own agent, which asks as it likes."""
    (tmp_path / "llamarl_sums.py").write_text(TASKS)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    try:
        with served(model, "--api-key", "k", "--name", "tiny") as url:
            done = subprocess.run(
                [
                    *(PYTHON.parent / "vf-eval", "llamarl-sums", "-m", "tiny", "--no-push"),
                    *("--client.base-url", url, "--client.api-key-var", "KEY"),
                    *("--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"),
                ],
                cwd=tmp_path, env=os.environ | {"KEY": "k", "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
                capture_output=True, text=True, timeout=240,
            )  # fmt: skip
    finally:
        (model / "chat_template.jinja").unlink()
    assert done.returncode == 0, done.stderr
    assert re.search(r"4/4 .* reward 1\.00 .* err 0\.00", done.stdout), done.stdout
    tokens = re.search(r"usage +(\d+)/(\d+) tokens", done.stdout)
    assert tokens and int(tokens[1]) > 0 and int(tokens[2]) > 0, done.stdout
