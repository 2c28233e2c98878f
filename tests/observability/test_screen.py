from __future__ import annotations

import io
import math

import pytest

from llamarl.config import ConfigError
from llamarl.config.schema import ScreenConfig
from llamarl.observability.screen import LineScreen, NullScreen, open_screen


def test_lines_of_a_wait(info, monkeypatch):
    out, now = io.StringIO(), [1.0]
    monkeypatch.setattr("llamarl.observability.screen.now_s", lambda: now[0])
    screen = LineScreen(info, out, io.StringIO())
    for now[0], done, names in ((1.0, 0, "a, b, c"), (1.5, 1, "b, c"), (3.0, 2, "c"), (3.1, 3, "")):
        screen.phase("starting executors", done, 3, names)
    assert out.getvalue().splitlines() == [
        "starting executors 0/3, waits for a, b, c",
        "starting executors 2/3, waits for c",
        "starting executors 3/3",
    ]


def test_lines_one_per_step(info, make_view, make_metrics, make_eval):
    out, err = io.StringIO(), io.StringIO()
    with LineScreen(info, out, err) as screen:
        for _ in range(3):
            screen.phase("starting executors")
        for done in (0, 1, 2, 2):
            screen.phase("evaluating", done, 2)
        for step in (1, 1, 1, 2):
            screen.show(make_view(step, metrics=make_metrics(step), evals=(make_eval(0, 0.184, k=4),)))
        screen.show(make_view(2, metrics=make_metrics(2, invalid_share=0.25, reward_mean=math.nan), evals=()))
        screen.warn("the disk is nearly full")
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["starting executors", "evaluating 0/2", "evaluating 2/2"]
    assert lines[3].startswith("held-out at step 0: accuracy 18.4% ± 2.4%  pass@4 48.4%")

    assert [line[:12] for line in lines[4:]] == ["step   1/100", "step   2/100"]
    assert "max 1/2 (S 1)" in lines[4]
    assert "reward 0.624  solved 63%" in lines[4]
    assert "eta 3m 18s" in lines[4]
    assert err.getvalue() == "warning: the disk is nearly full\n"


def test_a_line_names_the_rewards_of_the_sources(info, make_view, make_metrics):
    out = io.StringIO()
    extra = {"source_reward.gsm8k": 0.25, "source_share.gsm8k": 0.75, "source_reward.svamp": 1.0}
    LineScreen(info, out, io.StringIO()).show(make_view(1, metrics=make_metrics(1, extra=extra)))
    assert "reward 0.624 (gsm8k 0.250, svamp 1.00)  solved" in out.getvalue()


def test_a_line_says_what_is_decoded_lately(info, make_view, make_metrics):
    """Of this step generators may have told nothing yet."""
    out = io.StringIO()
    LineScreen(info, out, io.StringIO()).show(make_view(1, metrics=make_metrics(1, generated_tokens_per_s=0.0)))
    assert "3,240 tok/s" in out.getvalue()


def test_a_closed_pipe_does_not_end_the_run(info, make_view):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    LineScreen(info, Closed(), Closed()).show(make_view())


def test_ascii_logs(info):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    LineScreen(info, out, io.StringIO()).phase("größer – 漢")
    assert raw.getvalue() == b"gr??er ? ?\n"


def test_kinds(info, capsys):
    assert isinstance(open_screen(ScreenConfig(kind="auto"), info), LineScreen)  # pytest's stdout is no terminal
    with pytest.raises(ConfigError, match=r"screen\.kind = 'live'"):
        open_screen(ScreenConfig(kind="live"), info)
    with open_screen(ScreenConfig(kind="none"), info) as screen:
        assert isinstance(screen, NullScreen)
        screen.phase("x")
        screen.warn("still told")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "warning: still told\n")
