"""Data sets by name, from a server that speaks the Hub's protocol."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.config.hub import HubName
from llamarl.parts.hub.sources.hub import CONVERTED, Hub
from llamarl.rewards.gsm8k import Gsm8k
from llamarl.types import RewardItem
from tests.parts.hub.server import HubServer
from tests.parts.hub.test_layout import FILES, GSM8K

NAME = "openai/gsm8k"


def parquet(*rows: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


def gsm8k(split: str) -> dict[str, str]:
    return {"question": f"{split}: 40 and 2?", "answer": "40 + 2 = <<40+2=42>>42\n#### 42"}


def resolved(hub: HubServer) -> set[str]:
    """Files that were asked for."""
    return {path.rpartition("/resolve/")[2].partition("/")[2] for _, path in hub.requests if "/resolve/" in path}


@pytest.fixture
def gsm8k_hub(hub: HubServer) -> HubServer:
    """With gsm8k as it is there."""
    content = {path: parquet(gsm8k(path.split("-")[0]), gsm8k("again")) for path in FILES}
    hub.add(NAME, {"README.md": GSM8K.encode()} | content, kind="dataset")
    return hub


def test_the_rows_of_a_split_and_no_other_file(gsm8k_hub: HubServer) -> None:
    hub = gsm8k_hub
    ref = Ref(name="hub", path=NAME, config="main", split="test")
    first, second = build(ref, "llamarl.data.sources", "data.train")
    assert (first.problem_id, first.question) == (f"{NAME}/main/test-1", "main/test: 40 and 2?")
    assert second.problem_id == f"{NAME}/main/test-2"
    assert resolved(hub) == {"README.md", "main/test-00000-of-00001.parquet"}
    item = RewardItem(prompt="", response="It is\n#### 42", answer=first.answer, metadata={})
    assert Gsm8k().score([item])[0].value == 1.0
    pinned = HubName(NAME, Hub.pinned(HubName(NAME)).revision)
    assert pinned.is_pinned
    asked = len(hub.requests)
    assert len(Hub(path=NAME, config="main", split="test", revision=pinned.revision)) == 2
    assert Hub(path=str(pinned), config="main", split="test")[0].problem_id == first.problem_id
    assert len(hub.requests) == asked


def test_ids_of_splits_differ_and_of_files_of_a_split_too(hub: HubServer) -> None:
    rows = [{"problem": f"{n}?", "n": n} for n in range(4)]
    shards = {f"data/train-0000{n}-of-00002.parquet": parquet(*rows[2 * n : 2 * n + 2]) for n in range(2)}
    more = {"data/test-00000-of-00001.parquet": parquet(*rows)}
    hub.add("me/two", shards | more, kind="dataset")
    options: Any = {"path": "me/two", "question": "problem", "answer": "n"}
    train, test = Hub(**options), Hub(**options, split="test", limit=3)
    assert [row.problem_id for row in train] == [f"me/two/default/train-{n}" for n in range(1, 5)]
    assert [row.answer for row in train] == ["0", "1", "2", "3"]
    assert not {row.problem_id for row in train} & {row.problem_id for row in test}
    assert len(test) == 3


def test_files_after_the_last_row_that_is_taken_are_not_fetched(hub: HubServer) -> None:
    rows = [{"question": f"{n}?", "answer": n} for n in range(6)]
    paths = [f"data/train-0000{n}-of-00003.parquet" for n in range(3)]
    hub.add("me/three", {path: parquet(*rows[2 * n : 2 * n + 2]) for n, path in enumerate(paths)}, kind="dataset")
    for limit, num_files in ((2, 1), (3, 2), (0, 3)):
        taken = rows[:limit] if limit else rows
        assert [row.answer for row in Hub(path="me/three", limit=limit)] == [str(row["answer"]) for row in taken]
        assert resolved(hub) == set(paths[:num_files])
    assert sum("/tree/" in path for _, path in hub.requests) == 1  # of one commit


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": NAME}, "it has several configurations, so name one: config = 'main' or 'socratic'"),
        ({"path": NAME, "config": "mian"}, "config = 'mian' is none of its configurations; did you mean `main`"),
        ({"path": NAME, "config": "main", "split": "dev"}, "split = 'dev' is none of those of 'main'; .*test.*train"),
        ({"path": NAME, "config": "main", "revision": "nope"}, "no revision"),
        ({"path": "openai/none"}, "no such data set"),
        ({"path": "gsm8k"}, "path = 'gsm8k' is not a name of the Hub; give it as in 'openai/gsm8k'"),
        ({"path": NAME, "config": "main", "answer": "a"}, r"main/train-.*\.parquet:1: answer = 'a' is not among"),
    ],
)
@pytest.mark.usefixtures("gsm8k_hub")
def test_what_is_not_there(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^({options['path']}: |/).*{says}|^{says}"):
        len(Hub(**options))


def test_what_the_hub_has_converted_counts_where_nothing_else_can_be_read(hub: HubServer) -> None:
    hub.add("me/script", {"README.md": b"# nothing", "script.py": b"raise SystemExit"}, kind="dataset")
    options: Any = {"path": "me/script", "config": "all"}
    with pytest.raises(ConfigError, match=re.escape("none of its 2 files at ")) as caught:
        len(Hub(**options))
    assert f"and on its branch {CONVERTED}: " in str(caught.value)
    files = {"all/train/0000.parquet": parquet(gsm8k("a")), "all/train/0001.parquet": parquet(gsm8k("b"))}
    commit = hub.add("me/script", files, kind="dataset", revision=CONVERTED)
    assert [row.question[0] for row in Hub(**options)] == ["a", "b"]
    assert Hub.pinned(HubName("me/script")) == HubName("me/script", commit)
    assert len(Hub(**options, revision=commit)) == 2
    with pytest.raises(ConfigError, match=re.escape(f"; revision = {CONVERTED!r} has what the Hub has converted")):
        len(Hub(**options, revision="main"))


def test_a_split_of_lines_and_a_readme_that_is_wrong(hub: HubServer) -> None:
    row = json.dumps({"question": "1?", "answer": 1}).encode()
    hub.add("me/lines", {"train.jsonl": row, "test.jsonl": row + b"\n" + row}, kind="dataset")
    assert (len(Hub(path="me/lines")), len(Hub(path="me/lines", split="test"))) == (1, 2)
    hub.add("me/lines", {"train.jsonl": row, "README.md": b"---\na: [\n---\n"}, kind="dataset")
    with pytest.raises(ConfigError, match=r"^me/lines: the head of its README\.md is malformed YAML in line 2"):
        len(Hub(path="me/lines"))
