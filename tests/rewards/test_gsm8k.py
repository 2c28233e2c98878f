from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.rewards._text import TAIL_CHARS, after_hashes, last_box, parse_number
from llamarl.rewards.gsm8k import Gsm8k
from llamarl.types import Outcome
from tests.rewards.conftest import item


def outcome(response: str, answer: str = "72") -> Outcome:
    (result,) = Gsm8k().score([item(response, answer)])
    return result.outcome


def test_every_gold_solution_is_right(gsm8k_rows: list[dict[str, str]]) -> None:
    results = Gsm8k().score([item(row["solution"], row["answer"]) for row in gsm8k_rows])
    assert {result.outcome for result in results} == {Outcome.SCORE}
    assert {result.value for result in results} == {1.0}


def test_another_rows_solution_is_wrong(gsm8k_rows: list[dict[str, str]]) -> None:
    shifted = [*gsm8k_rows[1:], gsm8k_rows[0]]
    results = Gsm8k().score(
        [item(row["solution"], other["answer"]) for row, other in zip(gsm8k_rows, shifted, strict=True)]
    )
    for row, other, result in zip(gsm8k_rows, shifted, results, strict=True):
        assert (result.outcome is Outcome.SCORE) == (row["answer"] == other["answer"])


@pytest.mark.parametrize(
    "response",
    ["####72", "#### 72", "#### 72.", "#### $72", "####72$", "#### 72.0", "#### +72", "#### $ 72.00 ",
     "#### 1\n#### 72", "#### 72\nand so on", "#####72", "####\t072", "#### 72e0", "#### 7.2e+01", "#### 720E-1"],
)  # fmt: skip
def test_right_forms(response: str) -> None:
    assert outcome(response) is Outcome.SCORE


@pytest.mark.parametrize(
    "response",
    ["", "72", "The answer is 72", "#### 72 apples", "#### 71", "#### -72", "#### 7 2", "#### 7,2", "#### 72..", "####",
     "#### 72\n#### 1", "#### 72 #### ", "#### --72", "#### 72%", "#### 7²", "#### ٧٢", "#### 72e", "#### e72",
     "#### 72e1000",
     "#### 7,200e-2",
     "### 72", "#### NaN", "#### 72 or 73", "####\n72", "#### 72" + "x" * TAIL_CHARS],
)  # fmt: skip
def test_wrong_forms(response: str) -> None:
    assert outcome(response) is Outcome.WRONG


@pytest.mark.parametrize(("text", "right"), [("1,234", True), ("1234", True), ("12,34", False), ("1,2345", False),
                                             (",1234", False), ("1,,234", False)])  # fmt: skip
def test_commas_only_between_groups_of_three(text: str, right: bool) -> None:
    assert (outcome(f"#### {text}", "1,234") is Outcome.SCORE) == right


@pytest.mark.parametrize("gold", ["", "seventy-two", "1/2", "####"])
def test_broken_data_is_invalid_not_wrong(gold: str) -> None:
    (result,) = Gsm8k(wrong=-1.0).score([item("#### 72", gold)])
    assert (result.outcome, result.value) == (Outcome.INVALID, 0.0)
    assert result.reason


def test_scientific_notation_is_a_number() -> None:
    for answer in ("1.055e+06", "1055000", "1,055,000.0", "10.55E5"):
        assert outcome("#### 1.055e+06", answer) is outcome("#### 1055000", answer) is Outcome.SCORE
        assert outcome("#### 1.055e+05", answer) is Outcome.WRONG
        assert outcome(Gsm8k().written(answer), answer) is Outcome.SCORE, "the start's own trial"


def test_values_are_options() -> None:
    results = Gsm8k(correct=2.0, wrong=-1.0).score([item("#### 72"), item("#### 1")])
    assert [result.value for result in results] == [2.0, -1.0]


@given(
    number=st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=3),
    dollar=st.booleans(),
    commas=st.booleans(),
    stop=st.booleans(),
    space=st.sampled_from(["", " ", "  "]),
)
def test_a_number_is_itself_however_it_is_written(
    number: Decimal, dollar: bool, commas: bool, stop: bool, space: str
) -> None:
    digits = format(abs(number), ",f" if commas else "f")
    text = f"{'-' if number < 0 else ''}{'$' if dollar else ''}{digits}{'.' if stop else ''}{space}"
    assert parse_number(text) == number
    assert outcome(f"thus ####{space}{text}", format(number, "f")) is Outcome.SCORE
    assert outcome(f"thus ####{space}{text}", format(number + 1, "f")) is Outcome.WRONG


@given(st.text(alphabet="0123456789,.$+- #\n٣", max_size=40))
def test_what_parses_is_the_number_in_it(text: str) -> None:
    number = parse_number(text)
    if number is not None:
        assert number == Decimal("".join(char for char in text if char in "0123456789.+-").rstrip("."))


LONG = 400_000


@pytest.mark.parametrize("text", [" " * LONG + "x", "-" + " " * LONG + "x", "1" + " " * LONG + "x", "1" * LONG + "x",
                                  "1" + ",111" * LONG + "x", "$" * LONG], ids=range(6))  # fmt: skip
@pytest.mark.timeout(60)
def test_reading_a_number_is_linear(text: str) -> None:
    """The square of this length would be minutes."""
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("response", "content"),
    [(r"\boxed{5}", "5"), (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{5", None),
     (r"\boxed{1} then \boxed{2", "1"), (r"\boxed{\boxed{5}}", "5"), (r"\fbox{3}", "3"), (r"\boxed{\{1\}}", r"\{1\}"),
     ("}}}" + r"\boxed{1}", "1"), ("no box", None), (r"\boxed{1}" + " " * TAIL_CHARS, None), (r"\boxed {7}", "7")],
)  # fmt: skip
def test_last_closed_box(response: str, content: str | None) -> None:
    assert last_box(response) == content


def test_hashes_and_line() -> None:
    assert after_hashes("a #### 1 \r\n b") == "1"
    assert after_hashes("a ### 1") is None
