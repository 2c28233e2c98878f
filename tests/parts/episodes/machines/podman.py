"""A podman of the tests: an image made from files of this host, and a service that starts containers of it."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.sandbox.test_pool import until

IMAGE = "localhost/llamarl-machine:test"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PROGRAMS = ("bash", "cat", "cp", "grep", "head", "id", "ls", "rm", "sed", "sleep", "stat", "touch", "wc", PYTHON)
_LEFT_OUT = re.compile(r"(^|/)(dist-packages|site-packages|test|tests|__pycache__|idlelib|config-[^/]*)(/|$)")
_SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
"""


def problem() -> str:
    """Returns why this host has no podman for tests. Empty means that it has."""
    if lacking := [name for name in ("podman", "runc", "ldd") if shutil.which(name) is None]:
        return f"{', '.join(lacking)} missing: apt-get install podman runc"
    if os.getuid():
        return "only root is sure to start containers with limits"
    if not os.path.exists(f"/usr/bin/{PYTHON}"):
        return f"/usr/bin/{PYTHON} is missing, for the image"
    return "" if find_spec("docker") else "the package docker is missing: pip install 'llamarl[docker]'"


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Runs podman with its own storage. Yields the URL of its socket."""
    (folder / "containers.conf").write_text(_SETTINGS)
    podman = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
    settings = os.environ | {"CONTAINERS_CONF": str(folder / "containers.conf")}
    subprocess.run([*podman, "import", "-", IMAGE], input=_image(), env=settings, check=True, capture_output=True)
    socket = folder / "podman.sock"
    served = subprocess.Popen(
        [*podman, "system", "service", "--time", "0", f"unix://{socket}"],
        cwd=folder,  # where it notes that memory was short
        env=settings,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(socket.exists, "the service listens")
        yield f"unix://{socket}"
    finally:
        subprocess.run([*podman, "rm", "--all", "--force"], env=settings, check=True, capture_output=True)
        served.terminate()
        served.wait(60.0)
        subprocess.run(["umount", str(folder / "root" / "overlay")], check=False, capture_output=True)


def _image() -> bytes:
    """Returns an image with a shell and Python, as a tar archive."""
    library = Path("/usr/lib") / PYTHON
    programs = [f"/usr/bin/{name}" for name in _PROGRAMS]
    modules = [str(path) for path in (library / "lib-dynload").glob("*.so")]
    needs = subprocess.run(["ldd", *programs, *modules], capture_output=True, text=True, check=False).stdout
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for path in [*programs, *sorted(set(re.findall(r"(/\S+) \(0x", needs)))]:
            archive.add(path)
        archive.add(library, filter=lambda entry: None if _LEFT_OUT.search(entry.name) else entry)
        for name, target in (("usr/bin/python3", PYTHON), ("bin", "usr/bin")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name in ("tmp", "var/tmp"):
            place = tarfile.TarInfo(name)
            place.type, place.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(place)
    return packed.getvalue()
