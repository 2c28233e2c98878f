"""What W&B and MLflow are told, where they are not installed: recorded by modules that stand in for them.

That the real ones take it, `test_trackers.py` shows where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llamarl.observability.sinks import Subject
from llamarl.parts.page.trackers._base import Trackers
from llamarl.parts.page.trackers.mlflow import MAX_LETTERS

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Recorded:
    """Keeps the calls of its methods; `answers` are what they return."""

    def __init__(self, calls: list[Call], answers: Mapping[str, Any] | None = None) -> None:
        self._calls, self._answers = calls, answers or {}

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **named: Any) -> Any:
            self._calls.append((name, args, named))
            return self._answers.get(name)

        return method


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stand_in(name: str, **members: Any) -> None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return stand_in


def logged(name: str, folder: Path, settings: Mapping[str, Any], make_metrics: Any, make_eval: Any) -> None:
    """Two steps and an evaluation, through the thread."""
    warnings = list[str]()
    subject = Subject(name="made", folder=folder, settings=settings, port=9464, step=0)
    (one,) = Trackers([name], subject, warnings.append).each
    for step in (1, 2):
        one.put(make_metrics(step, reward_mean=step / 8 if step == 1 else float("nan")).to_json())
    one.put(make_eval(2, 0.25).to_json())
    one.end()
    one.wait(240.0)
    assert warnings == []


def test_wandb(stand_in, make_metrics, make_eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    calls = list[Call]()
    wandb = Recorded(calls, {"init": Recorded(calls), "Settings": "quiet"})
    stand_in("wandb", init=wandb.init, Settings=wandb.Settings, teardown=wandb.teardown)
    for _ in range(2):
        logged("wandb", tmp_path, {"steps": 2}, make_metrics, make_eval)
    assert [name for name, _, _ in calls] == ["Settings", "init", "log", "log", "log", "finish", "teardown"] * 2
    (_, _, first), (_, _, second) = (call for call in calls if call[0] == "init")
    assert (first["project"], first["name"], first["config"]) == ("llamarl", "made", {"steps": 2})
    assert first["dir"] == str(tmp_path.resolve())
    assert first["resume"] == "allow"
    assert first["id"] == second["id"], "a run that is resumed goes on"
    logs = [(args[0], named["step"]) for name, args, named in calls[:6] if name == "log"]
    assert [step for _, step in logs] == [1, 2, 2]
    assert logs[0][0]["reward_mean"] == 0.125
    assert "reward_mean" not in logs[1][0], "it was NaN"
    assert logs[2][0]["eval.accuracy"] == 0.25


@pytest.mark.parametrize("uri", ["", "http://127.0.0.1:1"])
@pytest.mark.parametrize("is_known", [False, True])
def test_mlflow(
    stand_in, make_metrics, make_eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, is_known: bool
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    calls, opened = list[Call](), list[str]()
    answers = {
        "get_experiment_by_name": SimpleNamespace(experiment_id="7") if is_known else None,
        "create_experiment": "8",
        "create_run": SimpleNamespace(info=SimpleNamespace(run_id="r")),
    }

    def client(tracking_uri: str) -> Recorded:
        opened.append(tracking_uri)
        return Recorded(calls, answers)

    stand_in("mlflow")
    stand_in("mlflow.entities", Metric=lambda *args: args, Param=lambda *args: args)
    stand_in("mlflow.tracking", MlflowClient=client)
    (folder := tmp_path / "made").mkdir()
    settings = {f"name_{number}": "x" * 600 for number in range(150)}
    logged("mlflow", folder, settings, make_metrics, make_eval)
    assert opened == [uri or (tmp_path / "mlruns").as_uri()]
    assert ("create_experiment", ("llamarl",), {}) in calls or is_known
    assert ("create_run", ("7" if is_known else "8",), {"run_name": "made"}) in calls
    batches = [named for name, args, named in calls if name == "log_batch" and args == ("r",)]
    params = [param for one in batches for param in one.get("params", ())]
    assert [name for name, _ in params] == list(settings), "at most 100 at a time are taken"
    assert {len(value) for _, value in params} == {MAX_LETTERS}
    assert max(len(one.get("params", ())) for one in batches) == 100
    first, second, third = ({name: (value, step) for name, value, _, step in one["metrics"]} for one in batches[2:])
    assert first["reward_mean"] == (0.125, 1)
    assert "reward_mean" not in second
    assert third["eval.accuracy"] == (0.25, 2)
    assert calls[-1] == ("set_terminated", ("r",), {})
