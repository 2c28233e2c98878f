"""What docs/data.md shows can be written: settings of sections, and options of sources."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import build
from llamarl.config.load import resolved
from llamarl.data.files import READERS
from llamarl.data.prompts import SOURCES
from tests.architecture.repository import ROOT

PAGE = Path(ROOT, "docs", "data.md").read_text(encoding="utf-8")
SHOWN = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize("settings", SHOWN)
def test_settings_load(settings: dict[str, Any]) -> None:
    config = resolved({"model": {"path": "x"}} | settings).data
    train = [source.source for source in config.sources] or [config.train]
    for ref in filter(None, (*train, config.eval)):
        build(ref, SOURCES, "data.train")


def test_all_suffixes_are_there() -> None:
    assert len(SHOWN) == 4
    assert set(re.findall(r"`(\.[a-z]+)`", PAGE)) - {".gz"} == READERS.keys()
