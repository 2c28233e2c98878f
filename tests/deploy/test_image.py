"""The container image: its file, and, where buildah and debootstrap are, an image that is built and trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT
from tests.deploy.tools import has_tools, tool
from tests.end_to_end.tiny import make_model, write_toml
from tests.nightly import nightly

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
STEPS = [line for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line and not line.startswith("#")]
PROGRAMS = ("buildah", "crun")
BASE = os.environ.get("LLAMARL_IMAGE_BASE", "")
"""An image that the builder has or fetches. Without it debootstrap makes one of Debian 12."""
ARGUMENTS = shlex.split(os.environ.get("LLAMARL_IMAGE_ARGS", ""))
"""Further arguments of `buildah build`, such as a configuration of pip."""
MIRROR = "http://deb.debian.org/debian"


def steps(kind: str) -> list[str]:
    return [step.removeprefix(kind).strip() for step in STEPS if step.startswith(f"{kind} ")]


def test_the_last_stage_is_small_and_not_root() -> None:
    assert steps("FROM") == ["${BASE} AS build", "${BASE}"]
    last = STEPS[max(i for i, step in enumerate(STEPS) if step.startswith("FROM ")) :]
    text = "\n".join(last)
    assert "USER 1000:1000" in last and "COPY --from=build /opt/llamarl /opt/llamarl" in last
    assert "pip install" not in text and json.loads(steps("ENTRYPOINT")[0]) == ["llamarl"]
    assert "LLAMARL_HEARTBEAT=/tmp/heartbeat" in text and steps("HEALTHCHECK")


@pytest.mark.parametrize(("age_s", "is_healthy"), [(None, True), (1, True), (600, False)])
def test_health_is_the_age_of_the_heartbeat(age_s: int | None, is_healthy: bool, tmp_path: Path) -> None:
    command = json.loads(steps("HEALTHCHECK")[0].partition("CMD ")[2])
    beat = tmp_path / "heartbeat"
    if age_s is not None:
        beat.touch()
        os.utime(beat, (beat.stat().st_mtime - age_s,) * 2)
    done = subprocess.run(command, env=os.environ | {"LLAMARL_HEARTBEAT": str(beat)}, timeout=60)
    assert (done.returncode == 0) == is_healthy


def test_the_context_has_what_the_package_needs() -> None:
    """And neither data nor runs, which are beside it."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((ROOT / name).exists() for name in allowed)
    assert {"llamarl", "pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"} <= allowed
    assert not any(fnmatch(name, one) for one in allowed for name in ("runs", ".git", ".venv", "tests"))


@has_tools
def test_the_linter_accepts_it() -> None:
    tool("hadolint", DOCKERFILE)


def buildah(folder: Path, *words: object, timeout_s: float = 3600) -> str:
    """Returns what buildah prints. Its images are in `folder`."""
    own = ["--root", folder / "images", "--runroot", folder / "run", "--storage-driver", "vfs"]
    command = ["buildah", *map(str, own), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of an image `llamarl:cpu`."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and programs that are missing here: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("image")
    try:
        arguments = ["--build-arg", f"BASE={BASE or _base(folder)}", "--build-arg", "VERSION=v7.8.9", *ARGUMENTS]
        kind = ["--isolation", "chroot", "--format", "docker", "--layers=false", "--file", DOCKERFILE]
        buildah(folder, "build", *kind, *arguments, "--tag", "llamarl:cpu", ROOT)
        yield folder
    finally:
        subprocess.run(
            ["buildah", "--root", folder / "images", "--runroot", folder / "run", "rm", "--all"], capture_output=True
        )
        shutil.rmtree(folder, ignore_errors=True)


def _base(folder: Path) -> str:
    """Makes an image of Debian 12. Returns its name."""
    if shutil.which("debootstrap") is None:
        pytest.skip("name a base image in LLAMARL_IMAGE_BASE, or install debootstrap")
    root = folder / "debian"
    command = ["debootstrap", "--variant=minbase", "bookworm", str(root), MIRROR]
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    container = buildah(folder, "from", "scratch")
    buildah(folder, "add", container, root, "/")
    shutil.rmtree(root)
    buildah(folder, "commit", "--rm", container, "localhost/base:12")
    return "localhost/base:12"


@nightly("builds an image")
@pytest.mark.timeout(5400)
def test_the_image_trains_as_a_user(image: Path, tmp_path: Path) -> None:
    config = json.loads(buildah(image, "inspect", "--type", "image", "llamarl:cpu"))["Docker"]["config"]
    assert config["User"] == "1000:1000" and config["Entrypoint"] == ["llamarl"] and config["Healthcheck"]
    container = buildah(image, "from", "llamarl:cpu")
    work = tmp_path / "work"
    work.mkdir()
    write_toml(work, make_model(work / "model"))
    toml = (work / "tiny.toml").read_text().replace(str(work), "/work")
    (work / "tiny.toml").write_text(toml)
    for path in (work, *work.rglob("*")):
        os.chown(path, 1000, 1000)
    run = ("run", "--isolation", "chroot", "--volume", f"{work}:/work", container, "--")
    assert buildah(image, *run, "llamarl", "--version") == "llamarl 7.8.9"
    assert buildah(image, *run, "id", "-u") == "1000"
    told = buildah(
        image, *run, "llamarl", "train", "tiny.toml", "--steps", "2", "--cluster.timeout_s", "900", timeout_s=1800
    )
    assert "finished 2 steps" in told
    assert (work / "runs" / "tiny" / "summary.json").stat().st_uid == 1000
    for program in ("getent", "find", "g++"):
        assert buildah(image, *run, "sh", "-c", f"command -v {program}")
