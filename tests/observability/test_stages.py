"""What a thread is at, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llamarl.observability.notes import keep_notes_in, note
from llamarl.observability.spans import stage, stage_here, stage_of


def test_stages_nest_and_end() -> None:
    own = threading.get_ident()

    @stage("loads")
    def load() -> None:
        assert stage_of(own) == "loads"
        raise ValueError("no")

    with stage("starts"):
        with pytest.raises(ValueError, match="no"):
            load()
        assert stage_of(own) == "starts"
        assert stage_of(None) == stage_of(own + 1) == ""
    assert stage_of(own) == ""


def test_a_function_is_a_stage_each_time() -> None:
    @stage("loads")
    def load() -> str:
        return stage_of(threading.get_ident())

    assert [load(), load()] == ["loads", "loads"]
    assert stage_of(threading.get_ident()) == ""


def test_another_threads_stage_stands_in() -> None:
    """A command waits in its main thread for an executor's."""
    own, is_over, is_in = threading.get_ident(), threading.Event(), threading.Event()

    def work() -> None:
        with stage("loads"):
            is_in.set()
            is_over.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    is_in.wait(10)
    assert stage_here(own) == "loads"
    with stage("waits"):
        assert stage_here(own) == "waits"
    is_over.set()
    thread.join()
    assert stage_here(own) == ""


def test_notes_of_a_thread_go_to_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs/generator-0.log"

    def work() -> None:
        keep_notes_in(log)
        note("weights by avx2")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    note("here")
    assert (log.read_text(), capsys.readouterr().out) == ("weights by avx2\n", "here\n")
