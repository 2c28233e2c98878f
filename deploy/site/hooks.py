"""Hooks of MkDocs: what the pages in docs/ need to become a site. They stay plain Markdown that GitHub shows.

- The navigation is the list of docs/index.md.
- A link to a file outside of docs/ leads to the repository.
- `<!-- api: llamarl.train -->` becomes the reference of that name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify

SECTION = re.compile(r"^## (.+)$")
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+\.md)(?:#[^)]*)?\)")
OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")
API = re.compile(r"^<!-- api: ([\w.]+)(?: members: ([\w, ]+))? -->$", re.MULTILINE)


def navigation(index: str) -> list[dict[str, Any]]:
    """Returns sections and pages in the order of the index. A page that several entries name has the first one's
    place."""
    sections, seen = [{"Home": "index.md"}], set[str]()
    pages: list[dict[str, str]] = []
    for line in index.splitlines():
        if found := SECTION.match(line):
            pages = []
            sections.append({found[1]: pages})
        elif (found := ENTRY.match(line)) and found[2] not in seen:
            seen.add(found[2])
            pages.append({found[1]: found[2]})
    return sections


def on_config(config: Any) -> Any:
    """Sets navigation and anchors, which are those of GitHub."""
    config.nav = navigation((Path(config.docs_dir) / "index.md").read_text("utf-8"))
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Returns a page as MkDocs reads it."""
    markdown = OUTSIDE.sub(lambda found: f"]({config.repo_url}/blob/main/{found[1]})", markdown)
    return API.sub(lambda found: _reference(found[1], found[2]), markdown)


def _reference(name: str, members: str | None) -> str:
    lines = [f"::: {name}"]
    if members:
        lines += ["    options:", f"      members: [{members}]"]
    return "\n".join(lines)
