"""Which settings a journal depends on, and what a run says that goes on with others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig
from llamarl.controller.admission import Problems
from llamarl.executors.replies import ControllerState
from llamarl.run.folder import RunFolder
from llamarl.run.journal import open_journal
from tests.controller.fakes import config, prompts

STATE: ControllerState = {"step": 0, "sampler": {}, "next_group_id": 0, "unconsumed": []}


def said(folder: Path, settings: RunConfig, num_prompts: int = 5, unknown: Sequence[str] = ()) -> str:
    """Of a journal that has a step, by a run with these settings; code that wrote it may not have known some."""
    problems = Problems(train=prompts(num_prompts), eval=(), stop_token_ids=(2,))
    journal = open_journal(settings, problems, RunFolder(folder), pytest.fail)
    _, lost = journal.resume(None)
    if not (folder / "journal").exists():
        for name in unknown:
            del journal.reader.settings[name]
        journal.begin(0)
        journal.step([], STATE | {"step": 1})  # type: ignore[arg-type]
    journal.close()
    return lost


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rollout": {"group_size": 3}}, "rollout.group_size"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"trainer": {"learning_rate": 1e-3}}, "trainer.learning_rate"),
        ({"shaping": {"length_penalty": 0.5}}, "shaping.length_penalty"),
        ({"seed": 3}, "seed"),
        ({"trainer": {"moments": "8bit"}}, "trainer.moments"),
        ({"trainer": {"weights": "bfloat16", "dtype": "bfloat16"}}, "trainer.dtype"),
        ({"trainer": {"moments_on": "host"}}, ""),
        ({"rollout": {"segment_tokens": 9}}, ""),
        ({"trainer": {"threads": 2, "microbatch_tokens": 100}, "generator": {"replicas": 3}, "steps": 99}, ""),
        ({"data": {"eval": "jsonl"}, "checkpoint": {"keep": 4}}, ""),
    ],
)
def test_settings_that_change_what_is_recorded_are_named(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    assert said(tmp_path, config(tmp_path)) == ""
    expected = f"steps 1 to 1 are done again: {name} is not what it was" if name else ""
    assert said(tmp_path, config(tmp_path, **changes)) == expected


def test_other_data_under_the_same_name(tmp_path: Path) -> None:
    assert said(tmp_path, config(tmp_path)) == ""
    assert said(tmp_path, config(tmp_path), 6) == "steps 1 to 1 are done again: data is not what it was"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, ""),
        ({"trainer": {"moments": "8bit"}}, "trainer.moments"),
        ({"trainer": {"weights": "bfloat16", "dtype": "bfloat16"}}, "trainer."),
    ],
)
def test_a_journal_of_code_that_did_not_know_a_setting(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    assert said(tmp_path, config(tmp_path), unknown=("trainer.weights", "trainer.moments", "data.filter")) == ""
    lost = said(tmp_path, config(tmp_path, **changes))
    assert name in lost if name else not lost
