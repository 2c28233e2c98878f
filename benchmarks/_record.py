"""What every benchmark writes: one dated JSON with machine, versions, command, settings, figures and notes. And the CPU
time of the commands that it starts."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchmonarch", "numpy", "tokenizers")


def write_result(
    name: str, settings: dict[str, Any], figures: dict[str, Any], notes: list[str], folder: Path = RESULTS
) -> Path:
    """Writes `results/NAME-DATE.json`, or there in `folder`, and returns its path."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = folder / f"{name}-{day}.json"
    record = {
        "name": name,
        "date": day,
        "command": " ".join(["python", *sys.argv]),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        "settings": settings,
        **figures,
        "notes": notes,
    }
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def children_s() -> float:
    """Returns CPU seconds of all processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
