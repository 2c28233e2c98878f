"""The choice of what multiplies: measured once, the same for everyone, and shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llamarl.config import ConfigError
from llamarl.kernels import build, paths
from llamarl.kernels.linear import Linear
from tests.kernels.engines import forget, has_tiles


@pytest.fixture(autouse=True)
def two_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, float]]:
    """A cache folder of its own and two paths, `wide` and `other`, with the seconds that each takes per row."""
    seconds = {"wide": 1e-6, "other": 1e-6}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "offered", lambda kind: tuple(paths.Path(name=name, multiply=None) for name in seconds))
    monkeypatch.setattr(paths, "peak_gflops", lambda path: 2.0)
    monkeypatch.setattr(paths, "seconds_of", lambda path, kind, m, n, k, repeats: m * seconds[path.name])
    paths.chosen.cache_clear()
    yield seconds
    forget()


def test_the_fastest_serves_and_near_ties_fall_to_the_first(two_paths: dict[str, float]) -> None:
    assert paths.chosen("int8", 40, 30).name == "wide"
    two_paths["other"] = 0.9e-6
    assert paths.chosen("int8", 41, 30).name == "wide"
    two_paths["other"] = 0.7e-6
    assert paths.chosen("int8", 42, 30).name == "other"
    found = paths.record()["int8 42x30"]
    assert found.path == "other"
    assert found.measured_us.keys() == two_paths.keys()
    assert all(len(times) == len(paths.ROWS) for times in found.measured_us.values())
    # Four such matrices: 512 rows of one take 512 * 0.7 / 4 us, 32 rows 5.6 us for 1260 bytes.
    assert found.describe("int8", 42, 30) == "42x30 at 14 GFLOP/s = 720% of its peak, 0.2 GB/s"


def test_a_choice_holds_for_later_processes(two_paths: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.chosen("bfloat16", 40, 30).name == "wide"
    two_paths["other"] = 0.1e-6
    paths.chosen.cache_clear()
    assert paths.chosen("bfloat16", 40, 30).name == "wide"
    monkeypatch.setattr(build, "processor", lambda: "another")
    paths.chosen.cache_clear()
    assert paths.chosen("bfloat16", 40, 30).name == "other"


def test_a_run_keeps_its_choices_whatever_is_measured_later(
    two_paths: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache that was cleared, or another host's, changes nothing for a run that goes on."""
    monkeypatch.setattr(build, "_run_folder", [])
    build.keep_choices_in(tmp_path / "run" / "kernels")
    assert paths.chosen("bfloat16", 40, 30).name == "wide"
    two_paths["other"] = 0.1e-6
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    paths.chosen.cache_clear()
    assert paths.chosen("bfloat16", 40, 30).name == "wide"
    build.keep_choices_in(tmp_path / "another" / "kernels")
    paths.chosen.cache_clear()
    assert paths.chosen("bfloat16", 40, 30).name == "other"


def test_of_processes_that_choose_at_once_the_first_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured_us(*_arguments: object) -> dict[str, list[float]]:
        """While another process writes its choice."""
        folder = next(iter((tmp_path / "llamarl").glob("measured-*")), tmp_path)
        if folder != tmp_path:
            choice = {"path": "other", "measured_us": {}}
            (folder / "int8-40x30.json").write_text(json.dumps(choice), encoding="utf-8")
        return {"wide": [1.0] * len(paths.ROWS), "other": [2.0] * len(paths.ROWS)}

    assert paths.chosen("int8", 8, 8).name == "wide"  # makes the folder
    monkeypatch.setattr(paths, "_measured_us", measured_us)
    assert paths.chosen("int8", 40, 30).name == "other"


def test_tiles_that_linux_refuses_are_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        """Compiled for AMX, in a container that may not use it."""

        def __init__(self) -> None:
            self.pack_int8 = self.packed_bytes_int8 = self.avx512_int8 = self.avx512_int8_peak = lambda *_: None
            self.amx_enable = lambda: -1

    loaded = build.Kernel(library=Refused(), reason="")  # pyrefly: ignore
    assert [path.name for path in paths.packed_paths(loaded, "int8")] == ["avx512-vnni"]


def test_a_pin_leaves_its_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for pin in build.offered():
        monkeypatch.setenv(build.VARIABLE, pin)
        forget()
        if pin == "amx" and not has_tiles():
            with pytest.raises(ConfigError, match="Linux"):
                paths.offered("int8")
            continue
        for kind in ("bfloat16", "int8"):
            names = [path.name for path in paths.offered(kind)]
            assert bool(names) == (pin != "torch")
            assert all(name.startswith(pin) for name in names)
        values = torch.ones(32, 32, dtype=torch.bfloat16)
        assert Linear(values).path.startswith(pin)
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(("dots", "panels", "serves"), [(160.0, 100.0, "avx512-bf16"), (140.0, 100.0, "avx512")])
def test_dot_products_of_bfloat16_serve_all_shapes_where_they_are_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, dots: float, panels: float, serves: str
) -> None:
    """Not by shape: they round activations, and ranks with parts of a matrix must compute as one with all of it."""
    peaks = {"avx512-bf16": dots, "avx512": panels, "avx2": 50.0}
    monkeypatch.setattr(paths, "peak_gflops", lambda path: peaks[path.name])
    found = paths._of_one_arithmetic([paths.Path(name=name, multiply=None) for name in peaks])
    assert found[0].name == serves and ("avx2" in [path.name for path in found]) == (serves == "avx512")
    peaks["avx512-bf16"] = 300.0
    again = paths._of_one_arithmetic([paths.Path(name=name, multiply=None) for name in peaks])
    assert [path.name for path in again] == [path.name for path in found]
