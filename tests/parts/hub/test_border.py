"""Answers that no Hub gives: nothing outside the cache is written or deleted, and a sentence says what is wrong."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import ConfigError
from llamarl.config.hub import HubName, cache_folder
from llamarl.parts.hub import border
from llamarl.parts.hub import process as asking
from llamarl.parts.hub.border import HubFile, Nonsense, check_headers, commit_of, fault_of_endpoint, files_of, path_of
from llamarl.parts.hub.cache import Repository
from llamarl.parts.hub.fetch import fetched
from llamarl.parts.hub.progress import shown
from tests.nightly import nightly
from tests.parts.hub.server import HubServer, blob_id

COMMIT = "a" * 40
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=6), one, max_size=3),
    max_leaves=6,
)
PARTS = st.sampled_from(
    ["", ".", "..", "a", "b.json", "C:", "~", "con", "\0", "\\", "..\\..", "é", " ", "\n", "\ud800"]
)
PATHS = st.lists(PARTS, max_size=5).map("/".join) | st.text(max_size=30)
DIGESTS = st.sampled_from(["", "0" * 40, "f" * 64, "F" * 40, "../x", "0" * 39, "0" * 40 + "\n"])


@given(path=PATHS | JSON)
def test_a_path_stays_in_its_folder(path: Any) -> None:
    try:
        found = path_of(path)
    except Nonsense:
        return
    folder = Path("/home/cache")
    assert (folder / found).parts[:3] == folder.parts and ".." not in Path(found).parts
    assert not PureWindowsPath(found).drive and not PureWindowsPath(found).is_absolute()
    assert "\0" not in found and found.encode() and len(found) <= border.MAX_PATH_CHARS


@given(answer=DIGESTS | PATHS | JSON)
def test_a_commit_is_one(answer: Any) -> None:
    with suppress(Nonsense):
        assert HubName("a/b", commit_of(answer)).is_pinned


@given(
    rows=st.dictionaries(
        PATHS,
        JSON
        | st.fixed_dictionaries(
            {"size": st.integers(-2, 1 << 60) | JSON, "blob_id": DIGESTS | JSON},
            optional={"lfs_sha256": DIGESTS, "xet_hash": DIGESTS | PATHS, "other": JSON},
        ),
        max_size=4,
    ),
    whole=JSON | st.none(),
)
def test_a_listing_on_the_disk_is_whole_or_none(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, Any], whole: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.getbasetemp() / "listings"))
        repository = Repository("a/b")
        tree = repository.path / "trees" / f"{COMMIT}.json"
        tree.parent.mkdir(parents=True, exist_ok=True)
        tree.write_text(json.dumps(whole if whole is not None else {"format_version": 1, "files": rows}))
        found = repository.listing(COMMIT)
    for path, one in (found or {}).items():
        assert path_of(path) and isinstance(one, HubFile) and one.size >= 0


def test_very_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(border, "MAX_FILES", 100)

    def endless() -> Any:
        number = 0
        while True:
            yield f"a/{(number := number + 1)}", {"size": 1}

    with pytest.raises(Nonsense, match="100"):
        files_of(endless())


def test_headers_of_which_names_of_files_are_made() -> None:
    check_headers("GET", 200, "/api/models/a/b", {"ETag": 'W/"12-x"', "Content-Type": "application/json"})
    check_headers("GET", 200, "/a", {"X-Repo-Commit": COMMIT, "ETag": 'W/"a/b=="'})
    check_headers("HEAD", 200, "/a", {"X-Repo-Commit": COMMIT, "ETag": 'W/"5f3a-61b2"'})
    check_headers("HEAD", 302, "/a", {"X-Repo-Commit": COMMIT, "X-Linked-ETag": f'"{"0" * 64}"', "ETag": '"x/../y"'})
    check_headers("HEAD", 404, "/a", {"X-Repo-Commit": COMMIT, "ETag": 'W/"12-x"'})
    for status, headers in (
        (200, {"X-Repo-Commit": "../../x"}),
        (404, {"X-Repo-Commit": "../../x"}),
        (200, {"X-Repo-Commit": COMMIT, "ETag": '"../../victim"'}),
        (200, {"X-Repo-Commit": COMMIT, "ETag": ".."}),
        (200, {"X-Repo-Commit": COMMIT, "ETag": "x" * 300}),
        (200, {"X-Repo-Commit": COMMIT, "X-Linked-ETag": "/etc/passwd", "ETag": f'"{COMMIT}"'}),
        (200, {"X-Repo-Commit": COMMIT, "ETag": f'"{COMMIT}"', "X-Xet-Hash": "../x"}),
        (200, {"Content-Type": "text/html; charset=utf-8"}),
    ):
        with pytest.raises(Nonsense):
            check_headers("HEAD", status, "/api/models/a/b", headers)


@pytest.mark.parametrize(
    "text",
    ["", "huggingface.co", "htp://x", "http://", "http://[::1", "http://x:99999", "http://x:0", "http://a b"],
)
def test_an_endpoint_that_is_none_is_named(text: str) -> None:
    assert "HF_ENDPOINT" in fault_of_endpoint(text)
    assert not fault_of_endpoint("https://huggingface.co") + fault_of_endpoint("http://127.0.0.1:80/hub")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user outside the cache."""
    (victim := tmp_path / "victim").mkdir()
    (victim / "settings.json").write_text("precious")
    return victim / "settings.json"


def answer(hub: HubServer, part: str, content: Any, method: str = "GET", **headers: str) -> None:
    """Requests whose path has `part` get this."""
    fault = hub.fail(part, status=200, method=method, headers={"Content-Type": "application/json", **headers})
    fault.body = content if isinstance(content, bytes) else json.dumps(content).encode()


def refusal(kind: Any = "model") -> str:
    with pytest.raises(ConfigError) as error:
        fetched(HubName("tiny/model"), kind, list)
    return str(error.value)


def test_nothing_outside_the_cache_is_touched(hub: HubServer, victim: Path) -> None:
    """A commit, paths and digests that lead out of the cache, in JSON and in headers."""
    up = "../" * 8
    out = f"{up}{victim.with_suffix('').relative_to('/')}"
    commit = hub.add("tiny/model", {"config.json": b"{}"})
    tree, info = f"/tree/{commit}", "/api/models/tiny/model"
    row = {"type": "file", "path": "config.json", "size": 2, "oid": blob_id(b"{}")}
    for part, content in (
        (info, {"id": "tiny/model", "sha": out}),
        (info, {"id": "tiny/model", "sha": None}),
        (tree, [row | {"path": str(victim), "size": 3}]),
        (tree, [row | {"path": f"{out}.json", "size": 3}]),
        (tree, [row | {"oid": out}]),
        (tree, [row | {"size": -1}]),
    ):
        hub.faults.clear()
        answer(hub, part, content)
        assert "HF_ENDPOINT" in refusal() and victim.read_text() == "precious"
    for headers in ({"X-Repo-Commit": commit, "ETag": f'"{out}.json"'}, {"X-Repo-Commit": out}):
        hub.faults.clear()
        answer(hub, "/resolve/", b"xx", "HEAD", **headers)
        assert "HF_ENDPOINT" in refusal()
    hub.faults.clear()
    hub.fail("/resolve/", method="HEAD", status=404,
             headers={"X-Repo-Commit": out, "X-Error-Code": "EntryNotFound", "X-Error-Message": "\x1b[2J"})  # fmt: skip
    assert "\x1b" not in refusal()
    hub.faults.clear()
    place = fetched(HubName("tiny/model"), choose=list).folder / "config.json"
    place.unlink()
    place.symlink_to(victim)  # by another program: a link out of the cache, of another size
    assert fetched(HubName("tiny/model"), choose=list).folder.joinpath("config.json").read_bytes() == b"{}"
    assert [victim.name] == [one.name for one in victim.parent.iterdir()] and victim.read_text() == "precious"
    allowed = {cache_folder().parent, victim.parent}
    assert {one for one in victim.parents[1].iterdir() if one not in allowed} == set()


@nightly("real time; by day paths and listings stay within their folder")
def test_answers_of_other_kinds_have_a_cause(hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    """One client is asked again and again, and outlives all answers."""
    name, commit = HubName("tiny/model"), hub.add("tiny/model", {"config.json": b"{}"})
    rows = [], None, {}, "text", 3, {"sha": 3}, [1], [None], [[]], [{"type": "file"}], {"id": []}
    with asking.Client() as client, shown("asking") as progress:
        for content in (*rows, b"<html>log in</html>", b"\xff", b"[" * 100_000, b"1" * 5000):
            for part in ("/api/models/tiny/model", f"/tree/{commit}"):
                if part.startswith("/tree") and content in ([], {}):
                    continue  # a repository without files
                hub.faults.clear()
                answer(hub, part, content)
                with pytest.raises(ConfigError, match="HF_ENDPOINT"):
                    client.ask(name, "model", progress, order="list")
        hub.faults.clear()
        answer(hub, "/api/", b"<html>log in</html>", **{"Content-Type": "text/html; charset=utf-8"})
        with pytest.raises(ConfigError, match="web page"):
            client.ask(name, "model", progress, order="list")
        hub.faults.clear()
        assert client.ask(name, "model", progress, order="list")["commit"] == commit
    assert "Traceback" not in capfd.readouterr().err


def test_a_nonsense_endpoint(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "htp:/nowhere")
    assert "HF_ENDPOINT = 'htp:/nowhere'" in refusal()


@nightly("real time; by day paths and listings stay within their folder")
@pytest.mark.usefixtures("own_process")
def test_endless_pages_and_slow_bytes_end(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("tiny/model", {"config.json": b"{}", "model.safetensors": b"x" * (1 << 16)})
    name, tree = HubName("tiny/model"), f"/api/models/tiny/model/tree/{commit}"
    with shown("asking") as progress:
        with asking.Client() as client:
            files = client.ask(name, "model", progress, order="list")["files"]
            Repository(name.repo).path.joinpath("trees", f"{commit}.json").unlink()
            answer(hub, tree, [], Link=f'<{hub.endpoint}{tree}?cursor=x>; rel="next"')
            monkeypatch.setattr(asking, "LIST_S", 2.0)
            with pytest.raises(ConfigError, match=r"2 s"):
                client.ask(name, "model", progress, order="list")
        assert hub.asked("cursor")
        hub.faults.clear()
        monkeypatch.setattr(asking, "STALL_S", 1.0)
        hub.fail("/lfs/", bytes_per_s=200)
        start_s, slow = time.monotonic(), iter(range(0, 1 << 20, 100))
        with asking.Client() as client, pytest.raises(ConfigError, match=r"1 s"):
            client.ask(name.at(commit), "model", progress, order="get", files=files, done=lambda: next(slow))
        assert time.monotonic() - start_s < 60, "as many bytes as come, they are too few"
