from __future__ import annotations

import re

import numpy as np
import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.data.sources.running_total import RunningTotal

QUESTION = re.compile(r"[A-Z][a-z]{2} has (\d\d) (\w+): (.*)\. How many \2 now\?")


def test_answer_is_the_sum_and_the_perfect_teacher_finds_it() -> None:
    for row in RunningTotal(count=300):
        match = QUESTION.fullmatch(row.question)
        assert match
        gains = [int(gain) for gain in re.findall(r"[a-o]\+(\d)(?= |$)", match[3])]
        totals = np.cumsum([int(match[1]), *gains])
        assert row.answer == str(totals[-1])
        lines = [
            f"{label}:{totals[i]}+{gain}={totals[i + 1]}"
            for i, (label, gain) in enumerate(zip("abcdefghijklmno", gains, strict=False))
        ]
        assert row.solution == " ".join(lines) + f"\n#### {row.answer}"
        assert 10 <= totals[0] <= 29
        assert totals[-1] < 100
        assert all(1 <= gain <= 9 for gain in gains)


def test_problem_depends_on_seed_and_index_alone() -> None:
    long = RunningTotal(count=400, error_rate=0.5, seed=3)
    part = RunningTotal(count=50, first=200, error_rate=0.5, seed=3)
    assert [part[i] for i in range(50)] == [long[200 + i] for i in range(50)]
    assert RunningTotal(count=50, seed=4)[0] != long[0]


def test_disjoint_ranges_share_no_question() -> None:
    held_out, train = RunningTotal(count=1000), RunningTotal(count=20_000, first=1000)
    questions = {row.question for row in held_out} | {row.question for row in train}
    assert len(questions) == 21_000
    assert not {row.problem_id for row in held_out} & {row.problem_id for row in train}


def test_teacher_forgets_to_carry_at_its_rate_and_nothing_else() -> None:
    carries = forgotten = 0
    for row in RunningTotal(count=2000, error_rate=0.65):
        assert row.solution
        for total, gain, result in re.findall(r":(\d\d)\+(\d)=(\d\d)", row.solution):
            right = int(total) + int(gain)
            carry = int(total) % 10 + int(gain) >= 10
            assert int(result) in ((right, right - 10) if carry else (right,))
            carries += carry
            forgotten += int(result) != right
    assert abs(forgotten / carries - 0.65) < 0.03
    right, wrong = RunningTotal(count=200), RunningTotal(count=200, error_rate=1.0)
    assert [row.question for row in right] == [row.question for row in wrong]
    assert [row.answer for row in right] == [row.answer for row in wrong]


def test_lengths_are_roughly_exponential() -> None:
    num_lines = np.array([row.question.count("+") for row in RunningTotal(count=5000)])
    assert 3.0 < num_lines.mean() < 4.0
    assert num_lines.max() <= 15
    assert np.median(num_lines) <= 3
    assert (num_lines >= 9).mean() > 0.02


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 1, "error_rate": 1.5}, {"count": 1, "first": -1}, {}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"source\."):
        build(Ref(name="running_total", **options), "llamarl.data.sources", "source")
