from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.data.sources.jsonl import Jsonl

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def test_row_keeps_every_field(tmp_path: Path) -> None:
    row = {"id": "x-1", "question": "1+1?", "answer": 2, "solution": "1+1=2", "level": [3, None]}
    (read,) = Jsonl(path=write(tmp_path / "a.jsonl", row))
    assert (read.problem_id, read.question, read.answer, read.solution) == ("x-1", "1+1?", "2", "1+1=2")
    assert read.metadata == {"solution": "1+1=2", "level": [3, None]}


def test_prompt_is_a_name_of_question_and_a_missing_id_is_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text('{"prompt": "p", "answer": ""}\n\n{"question": "q", "prompt": "kept", "answer": "a"}\n')
    first, second = Jsonl(path=str(path))
    assert (first.question, first.answer, first.problem_id, first.solution) == ("p", "", "code-1", None)
    assert (second.question, second.problem_id, second.metadata) == ("q", "code-3", {"prompt": "kept"})


def test_several_files_and_a_limit(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", *[{"question": name, "answer": "1"}] * 2) for name in "ab"]
    source = build(Ref(name="jsonl", path=paths, limit=3), "llamarl.data.sources", "data.train")
    assert [row.problem_id for row in source] == ["a-1", "a-2", "b-1"]
    assert len(Jsonl(path=tuple(paths))) == 4


GOOD = b'{"id": "g", "question": "1?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b"", 1, "empty"),
        (b"\n \n", 1, "empty"),
        (GOOD + b'{"question": "2?", \n', 2, "malformed JSON"),
        (GOOD + b"\n" + b'"text"\n', 3, "not an object"),
        (GOOD + b'{"question": "2?"}\n', 2, "`answer` is missing"),
        (GOOD + b'{"question": "2?", "answer": null}\n', 2, "`answer` is missing"),
        (GOOD + b'{"answer": "2"}\n', 2, "`question` (or `prompt`) is missing"),
        (GOOD + b'{"question": "", "answer": "2"}\n', 2, "`question` (or `prompt`) is missing"),
        (GOOD + '{"question": "Wie heißt du?", "answer": "2"}\n'.encode("latin-1"), 2, "not UTF-8"),
        (GOOD + b'{"question": "2?", "answer": "2"}\n' + GOOD, 3, "also the id of"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, content: bytes, line: int, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}:{line}:')}.*{re.escape(says)}"):
        len(Jsonl(path=str(path)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        len(Jsonl(path=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("gsm8k_train", 7473), ("gsm8k_test", 1319), ("svamp", 1000), ("humaneval", 164), ("mbpp", 974)],
)
def test_real_data(name: str, num_rows: int) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    rows = list(Jsonl(path=str(path)))
    assert len(rows) == num_rows
    if name.startswith("gsm8k"):
        assert all(row.solution and row.solution.replace(",", "").endswith(f"#### {row.answer}") for row in rows)
