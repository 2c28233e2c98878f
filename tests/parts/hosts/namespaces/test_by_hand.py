"""The first commands of docs/hosts.md, as they stand there, on two hosts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from tests.end_to_end.tiny import ROOT, make_model, rows, write_toml
from tests.nightly import nightly

REASON = available()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    nightly("a run on two hosts"),
]
RUN_S = 240.0


def test_two_shells(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    section = page.partition("\n## By hand")[2].partition("\n## ")[0]
    certs, train, host = re.findall(r"^llamarl .*", section, re.MULTILINE)
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))

    def words(command: str) -> list[str]:
        command = command.replace("10.0.0.", "10.77.0.").replace("configs/demo.toml", shlex.quote(str(toml)))
        return [sys.executable, "-m", *shlex.split(command)]

    with Namespaces(2) as hosts:
        options = {
            "cwd": tmp_path,
            "env": {"PYTHONPATH": str(ROOT)},
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        assert hosts.popen("host-a", words(certs), **options).wait(RUN_S) == 0
        controller = hosts.popen("host-a", words(train), text=True, **options)
        hosts.popen("host-b", words(host), **options)
        told, _ = controller.communicate(timeout=RUN_S)
    assert controller.returncode == 0, told
    assert [row["step"] for row in rows(tmp_path / "runs/tiny/metrics.jsonl") if row["kind"] == "step"] == [1, 2, 3, 4]
    assert (tmp_path / "runs/tiny/logs/host-b.log").exists()
