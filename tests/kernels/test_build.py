"""Kernels compile once, and a machine without a compiler is told so."""

import os

import pytest

from llamarl.config import ConfigError
from llamarl.kernels import build

needs_compiling = pytest.mark.skipif(
    os.environ.get(build.VARIABLE) == "torch", reason=f"{build.VARIABLE}=torch: nothing is compiled"
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def write_source(monkeypatch, folder, text):
    (folder / "twice.cpp").write_text(text)
    monkeypatch.setattr(build, "__file__", str(folder / "build.py"))


@needs_compiling
def test_a_kernel_is_compiled_once(monkeypatch, tmp_path):
    write_source(monkeypatch, tmp_path, 'extern "C" int twice(int x) { return 2 * x; }')
    library = build.load("twice").library
    assert library is not None
    assert library.twice(21) == 42
    compiled = list(build.cache_folder().glob("*.so"))
    build.load.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS,))
    assert build.load("twice").library is not None
    assert list(build.cache_folder().glob("*.so")) == compiled


@needs_compiling
@pytest.mark.parametrize("size", [0, 5000])
def test_a_damaged_kernel_is_compiled_again(monkeypatch, tmp_path, size):
    """As a crash leaves it: running a truncated one is SIGBUS."""
    write_source(monkeypatch, tmp_path, 'extern "C" int twice(int x) { return 2 * x; }')
    made = build._compiled("g++", tmp_path / "twice.cpp", ())
    os.truncate(made, size)
    build.load.cache_clear()
    again = build._compiled("g++", tmp_path / "twice.cpp", ())
    assert again == made and again.stat().st_size > 5000


@needs_compiling
def test_a_changed_source_is_compiled_anew(monkeypatch, tmp_path):
    write_source(monkeypatch, tmp_path, 'extern "C" int twice(int x) { return 2 * x; }')
    assert build.load("twice").library.twice(1) == 2
    build.load.cache_clear()
    write_source(monkeypatch, tmp_path, 'extern "C" int twice(int x) { return x + x + 0 * x; }')
    build.load("twice")
    assert len(list(build.cache_folder().glob("*.so"))) == 2


@needs_compiling
def test_a_broken_source_gives_the_compilers_words(monkeypatch, tmp_path):
    write_source(monkeypatch, tmp_path, "this is no C++")
    kernel = build.load("twice")
    assert kernel.library is None
    assert "twice.cpp did not compile" in kernel.reason
    assert "error" in kernel.reason or "this" in kernel.reason


@needs_compiling
def test_without_a_compiler_there_is_a_reason(monkeypatch, tmp_path):
    write_source(monkeypatch, tmp_path, 'extern "C" int twice(int x) { return 2 * x; }')
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel = build.load("twice")
    assert kernel.library is None
    assert "no C++ compiler" in kernel.reason


def test_kernels_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(build.VARIABLE, "torch")
    assert build.load("attention").reason == "LLAMARL_KERNELS=torch"


def test_what_cannot_be_pinned_is_refused(monkeypatch):
    monkeypatch.setattr(build, "processor", lambda: "model name : x flags : avx2 fma avx512f avx512bw")
    assert build.offered() == ("avx512", "avx2", "torch")
    monkeypatch.setenv(build.VARIABLE, "amx")
    with pytest.raises(ConfigError, match="LLAMARL_KERNELS=amx: this processor offers avx512, avx2, torch"):
        build.load("attention")
    monkeypatch.delenv(build.VARIABLE)
    monkeypatch.setenv("LLAMARL_NO_KERNELS", "1")
    with pytest.raises(ConfigError, match="LLAMARL_KERNELS=torch"):
        build.load("attention")
