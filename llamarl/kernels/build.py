"""Compiles the C++ files of this folder for this machine, once, and loads them.

The files use no header of torch or Python: a kernel is a C function on raw pointers, so it compiles in a second or two
and calls need no binding code. A machine without a compiler, or whose compiler refuses a file, gets None and the
reason; callers then take their torch path and say so. Compiled files lie in the user's cache folder, named after the
source, the compiler and the processor, so a changed one of these is compiled anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

DISABLE_VARIABLE = "LLAMARL_NO_KERNELS"
"""Set to 1 to run on torch alone."""
COMPILE_TIMEOUT_S = 120
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-Wall")
"""Sums may be reordered to fill vector registers; NaN and infinity keep their meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One compiled file, or why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """Empty when it is there."""


@functools.cache
def load(name: str) -> Kernel:
    """The kernels of `<name>.cpp`, compiled at the first call on this machine. Never raises for want of a compiler."""
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return Kernel(library=None, reason=f"{DISABLE_VARIABLE}=1")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return Kernel(library=None, reason="no C++ compiler (g++ or clang++) on PATH")
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        path = _compiled(compiler, source)
        return Kernel(library=ctypes.CDLL(str(path)), reason="")
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip()
        return Kernel(
            library=None, reason=f"{source.name} did not compile: {output.splitlines()[0] if output else error!r}"
        )


def cache_folder() -> Path:
    """Where compiled files lie: `$XDG_CACHE_HOME/llamarl`, by default `~/.cache/llamarl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl"


def _compiled(compiler: str, source: Path) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\0".join((*texts, version, _processor(), "-c", *FLAGS)).encode()).hexdigest()[:16]
    target = cache_folder() / f"{source.stem}-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may compile at once: each into a folder of its own, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            object_file, made = Path(folder) / "object.o", Path(folder) / target.name
            # Linked without -ffast-math, with which loading the library would flush the process's denormals to zero.
            for command in (
                [compiler, *FLAGS, "-c", str(source), "-o", str(object_file)],
                [compiler, "-shared", str(object_file), "-o", str(made)],
            ):
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(target)
    return target


def _processor() -> str:
    """What `-march=native` depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
