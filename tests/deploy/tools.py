"""The tools of `make test-deploy`, which have an environment of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT

TOOLS = ROOT / ".venv-deploy" / "bin"
has_tools = pytest.mark.skipif(not (TOOLS / "check-jsonschema").exists(), reason="`make test-deploy` does it")


def tool(name: str, *words: object, cwd: Path = ROOT, given: str | None = None) -> str:
    """Returns what a tool prints. Fails with its output if it fails."""
    command = [str(TOOLS / name), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
