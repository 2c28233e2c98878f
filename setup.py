"""The README as the package index shows it: its links and pictures are URLs. The rest is in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"\]\((?!https?://|#)([^)]+)\)")
PICTURES = (".jpg", ".png", ".svg")


def with_urls(text: str, source: str) -> str:
    """Returns a page whose links to files of the repository are URLs."""

    def url(found: re.Match[str]) -> str:
        return f"]({source}/{'raw' if found[1].endswith(PICTURES) else 'blob'}/main/{found[1]})"

    return LINK.sub(url, text)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    readme = with_urls((ROOT / "README.md").read_text("utf-8"), urls["Source"])
    setup(long_description=readme, long_description_content_type="text/markdown")
