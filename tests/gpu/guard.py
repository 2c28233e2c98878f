"""Makes torch without a GPU accept tensors on `cuda:0`: compiles `device.cpp` and loads it before torch.

A process that has it stays so, so it is a process of its own that tests send functions to. Imports no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from llamarl.kernels.build import COMPILE_TIMEOUT_S, cache_folder, processor

SOURCE = Path(__file__).with_name("device.cpp")


def begin() -> None:
    """In a fresh process, before all else."""
    assert "torch" not in sys.modules, "torch asks once, when it is imported, whether there are GPUs"
    library = ctypes.CDLL(str(_compiled()), ctypes.RTLD_GLOBAL)

    import torch

    library.register_device()
    torch.set_num_threads(1)
    from tests.gpu import pretend

    pretend.install()


def _compiled() -> Path:
    """As `kernels/build.py` compiles: once per source, compiler's headers and processor."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder = Path(spec.origin).parent
    version = (torch_folder / "version.py").read_text(encoding="utf-8")
    compiler = os.environ.get("CXX", "g++")
    libraries = torch_folder / "lib"
    command = [
        compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE),
        f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    texts = SOURCE.read_text(encoding="utf-8"), version, processor(), *command
    target = cache_folder() / f"device-{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, target.name)
            subprocess.run([*command, "-o", str(made)], check=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(target)
    return target
