from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llamarl.observability.sinks import JsonlSink, MetricsLog


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes: a part of a write succeeds, the rest fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_are_readable_at_once_and_flat(tmp_path, make_metrics, make_eval):
    path, failures = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, failures.append)
    log.log(make_eval(0, 0.18))
    log.log(make_metrics(1, reward_mean=float("nan"), loss=float("inf"), extra={"clip": 0.5}))
    first, second = rows(path)
    assert (first["kind"], first["accuracy"]) == ("eval", 0.18)
    assert (second["kind"], second["step"], second["busy_share.trainer"], second["extra.clip"]) == (
        "step",
        1,
        0.58,
        0.5,
    )
    assert second["reward_mean"] is None  # measured, not finite
    assert second["loss"] is None
    assert "fingerprint" not in second  # not measured
    log.close()
    assert failures == []


def test_a_full_disk_is_told_once_and_leaves_valid_lines(tmp_path, make_metrics):
    path, failures = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, failures.append)
    log.log(make_metrics(1))
    with disk_of(path.stat().st_size + 10):
        log.log(make_metrics(2))
        log.log(make_metrics(3))
    assert [row["step"] for row in rows(path)] == [1]  # ten bytes of row 2 were taken back
    assert len(failures) == 1
    assert str(path) in str(failures[0])
    log.log(make_metrics(4))  # there is room again
    log.close()
    assert [row["step"] for row in rows(path)] == [1, 4]
    assert [failure.rows_lost for failure in failures] == [1, 2]


class FullDevice:
    """A file that refuses everything."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fileno(self):
        return self._file.fileno()

    def close(self):
        self._file.close()


def test_enospc_never_raises_and_names_the_reason(tmp_path, make_metrics):
    failures = []
    log = MetricsLog(tmp_path / "metrics.jsonl", failures.append)
    log._sink._file = FullDevice(log._sink._file)
    for step in (1, 2):
        log.log(make_metrics(step))
    assert [failure.reason for failure in failures] == ["No space left on device"]
    log.close()
    assert failures[-1].rows_lost == 2


def test_appends_after_a_torn_line(tmp_path, make_metrics):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    sink = JsonlSink(path)
    assert sink.write(make_metrics(2).to_json()) is None
    assert sink.close() is None
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_path_that_cannot_be_opened_is_an_error_at_the_start(tmp_path):
    with pytest.raises(OSError, match="missing"):
        JsonlSink(tmp_path / "missing" / "metrics.jsonl")


def test_rows_of_later_steps_are_taken_back_for_a_resumed_run(tmp_path, make_metrics, make_eval):
    path, failures = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, failures.append)
    for step in (1, 2, 3):
        log.log(make_metrics(step))
    log.log(make_eval(2, 0.5))  # an evaluation may end after later steps
    log.drop_after(2)
    log.log(make_metrics(3))
    log.close()
    assert [(row["kind"], row["step"]) for row in rows(path)] == [("step", 1), ("step", 2), ("eval", 2), ("step", 3)]
    assert failures == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
