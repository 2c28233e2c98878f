"""Compiles the C++ files of this folder for this machine, once, and loads them.

The files use no header of torch or Python. A kernel is a C function on raw pointers, so it compiles in a second or two
and calls need no binding code. Without a working compiler callers get None and the reason, and then use torch and say
so. Compiled files are in the user's cache folder, named by source, compiler and processor, so a change of these
compiles anew.

`LLAMARL_KERNELS` pins the instructions: `amx`, `avx512`, `avx2`, or `torch` for no kernels at all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config.errors import ConfigError
from llamarl.observability.spans import stage

VARIABLE, FORMER_VARIABLE = "LLAMARL_KERNELS", "LLAMARL_NO_KERNELS"
_NEEDS = {
    "amx": {"avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"},
    "avx512": {"avx512f", "avx512bw"},
    "avx2": {"avx2", "fma"},
}
"""Flags of the processor, by instructions."""
_LIMITS = {"avx512": ("-mno-amx-tile",), "avx2": ("-mno-avx512f",)}
"""Flags that keep the compiler from using wider instructions."""
COMPILE_TIMEOUT_S = 120
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-Wall")
"""Sums may be reordered to fill vector registers. NaN and infinity keep their meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One compiled file, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """"" if there is a library."""


def offered() -> tuple[str, ...]:
    """Returns values that `LLAMARL_KERNELS` can have on this processor, the widest first."""
    flags = set(processor().split())
    return (*(name for name, needs in _NEEDS.items() if needs <= flags), "torch")


def pinned() -> str:
    """Returns the value of `LLAMARL_KERNELS`, or "" if measurements decide.

    Raises:
        ConfigError: this processor does not have it.
    """
    if FORMER_VARIABLE in os.environ:
        raise ConfigError(f"{FORMER_VARIABLE} is no longer supported; set {VARIABLE}=torch, or unset it")
    value = os.environ.get(VARIABLE, "")
    if value not in ("", *offered()):
        raise ConfigError(f"{VARIABLE}={value}: this processor offers {', '.join(offered())}; unset it to measure them")
    return value


@functools.cache
def load(name: str, instructions: str = "") -> Kernel:
    """Returns the kernels of `<name>.cpp`, compiled at the first call on this machine. A missing compiler does not
    raise.

    Args:
        instructions: one of `offered()`. By default the pinned ones, or all that the processor has.

    Raises:
        ConfigError: `LLAMARL_KERNELS` has a value that this processor lacks.
    """
    if pinned() == "torch":
        return Kernel(library=None, reason=f"{VARIABLE}=torch")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return Kernel(library=None, reason="no C++ compiler (g++ or clang++) on PATH")
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        path = _compiled(compiler, source, _LIMITS.get(instructions or pinned(), ()))
        return Kernel(library=ctypes.CDLL(str(path)), reason="")
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip()
        return Kernel(
            library=None, reason=f"{source.name} did not compile: {output.splitlines()[0] if output else error!r}"
        )


def cache_folder() -> Path:
    """Returns the folder of compiled files: `$XDG_CACHE_HOME/llamarl`, by default `~/.cache/llamarl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl"


def source_text(name: str) -> str:
    """Returns the text of a kernel and of its includes."""
    folder = Path(__file__).parent
    return "\0".join(path.read_text() for path in (folder / f"{name}.cpp", *sorted(folder.glob("*.h"))))


@stage("compiling kernels")
def _compiled(compiler: str, source: Path, limits: tuple[str, ...]) -> Path:
    flags = (*FLAGS, *limits)
    texts = source_text(source.stem), _version(compiler), processor(), "-c", *flags
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    target = cache_folder() / f"{source.stem}-{key}.so"
    proof = target.with_suffix(".sha256")
    if not (target.exists() and proof.exists() and proof.read_text(encoding="utf-8") == _digest(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may compile at once: each in a separate folder, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            object_file, made = Path(folder) / "object.o", Path(folder) / target.name
            # Linked without -ffast-math: loading such a library would flush the process's denormals to zero.
            for command in (
                [compiler, *flags, "-c", str(source), "-o", str(object_file)],
                [compiler, "-shared", str(object_file), "-o", str(made)],
            ):
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # after a crash a file without its bytes would raise SIGBUS
            text = Path(folder) / proof.name
            text.write_text(_digest(made), encoding="utf-8")
            made.replace(target)
            text.replace(proof)
    return target


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_run_folder: list[Path] = []


def keep_choices_in(folder: Path | None) -> None:
    """Keeps later measurements also in `folder`, and uses those in it, so that a resumed run computes alike. None means
    only in the cache folder."""
    _run_folder[:] = [folder] if folder else []


def kept_in() -> Path | None:
    """Returns the folder of the run."""
    return _run_folder[0] if _run_folder else None


def is_kept(name: str, parts: Iterable[str]) -> bool:
    """Returns whether this run has the answer of `remembered` on record."""
    return bool(_run_folder) and (_run_folder[0] / f"{name}-{_key(parts)}.json").exists()


def remembered(name: str, parts: Iterable[str], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the first answer of `measure` on this kind of processor: of this run, or of any.

    Args:
        parts: texts that the answer depends on.
    """
    key = _key(parts)

    def of_any_run() -> dict[str, Any]:
        try:
            folder = cache_folder()
        except RuntimeError:  # there is no home folder
            return measure()
        return _kept(folder / f"measured-{key}" / f"{name}.json", measure)

    return _kept(_run_folder[0] / f"{name}-{key}.json", of_any_run) if _run_folder else of_any_run()


def _key(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join((processor(), *parts)).encode()).hexdigest()[:16]


@stage("measuring which kernels are fastest")
def _kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the file's content. The first of several processes makes it. If it cannot be written, the answer is this
    process's."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        pass
    except ValueError:  # truncated by a crash
        file.unlink(missing_ok=True)
    content = make()
    with suppress(OSError, ValueError):
        _keep(file, json.dumps(content))
        return json.loads(file.read_text(encoding="utf-8"))
    return content


def _keep(file: Path, text: str) -> None:
    """Writes a file atomically, unless it exists. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with made.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(made, file)
        except FileExistsError:  # another process was first, and its measurement counts
            return
        except OSError:  # a file system without links
            made.replace(file)
    finally:
        made.unlink(missing_ok=True)


@functools.cache
def processor() -> str:
    """Returns name and flags of the processor, on which `-march=native` and speed depend. Machines may share a cache
    folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    texts = [next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags")]
    return " ".join(texts).strip() or platform.machine()
