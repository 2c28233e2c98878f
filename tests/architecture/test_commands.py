"""Every command that we print, or write into a file for a user, is one that exists, with options that it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path

from llamarl.config import RunConfig, SftConfig
from tests.architecture.repository import ROOT, documents, name_of, nodes, python_files
from tests.end_to_end.tiny import llamarl_here

COMMAND = re.compile(r"llamarl ([a-z]+)((?:[ \n][^`\n;#|&]*)?)")
OPTION = re.compile(r"(?<![\w-])--([a-z][\w.-]*)")
SECTIONS = {"section", "key", *RunConfig.model_fields, *SftConfig.model_fields}
PATHS = re.compile(r"(?<![\w./-])((?:tests|benchmarks|configs|examples|docs)/[\w./-]+)")


def _texts(path: Path) -> Iterator[str]:
    """String literals; what an f-string fills in is X."""
    pieces = set[ast.AST]()
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values)
            pieces.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            yield node.value


@cache
def _help(command: str) -> str:
    """Help of a command; empty: there is no such command."""
    done = llamarl_here(command, "--help")
    return done.stdout if done.returncode == 0 else ""


def _faults(text: str) -> Iterator[str]:
    """Commands and options in a text that are not there."""
    for command, rest in COMMAND.findall(text):
        if not _help(command):
            continue  # `llamarl and`: a sentence
        for option in OPTION.findall(rest):
            name = option.rstrip(".")
            if f"--{name}" not in _help(command) and name.split(".")[0].replace("-", "_") not in SECTIONS:
                yield f"`llamarl {command}` has no --{name}"


def test_commands_in_messages_exist() -> None:
    files = python_files("llamarl")
    faults = [f"{name_of(path)}: {one}" for path in files for text in _texts(path) for one in _faults(text)]
    assert not faults, "\n".join(faults)


def test_commands_on_pages_exist() -> None:
    pages = [page for page in documents() if page.name != "CHANGELOG.md"]  # which tells of what was
    faults = [f"{page.name}: {fault}" for page in pages for fault in _faults(page.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def test_commands_in_templates_exist() -> None:
    launch = resources.files("llamarl.parts.hosts.launch")
    faults = [fault for one in launch.iterdir() if one.name.endswith("jinja") for fault in _faults(one.read_text())]
    assert not faults, faults


def test_paths_in_the_makefile_exist() -> None:
    named = PATHS.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(named) > 4 and not (gone := [path for path in named if not (ROOT / path).exists()]), gone


def test_the_check_can_fail() -> None:
    assert [*_faults("see `llamarl export runs/x --no-such-thing`")] == ["`llamarl export` has no --no-such-thing"]
    assert not [*_faults("`llamarl train RUN.toml --trainer.lora.rank 8 --resume`, or llamarl and --others")]
