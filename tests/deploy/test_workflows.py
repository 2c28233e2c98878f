"""What GitHub runs is what `.ci/run` and the Makefile run; hooks and badges too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.repository import ROOT
from tests.deploy.test_package import PROJECT
from tests.deploy.tools import has_tools, tool

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
TARGETS = {*re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)}
IDS = [path.stem for path in WORKFLOWS]


AS_ROOT = 'sudo --preserve-env env "PATH=$PATH" '


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    """Commands of a job, once for each target of its matrix."""
    targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    lines = [line.removeprefix(AS_ROOT) for line in lines if not line.startswith("sudo apt-get ")]
    return [line.replace("${{ matrix.target }}", target) for line in lines for target in targets]


@pytest.mark.parametrize("path", WORKFLOWS, ids=IDS)
def test_workflows_run_commands_of_the_repository(path: Path) -> None:
    """Each is `.ci/run` or a target of the Makefile, within a time limit, with no more rights than it needs."""
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        for command in commands(job):
            program, *words = command.split()
            assert (program, words) == ("bash", [".ci/run"]) or (program == "make" and {*words} <= TARGETS), command
        assert not commands(job) or job["timeout-minutes"] <= 180
        assert all(
            re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]) for step in job["steps"] if "uses" in step
        )


def test_every_change_is_tested_as_here_with_every_python() -> None:
    test = jobs(ROOT / ".github" / "workflows" / "test.yml")
    assert commands(test["test"]) == ["bash .ci/run"]
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert {*test["test"]["strategy"]["matrix"]["python"]} == named
    (last,) = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1:]
    assert re.search(rf"^{last} ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"make package", "make docs"} <= {*commands(test["package"])}


def test_the_nightly_workflow_has_every_long_target() -> None:
    """Targets that set LLAMARL_NIGHTLY, but those that need a browser to be looked at."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([\w-]+):.*## .*\n((?:\t.*\n)+)", text, re.MULTILINE)
    long = {name for name, recipe in rules if "LLAMARL_NIGHTLY=1" in recipe} - {"pictures", "package"}
    (job,) = jobs(ROOT / ".github" / "workflows" / "nightly.yml").values()
    assert {*job["strategy"]["matrix"]["target"]} == long


def test_hooks_are_targets_of_the_makefile() -> None:
    (repository,) = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))["repos"]
    entries = [hook["entry"].split() for hook in repository["hooks"]]
    assert repository["repo"] == "local" and all(entry[0] == "make" and {*entry[1:]} <= TARGETS for entry in entries)


def test_badges_lead_to_what_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    source = PROJECT["urls"]["Source"]
    workflows = re.findall(rf"{re.escape(source)}/actions/workflows/([\w.]+)", text)
    assert workflows and {*workflows} <= {path.name for path in WORKFLOWS}
    assert f"]({PROJECT['urls']['Documentation']})" in text


@has_tools
def test_the_schemas_accept_them() -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    tool("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", ROOT / "CITATION.cff")
    tool("pre-commit", "validate-config", HOOKS)
