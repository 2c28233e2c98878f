from __future__ import annotations

import math
from dataclasses import replace

from llamarl.parts.answers.table import eval_table


def test_a_table_of_sets(make_eval):
    """A row each, aligned; what nobody could judge is said below."""
    known = replace(
        make_eval(0, 0.25, k=4), name="sums", accuracy_low=0.2, accuracy_high=0.31, pass_at={"2": 0.4, "4": 0.5},
        truncated_share=0.5, num_invalid=3, invalid_reason="a\nb",
    )  # fmt: skip
    head, *rows, invalid = eval_table([known, replace(make_eval(0, math.nan), name="other")]).split("\n")
    assert head.split() == [
        "set",
        "accuracy",
        "95%",
        "interval",
        "pass@k",
        "invalid",
        "cut",
        "tokens",
        "prompts",
        "time",
    ]
    assert [row.split()[0] for row in rows] == ["sums", "other"]
    assert {len(row) for row in rows} == {len(head)}
    for cell in ("25.0%", "20.0% to 31.0%", "@4 50.0%", "50%", "30.1", "256 x 4", "3.2s"):
        assert cell in rows[0], cell
    assert " nan " in rows[1] and "–" in rows[1]
    assert invalid == "sums: 3 of 1,024 invalid: a ↵ b"
