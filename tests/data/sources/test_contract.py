"""What every prompt source promises. Members come from the folder: a new one without an entry in OPTIONS fails here."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import Ref, build
from llamarl.config.ref import members
from llamarl.data.sources import ProblemRow, ProblemSource

FAMILY = "llamarl.data.sources"
OPTIONS = {
    "file": {"path": "rows.jsonl"},
    "hub": {"path": "me/rows"},
    "jsonl": {"path": "rows.jsonl"},
    "list_functions": {"count": 3},
    "running_total": {"count": 3},
    "reasoning_gym": {"family": "chain_sum", "count": 3, "first": 2},
    "verifiers": {"id": "gsm8k-v1", "count": 3},
}
NEEDS = {
    "reasoning_gym": "the package `reasoning_gym` is not installed",
    "verifiers": "the package `verifiers` is not installed; `make verifiers` tests its rows",
}


@pytest.fixture(params=members(FAMILY))
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProblemSource:
    if request.param in NEEDS:
        pytest.importorskip(request.param, reason=NEEDS[request.param])
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"question": "{i}+1?", "answer": "{i + 1}"}}\n' for i in range(3)))
    if request.param == "hub":
        request.getfixturevalue("hub").add("me/rows", {"a.jsonl": Path("rows.jsonl").read_bytes()}, kind="dataset")
    return build(Ref(name=request.param, **OPTIONS[request.param]), FAMILY, "data.train")


def test_source_is_a_finite_sequence_of_problems(source: ProblemSource) -> None:
    rows = [source[i] for i in range(len(source))]
    assert len(rows) == 3
    assert all(
        isinstance(row, ProblemRow) and row.question and (row.answer or "test_list" in row.metadata) for row in rows
    )
    assert len({row.problem_id for row in rows}) == 3
    assert rows == [source[i] for i in range(3)]
    with pytest.raises(IndexError):
        source[3]
