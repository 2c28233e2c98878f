"""Configurations and splits by a README's head and by names of files, as `datasets` has them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from random import Random

import pytest

from llamarl.config import ConfigError
from llamarl.parts.hub import layout
from llamarl.parts.hub.globs import Glob
from llamarl.parts.hub.layout import chosen, configurations

GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - {split: train, path: ["socratic/train-*"]}
---
# GSM8K
"""
FILES = [f"{name}/{split}-00000-of-00001.parquet" for name in ("main", "socratic") for split in ("train", "test")]


def test_a_readme_says_what_is_what() -> None:
    found = configurations([".gitattributes", "README.md", *FILES], GSM8K)
    assert found == {"main": {"train": FILES[:1], "test": FILES[1:2]}, "socratic": {"train": FILES[2:3]}}
    assert configurations(FILES, "# no head")["socratic"] == {"train": FILES[2:3], "test": FILES[3:]}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{data_files: a.csv}", {"train": ["a.csv"]}),
        ("{data_files: [a.csv, 'b/*.csv']}", {"train": ["a.csv", "b/c.csv"]}),
        ("{data_files: {dev: ['**/*.csv', a.csv]}}", {"dev": ["a.csv", "b/c.csv"]}),
        ("{data_files: [{split: x, path: none.csv}, {split: y, path: a.csv}]}", {"y": ["a.csv"]}),
        ("{data_dir: b}", {"train": ["b/c.csv"]}),
        ("{data_dir: ./}", {"train": ["a.csv", "b/c.csv"]}),
    ],
)
def test_forms_of_data_files(entry: str, expected: dict[str, list[str]]) -> None:
    readme = f"---\r\nconfigs:\r\n- {entry}\r\n---\r\n"
    assert configurations(["a.csv", "b/c.csv", "b/c.txt"], readme) == {"default": expected}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["train.jsonl", "test.jsonl.gz", "dataset_infos.json"], {"default": ["test", "train"]}),
        (["data/train-00000-of-00002-0a1b.parquet", "data/train_sft-00000-of-00001.parquet"],
         {"default": ["train", "train_sft"]}),
        (["main/train/0000.parquet", "main/train/0001.parquet", "other/test/0000.parquet"],
         {"main": ["train"], "other": ["test"]}),
        (["default/partial-train/0000.parquet"], {"default": ["partial-train"]}),
        (["data/my_set_train.csv", "data/my_set_dev.csv"], {"default": ["train", "dev"]}),
        (["train/a.json", "test/b.json"], {"default": ["train", "test"]}),
        (["en/validation.csv", "de/validation.csv"], {"en": ["validation"], "de": ["validation"]}),
        (["math/data/train.jsonl"], {"math": ["train"]}),
        (["easy.csv", "hard.csv"], {"default": ["train"]}),
        (["easy.csv", "test.csv"], {"default": ["test"]}),
        ([".cache/train.csv", "_old/train.csv", "train.arrow", "README.md", "state.json"], {}),
    ],
)  # fmt: skip
def test_names_of_files(paths: list[str], expected: dict[str, list[str]]) -> None:
    found = configurations(paths, "")
    assert {name: sorted(splits) for name, splits in found.items()} == {k: sorted(v) for k, v in expected.items()}


def test_the_same_rows_in_two_formats_are_read_once() -> None:
    assert configurations(["train.csv", "train.parquet"], "") == {"default": {"train": ["train.parquet"]}}
    assert configurations(["train.csv", "train.jsonl"], "") == {"default": {"train": ["train.jsonl"]}}


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        ("main/train-*", ["main/train-0.parquet"], ["main/train", "main/train-0/x", "xmain/train-0"]),
        ("**/*.csv", ["a.csv", "b/c/a.csv"], ["a.csv.gz"]),
        ("data/**", ["data/a", "data/b/c"], ["data"]),
        ("./a?.[cj]sv", ["ab.csv", "ab.jsv"], ["a/.csv", "ab.tsv"]),
        ("{train,dev}-[!0].csv", ["train-1.csv", "dev-2.csv"], ["train-0.csv", "test-1.csv"]),
        ("a+(b),c", ["a+(b),c"], ["aab,c"]),
        ("**/a", ["a", "x/a", "x/y/a"], ["xa", "x/ya"]),
        ("a**b", ["ab", "a/x/b"], ["a"]),
        ("x{a,{b,c}d}*", ["xa1", "xbd", "xcd.csv"], ["xb", "x", "xa/b"]),
        ("{a", ["{a"], ["a"]),
        ("a}[z-a]{b", ["a}z{b"][:0], ["a}b{b"]),
        ("[!a]", ["b"], ["a", ""]),
    ],
)
def test_patterns(pattern: str, matches: list[str], differs: list[str]) -> None:
    assert all(map(Glob(pattern).fullmatch, matches))
    assert not any(map(Glob(pattern).fullmatch, differs))


def test_a_configuration_and_a_split_are_chosen_or_listed() -> None:
    found = configurations(FILES, GSM8K)
    assert chosen(found, "main", "test") == ("main", FILES[1:2])
    for name, split, says in (
        ("", "train", "has several configurations, so name one: config = 'main' or 'socratic'"),
        ("man", "train", "config = 'man' is none of its configurations; .*main"),
        ("socratic", "test", "split = 'test' is none of those of 'socratic'; .*train"),
    ):
        with pytest.raises(ConfigError, match=says):
            chosen(found, name, split)
    assert chosen({"only": {"train": ["a"]}}, "", "train") == ("only", ["a"])
    assert chosen({"default": {"train": ["a"]}, "b": {"train": ["b"]}}, "", "train") == ("default", ["a"])
    marked = GSM8K.replace("config_name: socratic", "config_name: socratic\n  default: true")
    assert chosen(found, "", "train", marked)[0] == "socratic"


def test_a_head_that_is_no_yaml() -> None:
    with pytest.raises(ConfigError, match=r"the head of its README\.md is malformed YAML in line 3"):
        configurations(FILES, "---\nlicense: mit\nconfigs: [\n---\n")


def test_patterns_as_a_regular_expression_has_them() -> None:
    """Random patterns and paths: the same as by backtracking, where that ends."""
    random = Random(0)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]", "a": "a", "b": "b", "/": "/"}
    for _ in range(3000):
        tokens = random.choices(list(words), k=random.randrange(1, 6))
        pattern = "".join(tokens)
        expected = "".join(words[one] for one in re.findall(r"\*\*/|\*\*|\*|\?|.", pattern))
        path = "".join(random.choices("ab/", k=random.randrange(7)))
        assert Glob(pattern).fullmatch(path) == bool(re.fullmatch(expected, path)), (pattern, path)


@pytest.mark.parametrize(
    "entry",
    [
        "'" + "**a" * 300 + "'",
        "'" + "*a" * 400 + "'",
        "'" + "{a,b}" * 100 + "'",
        "'" + "{" * 500 + "'",
        "'" + "x" * 5000 + "'",
        "&a [*a]",
        "&a {x: *a}",
        "[" * 200 + "]" * 200,
        "[" * 500 + "]" * 500,
        "[" + ", ".join(["'*'"] * 5000) + "]",
        "2020-13-45",
        "{? [a] : b}",
        "!!python/object:os.system x",
        "9" * 5000,
    ],
)
def test_what_no_readme_has_is_refused_or_matches_nothing(entry: str) -> None:
    paths = [f"{'a' * 200}/{number}.csv" for number in range(200)]
    start_s = time.process_time()
    for readme in (f"---\nconfigs:\n- data_files: {entry}\n---\n", f"---\nconfigs:\n- config_name: {entry}\n---\n"):
        with suppress(ConfigError):
            configurations(paths, readme)
    assert time.process_time() - start_s < 2.0


def test_an_alias_that_doubles_is_not_followed_to_its_end() -> None:
    lines = ["a0: &a0 ['*.csv', '*.csv']", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    for name in ("data_files", "config_name", "data_dir"):
        readme = "\n".join(["---", *lines, f"configs:\n- {name}: *a59", "---"])
        if name == "data_files":
            with pytest.raises(ConfigError, match="data_files"):
                configurations(["a.csv"], readme)
        else:
            assert configurations(["a.csv"], readme)
    bomb = "\n".join(["---", *lines[:8], "configs:\n- data_files: *a7", "---"])
    assert configurations(["a.csv"], bomb) == {"default": {"train": ["a.csv"]}}


def test_a_head_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start_s = time.process_time()
    for readme in ("---" + "\n" * 200_000, "---\n" + "---  x\n" * 100_000, "\n" * 200_000 + "---\n", ""):
        assert configurations(["train.csv"], readme) == {"default": {"train": ["train.csv"]}}
    assert time.process_time() - start_s < 2.0
    monkeypatch.setattr(layout, "MAX_HEAD_CHARS", 100)
    with pytest.raises(ConfigError, match="README"):
        configurations(["train.csv"], "---\n" + "a: b\n" * 100 + "---\n")
