from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llamarl.config import ConfigError
from llamarl.observability.files import compress, pieces, read_run_rows
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


def written(path, steps, max_bytes=2000):
    """A sink with a row of about 200 bytes for each step, closed."""
    sink = JsonlSink(path, max_bytes)
    for step in steps:
        assert sink.write({"kind": "step", "step": step, "text": "x" * 150}) is None
    assert sink.close() is None
    return sink


def steps_of(path):
    return [row["step"] for _, row in read_run_rows(path, "")]


class TestPieces:
    def test_nothing_is_lost_and_full_ones_are_compressed(self, tmp_path):
        path = tmp_path / "rollouts.jsonl"
        written(path, range(1, 26))
        written(path, range(26, 51))
        names = sorted(entry.name for entry in tmp_path.iterdir())
        assert names == [*(f"rollouts-{number:05d}.jsonl.gz" for number in range(1, len(names))), "rollouts.jsonl"]
        assert 4 < len(names) < 9
        assert steps_of(path) == list(range(1, 51))
        assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())

    def test_a_row_larger_than_a_piece(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        written(path, range(3), max_bytes=10)
        assert steps_of(path) == [0, 1, 2]
        assert len(pieces(path)) == 3

    @pytest.mark.parametrize("step", [0, 3, 9, 10, 11, 27, 30])
    def test_rows_of_later_steps_are_taken_back_from_all(self, tmp_path, step):
        """Also where an evaluation in the newest piece is of an earlier step, and after a piece is full to its end."""
        path = tmp_path / "metrics.jsonl"
        written(path, range(1, 31))
        sink = JsonlSink(path, 2000)
        sink.write({"kind": "eval", "step": 8})
        sink.drop_after(step)
        sink.write({"kind": "step", "step": step + 1})
        sink.close()
        evals = [8] if step >= 8 else []
        assert steps_of(path) == [*range(1, step + 1), *evals, step + 1]
        assert not list(tmp_path.glob(".*"))
        assert all(file.suffix == ".gz" for file in pieces(path)[:-1])

    @pytest.mark.parametrize("num_done", range(6))
    def test_taking_back_that_is_cut_short_is_finished_by_the_next(self, tmp_path, monkeypatch, num_done):
        path = tmp_path / "metrics.jsonl"
        written(path, range(1, 31))
        sink = JsonlSink(path, 2000)
        done, replace = [], os.replace

        def cut(source, target):
            done.append(target)
            if len(done) > num_done:
                raise OSError(errno.EIO, "cut")
            replace(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", cut)
            try:
                sink.drop_after(7)
            except OSError:
                assert len(done) > num_done
        sink.close()
        again = JsonlSink(path, 2000)
        again.drop_after(7)
        again.close()
        assert steps_of(path) == list(range(1, 8))

    def test_an_evaluation_alone_in_the_newest_piece_hides_no_later_step(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        (tmp_path / "metrics-00001.jsonl").write_text(
            "".join(f'{{"kind": "step", "step": {n}}}\n' for n in range(1, 9))
        )
        path.write_text('{"kind": "eval", "step": 5}\n')
        sink = JsonlSink(path, 2000)
        sink.drop_after(6)
        sink.close()
        assert steps_of(path) == [1, 2, 3, 4, 5, 6, 5]

    @pytest.mark.parametrize("twin", [False, True])
    def test_a_piece_that_a_crash_has_left_empty_goes(self, tmp_path, twin):
        path = tmp_path / "metrics.jsonl"
        (tmp_path / "metrics-00001.jsonl").write_text('{"kind": "step", "step": 1}\n')
        (tmp_path / "metrics-00002.jsonl").write_text("")
        if twin:
            (tmp_path / "metrics-00002.jsonl.gz").write_bytes(gzip.compress(b'{"kind": "step", "step": 2}\n'))
        sink = JsonlSink(path, 2000)
        sink.drop_after(1)
        sink.write({"kind": "step", "step": 2})
        sink.close()
        assert steps_of(path) == [1, 2]
        assert not [*tmp_path.glob("*00002*")]

    def test_a_damaged_piece_is_named(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        (tmp_path / "metrics-00001.jsonl.gz").write_bytes(gzip.compress(b'{"kind": "step", "step": 1}\n')[:-9])
        with pytest.raises(ConfigError, match=r"metrics-00001\.jsonl\.gz is damaged .* move it away"):
            JsonlSink(path, 2000).drop_after(1)

    def test_a_bad_line_changes_nothing(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        written(path, range(1, 31))
        bad = tmp_path / "metrics-00001.jsonl"
        bad.write_text('no row\n{"kind": "step", "step": 9}\n')
        (tmp_path / "metrics-00001.jsonl.gz").unlink()
        before = steps_of(path.with_name("metrics-00002.jsonl.gz"))
        sink = JsonlSink(path)
        with pytest.raises(ConfigError, match=r"metrics-00001\.jsonl(\.gz)?:1 is not a row of a run"):
            sink.drop_after(2)
        assert steps_of(path.with_name("metrics-00002.jsonl.gz")) == before

    def test_a_disk_that_refuses_the_next_piece_costs_rows_only(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        sink = JsonlSink(path, 300)
        assert sink.write({"step": 1, "text": "x" * 200}) is None
        (tmp_path / ".metrics.jsonl.fresh").mkdir()
        assert sink.write({"step": 2, "text": "x" * 200}) is not None
        (tmp_path / ".metrics.jsonl.fresh").rmdir()
        assert sink.write({"step": 3, "text": "x" * 200}) is None
        sink.close()
        assert steps_of(path) == [1, 3]

    def test_what_was_not_compressed_is_read_and_compressed_later(self, tmp_path, monkeypatch):
        path = tmp_path / "metrics.jsonl"

        def refuse(*_):
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copyfileobj", refuse)
            written(path, range(1, 31))
        assert not list(tmp_path.glob(".*"))
        assert {file.suffix for file in pieces(path)} == {".jsonl"}
        assert steps_of(path) == list(range(1, 31))
        whole = pieces(path)[0].read_bytes()
        compress(pieces(path)[0])
        (tmp_path / "metrics-00001.jsonl").write_bytes(whole)  # as when it was cut before it removed this
        assert steps_of(path) == list(range(1, 31))
        written(path, [31])
        assert {file.suffix for file in tmp_path.iterdir()} == {".gz", ".jsonl"} and len(pieces(path)) > 3
        assert [file.name for file in tmp_path.glob("*.jsonl")] == ["metrics.jsonl"]
        assert steps_of(path) == list(range(1, 32))


def test_what_no_token_has_measured_is_null(make_metrics):
    row = make_metrics(importance_ratio_mean=None, kl_to_behavior=None).to_json()
    assert (row["importance_ratio_mean"], row["kl_to_behavior"], row["loss"]) == (None, None, -0.0123)
