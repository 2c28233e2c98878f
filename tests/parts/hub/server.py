"""The protocol of the Hugging Face Hub on the loopback, as its client speaks it, and what may go wrong with it."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import disable_progress_bars

from llamarl.parts.hub import client, process

_LARGE = (".safetensors", ".parquet", ".bin")
"""Ends of names of files that are kept outside of git."""


@dataclass
class Fault:
    """What goes wrong with requests."""

    part: str
    """Of the path of a request."""
    method: str = "GET"
    times: int = 1 << 30
    """How often."""
    status: int = 0
    """Code of the answer; 0: that of one that works."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer, besides."""
    body: bytes = b""
    """Of the answer, where it has a code of its own."""
    cut_at: int | None = None
    """The connection ends after so many bytes of the body."""
    flip_at: int | None = None
    """This byte of the body is another."""
    bytes_per_s: float | None = None
    """How fast the body comes."""
    seen: int = 0
    """Requests that it was for."""


@dataclass
class Repo:
    """One repository."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Contents of all files by path, by commit."""
    refs: dict[str, str] = field(default_factory=dict)
    """Commits by branch and tag."""
    gated: bool = False
    private: bool = False


def blob_id(content: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(_LARGE)


class HubServer:
    """Repositories that a test adds, at `endpoint`; large files come from another host name. As a context manager it
    serves."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens = {"hf_good": "tester"}
        """Accounts by token."""
        self.members: set[str] = set()
        """Accounts that gated repositories let in."""
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """Methods and paths, as they came."""
        self.uploads: dict[str, bytes] = {}
        """Large files that were sent and are in no commit yet, by SHA-256."""
        self.errors: list[str] = []
        """Tracebacks of this server's own."""
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def environment(self, home: Path) -> dict[str, str]:
        """Variables by which a client finds nothing but this server, and a cache of its own."""
        return {
            "HF_HOME": str(home), "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, repo: str, files: Mapping[str, bytes], kind: str = "model", revision: str = "main") -> str:
        """One more commit with these files, to which the revision moves."""
        of = self.repos.setdefault((kind, repo), Repo())
        commit = hashlib.sha1(repr((repo, len(of.commits), sorted(files))).encode()).hexdigest()
        of.commits[commit] = dict(files)
        of.refs[revision] = commit
        return commit

    def fail(self, part: str, **how: Any) -> Fault:
        """Requests whose path has `part` go wrong from now on."""
        self.faults.append(Fault(part, **how))
        return self.faults[-1]

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for one in self.faults:
                if one.part in path and one.method == method and one.times > 0:
                    one.times -= 1
                    one.seen += 1
                    return one
        return None

    def asked(self, part: str, method: str = "GET") -> int:
        """How many requests had `part` in their path."""
        return sum(one == method and part in path for one, path in self.requests)


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        hub = server

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            try:
                _answer(self, server)
            except OSError:  # whoever asked has gone
                self.close_connection = True
            except Exception:
                server.errors.append(traceback.format_exc())
                raise

        do_GET = do_POST = do_PUT = do_HEAD

    return Handler


def _answer(http: Any, hub: HubServer) -> None:
    path = unquote(http.path)
    length = int(http.headers.get("Content-Length") or 0)
    http.body = http.rfile.read(length)
    hub.requests.append((http.command, path))
    fault = hub.fault_of(http.command, path)
    if fault and fault.status:
        return _send(http, fault.status, fault.body, fault.headers, None)
    token = (http.headers.get("Authorization") or "").removeprefix("Bearer ")
    if token and token not in hub.tokens:
        return _error(http, 401, "", "Invalid credentials in Authorization header")
    http.account = hub.tokens.get(token, "")
    status, body, headers = _found(http, hub, urlsplit(path))
    return _send(http, status, body, headers, fault)


def _error(http: Any, status: int, code: str, message: str = "") -> None:
    _send(http, *_refusal(status, code, message), None)


def _refusal(status: int, code: str, message: str = "") -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps({"error": message or code}).encode(), {"X-Error-Code": code, "X-Error-Message": message}


def _json(content: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


def _found(http: Any, hub: HubServer, url: Any) -> tuple[int, bytes, dict[str, str]]:
    if http.command in ("POST", "PUT"):
        return _written(http, hub, url)
    if found := re.fullmatch(r"/api/(model|dataset)s", url.path):
        word = parse_qs(url.query).get("search", [""])[0].lower()
        names = [repo for kind, repo in hub.repos if kind == found[1] and word in repo.lower()]
        return _json([{"_id": repo, "id": repo, "private": False} for repo in names])
    if found := re.fullmatch(r"/lfs/(\w+)", url.path):
        all_files = (one for repo in hub.repos.values() for files in repo.commits.values() for one in files.values())
        content = next(one for one in all_files if hashlib.sha256(one).hexdigest() == found[1])
        return 200, content, {}
    if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", url.path):
        kind, repo, what, revision = found.groups()
        return _listed(http, hub, (kind, repo), what or "revision", revision or "main")
    if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
        key = ("dataset" if found[1] else "model", found[2])
        return _resolved(http, hub, key, found[3], found[4])
    return 404, b"", {}


def _written(http: Any, hub: HubServer, url: Any) -> tuple[int, bytes, dict[str, str]]:
    """What pushes ask for: a repository, how to send each file, the large ones, and the commit."""
    if found := re.fullmatch(r"/upload/(\w+)", url.path):
        hub.uploads[found[1]] = http.body
        return 200, b"", {}
    if url.path == "/api/validate-yaml":
        return _json({"errors": [], "warnings": []})
    if not http.account:
        return _refusal(401, "", "Invalid username or password.")
    if url.path == "/api/repos/create":
        return _created(http, hub, json.loads(http.body))
    found = re.fullmatch(
        r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git/info/lfs/objects/(batch)|/(preupload|commit)/main)", url.path
    )
    assert found, url.path
    if not found[1].startswith(f"{http.account}/"):
        return _refusal(403, "", "you may not write here")
    if found[3] == "commit":
        return _committed(hub, hub.repos["model", found[1]], found[1], http.body)
    asked = json.loads(http.body)
    if found[3] == "preupload":
        modes = {one["path"]: "lfs" if is_large(one["path"]) else "regular" for one in asked["files"]}
        return _json(
            {"files": [{"path": path, "uploadMode": how, "shouldIgnore": False} for path, how in modes.items()]}
        )
    place = f"{hub.endpoint}/upload"
    rows = [one | {"actions": {"upload": {"href": f"{place}/{one['oid']}", "header": {}}}} for one in asked["objects"]]
    return _json({"transfer": "basic", "objects": rows})


def _created(http: Any, hub: HubServer, asked: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    repo = f"{asked['organization'] or http.account}/{asked['name']}"
    if not repo.startswith(f"{http.account}/"):
        return _refusal(403, "", "you may not create a model there")
    if ("model", repo) in hub.repos:
        return 409, _json({"error": "You already created it", "url": f"{hub.endpoint}/{repo}"})[1], {}
    hub.add(repo, {".gitattributes": b""})
    hub.repos["model", repo].private = asked.get("visibility") == "private"
    return _json({"url": f"{hub.endpoint}/{repo}"})


def _committed(hub: HubServer, repo: Repo, name: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
    files = dict(repo.commits[repo.refs["main"]])
    for line in body.splitlines():
        row = json.loads(line)
        if row["key"] == "file":
            files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        elif row["key"] == "lfsFile":
            files[row["value"]["path"]] = hub.uploads[row["value"]["oid"]]
        else:
            assert row["key"] == "header", "nothing is deleted"
    commit = hub.add(name, files)
    return _json({"success": True, "commitOid": commit, "commitUrl": f"{hub.endpoint}/{name}/commit/{commit}"})


def _commit_of(http: Any, hub: HubServer, key: tuple[str, str], revision: str) -> tuple[str, Any]:
    """Commit and, where there is none, the refusal."""
    repo = hub.repos.get(key)
    if repo is None or (repo.private and not http.account):
        return "", _refusal(404 if http.account else 401, "RepoNotFound", "Repository not found")
    if repo.gated and http.account not in hub.members:
        return "", _refusal(403 if http.account else 401, "GatedRepo", "Access to this repository is restricted")
    commit = repo.refs.get(revision, revision)
    if commit not in repo.commits:
        return "", _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    return commit, None


def _listed(
    http: Any, hub: HubServer, key: tuple[str, str], what: str, revision: str
) -> tuple[int, bytes, dict[str, str]]:
    commit, refusal = _commit_of(http, hub, key, revision)
    if refusal:
        return refusal
    files = hub.repos[key].commits[commit]
    if what == "revision":
        return _json(
            {
                "_id": key[1],
                "id": key[1],
                "sha": commit,
                "private": hub.repos[key].private,
                "siblings": [{"rfilename": one} for one in files],
            }
        )
    rows: list[dict[str, Any]] = []
    for path, content in files.items():
        row = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
        if is_large(path):
            row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        rows.append(row)
    return _json(rows)


def _resolved(
    http: Any, hub: HubServer, key: tuple[str, str], revision: str, path: str
) -> tuple[int, bytes, dict[str, str]]:
    commit, refusal = _commit_of(http, hub, key, revision)
    if refusal:
        return refusal
    content = hub.repos[key].commits[commit].get(path)
    if content is None:
        return _refusal(404, "EntryNotFound", "Entry not found")
    if not is_large(path):
        return 200, content, {"X-Repo-Commit": commit, "ETag": f'"{blob_id(content)}"'}
    digest = hashlib.sha256(content).hexdigest()
    return 302, b"", {
        "X-Repo-Commit": commit, "X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content)),
        "Location": f"http://localhost:{hub.port}/lfs/{digest}",
    }  # fmt: skip


def _send(http: Any, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None) -> None:
    first = 0
    if status == 200 and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", http.headers.get("Range") or "")):
        first, whole, status = int(asked[1]), len(body), 206
        last = min(int(asked[2]) if asked[2] else whole - 1, whole - 1)
        headers = {**headers, "Content-Range": f"bytes {first}-{last}/{whole}"}
        body = body[first : last + 1]
    if fault and fault.flip_at is not None and first <= fault.flip_at < first + len(body):
        at = fault.flip_at - first
        body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    http.send_response(status)
    for name, value in headers.items():
        if value:
            http.send_header(name, value)
    http.send_header("Content-Length", str(len(body)))
    http.end_headers()
    if http.command == "HEAD":
        return
    try:
        _send_body(http, body, fault)
    except OSError:  # whoever asked has gone
        http.close_connection = True


def _send_body(http: Any, body: bytes, fault: Fault | None) -> None:
    if fault and fault.cut_at is not None:
        body, http.close_connection = body[: fault.cut_at], True
    while body:
        speed = fault.bytes_per_s if fault else None
        piece = max(int(speed * 0.05), 1) if speed else 1 << 20
        http.wfile.write(body[:piece])
        body = body[piece:]
        if speed:
            time.sleep(piece / speed)
    http.wfile.flush()
    if fault and fault.cut_at is not None:
        http.connection.close()


class ClientHere:
    """Stands in for the process of the Hub's client: a thread of this process obeys the orders.

    It takes the environment as it is at its start, as a process does, and cannot be killed: a test that ends the
    client in the middle of its work needs the process (`own_process` in conftest.py).
    """

    def __init__(self, *_: str) -> None:
        self.stream, theirs = socket.socketpair()
        importlib.reload(constants)
        client.TOKENS = f"{constants.ENDPOINT}/settings/tokens"
        set_client_factory(client.checked_client)
        disable_progress_bars()
        self._thread = threading.Thread(target=self._obey, args=(theirs,), daemon=True)
        self._thread.start()

    def _obey(self, stream: socket.socket) -> None:
        with suppress(ConnectionError, ValueError), stream, stream.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                client.sys = SimpleNamespace(stdout=lines)
                client.obey(json.loads(line))

    def end(self) -> None:
        self.stream.close()
        self._thread.join(30)
        assert not self._thread.is_alive(), "it is in the middle of an order; use the fixture `own_process`"


@contextmanager
def only_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub without repositories, the only one that this process finds, with an empty cache in `home`. Its client runs
    in this process."""
    before = dict(vars(constants))
    monkeypatch.setattr(process, "Child", ClientHere)
    monkeypatch.setattr(client, "TOKENS", client.TOKENS)
    monkeypatch.setattr(client, "sys", client.sys)
    with HubServer() as server:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment(home).items():
            monkeypatch.setenv(name, value)
        yield server
    vars(constants).update(before)
