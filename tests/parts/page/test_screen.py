from __future__ import annotations

import math
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from llamarl.observability.screen import CompletionView, ExecutorView
from llamarl.parts.page.layout import Board, PhaseView, frame
from llamarl.parts.page.screen import LiveScreen
from tests.nightly import examples

SIZES = [(80, 24), (140, 40), (200, 60), (60, 20), (40, 12), (24, 6), (10, 3), (1, 1)]


def draw(board, width, height, now_s):
    lines = frame(board, width, height, now_s).plain.split("\n")
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= max(width, 2)
    return "\n".join(lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_fits_every_terminal(width, height, info, make_view, now_s):
    warnings = {"the disk is nearly full": 2}
    phases = (PhaseView(text="starting executors", started_s=1.0, done=2, total=3),)
    for view in (None, make_view(), make_view(metrics=None, evals=(), rewards=(), completions=(), executors=())):
        for some_phases in ((), phases):
            board = Board(info=info, started_s=now_s, view=view, phases=some_phases, warnings=warnings)
            draw(board, width, height, now_s)


def test_shows_the_rewards_of_the_sources(info, make_view, make_metrics, now_s):
    extra = {"source_reward.gsm8k": 0.25, "source_reward.svamp": 1.0}
    board = Board(info=info, started_s=now_s, view=make_view(metrics=make_metrics(1, extra=extra)))
    assert re.search(r"sources +gsm8k 0\.250   svamp 1\.00", draw(board, 80, 30, now_s))
    assert "sources" not in draw(Board(info=info, started_s=now_s, view=make_view()), 80, 30, now_s)


def test_shows_the_load_of_experts(info, make_view, make_metrics, now_s):
    """The fullest layer, and the idle experts of all."""
    extra = {"expert_load.0": 1.5, "expert_load.11": 2.25, "idle_experts.0": 1.0, "idle_experts.11": 2.0}
    board = Board(info=info, started_s=now_s, view=make_view(metrics=make_metrics(1, extra=extra)))
    assert re.search(r"experts +busiest 2\.25 x mean +idle 3", draw(board, 80, 30, now_s))
    assert "experts" not in draw(Board(info=info, started_s=now_s, view=make_view()), 80, 30, now_s)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40)])
def test_shows_the_key_numbers(width, height, info, make_view, now_s):
    screen = draw(Board(info=info, started_s=now_s - 102, view=make_view()), width, height, now_s)
    for words in (
        *("running-total", "43/100", "8/16 groups", "1m 42s", "eta 1m 53s"),  # 56.5 steps of 2 s
        *("generator-0", "decoding 96", "97%", "waits for rollouts", "58%", "seen 0.5s ago"),
        *("3,240 tok/s", "running 96", "waiting 32", "mean 0.820", "max 1 of 2", "mean 0.624", "right 63%"),
        *("mean 31.4", "max 3.91", "capped 0.1%", "grad norm 0.834", "now 42.0% (step 40)", "first 18.0% (step 0)"),
        *(
            "generator-bound over steps 34 to 43, 11s: the trainer waits",
            "adv +0.38",
            "How many?",
            "1+1=2 ↵ #### 2",
            "█",
        ),
    ):
        assert words in screen, words


def test_a_line_for_each_set(info, make_view, make_eval, now_s):
    names = ("sums", "a-long-name-of-a-set", "c", "d", "e", "f")

    def drawn(some: tuple[str, ...]) -> str:
        evals = [
            replace(make_eval(step, step / 100 + len(name) / 1000), name=name) for step in (0, 20) for name in some
        ]
        return draw(Board(info=info, started_s=now_s, view=make_view(evals=tuple(evals))), 100, 40, now_s)

    screen = drawn(names[:5])
    for line in (r"sums +now 20.4% .step 20. +first 0.4%", r"a-long-name- +now 22.0%", r"e +now 20.1%"):
        assert re.search(line, screen), line
    assert "more sets" not in screen
    screen = drawn(names)
    assert re.search(r"d +now 20.1%", screen) and not re.search(r"e +now 20.1%", screen)
    assert "and 2 more sets" in screen


def test_a_fall_from_the_best_accuracy_is_marked(info, make_view, make_eval, now_s):
    """The best one and where it was stand next to the newest; one that is within its error is not marked."""
    for last, style in ((0.07, "yellow"), (0.12, "bold")):
        evals = tuple(make_eval(step, share) for step, share in ((0, 0.04), (75, 0.131), (100, last)))
        text = frame(Board(info=info, started_s=now_s, view=make_view(evals=evals)), 80, 24, now_s)
        assert re.search(rf"held-out +now {100 * last:.1f}% .step 100. +best 13.1% .step 75.", text.plain)
        at = text.plain.index(f"{100 * last:.1f}% (step 100)")
        assert style in {str(span.style) for span in text.spans if span.start <= at < span.end}


def test_the_address_of_the_page_is_whole_in_the_header(info, make_view, now_s):
    address = "http://127.0.0.1:41234/3Jk29dkLmNoPqRsTuVwXyZ12/"
    for view in (None, make_view()):
        board = Board(info=replace(info, watch=f"watch at {address}"), started_s=now_s, view=view)
        assert re.match(rf" llamarl .*\n watch +{address}", draw(board, 80, 24, now_s))


def test_no_column_is_cut_at_80_columns(info, make_view, make_metrics, now_s):
    """However large the numbers are, and however long the states of executors."""
    large = {"staleness_mean": 1234.5, "staleness_max": 123, "staleness_limit": 124, "grad_norm": 1.2e-5, "loss": -1e-4}
    metrics = make_metrics(43, **large, importance_ratio_max=123_456.0, truncated_share=1.0, kl_to_behavior=1.2e-7)
    state = "training, step 1,234 of 10,000"
    executors = tuple(
        ExecutorView(name=name, state=state, busy_share=1.0, heartbeat_s=now_s - 0.5)
        for name in ("generator-0", "trainer")
    )
    view = make_view(metrics=metrics, executors=executors, generated_tokens_per_s=1e9, completions=())
    screen = draw(Board(info=info, started_s=now_s, view=view), 80, 24, now_s)
    assert "…" not in screen and screen.count(state) == 2


def test_small_terminals_keep_what_matters(info, make_view, now_s):
    board = Board(info=info, started_s=now_s, view=make_view(), warnings={"disk": 1})
    screen = draw(board, 40, 9, now_s)
    assert "43/100" in screen
    assert "! disk" in screen
    assert "adv" not in screen


def test_model_output_is_only_text(info, make_view, now_s):
    evil = "[bold red]x[/bold red] \x1b[2J\x1b[H[/] \x07 \u202e \ud800 漢字漢字" + "é" * 500
    views = tuple(CompletionView(prompt=evil, response=evil, reward=math.nan, advantage=0.0) for _ in range(2))
    text = frame(Board(info=info, started_s=now_s, view=make_view(completions=views)), 80, 40, now_s)
    assert "[bold red]x[/bold red]" in text.plain
    assert "\x1b" not in text.plain
    text.plain.encode()  # a lone surrogate would raise
    assert not any("bold red" in str(span.style) and "x[" in text.plain[span.start : span.end] for span in text.spans)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(response=st.text(max_size=400), width=st.integers(1, 160), height=st.integers(1, 50))
def test_any_response_fits(info, make_view, now_s, response, width, height):
    completions = (CompletionView(prompt=response, response=response, reward=1.0, advantage=0.0),) * 2
    draw(Board(info=info, started_s=now_s, view=make_view(completions=completions)), width, height, now_s)


def test_turns_of_a_response_are_seen(info, make_view, now_s):
    for response in ("17+58?=75", "17+58?=75 and so on " * 30):
        completions = (CompletionView(prompt="p", response=response, reward=1.0, advantage=0.0, turns=3),)
        screen = draw(Board(info=info, started_s=now_s, view=make_view(completions=completions)), 100, 50, now_s)
        assert "3 turns" in screen


def test_nan_is_seen(info, make_view, make_metrics, now_s):
    metrics = make_metrics(43, loss=math.nan, grad_norm=math.inf, reward_mean=math.nan)
    view = make_view(metrics=metrics, rewards=(0.1, math.nan), recent_step_s=math.nan)
    screen = draw(Board(info=info, started_s=now_s, view=view), 80, 24, now_s)
    assert "loss nan" in screen
    assert "grad norm inf" in screen
    assert "eta –" in screen


def test_many_executors_are_counted(info, make_view, now_s):
    executors = tuple(
        ExecutorView(name=f"generator-{n}", state="decoding", busy_share=math.nan, heartbeat_s=now_s - 90)
        for n in range(64)
    )
    screen = draw(Board(info=info, started_s=now_s, view=make_view(executors=executors)), 80, 24, now_s)
    assert "seen 1m 30s ago" in screen and "nan" not in screen, "how busy they are is not known yet"
    assert int(re.search(r"and (\d+) more", screen)[1]) + screen.count("decoding") == 64


def test_who_is_silent_is_seen(info, make_view, now_s):
    for age_s, style in ((2, "dim"), (15, "yellow"), (45, "red")):
        executor = ExecutorView(name="trainer", state="step", busy_share=0.5, heartbeat_s=now_s - age_s)
        text = frame(Board(info=info, started_s=now_s, view=make_view(executors=(executor,))), 80, 24, now_s)
        at = text.plain.index(f"seen {age_s}")
        assert style in {str(span.style) for span in text.spans if span.start <= at < span.end}


def test_phases_before_the_loop(info, now_s):
    phases = (
        PhaseView(text="making the base model", started_s=now_s - 80, done=700, total=700, ended_s=now_s - 9),
        PhaseView(text="evaluating", started_s=now_s - 9, done=64, total=256),
    )
    screen = draw(Board(info=info, started_s=now_s - 80, phases=phases), 80, 24, now_s)
    assert re.search(r"✓ making the base model +1m 11s", screen)
    assert re.search(r"› evaluating +9.0s +64/256 +━+─+", screen)


def test_a_wait_says_for_whom_and_since_when(info, now_s):
    for names in ("trainer, generator-0", "generator-0, generator-1, generator-2, generator-3 and 60 more"):
        phase = PhaseView(text="starting executors", started_s=now_s - 102, done=1, total=3, waits_for=names)
        board = Board(info=info, started_s=now_s - 102, phases=(phase,))
        for width, height in SIZES[:3]:
            assert re.search(
                rf"› starting executors +1m 42s +1/3 +━+─+ *\n +waits for {names}", draw(board, width, height, now_s)
            )
        board = replace(board, phases=(replace(phase, ended_s=now_s),))
        assert "waits for" not in draw(board, 80, 24, now_s)


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_what_those_are_at_who_are_waited_for(info, now_s, size):
    at = "trainer (loads the model), reward (imports), generator-0 (compiles kernels), generator-1 (starts vLLM)"
    phase = PhaseView(text="starting executors", started_s=now_s - 20, done=1, total=5, waits_for=at)
    screen = draw(Board(info=info, started_s=now_s - 20, phases=(phase,)), *size, now_s)
    assert f"waits for {at}" in " ".join(screen.split()), "nothing of it is cut"
    assert max(map(len, screen.splitlines())) <= size[0]


def test_a_phase_goes_on_until_another_begins(info, monkeypatch, tmp_path):
    screen, now = LiveScreen(replace(info, folder=tmp_path)), [1.0]
    monkeypatch.setattr("llamarl.parts.page.screen.now_s", lambda: now[0])
    for now[0], done, names in ((1.0, 0, "reward, trainer"), (3.0, 1, "trainer"), (9.0, 2, "")):
        screen.phase("starting executors", done, 2, names)
        (phase,) = screen._board.phases
        assert (phase.started_s, phase.ended_s, phase.done, phase.waits_for) == (1.0, None, done, names)
    now[0] = 12.0
    screen.phase("loading the checkpoint")
    first, second = screen._board.phases
    assert (first.ended_s, second.started_s, second.ended_s) == (12.0, 12.0, None)
    screen.phase("starting executors")
    assert len(screen._board.phases) == 3, "it begins anew"


LIVE = """
import os, subprocess, sys
from pathlib import Path
from llamarl.config.schema import ScreenConfig
from llamarl.observability.screen import open_screen
from llamarl.observability.screen import RunInfo
info = RunInfo(name="demo", model="m", folder=Path(sys.argv[1]), steps=3, groups_per_step=1, max_staleness=1)
with open_screen(ScreenConfig(), info) as screen:
    screen.phase("starting executors", 1, 2)
    subprocess.run(["echo", "from a child"], check=True)
    print("from python")
    screen.warn("odd [red]thing[/red]")
    sys.stdin.readline()  # until the frame was seen
print("afterwards")
"""


def test_live_on_a_terminal(tmp_path):
    """A real pseudo-terminal: the frame is drawn, foreign output is kept away from it, and everything is given back."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(parent, (24, 80))
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", LIVE, str(tmp_path)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    seen, answered, deadline = b"", False, time.monotonic() + 240
    try:
        while b"afterwards" not in seen and time.monotonic() < deadline:
            if select.select([parent], [], [], 0.1)[0]:
                seen += os.read(parent, 65536)
            if not answered and b"odd [red]thing[/red]" in seen:
                os.write(parent, b"\n")
                answered = True
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    drawn, _, after = seen.decode().partition("\x1b[?1049l")
    assert "\x1b[?1049h" in drawn
    assert "starting executors" in drawn
    assert "from" not in drawn
    assert "warning: odd [red]thing[/red]" in after
    assert "afterwards" in after
    assert (tmp_path / "output.log").read_text().split("\n") == ["from a child", "from python", ""]
