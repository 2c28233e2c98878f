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
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#]+\.md)(#[^)]*)?\)")
OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")
API = re.compile(r"^<!-- api: ([\w.]+)(?: members: ([\w, ]+))? -->$", re.MULTILINE)


def navigation(index: str) -> list[dict[str, Any]]:
    """Returns sections and pages in the order of the index. A page that several entries name has the place of the first
    one that links to all of it."""
    sections: list[dict[str, Any]] = [{"Home": "index.md"}]
    places = dict[str, tuple[bool, int, str]]()
    for line in index.splitlines():
        if found := SECTION.match(line):
            sections.append({found[1]: []})
        elif found := ENTRY.match(line):
            title, page, anchor = found.groups()
            if page not in places or (places[page][0] and not anchor):
                places.pop(page, None)  # its order is that of its new place
                places[page] = bool(anchor), len(sections) - 1, title
    for page, (_, number, title) in places.items():
        (pages,) = sections[number].values()
        pages.append({title: page})
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
