"""What the documents name exists, and what they tell people to type works."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from llamarl.config import RunConfig, SftConfig, load_config, load_sft_config
from llamarl.config.schema import Section
from tests.architecture.repository import PACKAGE, ROOT, documents, name_of, nodes, python_files, tree
from tests.end_to_end.tiny import llamarl_here

CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"\w+(\.\w+)+")
FILE_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
CHECKED_SUFFIXES = (".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".json", ".jsonl", ".safetensors")
FILE_AND_NAME = re.compile(r"([\w./-]+\.py): (\w+)")
READERS_OWN = {"my_reward.py", "my_loss.py", "mine.toml", "my.toml", "train.jsonl", "test.jsonl"}
"""Names that stand for a file of the reader's."""
OWN_FOLDERS = ("llamarl", "tests", "configs", "docs", "examples", "benchmarks", "deploy", ".ci", ".github")


def _code_spans(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return (match.group(1).strip() for match in CODE_SPAN.finditer(text))


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_names_exist(page: Path) -> None:
    faults = []
    for span in _code_spans(page):
        if span.endswith(CHECKED_SUFFIXES) or (span.endswith("/") and span.split("/")[0] in OWN_FOLDERS):
            if FILE_PATH.fullmatch(span) and not _file_exists(span, page):
                faults.append(f"no file `{span}`")
        elif match := FILE_AND_NAME.fullmatch(span):
            if not _file_defines(*match.groups(), page):
                faults.append(f"nothing is called `{span}`")
        elif DOTTED.fullmatch(span):
            first = span.split(".")[0]
            if first == "llamarl" and not _name_exists(span):
                faults.append(f"nothing is called `{span}`")
            elif first in RunConfig.model_fields and not _setting_exists(span):
                faults.append(f"no setting `{span}`")
    assert not faults, f"{name_of(page)}: " + "; ".join(faults)


def _file_exists(span: str, page: Path) -> bool:
    """In the repository; or, outside its folders, a file of a run or a model: then the code has its name."""
    if any((folder / span).exists() for folder in (ROOT, PACKAGE, page.parent)):
        return True
    if span.split("/", maxsplit=1)[0] in OWN_FOLDERS:
        return False
    name = span.rsplit("/", 1)[-1]
    sources = python_files("llamarl")
    return name in READERS_OWN or any(path.name == name or name in path.read_text("utf-8") for path in sources)


def _file_defines(file: str, name: str, page: Path) -> bool:
    """`controller/admission.py: take`: the file from the package, the repository or the page; any name in it."""
    places = (folder / file for folder in (PACKAGE, ROOT, page.parent))
    found = next((place for place in places if place.exists()), None)
    if found is None:
        return False
    return any(getattr(node, "name", "") == name or name in _bound(node) for node in nodes(found))


def _name_exists(dotted: str) -> bool:
    """`llamarl.config.ref.Ref.options`: a module, then names inside it, read without importing anything."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:cut])
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if module.exists():
            return _defines(tree(module).body, parts[cut:])
    return False


def _defines(body: list[ast.stmt], names: list[str]) -> bool:
    if not names:
        return True
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return _defines(node.body, names[1:])
        if len(names) == 1 and names[0] in _bound(node):
            return True
    return False


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            return [ast.unparse(target) for target in node.targets]
        case ast.AnnAssign():
            return [ast.unparse(node.target)]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):  # of a module that imports its names where one is used
            return [name for one in node.body for name in _bound(one)]
    return []


def _setting_exists(dotted: str) -> bool:
    """`rollout.max_staleness`; below a part (a Ref) every option may follow."""
    schema: type[Section] = RunConfig
    for part in dotted.split("."):
        if part not in schema.model_fields:
            return False
        annotation = schema.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return True
        schema = annotation
    return True


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    faults = []
    for file, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            faults.append(f"{file}#{anchor}".rstrip("#"))
    assert not faults, f"{name_of(page)}: nothing at {', '.join(faults)}"


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _commands(page: Path) -> list[str]:
    """Command lines of a page's `bash` blocks, without comments, continuation lines joined."""
    blocks = [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    bare = (re.sub(r"\s+#.*", "", f" {line}").strip() for line in lines)
    return [line for line in bare if line]


SHOWN = [(page, command) for page in documents() for command in _commands(page)]


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page.name}:{command}" for page, command in SHOWN])
def test_shown_command_works(page: Path, command: str) -> None:
    for part in re.split(r"\s(?:&&|\|\||[|;])\s", command):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=.*", words[0]):  # NAME=value in front of a command
            words.pop(0)
        program = words[0].rsplit("/", 1)[-1]
        assert program in CHECKS, f"{name_of(page)} shows `{command}`: add a check for `{program}` to this file"
        CHECKS[program](words[1:])


def _check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w.-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = {word for word in words if "=" not in word and not word.startswith("-")} - targets
    assert not unknown, f"no make target {unknown}"


def _check_llamarl(words: list[str]) -> None:
    """The subcommand exists; a shipped config loads with the overrides that are shown."""
    command = words[:1] if words and not words[0].startswith("-") else []
    assert not (said := _refusal(*command)), said
    for position, word in enumerate(words):
        is_output = position > 0 and words[position - 1] == "--to"
        if word.startswith(tuple(f"{folder}/" for folder in OWN_FOLDERS)) and not is_output:
            assert (ROOT / word).exists(), f"no file {word}"
        if word.startswith(("configs/", "examples/")) and word.endswith(".toml"):
            hosts = ["--cluster.kind=hosts", "--cluster.listen=0.0.0.0:1"] if command == ["launch"] else []
            _check_overrides(ROOT / word, [*words[position + 1 :], *hosts])


@cache
def _refusal(*command: str) -> str:
    """Why a subcommand shows no help; empty: it does."""
    done = llamarl_here(*command, "--help")
    return done.stderr or "no help" if done.returncode else ""


def _check_overrides(path: Path, words: list[str]) -> None:
    schema, load = (SftConfig, load_sft_config) if path.stem.endswith("_sft") else (RunConfig, load_config)
    overrides: list[str] = []
    for word, after in pairwise([*words, "--"]):
        if word.startswith("--") and word[2:].replace("-", "_").partition("=")[0].split(".")[0] in schema.model_fields:
            overrides += [word] if "=" in word else [word, after]
    load(path, overrides)


def _check_python(words: list[str]) -> None:
    """The script or the module of this repository exists."""
    if words[:1] == ["-m"]:
        assert not words[1].startswith("llamarl") or _name_exists(words[1]), f"no module {words[1]}"
    elif words and not words[0].startswith("-"):
        assert (ROOT / words[0]).exists(), f"no file {words[0]}"


def _check_shell_script(words: list[str]) -> None:
    assert (ROOT / words[0]).exists(), f"no file {words[0]}"


def _accept(_: object) -> None:
    """Programs that are not ours."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": _check_make,
    "llamarl": _check_llamarl,
    "python": _check_python,
    "python3": _check_python,
    "bash": _check_shell_script,
} | dict.fromkeys(("git", "cd", "source", "pip", "cat", "less", "tail", "jq", "ls", "tensorboard", "curl"), _accept)
CHECKS |= dict.fromkeys(("squeue", "kubectl", "docker", "sky", "sudo"), _accept)  # those need a cluster
"""How a shown command is checked, by its program."""


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_shown_code_is_code(page: Path) -> None:
    """Python compiles, settings load, JSON parses, the shell reads each block."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        assert language in BLOCKS, (
            f"{name_of(page)}: a block is marked {language!r}; mark it as one of {sorted(BLOCKS)}"
        )
        BLOCKS[language](text)


def _check_settings(text: str) -> None:
    """A part of a run file: its sections and settings exist. Code of the reader's own is not imported."""
    tables = tomllib.loads(text)
    schema: type[Section] = (
        SftConfig if tables.keys() & (SftConfig.model_fields.keys() - RunConfig.model_fields) else RunConfig
    )
    unknown = [name for name in _names(tables, schema) if name]
    assert not unknown, f"no setting {unknown}"


def _names(tables: dict[str, Any], schema: type[Section], where: str = "") -> Iterator[str]:
    """Dotted names that a schema lacks. The options of plugins are theirs."""
    for key, value in tables.items():
        field = schema.model_fields.get(key)
        if field is None:
            yield where + key
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section) and isinstance(value, dict):
            yield from _names(value, field.annotation, f"{where}{key}.")


def _check_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _whole(text: str) -> str:
    """JSON of which a page shows a member."""
    return text if text[0] in "{[" else f"{{{text}}}"


BLOCKS: dict[str, Callable[[str], Any]] = {
    "": _accept,
    "bash": _check_bash,
    "json": lambda text: [json.loads(_whole(part)) for part in re.split(r"\n(?=[{\[])", text.strip())],
    "python": lambda text: compile(text, "page", "exec", dont_inherit=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
    "text": _accept,
    "toml": _check_settings,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
"""How a shown block is checked, by its language."""


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_pictures_are_pictures(page: Path) -> None:
    """With a description for those who do not see them."""
    for description, file in re.findall(r"!\[([^\]]*)\]\((?!https?://)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path = page.parent / file
        assert len(description.split()) > 3, f"{file} needs a description"
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes()[:4] in (b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xe1", b"\x89PNG"), (
                f"{file} is no picture"
            )


PRIVATE = re.compile(r"^\s*(?:from|import) llamarl[\w.]*\._\w+", re.MULTILINE)
"""Imports of modules that are not public."""


def test_shown_code_imports_public_names() -> None:
    """In Python of documents and in `examples/`, which readers copy."""
    blocks = [
        (page, text)
        for page in documents()
        for language, text in FENCE.findall(page.read_text("utf-8"))
        if language == "python"
    ]
    shown = [*blocks, *((path, path.read_text("utf-8")) for path in (ROOT / "examples").rglob("*.py"))]
    assert len(shown) > 5
    assert [name_of(path) for path, text in shown if PRIVATE.search(text)] == []
    assert PRIVATE.search("from llamarl.rewards._base import Reward")


def test_the_checks_can_fail() -> None:
    assert _name_exists("llamarl.config.ref.Ref.options")
    assert not _name_exists("llamarl.config.ref.Ref.opinions")
    assert not _name_exists("llamarl.no_such_module")
    assert _setting_exists("trainer.loss.rho")
    assert not _setting_exists("trainer.los")
    assert _file_defines("controller/admission.py", "take", ROOT / "README.md")
    assert not _file_defines("controller/admission.py", "took", ROOT / "README.md")
    assert _file_exists("model.safetensors", ROOT / "README.md")
    assert not _file_exists("llamarl/no_such_file.py", ROOT / "README.md")
    assert not _file_exists("no_such_file.json", ROOT / "README.md")
    assert "train-your-own-task" in _anchors(ROOT / "docs" / "index.md")
    with pytest.raises(AssertionError, match="no make target"):
        _check_make(["demmo"])


def test_the_map_has_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {f"`llamarl/{path.parent.name}/`" for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(re.findall(r"^\| (`llamarl/\w+/`) \|", text, re.MULTILINE))


def test_the_architecture_has_the_string_of_every_executor() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code = (PACKAGE / "run" / "executors.py").read_text(encoding="utf-8")
    strings = set(re.findall(r'"(\w+:[A-Z]\w+)"', code))
    assert strings
    assert set(re.findall(r"`(\w+:[A-Z]\w+)`", text)) == strings


def test_every_page_is_in_the_index() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md" and f"({page.name})" not in text
    ]
