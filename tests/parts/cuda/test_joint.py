"""Who needs no GPU loads nothing of this part, and a GPU without it computes by torch and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llamarl.config import ConfigError
from llamarl.kernels import gpu
from llamarl.parts.cuda.checks import TOGETHER
from llamarl.weight_sync.select import check_name, names
from tests.end_to_end.test_core_alone import HIDES
from tests.end_to_end.tiny import ROOT, environment
from tests.nightly import nightly

DOCSTRINGS = {"llamarl.parts.cuda", "llamarl.parts.cuda.transports"}
"""Packages without code, in which families look for members."""
NAMES = [name for together in TOGETHER for name in together]
RUN = """
import json, sys
from llamarl.cli.main import main
try:
    main()
except SystemExit as ended:
    code = ended.code
found = [one for one in sys.modules if f"{one}.".startswith(("llamarl.parts.cuda.", "triton.")) or "nixl" in one]
print(json.dumps([code, sorted(found)]))
"""
ALONE = """
import json
from tests.gpu import guard
guard.begin()
import torch
from llamarl.config import ConfigError
from llamarl.kernels import gpu
from tests.gpu.engines import generate
device = torch.device("cuda", 0)
reasons = [gpu.reason(name, device) for name in ("decode", "train", "fingerprint")]
kernels = [gpu.kernel(name, device) for name in ("decode", "train", "fingerprint")]
found = generate("llama", "bfloat16", None, {"temperature": 0.0})
try:
    generate("llama", "bfloat16", True, {"temperature": 0.0})
    refused = ""
except ConfigError as error:
    refused = str(error)
print(json.dumps([kernels, reasons, len(found.tokens), found.described, refused]))
"""


def said(code: str, *arguments: object, path: Path = ROOT) -> list:
    env = environment() | {"PYTHONPATH": f"{path}:{ROOT}"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@nightly("a run of its own; architecture/test_imports.py says by day what processes of a run import")
def test_a_run_on_processors_loads_nothing_of_it(toml: Path, tmp_path: Path) -> None:
    inline = ("--cluster.kind", "inline", "--steps", 1, "--output", tmp_path / "runs")
    code, found = said(RUN, "train", toml, *inline)
    assert code == 0
    assert not {*found} - DOCSTRINGS


@nightly("`weight_sync/test_select.py` chooses among transports by day")
def test_transports_between_processes_on_processors_are_others() -> None:
    code = """
import json, sys
from llamarl.weight_sync.select import candidates
found = candidates(same_host=True, same_process=False, delta=False, on_gpu=False)
print(json.dumps([found, [one for one in sys.modules if one.startswith("llamarl.parts.cuda.")]]))
"""
    found, loaded = said(code)
    assert found == ["shared_memory", "p2p", "file"]
    assert not {*loaded} - DOCSTRINGS


def test_a_device_that_is_no_gpu_has_no_kernels() -> None:
    for name in NAMES:
        for kind in ("cpu", "meta"):
            assert gpu.kernel(name, torch.device(kind)) is None
            assert gpu.reason(name, torch.device(kind)) == f"{kind} device"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch could have a GPU")
def test_a_torch_without_cuda_is_told() -> None:
    assert {gpu.reason(name, torch.device("cuda", 0)) for name in NAMES} == {"this torch has no CUDA"}


def test_its_transport_has_a_name_like_the_others() -> None:
    assert names() == ["cuda_ipc", "file", "in_place", "nixl", "p2p", "shared_memory"]
    check_name("nixl")
    with pytest.raises(ConfigError, match="use auto, cuda_ipc, file, in_place, nixl, p2p, shared_memory or package"):
        check_name("nixxl")


@nightly("three starts; what says the reason is tested above")
@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a real GPU none is pretended")
def test_a_gpu_without_it_computes_by_torch_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES.replace('"llamarl.parts")', '"llamarl.parts.cuda")'))
    kernels, reasons, count, described, refused = said(ALONE, path=tmp_path)
    lacks = "this installation lacks the part `cuda`"
    assert kernels == [None] * 3 and all(lacks in reason for reason in reasons)
    assert count == 6 and f"attention by torch ({lacks}" in described and "graphs" not in described
    assert lacks in refused
