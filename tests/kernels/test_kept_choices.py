"""What was measured is kept where it can be, and a start never fails for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.kernels import build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    build.keep_choices_in(None)
    return tmp_path


def asked(number: int) -> dict[str, int]:
    return build.remembered("choice", ["here"], lambda: {"n": number})


def test_the_first_answer_holds(home: Path) -> None:
    assert asked(1) == asked(2) == {"n": 1}
    (file,) = home.rglob("*.json")
    assert json.loads(file.read_text()) == {"n": 1} and not list(home.rglob(".*")), "nothing is left beside it"


def test_a_file_that_a_crash_has_cut_is_made_again(home: Path) -> None:
    asked(1)
    (file,) = home.rglob("*.json")
    file.write_text("")
    assert asked(2) == asked(3) == {"n": 2}


@pytest.mark.parametrize("fault", [PermissionError, OSError])
def test_a_folder_that_takes_no_files_costs_the_memory_of_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, fault: type[OSError]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise fault("no")

    monkeypatch.setattr(Path, "mkdir", refused)
    assert asked(1) == {"n": 1} and asked(2) == {"n": 2} and not list(home.iterdir())


def test_a_file_system_without_links_keeps_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(build.os, "link", refused)
    assert asked(1) == asked(2) == {"n": 1} and len(list(home.rglob("*"))) == 2


def test_without_a_home_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "cache_folder", nowhere)
    build.keep_choices_in(None)
    assert asked(1) == {"n": 1} and asked(2) == {"n": 2}
