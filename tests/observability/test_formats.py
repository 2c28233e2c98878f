from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observability.metrics import duration, last_question, number, percent, plain, remaining_s

NAN = math.nan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (NAN, "–"),
        (math.inf, "–"),
        (-1, "0ms"),
        (0.0043, "4ms"),
        (0.0994, "99ms"),
        (0.4, "0.4s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (102, "1m 42s"),
        (3599.6, "1h 00m"),
        (7500, "2h 05m"),
        (273600, "3d 04h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_remaining_time_is_unknown_before_the_first_step():
    assert remaining_s(10, 2.0) == 20
    assert remaining_s(-1, 2.0) == 0
    assert duration(remaining_s(10, NAN)) == "–"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (NAN, "nan"),
        (math.inf, "inf"),
        (0, "0"),
        (0.00312, "0.00312"),
        (0.834, "0.834"),
        (-0.0123, "-0.0123"),
        (31.44, "31.4"),
        (3240.4, "3,240"),
        (3e-5, "3.00e-05"),
        (12_345_678, "1.23e+07"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_percent_keeps_nan_visible():
    assert [percent(0.184, 1), percent(NAN), percent(None)] == ["18.4%", "nan", "–"]


@given(st.text())
def test_plain_is_one_printable_line(text):
    assert all(unicodedata.category(letter)[0] != "C" for letter in plain(text))
    assert "\n" not in plain(text)


EARLIER = "<|im_start|>user\nOld?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    "around",
    [
        ("<|im_start|>system\nx<|im_end|>\n" + EARLIER + "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA.format("system") + "x<|eot_id|>" + LLAMA.format("user"), "<|eot_id|>" + LLAMA.format("assistant")),
        ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
        ("<s>[INST] ", " [/INST]"),
        ("[gMASK]<sop><|system|>\nx<|user|>\n", "<|assistant|>\n<think>"),
        ("<｜begin▁of▁sentence｜><｜User｜>", "<｜Assistant｜>"),
        ("", ""),
    ],
)
def test_the_users_last_message_is_what_is_shown_of_a_prompt(around: tuple[str, str]) -> None:
    assert last_question("How many?\nSay it.".join(around)) == "How many?\nSay it."


@pytest.mark.parametrize("prompt", ["", "<b> user = 3", "<|im_start|>user\n<|im_end|>", "[INST]"])
def test_a_prompt_without_a_question_stays(prompt: str) -> None:
    assert last_question(prompt) == prompt
