"""Pass rates: who is known by what, which bounds count, and what a file may not say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.config import ConfigError, resolved
from llamarl.config.data import DataConfig, FilterConfig
from llamarl.data.prompts import load_prompts
from llamarl.data.rates import digest, kept, rate_rows, read_rates
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.sft.run import load_documents
from tests.end_to_end.tiny import make_model

ROWS = [ProblemRow(problem_id=f"r{n}", question=f"{n}+1?", answer=str(n + 1)) for n in range(5)]


def write(path: Path, rights: dict[int, int], samples: int = 8) -> str:
    rows = [{"right": right, "samples": samples, "problem": digest(ROWS[n])} for n, right in rights.items()]
    path.write_text("".join(rate_rows({"model": "m"}, rows)))
    return str(path)


def test_a_problem_is_known_by_question_and_answer_alone() -> None:
    one = ProblemRow(problem_id="a", question="q", answer="1", metadata={"level": 3})
    assert digest(one) == digest(ProblemRow(problem_id="b", question="q", answer="1"))
    talk = ({"role": "user", "content": "q"},)
    others = [
        ProblemRow(problem_id="a", question="q", answer="2"),
        ProblemRow(problem_id="a", question="q ", answer="1"),
        ProblemRow(problem_id="a", question="q", answer="1", messages=talk),
        ProblemRow(problem_id="a", question="q", answer="1", messages=({"role": "system", "content": "s"}, *talk)),
    ]
    assert len({digest(row) for row in (one, *others)}) == 5


def test_both_bounds_are_kept_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rates.jsonl", {0: 0, 1: 2, 2: 6, 3: 7, 4: 8})
    keeps, said = kept(ROWS, FilterConfig(path=path, min=0.25, max=0.75))
    assert keeps == [False, True, True, False, False]
    assert said == (
        f"data.filter = {path}: 2 of 5 prompts are kept; left out: 1 solved less often than 0.25, 2 more often than "
        "0.75"
    )
    assert kept(ROWS, FilterConfig(path=path, min=0, max=1)) == ([True] * 5, "")
    assert kept(ROWS, FilterConfig(path=path))[0] == [False, True, True, True, False], "never and always, by default"


def test_held_out_prompts_are_all_asked(tmp_path: Path, base_tokenizer: Tokenizer) -> None:
    (data := tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": row.question, "answer": row.answer}) + "\n" for row in ROWS)
    )
    source = {"name": "jsonl", "path": str(data)}
    rates = {"path": write(tmp_path / "rates.jsonl", {0: 0, 1: 4, 2: 8, 3: 8, 4: 8})}
    config = DataConfig.model_validate({"train": source, "eval": source, "filter": rates})
    assert [one.answer for one in load_prompts(config, base_tokenizer, 99).prompts] == ["2"]
    assert [row.answer for row in load_prompts(config, base_tokenizer, 99).rows] == ["2"]
    assert len(load_prompts(config, base_tokenizer, 99, "eval").prompts) == 5


def test_measured_twice_counts_together(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    first, second = write(path, {0: 8}), json.dumps({"right": 0, "samples": 24, "problem": digest(ROWS[0])})
    path.write_text(Path(first).read_text() + second + "\n")
    assert read_rates(str(path)) == {digest(ROWS[0]): 0.25}


def test_what_nobody_could_judge_is_not_measured(tmp_path: Path) -> None:
    assert read_rates(write(tmp_path / "rates.jsonl", {0: 0}, samples=0)) == {}


def test_prompts_that_were_not_measured_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rates.jsonl", {0: 4})
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 problems, such as 'r1'; measure them with `llamarl eval"):
        kept(ROWS[:2], FilterConfig(path=path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "a row of data"}'], "rates.jsonl:1: the file does not contain pass rates"),
        (['{"kind": "pass rates"}', '{"right": 1, "samples": 2}'], "rates.jsonl:2: a row needs `problem`, `right` and"),
        (['{"kind": "pass rates"}', '{"problem": "x", "right": "a", "samples": 2}'], "rates.jsonl:2: a row needs"),
        (['{"kind": "pass rates"}', '{"problem": "x", "right": 3, "samples": 2}'], "3 right of 2 samples"),
        ([], "rates.jsonl:1: the file is empty"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (path := tmp_path / "rates.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError) as error:
        read_rates(str(path))
    assert message in str(error.value)


def test_supervised_training_says_what_is_left_out(tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"question": row.question, "answer": row.answer, "solution": "s"}) + "\n" for row in ROWS)
    )
    said, rates = list[str](), write(tmp_path / "rates", {0: 0, 1: 4, 2: 4, 3: 8, 4: 2})
    tables = {"train": {"name": "jsonl", "path": str(data)}, "filter": {"path": rates}}
    documents = load_documents(
        resolved({"model": {"path": str(make_model(tmp_path / "m"))}, "data": tables}), said.append
    )
    assert len(documents) == 3
    assert f"data.filter = {rates}: 3 of 5 prompts are kept; left out: 1 solved less often" in said[0]
