"""A kernel runs the example, and is interrupted in the middle of a run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.tiny import ROOT, make_model, write_toml
from tests.nightly import NIGHTLY, nightly

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path

def interrupt():
    while not (metrics := Path("runs/long/metrics.jsonl")).exists() or '"step": 2,' not in metrics.read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    settings = {{"screen": {{"kind": "auto"}}, "steps": 100000}}
    llamarl.train({toml!r}, name="long", reward=lambda response: len(response) / 100, **settings)
except KeyboardInterrupt as error:
    print(error)
"""


def executed(cells: list[str], folder: Path) -> list[Any]:
    """Outputs of each cell."""
    kernels = folder / "kernels/own"
    kernels.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "own"}
    (kernels / "kernel.json").write_text(json.dumps(spec | {"language": "python"}))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"JUPYTER_PATH": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": bin_folder}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="own", resources={"metadata": {"path": str(folder)}}
    )
    before = dict(os.environ)
    os.environ.update(env)
    try:
        client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return [cell.outputs for cell in notebook.cells]


@nightly("interrupts of a script are in end_to_end/test_processes.py")
def test_an_interrupt_saves_and_leaves_the_kernel_alive(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    look = "print(len(llamarl.open_run('runs/long').metrics()) >= 2, sorted(os.listdir('runs/long/checkpoints')))"
    cells = ["import llamarl", INTERRUPTED.format(toml=str(toml)), look]
    _, ran, looked = executed(cells, tmp_path)
    texts = "".join(one.text for one in ran if one.output_type == "stream")
    assert "ended by SIGINT; continue with resume=True. Files: runs/long" in texts
    blocks = [one for one in ran if one.output_type == "display_data"]
    assert len(blocks) == 1, "one block renews itself"
    assert "llamarl  long" in blocks[0].data["text/plain"] and blocks[0].data["text/html"].startswith("<pre>")
    assert looked[0].text.startswith("True") and "step-" in looked[0].text


@nightly("an example that trains; architecture/test_docs.py reads its code by day")
@pytest.mark.skipif(not NIGHTLY, reason="`make test-all` does it: a minute for the base model")
def test_the_example(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/first_run.ipynb", as_version=4)
    assert all(cell.cell_type != "code" or not cell.outputs for cell in notebook.cells), "outputs are not kept"
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    outputs = executed(cells, tmp_path)
    assert not any(one.output_type == "error" for of_cell in outputs for one in of_cell)
    assert (tmp_path / "runs/first/report.html").exists() and (
        tmp_path / "runs/first/export/model.safetensors"
    ).exists()
    shutil.rmtree(tmp_path / "runs")
