"""What a thread is at, and nobody else."""

from __future__ import annotations

import threading

import pytest

from llamarl.observability.stages import stage, stage_of


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
