from __future__ import annotations

import os
import signal
import time

import pytest

from llamarl.rewards._math_text import quick_verdict, read_number, tidy
from llamarl.rewards.math import Math
from llamarl.types import Outcome
from tests.nightly import nightly
from tests.rewards.conftest import item


def outcomes(math: Math, pairs: list[tuple[str, str]]) -> list[Outcome]:
    results = math.score([item(rf"so \boxed{{{answer}}}", gold) for gold, answer in pairs])
    assert all(result.reason for result in results if result.outcome is not Outcome.SCORE)
    return [result.outcome for result in results]


RIGHT_AT_ONCE = [
    ("72", "72"), ("72", "72.0"), ("1,234", "1234"), ("1234", r"1\,234"), ("10000", r"10,\!000"),
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", r"\dfrac12"), ("1/2", r"\tfrac{1}{2}"), ("-1/3", r"-\frac{1}{3}"),
    (r"\frac{1}{3}", "0.333333"), ("5", "x = 5"), ("5", "5.0 = 5"), (r"50\%", "0.5"),
    (r"50\%", "50"), ("$5$", "5."), (r"\text{Evelyn}", "evelyn"), (r"\text{(C)}", "C"), (r"\$18.90", "18.9"),
    (r"\left( 1, 2 \right)", "( 1, 2 )"), ("4", r"\( 4 \)"),
    ("1.055e+06", "1055000"), ("1055000", "1.055e6"), ("1.5e-3", "0.0015"), ("1.23456e-4", "0.000123456"),
]  # fmt: skip
WRONG_AT_ONCE = [
    ("5", "7=5"), ("5", "5=7"), ("5", "x=5=7"), ("0.0000001", "0.0000002"), ("Evelyn", "nylevE"), ("5", "x=1, y=5=2"),
    ("5050", r"\sum_{i=1}^{100} i"), ("6", r"\prod_{i=1}^{3} i"), ("2", r"\int_0^2 1 dx"), ("0", "0.0000001"),
    ("100000000", "100000001"), ("1/2", "0.51"), (r"\text{June 20}", "20 June"), ("3,4", "7=3, 8=4"),
    ("1.055e+06", "1055001"), ("1.5e-3", "0.0016"),
]  # fmt: skip
SCREENED = [
    ("12", "9^{9^{9}}"), ("12", "9^9^9^9"), ("12", "(9^9)^9^9"), ("12", "(((9^{99})^{99})^{99})"), ("12", "9^{999999}"),
    ("12", "1000000!"), ("12", "(9!)!"), ("12", "9!!!!"), ("12", "(" * 5000 + "12" + ")" * 5000), ("12", "1" * 5000),
    ("12", "(" * 100 + "12" + ")" * 100), ("12", "1" * 300 + r"\pi"), ("12", "x+" * 300 + "1"), ("12", "12$ or $13"),
    ("12", "12\x00"), ("12", "1" * 1_000_000),
]  # fmt: skip


def test_fast_path_starts_no_process() -> None:
    math = Math()
    assert outcomes(math, RIGHT_AT_ONCE) == [Outcome.SCORE] * len(RIGHT_AT_ONCE)
    assert outcomes(math, WRONG_AT_ONCE) == [Outcome.WRONG] * len(WRONG_AT_ONCE)
    assert outcomes(math, SCREENED) == [Outcome.WRONG] * len(SCREENED)
    assert math._pool._server is None
    math.close()


def test_gsm8k_golds_end_on_the_fast_path(gsm8k_rows: list[dict[str, str]]) -> None:
    math = Math()
    assert {r.outcome for r in math.score([item(row["solution"], row["answer"]) for row in gsm8k_rows])} == {
        Outcome.SCORE
    }
    boxed = [item(rf"\boxed{{{row['answer']}}}", row["solution"]) for row in gsm8k_rows]
    assert {result.outcome for result in math.score(boxed)} == {Outcome.SCORE}
    assert math._pool._server is None


@nightly("the library's own parser in a process; by day the fast path decides, and answers without end are wrong")
def test_math_verify_decides_the_rest() -> None:
    math = Math(workers=2, cpu_s=30)  # ten parentheses take most of a second on a busy machine
    right = [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\frac{\pi}{4}", r"\pi/4"), ("x^2+1", "1+x^2"),
        ("1,2", "2,1"), ("(x+y)^2", "x^2+2xy+y^2"), (r"x \ge 3", r"3 \le x"), ("120", "5!"), ("16", "2^4"),
        ("5", r"5\text{ cm}"),
        ("1,2", "x=1, x=2"), (r"10^{-3}", "0.001"), ("3+4i", "4i+3"), (r"[0,1)", r"\left[ 0,1 \right)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 1+1 \end{pmatrix}"),
        ("x^6", "(x^2)^3"), (r"\sqrt{2}", "1.414214"), ("e^{x^2}", r"e^{x \cdot x}"),
        ("12", "(" * 10 + "12" + ")" * 10), ("x=5", "5"),
    ]  # fmt: skip
    wrong = [
        (r"\frac{\sqrt{2}}{10^{7}}", "0.00000015"), ("x=5", "7=5"), ("x=5", "y=5"), ("(1,2]", "(1,2)"), ("1,2", "1,3"),
        (r"\begin{pmatrix}10^{-7}\\2\end{pmatrix}", r"\begin{pmatrix}0.0000002\\2\end{pmatrix}"),
        ("[0,10^{-7}]", "[0,0.0000002]"), ("x=10^{-7}", "0.0000002"), (r"\sqrt{2}", "1.41"), ("5", "junk 5 text"),
        ("5", "the answer is 5"), (r"5\pi", "answer: 5"), ("12", r"\%"), ("12", r"\frac{12}{"), ("12", "&&&"),
    ]  # fmt: skip
    assert outcomes(math, right) == [Outcome.SCORE] * len(right)
    assert outcomes(math, wrong) == [Outcome.WRONG] * len(wrong)
    math.close()


def test_gold_that_cannot_be_read_is_invalid_unless_repeated(math: Math) -> None:
    assert outcomes(math, [(r"3 \& \\ #", "3"), ("", "3"), (r"3 \& \\ #", r"3 \& \\ #")]) == [
        Outcome.INVALID, Outcome.INVALID, Outcome.SCORE,
    ]  # fmt: skip


@nightly("answers that take their whole limit; by day gold is read and repeated")
def test_endless_answers_are_wrong_and_cost_their_limit_once(math: Math) -> None:
    endless = [("12", r"\binom{100000000}{50000000}"), ("12", r"\cos^{999}(\sin^{999}(x))")]
    honest = [(r"\frac{\pi}{4}", rf"\frac{{{k}\pi}}{{{4 * k}}}") for k in range(2, 12)]
    assert outcomes(math, [*endless, *honest]) == [Outcome.WRONG] * 2 + [Outcome.SCORE] * 10
    start_s = time.monotonic()
    assert outcomes(math, endless * 50) == [Outcome.WRONG] * 100
    assert time.monotonic() - start_s < 20, "each once more would be 100 s of computing"


def test_an_answer_cannot_void_itself() -> None:
    """Whoever writes what no grader can compute is wrong; data that nobody can compute are invalid."""
    math = Math(workers=1, cpu_s=100, wall_s=300.0, batch_s=600.0)
    heavy = [r"\binom{999999999}{499999999}", r"\Gamma(999999999)", r"9^{999\cdot 999\cdot 999}", "1E999999999"]
    start_s = time.monotonic()
    assert outcomes(math, [("12", answer) for answer in heavy]) == [Outcome.WRONG] * 4
    assert outcomes(math, [("7" * 10**6, "12")]) == [Outcome.INVALID]
    assert time.monotonic() - start_s < 60, "any of them would be computed for 100 s"
    math.close()


@nightly("answers that take their whole limit; by day one does")
def test_a_batch_has_a_budget() -> None:
    math = Math(workers=1, cpu_s=50, wall_s=50.0, batch_s=4.0)
    try:
        math.score([item(r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}")])
        start_s = time.monotonic()
        results = math.score([item(rf"\boxed{{\cos^{{999}}(\sin^{{999}}(x+{k}))}}", "12") for k in range(1, 6)])
        assert time.monotonic() - start_s < 40, "the first of them alone would take 50 s of computing"
        assert [result.outcome for result in results] == [Outcome.INVALID] * 5
        assert "batch" in results[0].reason
        assert outcomes(math, [(r"\frac{\pi}{4}", r"\pi/4")]) == [Outcome.SCORE]
    finally:
        math.close()


def test_same_pair_is_compared_once(math: Math) -> None:
    pair = (r"\frac{\pi}{8}", r"\frac{2\pi}{16}")
    assert outcomes(math, [pair] * 20) == [Outcome.SCORE] * 20
    os.kill(math._pool._server.pid, signal.SIGSTOP)
    try:
        assert outcomes(math, [pair] * 20) == [Outcome.SCORE] * 20
    finally:
        os.kill(math._pool._server.pid, signal.SIGCONT)


@pytest.mark.timeout(60)
def test_text_work_is_bounded() -> None:
    rude = ["(" * 4000, "{" * 4000, "^" * 4000, "=" * 4000, ", " * 2000, "a=" * 2000, "$" * 4000,
            " " * 4000, "1" * 4000, "/" * 4000, r"\text{" * 600, r"\frac{" * 600,
            "x^" * 2000, "(1^" * 1300, "1!" * 2000,
            "\\" * 4001]  # fmt: skip
    for text in rude:
        for gold in ("12", r"\frac{1}{2}", "x+1", "Evelyn"):
            quick_verdict(gold, tidy(text))
            quick_verdict(tidy(text), tidy(text) + "1")
        read_number(text)
