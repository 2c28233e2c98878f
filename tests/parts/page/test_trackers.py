"""What users look at already gets every row; one that fails, hangs or is slow costs a warning and never a step."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.observability.sinks import MetricsLog, Subject
from llamarl.parts.page.trackers import _base
from llamarl.parts.page.trackers._base import Tracker, Trackers, TrackerThread, numbers, tracker_class
from llamarl.parts.page.trackers.prometheus import exposed
from tests.architecture.repository import ROOT

SETTINGS = {"steps": 3, "trainer.learning_rate": 1e-4}


def close(one: TrackerThread) -> None:
    trackers = Trackers([], subject(Path()), lambda text: None)
    trackers.each = [one]
    trackers.close()


def subject(folder: Path, port: int = 9464, step: int = 0) -> Subject:
    return Subject(name="made", folder=folder, settings=SETTINGS, port=port, step=step)


class Kept(Tracker):
    """Keeps what it gets."""

    PACKAGE = "json"
    rows: list[tuple[int, dict[str, float]]]
    is_closed = False

    def __init__(self, subject: Subject) -> None:
        Kept.rows = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        Kept.rows.append((step, dict(values)))

    def close(self) -> None:
        Kept.is_closed = True


class Failing(Kept):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError("the server is gone\nand more of it")


class Hanging(Kept):
    go_on = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        Hanging.go_on.wait()


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TrackerThread]:
    def forward(kind: type[Tracker], warn: Callable[[str], None] = pytest.fail) -> TrackerThread:
        monkeypatch.setattr(_base, "tracker_class", lambda name: kind)
        return TrackerThread("kept", subject(tmp_path), warn)

    return forward


def test_every_row_arrives_in_order(forward, make_metrics, make_eval, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", lambda failure: pytest.fail(str(failure)))
    log.recorder = Trackers([], subject(tmp_path), lambda text: None)
    log.recorder.each = [forward(Kept)]
    for step in (1, 2):
        log.log(make_metrics(step, reward_mean=float("nan") if step == 2 else 0.5))
    log.log(make_eval(2, 0.25))
    log.close()
    assert Kept.is_closed
    assert [step for step, _ in Kept.rows] == [1, 2, 2]
    assert Kept.rows[0][1]["reward_mean"] == 0.5
    assert "reward_mean" not in Kept.rows[1][1], "NaN is not sent"
    assert Kept.rows[2][1]["eval.accuracy"] == 0.25
    assert numbers(replace(make_eval(2, 0.5, k=4), name="math").to_json())["eval.math/pass_at_k"] == 0.8
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3, "JSON lines always"


def test_one_that_fails_is_said_once(forward, make_metrics) -> None:
    warnings = list[str]()
    one = forward(Failing, warnings.append)
    one.put(make_metrics(1).to_json())
    one.wait(240.0)
    for step in range(5):
        one.put(make_metrics(step).to_json())
    assert one._rows.empty(), "nobody would take them"
    close(one)
    (text,) = warnings
    assert "kept failed and gets no more rows: OSError: the server is gone;" in text


def test_one_that_hangs_never_holds_up_a_step(forward, make_metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_base, "CLOSE_S", 0.2)
    warnings, row = list[str](), make_metrics(1).to_json()
    one = forward(Hanging, warnings.append)
    start_s = time.monotonic()
    for _ in range(3 * _base.MAX_ROWS):
        one.put(row)
    close(one)
    assert time.monotonic() - start_s < 60
    assert len(warnings) == 1
    assert "does not keep up" in warnings[0]
    Hanging.go_on.set()


def test_a_mistake_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'csv' is not a sink; known: jsonl, mlflow, prometheus, tensorboard, wandb"):
        tracker_class("csv")
    monkeypatch.setattr(_base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[wandb\]'"):
        tracker_class("wandb")


def logged(name: str, folder: Path, make_metrics: Callable[..., Any], make_eval: Callable[..., Any]) -> None:
    """Three steps and an evaluation, through the thread; what it warns of fails."""
    warnings = list[str]()
    (one,) = Trackers(["jsonl", name], subject(folder), warnings.append).each
    for step in (1, 2, 3):
        one.put(make_metrics(step, reward_mean=step / 8).to_json())
    one.put(make_eval(3, 0.25).to_json())
    one.end()
    one.wait(240.0)
    assert warnings == []


def test_tensorboard_files_are_read_back(make_metrics, make_eval, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged("tensorboard", tmp_path, make_metrics, make_eval)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.tensor_proto.float_val[0]) for one in found.Tensors("reward_mean")] == [
        (1, 0.125),
        (2, 0.25),
        (3, 0.375),
    ]
    assert found.Tensors("eval/accuracy")[0].tensor_proto.float_val[0] == 0.25


def test_mlflows_file_store(make_metrics, make_eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (folder := tmp_path / "made").mkdir()
    logged("mlflow", folder, make_metrics, make_eval)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("llamarl")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.learning_rate"] == "0.0001"
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert sorted((one.step, one.value) for one in history) == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_wandb_offline(make_metrics, make_eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged("wandb", tmp_path, make_metrics, make_eval)
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    held = kept.read_bytes()
    assert b"reward_mean" in held
    assert b"eval.accuracy" in held
    assert b"learning_rate" in held
    assert (tmp_path / "wandb" / "id").read_text() in kept.name


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return opened.getsockname()[1]


def test_prometheus_names_and_the_dashboard(make_metrics, make_eval, tmp_path: Path, port: int) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    warnings = list[str]()
    (one,) = Trackers(["prometheus"], subject(tmp_path, port=port, step=2), warnings.append).each
    extra = {"rss_bytes.trainer": 5e8, "kl_same_version": 0.1, "kl_staleness": 0.2, "entropy_mean": 0.3}
    extra |= {"source_reward.gsm8k": 0.25, "expert_load.11": 1.5}
    for record in (make_metrics(3, extra=extra), make_metrics(4, extra=extra), make_eval(4, 0.25)):
        one.put(record.to_json())
    text, until_s = "", time.monotonic() + 240
    while "llamarl_eval_accuracy" not in text and time.monotonic() < until_s:
        time.sleep(0.05)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
                text = answer.read().decode()
        except OSError:
            continue
    with pytest.raises(ConnectionRefusedError):  # of the addresses of this machine, it listens at one
        socket.create_connection(("127.0.0.2", port), 5)
    close(one)
    assert warnings == []
    assert 'llamarl_steps_total{run="made"} 2.0' in text, "those of this start"
    assert 'llamarl_busy_ratio{executor="trainer",run="made"} 0.58' in text
    assert 'llamarl_rss_bytes{executor="trainer",run="made"} 5e+08' in text
    assert 'llamarl_source_reward{run="made",source="gsm8k"} 0.25' in text
    assert 'llamarl_expert_load{layer="11",run="made"} 1.5' in text
    assert 'llamarl_step_seconds{run="made"} 1.1' in text
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    named = set(re.findall(r"llamarl_\w+", json.dumps(dashboard["panels"])))
    assert len(named) > 10
    assert named <= set(re.findall(r"^(llamarl_\w+)\{", text, re.MULTILINE)), "the dashboard draws what is there"


def test_a_port_that_is_taken_is_said(make_metrics, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    warnings = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        (one,) = Trackers(["prometheus"], subject(tmp_path, port=taken_port), warnings.append).each
        one.put(make_metrics(1).to_json())
        close(one)
    assert len(warnings) == 1
    assert "Address already in use" in warnings[0]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("samples_per_s", ("llamarl_samples_per_second", {})),
        ("extra.publish_s", ("llamarl_publish_seconds", {})),
        ("busy_share.generator-0", ("llamarl_busy_ratio", {"executor": "generator-0"})),
        ("eval.accuracy", ("llamarl_eval_accuracy", {})),
        ("eval.wall_s", ("llamarl_eval_wall_seconds", {})),
        ("eval.pass_at.4", ("llamarl_eval_pass_at", {"k": "4"})),
        ("eval.math-1.5/pass_at.4", ("llamarl_eval_pass_at", {"set": "math-1.5", "k": "4"})),
    ],
)
def test_names_follow_the_conventions(key: str, name: tuple[str, dict[str, str]]) -> None:
    assert exposed(key) == name
