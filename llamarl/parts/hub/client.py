"""The process that talks to the Hub. Only this process imports the Hub's client, and it can be killed at any time.

Requests and answers are lines of JSON on the socket that is its standard input. The process exits when the socket
closes. The answer to `list` is `listed`, to `get` `got`, and to `push` `pushed`. Each answer may also be `failed`, with
a sentence, and may follow any number of `waits`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    logging,
    set_client_factory,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from huggingface_hub.utils._http import default_client_factory

from llamarl.config.errors import did_you_mean
from llamarl.config.hub import HubName, Kind, cache_folder
from llamarl.parts.hub.border import Nonsense, check_headers, commit_of, fault_of_endpoint, files_of, printable
from llamarl.parts.hub.cache import KINDS, HubFile, Repository

T = TypeVar("T")
_NO_HUB = (
    Nonsense, ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError, httpx2.InvalidURL
)  # fmt: skip
"""Errors that the Hub's client raises for answers that do not come from a Hub."""
PAUSES_S = (1.0, 5.0)
"""Seconds before the second and the third attempt if the server names no delay."""
LONGEST_PAUSE_S = 60.0
"""If the server asks for a longer delay, the command fails with a message."""
AT_ONCE = 4
"""Files that are fetched in parallel."""
_SUGGEST_S = 2.0
_STILL_S = 60.0
"""Seconds without a write after which a partial file without a lock counts as abandoned."""
_CHUNK_BYTES = 1 << 22
CARD = "README.md"
TOKENS = f"{constants.ENDPOINT}/settings/tokens"
_SAYING = threading.Lock()
_LIMITS = (429, 503)
"""HTTP status codes of rate limits."""


class Damaged(Exception):
    """A fetched file differs from the repository's file."""


class Refused(Exception):
    """Failure with a sentence for the user."""

    def __init__(self, text: str, *, is_lasting: bool = False) -> None:
        """Args: is_lasting: the cached copy must not be used instead."""
        super().__init__(text)
        self.is_lasting = is_lasting


def say(event: str, **content: Any) -> None:
    """Sends an answer."""
    content |= {"text": printable(content["text"])} if "text" in content else {}
    with _SAYING:
        sys.stdout.write(json.dumps({"event": event} | content) + "\n")
        sys.stdout.flush()


def listed(name: HubName, kind: Kind) -> dict[str, Any]:
    """Returns commit and files of the repository at the name's revision, and stores them in the cache."""
    api, repository = HfApi(), Repository(name.repo, kind)
    commit = name.revision
    if not name.is_pinned:
        found = api.repo_info(name.repo, repo_type=kind, revision=name.revision or None)
        commit = commit_of(found.sha)
    files = repository.listing(commit)
    if files is None:
        tree = api.list_repo_tree(name.repo, recursive=True, revision=commit, repo_type=kind)
        files = files_of((one.path, _fields(one)) for one in tree if isinstance(one, RepoFile))
        with suppress(OSError):  # a shared cache may be read-only
            repository.note_listing(commit, files)
    with suppress(OSError):
        repository.note_commit(name, commit)
    return {"commit": commit, "files": {path: asdict(one) for path, one in files.items()}}


def _fields(one: RepoFile) -> dict[str, Any]:
    """Returns the fields of `HubFile`, unchecked."""
    sha256 = one.lfs.sha256 if one.lfs else ""
    return {"size": one.size, "blob_id": one.blob_id, "lfs_sha256": sha256, "xet_hash": one.xet_hash or ""}


def got(name: HubName, kind: Kind, files: dict[str, HubFile]) -> dict[str, Any]:
    """Fetches `files` of a commit and verifies their digests. A file with a wrong digest is fetched a second time."""
    sweep(Repository(name.repo, kind))

    def get(path: str) -> None:
        fetch(name, kind, path, files[path])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in threads.map(get, files):
            pass
    return {}


def fetch(name: HubName, kind: Kind, path: str, expected: HubFile) -> None:
    """Fetches one file. Raises Damaged if two attempts gave a wrong digest."""
    place = Repository(name.repo, kind).snapshot(name.revision) / path
    for attempt in (1, 2):
        if place.is_file() and place.stat().st_size != expected.size:
            remove(place)
        hf_hub_download(name.repo, path, repo_type=kind, revision=name.revision)
        if fault := difference(place, expected):
            remove(place)
            if attempt == 2:
                raise Damaged(f"{path} came twice with {fault}")
            say("waits", text=f"{path} came with {fault}; fetched once more")


def remove(place: Path) -> None:
    """Removes a file of a snapshot and the blob that it links to."""
    if (blob := place.resolve()).is_relative_to(cache_folder().resolve()):
        blob.unlink(missing_ok=True)
    place.unlink(missing_ok=True)


def difference(place: Path, expected: HubFile) -> str:
    """Returns how a file differs from the repository's file. Empty means equal."""
    if (size := place.stat().st_size) != expected.size:
        return f"{size} bytes instead of {expected.size}"
    digest = hashlib.sha256() if expected.lfs_sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with place.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    wanted = expected.lfs_sha256 or expected.blob_id
    return "" if digest.hexdigest() == wanted else f"the digest {digest.hexdigest()[:12]} instead of {wanted[:12]}"


def sweep(repository: Repository) -> None:
    """Removes partial files of killed processes, which are never resumed."""
    for left in repository.blobs.glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < _STILL_S:
                continue
            with (repository.locks / f"{left.name.partition('.')[0]}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def pushed(name: HubName, files: dict[str, str], card: str, mark: str, private: bool) -> dict[str, Any]:
    """Adds files, by their path in the repository, to a repository, which is created if missing. Deletes nothing. An
    existing card without the mark was written by a person and stays unchanged."""
    api = HfApi()
    url = api.create_repo(name.repo, private=private, exist_ok=True)
    try:
        is_ours = mark in Path(hf_hub_download(name.repo, CARD, force_download=True)).read_text(encoding="utf-8")
    except RemoteEntryNotFoundError:
        is_ours = True
    added = [CommitOperationAdd(path, here) for path, here in sorted(files.items())]
    added += [CommitOperationAdd(CARD, card.encode())] if is_ours else []
    commit = api.create_commit(name.repo, added, commit_message=card.partition("\n# ")[2].partition("\n")[0])
    return {
        "url": printable(str(url)),
        "commit": printable(str(commit.oid)),
        "is_private": bool(api.repo_info(name.repo).private),
        "card": is_ours,
    }


def attempted(what: str, name: HubName, kind: Kind, once: Callable[[], T]) -> T:
    """Returns the result of `once`, within three attempts. Raises Refused."""
    for pause_s in (*PAUSES_S, None):
        try:
            return once()
        except Damaged as error:
            raise Refused(f"{error}; try later, or name another commit", is_lasting=True) from None
        except (*_NO_HUB, OSError, httpx2.HTTPError, OfflineModeIsEnabled, RuntimeError) as raised:
            error = _inner(raised)
            wait_s = pause_of(error, pause_s)
            if wait_s is None:
                lasts = isinstance(error, RevisionNotFoundError)
                raise Refused(sentence(error, what, name, kind), is_lasting=lasts) from None
            say("waits", text=f"{cause(error)}; tried again in {wait_s:.0f} s")
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _inner(error: Exception) -> Exception:
    """Returns the inner error: the client wraps errors of the network and, in uploads, of the Hub."""
    wraps = isinstance(error, LocalEntryNotFoundError | RuntimeError | ValueError)
    if isinstance(error, HfHubHTTPError) or not wraps or not isinstance(error.__cause__, Exception):
        return error
    return error.__cause__


def pause_of(error: Exception, otherwise_s: float | None) -> float | None:
    """Returns seconds before the next attempt. None means no further attempt."""
    response = getattr(error, "response", None)
    code = response.status_code if response is not None else 0
    if otherwise_s is None or isinstance(error, (OfflineModeIsEnabled, *_NO_HUB)) or getattr(error, "errno", None):
        return None
    if code in _LIMITS:
        asked_s = retry_after(error)
        return None if asked_s > LONGEST_PAUSE_S else max(asked_s, otherwise_s)
    if 400 <= code < 500 and code != 408:
        return None
    return otherwise_s


def retry_after(error: Exception) -> float:
    """Returns the seconds that the server asks for. 0 means unspecified."""
    response = getattr(error, "response", None)
    said = "" if response is None else response.headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else 0.0


def cause(error: Exception) -> str:
    """Returns the cause in a few words."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the Hub answered {response.status_code}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def sentence(error: Exception, what: str, name: HubName, kind: Kind) -> str:
    """Returns cause and fix as a sentence for the user."""
    at = constants.ENDPOINT
    if not isinstance(error, HfHubHTTPError):
        return _sentence_of_system(error, what, at)
    page = f"{at}/{'datasets/' if kind == 'dataset' else ''}{name.repo}"
    has_token = get_token() is not None
    whose = "the account of your token (HF_TOKEN)" if has_token else "anybody without a token"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision or 'main'!r}; see {page}/commits for its revisions"
    if isinstance(error, GatedRepoError | RepositoryNotFoundError | DisabledRepoError):
        return _sentence_of_repository(error, whose, name, kind, page)
    code = error.response.status_code
    if code == 401 and not has_token:
        return f"the Hub requires a login for this; set HF_TOKEN to a token of {TOKENS}"
    if code == 401:
        return f"the Hub does not know your token (HF_TOKEN); make one at {TOKENS}, or unset it"
    if code == 403:
        why = f" ({error.server_message})" if error.server_message else ""
        return f"the Hub does not allow this for {whose}{why}; see {page}, and which rights the token has"
    if code in _LIMITS:
        asked_s = retry_after(error)
        asks = f" and asks to wait {asked_s:.0f} s" if asked_s else ""
        fix = "try later" if has_token else "try later, or set HF_TOKEN, as those with an account may ask more often"
        return f"the Hub is busy ({code}){asks}; {fix}"
    return f"the Hub answered {code} {what}; try later, or see whether {at} works"


def _sentence_of_repository(error: Exception, whose: str, name: HubName, kind: Kind, page: str) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"the Hub does not give this {KINDS[kind]} to {whose}: its owners let people in one by one; ask for access "
            f"at {page}, and set HF_TOKEN to a token of the account that has it"
        )
    if isinstance(error, DisabledRepoError):
        return f"the Hub has closed this {KINDS[kind]} ({page}); name another one"
    return (
        f"there is no such folder, and the Hub shows no such {KINDS[kind]} to {whose} ({constants.ENDPOINT}): "
        f"{suggestion(name, kind)} (a private one needs HF_TOKEN)"
    )


def _sentence_of_system(error: Exception, what: str, at: str) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"no room in {cache_folder()} {what}; free space on that disk, or set HF_HOME to a folder on another one"
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return (
            f"{at} cannot be reached ({cause(error)}); check the network, HF_ENDPOINT and proxies, or bring the files "
            f"to {cache_folder()} and set HF_HUB_OFFLINE=1"
        )
    if isinstance(error, (FileMetadataError, *_NO_HUB)):
        said = str(error) if isinstance(error, Nonsense) else f"what its client cannot read ({cause(error)})"
        return (
            f"{at} answered {what} with {said}; see whether HF_ENDPOINT and proxies lead to the Hub, and whether this "
            "network wants a login"
        )
    if isinstance(error, httpx2.HTTPError) or not getattr(error, "errno", None):
        return f"the connection to {at} broke {what}, three times ({cause(error)}); the next start continues from there"
    return f"the cache {cache_folder()} cannot be used ({error}); fix that, or set HF_HOME to a folder of your own"


def suggestion(name: HubName, kind: Kind) -> str:
    """Returns the most similar known name, from the cache, otherwise from the Hub within two seconds."""
    prefix = f"{kind}s--"
    known = [path.name.removeprefix(prefix).replace("--", "/", 1) for path in cache_folder().glob(f"{prefix}*--*")]
    found = list[str]()

    def ask() -> None:
        api, own = HfApi(), name.repo.partition("/")[2]
        with suppress(OSError, httpx2.HTTPError, *_NO_HUB):
            asked = api.list_datasets if kind == "dataset" else api.list_models
            found.extend(f"{one.id:.100}" for one in islice(asked(search=own, limit=5), 5))

    if near := did_you_mean(name.repo, known, " ").strip():
        return near
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SUGGEST_S)
    others = f"others of that name are {', '.join(found)}" if found else "check its spelling"
    return did_you_mean(name.repo, found, others)


def obey(order: dict[str, Any]) -> None:
    """Executes one request and sends its answer."""
    name, kind = HubName(order["repo"], order["revision"]), order["kind"]
    try:
        if fault := fault_of_endpoint(constants.ENDPOINT):
            raise Refused(fault, is_lasting=True)
        if order["order"] == "push":
            what = {key: order[key] for key in ("files", "card", "mark", "private")}
            enable_progress_bars()
            if get_token() is None:
                raise Refused(
                    f"the Hub takes a model from those it knows; set HF_TOKEN to one of {TOKENS}, that may write"
                )
            say("pushed", **attempted("as the model went there", name, kind, lambda: pushed(name, **what)))
        elif order["order"] == "list":
            say("listed", **attempted("as its files were asked for", name, kind, lambda: listed(name, kind)))
        else:
            files = {path: HubFile(**one) for path, one in order["files"].items()}
            say("got", **attempted("as its files came", name, kind, lambda: got(name, kind, files)))
    except Refused as refused:
        say("failed", text=str(refused), is_lasting=refused.is_lasting)


def checked_client() -> httpx2.Client:
    """Returns an HTTP client for the Hub that validates every answer before it is used."""

    def check(response: httpx2.Response) -> None:
        check_headers(response.request.method, response.status_code, response.request.url.path, response.headers)

    client = default_client_factory()
    client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks.get("response", []), check]}
    return client


def main() -> None:
    """Executes requests until the input closes, which ends the process at once."""
    set_client_factory(checked_client)
    sys.stdout = os.fdopen(os.dup(0), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever native code prints
    logging.set_verbosity_error()
    disable_progress_bars()
    orders = queue.SimpleQueue[str]()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        obey(json.loads(orders.get()))


if __name__ == "__main__":
    main()
