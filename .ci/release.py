"""Makes a release: `make release VERSION=0.2.0`, on a clean branch main.

Checks the folder, runs the tests, dates the section *Unreleased* of CHANGELOG.md, sets the version of CITATION.cff,
commits, tags, builds and checks the packages. The tag is the version (setuptools-scm). Nothing leaves the machine: the
last line is the command that publishes, and `.github/workflows/release.yml` uploads the packages of a pushed tag.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
BRANCH = "main"
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)(0|[1-9]\d*))?")
"""Versions of releases, as Python's packages write them."""
UNRELEASED = "## Unreleased\n"
CHECKS = (["make", "test"], ["make", "package"])
"""Commands before the commit, and after the tag."""

Run = Callable[[list[str]], None]


class Refused(SystemExit):
    """The release cannot be made; the message says what to do."""


def main() -> None:
    if len(sys.argv) != 2:
        raise Refused("usage: make release VERSION=0.2.0")
    release(sys.argv[1], ROOT, _run)


def release(version: str, root: Path, run: Run) -> None:
    """Makes the commit, the tag and the packages of a version. Raises Refused, and CalledProcessError."""
    check(version, root)
    run(CHECKS[0])
    today = datetime.now(UTC).date().isoformat()
    changes = root / "CHANGELOG.md"
    changes.write_text(dated(changes.read_text("utf-8"), version, today), "utf-8")
    citation = root / "CITATION.cff"
    citation.write_text(cited(citation.read_text("utf-8"), version, today), "utf-8")
    tag = f"v{version}"
    _git(root, "commit", "--quiet", "--message", f"Release {version}", "CHANGELOG.md", "CITATION.cff")
    _git(root, "tag", "--annotate", tag, "--message", f"Release {version}")
    try:
        run(CHECKS[1])
    except subprocess.CalledProcessError:
        _git(root, "tag", "--delete", tag)
        _git(root, "reset", "--quiet", "--hard", "HEAD~1")
        raise
    print(f"release {version}: tagged {tag}, packages are in dist/. To publish:\n  git push origin {BRANCH} {tag}")


def check(version: str, root: Path) -> None:
    """Raises Refused unless a release of this version can begin here."""
    if not VERSION.fullmatch(version):
        raise Refused(f"{version!r} is not a version; write it as in 0.2.0 or 0.2.0rc1")
    if (branch := _git(root, "rev-parse", "--abbrev-ref", "HEAD")) != BRANCH:
        raise Refused(f"the branch is {branch}; releases are made on {BRANCH}")
    if changed := _git(root, "status", "--porcelain"):
        raise Refused(f"the folder has changes; commit or remove them first:\n{changed}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise Refused(f"the tag v{version} exists; choose the next version")
    source = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]
    origin = _git(root, "config", "--default", "", "remote.origin.url")
    if _repository(origin) != _repository(source):
        raise Refused(
            f"origin is {origin or 'not set'}, and pyproject.toml names {source}; correct the one that is wrong "
            "(`git grep` finds the other places of the name)"
        )
    dated((root / "CHANGELOG.md").read_text("utf-8"), version, "")


def dated(changes: str, version: str, day: str) -> str:
    """Returns the change log with a section of this version in place of *Unreleased*. Raises Refused."""
    before, found, after = changes.partition(UNRELEASED)
    if not found or not after.partition("\n## ")[0].strip():
        raise Refused("CHANGELOG.md has nothing under *Unreleased*; write what users notice")
    return f"{before}{UNRELEASED}\n## {version} - {day}\n{after}"


def cited(citation: str, version: str, day: str) -> str:
    """Returns CITATION.cff with this version and day."""
    citation = re.sub(r"^version: .*$", f"version: {version}", citation, flags=re.MULTILINE)
    return re.sub(r"^date-released: .*$", f'date-released: "{day}"', citation, flags=re.MULTILINE)


def _repository(url: str) -> str:
    """`owner/name` of a URL of any protocol."""
    return "/".join(url.removesuffix("/").removesuffix(".git").replace(":", "/").split("/")[-2:])


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
