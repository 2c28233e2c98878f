"""Rows of each kind of file: the same rows whatever the kind, and what is wrong with a file in a sentence."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import ConfigError
from llamarl.config.load import MAX_ROW_BYTES, read_text
from llamarl.data.files import no_json, read_file, suffix
from tests.nightly import some

Rows = list[dict[str, Any]]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TABLES = st.lists(st.lists(TEXT, min_size=3, max_size=3), min_size=1, max_size=5).map(
    lambda rows: [dict(zip(("question", "answer", "ünit, \n"), row, strict=True)) for row in rows]
)


def as_csv(rows: Rows, delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows: Rows) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "a.jsonl": lambda rows: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(),
    "bom.jsonl": lambda rows: b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "a.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "lines.json": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "bom.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows).encode(),
    "a.csv": as_csv,
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + as_csv(rows),
    "a.tsv": lambda rows: as_csv(rows, "\t"),
    "a.parquet": as_parquet,
    "a.csv.gz": lambda rows: gzip.compress(as_csv(rows), mtime=0),
    "A.JSON.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "a.jsonl.gz": lambda rows: gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()),
}


@given(rows=TABLES)
@pytest.mark.parametrize("name", some(WRITERS, 5))
def test_each_kind_of_file_has_the_same_rows(tmp_path_factory: pytest.TempPathFactory, name: str, rows: Rows) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    path.write_bytes(WRITERS[name](rows))
    assert [row for _, row in read_file(path)] == rows


def test_the_mark_with_which_windows_begins_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    """A first prompt would begin with it."""
    (path := tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_text(path, "") == "one\ntwo"


def test_a_place_is_the_line_in_text_and_the_row_elsewhere(tmp_path: Path) -> None:
    rows = [{"q": "a\nb", "a": "1"}, {"q": "c", "a": "2"}]
    for name, numbers in (("a.csv", (3, 4)), ("a.jsonl", (1, 2)), ("a.json", (1, 2)), ("a.parquet", (1, 2))):
        (path := tmp_path / name).write_bytes(WRITERS[name](rows))
        assert [place for place, _ in read_file(path)] == [f"{path}:{number}" for number in numbers]


def test_parquet_keeps_structs_and_lists_over_batches(tmp_path: Path) -> None:
    rows = [{"n": n, "m": [{"role": "user", "content": f"{n}", "x": None}], "f": n / 3} for n in range(3000)]
    (path := tmp_path / "a.parquet").write_bytes(as_parquet(rows))
    assert [row for _, row in read_file(path)] == rows


def test_a_field_of_csv_may_be_as_long_as_a_row(tmp_path: Path) -> None:
    (path := tmp_path / "a.csv").write_text(f"q,a\n{'x' * 200_000},1\n")
    assert [len(row["q"]) for _, row in read_file(path)] == [200_000]


LONG = "x" * (MAX_ROW_BYTES + 1)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"", ":1: the file is empty"),
        ("a.csv", b"question,answer\n", ":1: the file is empty"),
        ("a.csv", b"q,q\n1,2\n", ":1: the column 'q' appears twice"),
        ("a.csv", b"q,a\n1,2\n1,2,3\n", ":3: has 3 values for 2 columns; put quotes"),
        ("a.csv", b"q,a\n1\n", ":2: has 1 values for 2 columns"),
        ("a.csv", b'q,a\n"1"x,2\n', ":2: malformed CSV"),
        ("a.csv", b'q,a\n"1,2\n', ": malformed CSV (unexpected end of data)"),
        ("a.csv", f"q,a\n{LONG},1\n".encode(), ":2: malformed CSV (field larger than field limit"),
        ("a.csv", "q,a\nheiß,1\n".encode("latin-1"), " is not UTF-8"),
        ("a.csv.gz", b"q,a\n", "Not a gzipped file"),
        ("a.csv.gz", gzip.compress(b"q,a\n" * 9, mtime=0)[:-9], "ended before the end-of-stream"),
        ("a.json", b"[]", ":1: the file is empty"),
        ("a.json", b"", ":1: the file is empty"),
        ("a.json", b'[{"q": 1}, 2]', ":2: holds a JSON int, not an object"),
        ("a.json", b'[{"q": 1}', " is not valid JSON"),
        ("a.json", b'[{"q": NaN}]', "NaN is not a number in JSON"),
        ("a.json", b'[{"q": 1, "q": 2}]', "the key 'q' appears twice"),
        ("a.json", '["heiß"]'.encode("latin-1"), " is not UTF-8"),
        ("a.json", b'{"rows":\n []}', ":1: malformed JSON"),
        ("a.parquet", b"", "as Parquet"),
        ("a.parquet", b"PAR1 no more", "as Parquet"),
        ("a.parquet", as_parquet([{"q": "x"}] * 99)[:-40], "as Parquet"),
        ("a.txt", b"1", "whose name ends in .jsonl, .json, .csv, .tsv, .parquet"),
        ("a.parquet.gz", b"1", "text files may add .gz"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        list(read_file(path))
    assert str(path) in str(caught.value)


def test_a_parquet_file_without_rows_and_one_with_a_name_twice(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": pa.array([], pa.string())}), path := tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=":1: the file is empty"):
        list(read_file(path))
    pq.write_table(pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], ["q", "q"]), path)
    with pytest.raises(ConfigError, match="the column 'q' appears twice"):
        list(read_file(path))


@pytest.mark.parametrize("name", ["none.csv", "none.json", "none.parquet", "none.jsonl"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.*No such file"):
        list(read_file(tmp_path / name))


def test_parquet_without_its_package_says_how_to_get_it(tmp_path: Path) -> None:
    """Everything else works without."""
    (tmp_path / "a.csv").write_bytes(b"q,a\n1,2\n")
    code = """import sys; sys.modules["pyarrow"] = None
from llamarl.data.files import read_file
assert list(read_file("a.csv"))
list(read_file("a.parquet"))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "ConfigError: Parquet files need the package pyarrow: pip install 'llamarl[data]'" in done.stderr


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, ""), ("a", ""), (1, ""), (True, ""), (1.5, ""), ([{"a": [None, "b"]}], ""),
        (float("nan"), "nan"), ([1, float("-inf")], "-inf"), (b"x", "bytes"), ({"a": [b"x"]}, "bytes"),
        (datetime.date(2026, 1, 1), "date"), (Decimal(1), "Decimal"), ([("k", "v")], "map"),
    ],
)  # fmt: skip
def test_what_json_does_not_have(value: object, kind: str) -> None:
    assert no_json(value) == kind


def test_suffixes() -> None:
    assert [suffix(name) for name in ("a.csv", "b/A.CSV.gz", "a.parquet", "a.parquet.gz", "a.csv.zst", "a", "csv")] == [
        ".csv", ".csv", ".parquet", "", "", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("timestamp[us]", 2**62),
        ("timestamp[ms, tz=Europe/Berlin]", 2**53),
        ("date32", 2**31 - 1),
    ],
)
def test_a_parquet_value_out_of_range_is_named_with_its_column(tmp_path: Path, kind: str, value: int) -> None:
    types = {
        "timestamp[us]": pa.timestamp("us"), "timestamp[ms, tz=Europe/Berlin]": pa.timestamp("ms", "Europe/Berlin"),
        "date32": pa.date32(),
    }  # fmt: skip
    table = pa.table({"question": ["q"], "when": pa.array([value], types[kind])})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet.*'when'"):
        list(read_file(tmp_path / "rows.parquet"))
