"""The script that makes a release: in a small repository, with its checks recorded in place of run."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT

CHANGES = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0 - 2026-01-01\n\n- First.\n"
_spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
assert _spec is not None and _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "user.name", "n")
    git(folder, "config", "user.email", "e@example.org")
    git(folder, "remote", "add", "origin", "git@example.org:llamarl/llamarl.git")
    (folder / "CHANGELOG.md").write_text(CHANGES)
    (folder / "CITATION.cff").write_text('version: 0.1.0\ndate-released: "2026-01-01"\n')
    (folder / "pyproject.toml").write_text('[project.urls]\nSource = "https://example.org/llamarl/llamarl"\n')
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_a_release_is_a_dated_section_a_commit_and_a_tag(clone: Path) -> None:
    ran = list[list[str]]()
    release.release("0.2.0", clone, ran.append)
    assert ran == [["make", "test"], ["make", "package"]]
    changes = (clone / "CHANGELOG.md").read_text()
    assert changes.index("## Unreleased") < changes.index("## 0.2.0 - ") < changes.index("- A thing.")
    assert "version: 0.2.0\n" in (clone / "CITATION.cff").read_text()
    assert git(clone, "describe", "--exact-match") == "v0.2.0" and not git(clone, "status", "--porcelain")


def test_a_package_that_fails_leaves_no_tag(clone: Path) -> None:
    before = git(clone, "rev-parse", "HEAD")

    def run(command: list[str]) -> None:
        if command[-1] == "package":
            raise subprocess.CalledProcessError(2, command)

    with pytest.raises(subprocess.CalledProcessError):
        release.release("0.2.0", clone, run)
    assert git(clone, "rev-parse", "HEAD") == before and not git(clone, "tag")
    assert (clone / "CHANGELOG.md").read_text() == CHANGES


@pytest.mark.parametrize(
    ("prepare", "version", "names"),
    [
        ((), "0.2", "version"),
        ((), "v0.2.0", "version"),
        (("checkout", "--quiet", "-b", "other"), "0.2.0", "branch"),
        (("tag", "v0.2.0"), "0.2.0", "tag"),
        (("rm", "--quiet", "--cached", "CITATION.cff"), "0.2.0", "changes"),
        (("remote", "set-url", "origin", "https://example.org/me/fork"), "0.2.0", "pyproject.toml"),
        (("remote", "remove", "origin"), "0.2.0", "origin"),
    ],
)
def test_what_cannot_begin_is_refused(clone: Path, prepare: tuple[str, ...], version: str, names: str) -> None:
    if prepare:
        git(clone, *prepare)
    with pytest.raises(release.Refused, match=names):
        release.release(version, clone, lambda _: pytest.fail("a check ran"))


def test_nothing_to_tell_is_no_release() -> None:
    with pytest.raises(release.Refused, match=r"CHANGELOG\.md"):
        release.dated("## Unreleased\n\n## 0.1.0 - 2026-01-01\n\n- First.\n", "0.2.0", "today")
