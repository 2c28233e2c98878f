"""The documentation as a site: its navigation and reference, and, at night, every link of the pages that are built."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import llamarl
from tests.architecture.repository import ROOT, tree
from tests.nightly import nightly

DOCS, INDEX = ROOT / "docs", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src"}
CODE = ("code", "pre", "script", "style")
LOADED = ("link", "img", "script")
"""What a browser fetches without a click."""


def hooks() -> object:
    pytest.importorskip("pymdownx", reason="the site's tools are in the extra `dev`")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "deploy" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_is_the_index() -> None:
    home, *sections = hooks().navigation(INDEX)
    assert home == {"Home": "index.md"}
    assert [name for section in sections for name in section] == re.findall(r"^## (.+)$", INDEX, re.MULTILINE)
    pages = [
        page for section in sections for entries in section.values() for entry in entries for page in entry.values()
    ]
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "index.md")


def test_links_out_of_the_folder_lead_to_the_repository() -> None:
    config = type("Config", (), {"repo_url": "https://example.org/x"})
    text = hooks().on_page_markdown("see [rules](../AGENTS.md#style), [here](data.md)", config)
    assert text == "see [rules](https://example.org/x/blob/main/AGENTS.md#style), [here](data.md)"


def test_the_reference_has_every_public_name() -> None:
    """Each with a docstring, and with the same name in the table that GitHub shows."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    names = hooks().API.findall(page)
    assert {*llamarl.__all__} <= {name.rpartition(".")[2] for name, _ in names}
    for name, _ in names:
        module, _, last = name.rpartition(".")
        assert f"`{last}`" in page, f"{last} is not in the table"
        assert _is_documented(module, last), f"{name} has no docstring"


def _is_documented(module: str, name: str) -> bool:
    """Follows imports of the package from a module to the class or function. Imports nothing."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return bool(ast.get_docstring(node))
        for alias in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
            if (alias.asname or alias.name) == name:
                return _is_documented(node.module, alias.name)
    return False


def test_one_repository_is_named() -> None:
    class Loader(yaml.SafeLoader):
        """Reads tags of Python as nothing."""

    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'Source = "{site["repo_url"]}"' in text and f'Documentation = "{site["site_url"]}"' in text
    assert site["strict"] and site["theme"]["font"] is False


class Page(HTMLParser):
    """Links, anchors and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.ids, self.text = list[tuple[str, str]](), set[str](), list[str]()
        self._codes = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._codes += tag in CODE
        self.ids |= {values.get("id") or "", values.get("name") or ""}
        if tag in LINKS and (target := values.get(LINKS[tag])):
            self.links.append((tag if values.get("rel") != "canonical" else "a", target))

    def handle_endtag(self, tag: str) -> None:
        self._codes -= tag in CODE

    def handle_data(self, data: str) -> None:
        if not self._codes:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Pages by their files, built where no name can be looked up."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    offline = ["unshare", "--net", "--", *command]
    is_root = subprocess.run([*offline[:3], "true"], capture_output=True).returncode == 0
    done = subprocess.run(offline if is_root else command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


@nightly("builds the site")
def test_every_link_of_the_site_leads_somewhere(site: dict[Path, Page]) -> None:
    (root,) = (path.parent for path in site if path.name == "404.html")
    faults = []
    for path, page in site.items():
        for tag, link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                is_fault = tag in LOADED
            else:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                target = target / "index.html" if target.is_dir() else target
                lacks = parts.fragment and target in site and unquote(parts.fragment) not in site[target].ids
                is_fault = not target.exists() or bool(lacks)
            if is_fault:
                faults.append(f"{path.relative_to(root)}: {link}")
    assert not faults, "\n".join(faults)
    assert len(site) > 20


@nightly("builds the site")
def test_pages_are_rendered_as_on_github(site: dict[Path, Page]) -> None:
    """No list, table, fence or reference is left as text."""
    for path, page in site.items():
        text = "".join(page.text)
        left = re.findall(r"^(?:- \w|\|---|```|::: \w|<!-- api).*", text, re.MULTILINE)
        assert not left, f"{path.parent.name}: {left[:3]}"


@nightly("builds the site")
def test_search_and_reference_are_there(site: dict[Path, Page]) -> None:
    (root,) = (path.parent for path in site if path.name == "404.html")
    found = (root / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "max_staleness" in found and "open_run" in found
    reference = site[root / "commands" / "index.html"]
    assert {"llamarl.api.train", "llamarl.rewards.Reward"} <= reference.ids
