"""Validation of answers of the Hub, or of a mirror.

Names, digests and sizes are checked here, once. Validated paths stay inside the folder that they are joined to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_FILES = 1 << 20
"""Maximum number of files in a repository."""
MAX_PATH_CHARS = 1024
MAX_FILE_BYTES = 1 << 50
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}")
_BAD_CHARS = re.compile("[\0-\x1f\x7f\\\\\ud800-\udfff]")
_DRIVE = re.compile(r"[A-Za-z]:")
_OF_COMMIT, _OF_FILE, _OF_XET = "X-Repo-Commit", ("X-Linked-ETag", "ETag"), "X-Xet-Hash"


class Nonsense(Exception):
    """An invalid answer. The message names the fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository, according to its listing."""

    size: int
    """Bytes."""
    blob_id: str = ""
    """Hexadecimal SHA-1 of git's blob: of the file itself, or of the pointer to a large one."""
    lfs_sha256: str = ""
    """Hexadecimal SHA-256 of a large file. Empty means that git stores the file itself."""
    xet_hash: str = ""
    """Key in the Hub's chunk storage. Empty means not stored there."""

    def __post_init__(self) -> None:
        """Raises Nonsense."""
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE_BYTES:
            raise Nonsense(f"a file of {self.size!r:.60} bytes")
        for digest in (self.blob_id, self.lfs_sha256, self.xet_hash):
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise Nonsense(f"a file with the digest {digest!r:.80}")


def commit_of(answer: Any) -> str:
    """Returns a valid commit. Raises Nonsense."""
    if not isinstance(answer, str) or not COMMIT.fullmatch(answer):
        raise Nonsense(f"a commit that is {answer!r:.80}")
    return answer


def path_of(answer: Any) -> str:
    """Returns a valid relative path, with `/` between its parts. Raises Nonsense if it is invalid or leaves the folder
    on any system."""
    is_path = isinstance(answer, str) and 0 < len(answer) <= MAX_PATH_CHARS and not _BAD_CHARS.search(answer)
    if not is_path or _DRIVE.match(answer) or any(part in ("", ".", "..") for part in answer.split("/")):
        raise Nonsense(f"a file with the path {answer!r:.80}")
    return answer


def files_of(entries: Iterable[tuple[Any, Mapping[str, Any]]]) -> dict[str, HubFile]:
    """Returns the files of a listing by path, from paths and the fields of `HubFile`. Raises Nonsense."""
    found = dict[str, HubFile]()
    for path, fields in entries:
        found[path_of(path)] = HubFile(**fields)
        if len(found) > MAX_FILES:
            raise Nonsense(f"more than {MAX_FILES:,} files")
    return found


def check_headers(method: str, status: int, path: str, headers: Mapping[str, str]) -> None:
    """Checks the headers from which the Hub's client builds file names: the commit, and the file's tag. The tag is a
    digest on the Hub, but may be any text on a mirror. Raises Nonsense."""
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if status == 200 and kind == "text/html" and path.startswith("/api/"):
        raise Nonsense("a web page in place of data, as a network shows to who has not logged in")
    if (commit := headers.get(_OF_COMMIT)) is None:
        return
    commit_of(commit)
    etag = next((one for one in map(headers.get, _OF_FILE) if one), "").lstrip("W/").strip('"')
    if method == "HEAD" and status < 400 and etag and not _NAME.fullmatch(etag):
        raise Nonsense(f"a file with the tag {etag!r:.80}")
    if not DIGEST.fullmatch(xet := headers.get(_OF_XET) or ""):
        raise Nonsense(f"a file with the key {xet!r:.80}")


def fault_of_endpoint(text: str) -> str:
    """Returns why an address cannot be the Hub's. Empty means that it can."""
    try:
        found = urlsplit(text)
        is_address = found.scheme in ("http", "https") and bool(found.hostname) and (found.port is None or found.port)
    except ValueError:
        is_address = False
    if is_address and not re.search(r"[\s\0-\x1f]", text):
        return ""
    return f"HF_ENDPOINT = {text!r:.200} is not an address; give one such as https://huggingface.co, or unset it"


def printable(text: str) -> str:
    """Returns the text without terminal control characters, which a server may have sent."""
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f]", "?", text)
