"""Columns by name, conversations, ids, and what JSON cannot hold, over all kinds of files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.config.load import MAX_ROW_BYTES
from llamarl.data.prompts import fill_template
from llamarl.data.sources.file import File
from llamarl.data.sources.jsonl import Jsonl
from llamarl.rewards.exact import Exact
from llamarl.types import Outcome, RewardItem

Rows = list[dict[str, Any]]
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def parquet(path: Path, rows: Rows) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def lines(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_columns_are_named_and_stay_what_a_reward_may_read(tmp_path: Path) -> None:
    path = tmp_path / "math.csv"
    path.write_text("problem,solution,key,level\n1+1?,two: 2,first,3\n2+2?,four: 4,second,4\n")
    options = {"question": "problem", "answer": "solution", "id": "key", "path": str(path)}
    source = build(Ref(name="file", **options), "llamarl.data.sources", "data.train")
    first, second = source
    assert (first.problem_id, first.question, first.answer, first.solution) == ("first", "1+1?", "two: 2", "two: 2")
    assert second.metadata == {"problem": "2+2?", "solution": "four: 4", "key": "second", "level": "4"}
    assert second.fields["question"] == "2+2?"


def test_what_a_named_column_holds_comes_before_a_column_of_that_name(tmp_path: Path) -> None:
    """But for `answer`, which may be the worked solution that `data.solution` names."""
    row = {"question": "old?", "prompt": "raw", "id": "old", "answer": "work", "new": "new?", "key": "k", "final": "4"}
    (read,) = File(path=lines(tmp_path / "a.jsonl", [row]), question="new", id="key", answer="final")
    assert fill_template(read, "{id} {question} {prompt} {answer} {final}") == "k new? new? work 4"
    assert (read.answer, read.metadata) == ("4", row)


def test_a_column_inside_another(tmp_path: Path) -> None:
    row = {"prompt": [USER], "reward_model": {"ground_truth": "2", "style": "rule"}, "extra": {"index": 7}}
    (read,) = File(path=parquet(tmp_path / "a.parquet", [row]), answer="reward_model.ground_truth", id="extra.index")
    assert (read.problem_id, read.answer, read.messages) == ("7", "2", (USER,))
    assert read.metadata["reward_model"] == row["reward_model"]


def test_answer_empty_is_no_answer(tmp_path: Path) -> None:
    (read,) = File(path=lines(tmp_path / "a.jsonl", [{"prompt": "Say hello."}]), answer="")
    assert (read.question, read.answer) == ("Say hello.", "")


@pytest.mark.parametrize("name", ["messages", "prompt", "chat"])
def test_a_conversation_ends_with_the_question_and_its_reply_is_the_answer(tmp_path: Path, name: str) -> None:
    system, more = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}
    talk, four = [system, USER, ANSWER, more], {"role": "assistant", "content": "4"}
    path = parquet(tmp_path / "a.parquet", [{name: [*talk, four]}, {name: talk[:2]}, {name: [system, USER, ANSWER]}])
    named = {"messages": "chat"} if name == "chat" else {}
    with pytest.raises(ConfigError, match=r"a\.parquet:2: `answer` is missing"):
        len(File(path=path, **named))
    (first,) = File(path=path, **named, limit=1)
    assert (first.question, first.answer, first.reply) == ("2+2?", "4", four)
    assert first.messages == tuple(talk)
    _, second, third = File(path=path, answer="", **named)
    assert (second.reply, third.reply, third.answer, third.messages) == (None, ANSWER, "", (system, USER))


def test_an_answer_of_its_own_wins_over_the_reply(tmp_path: Path) -> None:
    (read,) = File(path=lines(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], "answer": 3}]))
    assert (read.answer, read.reply) == ("3", ANSWER)


@pytest.mark.parametrize(("write", "name"), [(lines, "a.jsonl"), (parquet, "a.parquet")])
def test_an_answer_that_is_null_is_none_of_its_own(
    tmp_path: Path, write: Callable[[Path, Rows], str], name: str
) -> None:
    rows = [{"messages": [USER, ANSWER], "answer": None}, {"messages": [USER, ANSWER], "answer": "3"}]
    assert [read.answer for read in File(path=write(tmp_path / name, rows))] == ["2", "3"]


def test_a_question_comes_before_messages_unless_those_are_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "p", "messages": [USER, ANSWER], "answer": "1"}])
    (as_text,), (as_chat,) = Jsonl(path=path), Jsonl(path=path, messages="messages")
    assert (as_text.question, as_text.messages, as_text.metadata["prompt"]) == ("p", (), "p")
    assert (as_chat.question, as_chat.messages) == ("1+1?", (USER,))
    with pytest.raises(ConfigError, match="question and messages are both set"):
        build(Ref(name="file", path=path, question="prompt", messages="messages"), "llamarl.data.sources", "data.train")


def test_messages_of_csv_are_json_and_those_of_parquet_lose_what_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('chat\n"' + json.dumps([USER, ANSWER]).replace('"', '""') + '"\n')
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}]}
    tool = {"role": "tool", "content": "3"}
    table = parquet(tmp_path / "a.parquet", [{"chat": [USER, call, tool]}])
    (read,), (called,) = File(path=str(path), messages="chat"), File(path=table, messages="chat", answer="")
    assert (read.messages, read.reply) == ((USER,), ANSWER)
    assert called.messages == (USER, call | {"content": ""}, tool)


def called(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"n": 1, "no": null, "arguments": "{}"}', {"n": 1, "no": None, "arguments": "{}"}),
        ("{}", {}),
        ("{n: 1", "{n: 1"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_that_are_json_text_are_objects(tmp_path: Path, text: str, value: Any) -> None:
    (read,) = File(path=lines(tmp_path / "a.jsonl", [{"messages": [USER, called("f", text)]}]), answer="")
    assert read.reply == called("f", value)
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": text}, "g()"]}
    (read,) = File(path=lines(tmp_path / "b.jsonl", [{"messages": [USER, flat]}]), answer="")
    assert read.reply == flat | {"tool_calls": [{"name": "f", "arguments": value}, "g()"]}


def test_calls_have_no_arguments_of_those_in_other_rows(tmp_path: Path) -> None:
    """Parquet has one type for all."""
    parts = {"at": {"y": [{"a": 2}, {"b": 3}]}}
    replies = [called("f", {"at": {"x": 1}}), called("g", {"city": "B"}), called("h", parts)]
    path = parquet(tmp_path / "a.parquet", [{"messages": [USER, one]} for one in replies])
    assert [read.reply for read in File(path=path, answer="")] == replies


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"problem": "x", "answer": "1"}, {}, r":1: `question` \(or `prompt`\) is missing .*columns are problem"),
        ({"q": 3, "answer": "1"}, {"question": "q"}, ":1: `q` is not text"),
        ({"a": "x", "b": "1"}, {"question": "c"}, ":1: question = 'c' is not among the columns; its columns are a, b$"),
        ({"question": "x", "b": {}}, {"answer": "b.c"}, ":1: answer = 'b.c' is not among the columns"),
        ({"question": "x", "answer": None}, {}, ":1: `answer` is missing .* its columns are question, answer$"),
        ({"messages": [USER], "answer": [1]}, {}, ":1: `answer` is missing .* its columns are messages, answer$"),
        ({"question": "x", "b": "1"}, {"answer": "b", "id": "n"}, ":1: id = 'n' is not among the columns"),
        ({"question": "x", "b": [1]}, {"answer": "b"}, ":1: `answer` is missing or not text or a number"),
        ({"m": "no JSON"}, {"messages": "m"}, ":1: the messages are not a list of objects"),
        ({"m": ["a"]}, {"messages": "m"}, ":1: the messages are not a list of objects"),
        ({"m": []}, {"messages": "m"}, ":1: the conversation has nothing to answer"),
        ({"m": [ANSWER]}, {"messages": "m"}, ":1: the conversation has nothing to answer"),
        ({"m": [USER, ANSWER, ANSWER]}, {"messages": "m"}, ":1: the conversation has nothing to answer"),
        ({"m": [{"role": "system", "content": "x"}]}, {"messages": "m"}, ":1: the conversation has nothing to answer"),
        ({"m": [{"from": "human", "value": "x"}]}, {"messages": "m"}, ":1: message 1 needs `role` and `content`"),
        ({"m": [USER, {"role": "user", "content": [1]}]}, {"messages": "m"}, ":1: message 2 needs"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        len(File(path=lines(tmp_path / "a.jsonl", [row]), **options))


def test_columns_that_are_no_json_are_left_out_of_all_rows_and_told(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 1)
    rows = [
        {"question": "a", "answer": "1", "score": 0.5, "when": None, "image": {"bytes": b"x"}},
        {"question": "b", "answer": "2", "score": float("nan"), "when": day, "image": None},
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    source = File(path=path)
    assert [row.metadata for row in source] == [{}, {}]
    assert source.left_out == {"image": "bytes", "score": "nan", "when": "date"}
    assert File(path=path, limit=1).left_out == {"image": "bytes"}
    with pytest.raises(ConfigError, match=r"id = 'image' is not among .*; `image` holds bytes"):
        len(File(path=path, id="image"))


def test_default_ids_are_those_of_the_file_and_of_files_of_one_name_of_their_paths(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "1"}
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(lines(tmp_path / folder / "train.jsonl", [row]))
    assert [one.problem_id for one in File(path=paths[0])] == ["train-1"]
    assert [one.problem_id for one in File(path=tuple(paths))] == [f"{path}-1" for path in paths]
    other = parquet(tmp_path / "more.parquet", [row | {"id": None}])
    assert [one.problem_id for one in File(path=(paths[0], other))] == ["train-1", "more-1"]


def test_a_row_must_fit_a_message(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"question": "x", "answer": "1", "more": "x" * MAX_ROW_BYTES}])
    with pytest.raises(ConfigError, match=r"a\.parquet:1: is too long: a row may have 1,048,576 bytes"):
        len(File(path=path))


def test_half_of_a_character(tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text('[{"question": "\\ud800", "answer": "1"}]')
    with pytest.raises(ConfigError, match=r":1: contains a lone surrogate"):
        len(File(path=str(path)))


@pytest.mark.parametrize(
    ("answer", "text"),
    [(3, "3"), (3.0, "3"), (-0.0, "0"), (2.5, "2.5"), (1.055e6, "1055000"), (1e21, "1" + "0" * 21), (1e300, "1e+300")],
)
def test_a_whole_number_has_no_decimal_point_however_it_came(tmp_path: Path, answer: float, text: str) -> None:
    (read,) = File(path=lines(tmp_path / "a.jsonl", [{"question": "q", "answer": answer, "level": 3.0}]))
    assert (read.answer, read.metadata) == (text, {"level": 3.0})


def test_an_integer_column_with_a_gap(tmp_path: Path) -> None:
    """As pandas writes one: floats."""
    table = pa.table({"question": ["a", "b"], "answer": pa.array([1.0, 20.0], pa.float64())})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = File(path=str(tmp_path / "a.parquet"))
    assert [row.answer for row in rows] == ["1", "20"]
    (result,) = Exact().score([RewardItem(prompt="", response=" 20", answer=rows[1].answer, metadata={})])
    assert result.outcome is Outcome.SCORE
