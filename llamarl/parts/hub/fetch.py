"""Fetches models and datasets of the Hub in a separate process, because the client cannot be interrupted within a
file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from llamarl.config.errors import ConfigError
from llamarl.config.hub import Choose, HubName, Kind, Snapshot, cache_folder, why_offline
from llamarl.parts.hub.cache import KINDS, HubFile, Repository
from llamarl.parts.hub.process import Client, NotAnswered
from llamarl.parts.hub.progress import shown

_SMALL = frozenset((
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
))  # fmt: skip
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def small_files(files: Mapping[str, int]) -> list[str]:
    """Returns the files of a model except its weights, and their index. Raises ConfigError if there is no model, or
    only pickles."""
    if "config.json" not in files:
        raise ConfigError(
            "its repository has no config.json, so it is not a whole model; name one with config.json, safetensors and "
            "tokenizer.json (adapters and GGUF files are none)"
        )
    top = [path for path in sorted(files) if "/" not in path]
    pickles = [path for path in top if path.endswith(_PICKLES)]
    if pickles and not any(path.endswith(".safetensors") for path in top):
        raise ConfigError(
            f"its weights are pickles only ({pickles[0]}), which can run code as they are read, so they are not "
            "fetched; name a repository with safetensors, or convert it: "
            "https://huggingface.co/spaces/safetensors/convert"
        )
    return sorted(_SMALL & files.keys()) + [_INDEX] * (_INDEX in files and _WHOLE not in files)


def model_files(files: Mapping[str, int]) -> list[str]:
    """Returns the files of a model: exact names in the top folder, so no code, pickles or other formats. Raises
    ConfigError if there is no model, weights are missing, or there are only pickles."""
    found = small_files(files)
    if _WHOLE in files:
        return [*found, _WHOLE]
    shards = {path: int(match[1]) for path in sorted(files) if (match := _SHARD.fullmatch(path))}
    if _INDEX in files and shards and len(shards) == max(shards.values()):
        return [*found, *shards]
    has = f"{len(shards)} shards of {max(shards.values())}" if shards else f"neither {_WHOLE} nor {_INDEX}"
    raise ConfigError(f"its repository has {has}, so its weights are not whole; name another revision or repository")


def listing(name: HubName, kind: Kind = "model") -> tuple[str, dict[str, int]]:
    """Returns the current commit of the name, and the bytes of all its files by path. A listed commit needs no request.
    If the Hub does not answer, returns the last known answer.

    Raises:
        ConfigError: the repository or revision does not exist, is not accessible, or the Hub does not answer.
    """
    with Client() as client:
        commit, files, note = _listed(client, name, kind)
    if note:
        sys.stderr.write(f"{name}: {note}\n")
    return commit, {path: one.size for path, one in files.items()}


def cached(name: HubName, kind: Kind = "model", choose: Choose = model_files) -> Snapshot | None:
    """Returns the snapshot that the name had at the last request if its files are in the cache with the right sizes,
    otherwise None. Makes no request."""
    repository = Repository(name.repo, kind)
    commit = repository.commit(name)
    if not commit:
        return None
    present, known = repository.present(commit), repository.listing(commit)
    files = present if known is None else {path: one.size for path, one in known.items()}  # another program's have none
    try:
        chosen = {path: files[path] for path in choose(files)}
    except ConfigError:
        if known is not None:
            raise
        return None
    is_whole = all(present.get(path) == size for path, size in chosen.items())
    return Snapshot(name=name.at(commit), folder=repository.snapshot(commit), files=chosen) if is_whole else None


def fetched(name: HubName, kind: Kind = "model", choose: Choose = model_files) -> Snapshot:
    """Fetches the files that `choose` selects from the current commit of the name into the cache, and returns the
    snapshot.

    A complete snapshot of a listed commit needs no request. Each file is verified by its digest. Ctrl-C stops at once;
    the next start fetches only the missing files.

    Raises:
        ConfigError: cause and fix, without the name.
    """
    with Client() as client:
        commit, files, note = _listed(client, name, kind)
        chosen = {path: files[path] for path in choose({path: one.size for path, one in files.items()})}
        repository, pinned = Repository(name.repo, kind), name.at(commit)
        present = repository.present(commit)
        missing = {path: one for path, one in chosen.items() if present.get(path) != one.size}
        if missing and why_offline():
            raise ConfigError(_offline(name, kind, missing))
        if missing:
            _get(client, pinned, kind, missing)
    sizes = {path: one.size for path, one in chosen.items()}
    return Snapshot(name=pinned, folder=repository.snapshot(commit), files=sizes, note=note)


def _listed(client: Client, name: HubName, kind: Kind) -> tuple[str, dict[str, HubFile], str]:
    """Returns commit, files by path, and a sentence if the answer comes from the cache. Raises ConfigError."""
    repository = Repository(name.repo, kind)
    commit = repository.commit(name)
    known = repository.listing(commit) if commit else None
    if known is not None and name.is_pinned:
        return commit, known, ""
    if known is None and commit:  # another program has fetched them, and may have left some out, such as stop tokens
        known = {path: HubFile(size=size) for path, size in repository.present(commit).items()}
    if why_offline():
        if not known:
            raise ConfigError(_offline(name, kind, {}))
        return commit, known, ""
    with shown(f"{name}: asking the Hub") as progress:
        try:
            answer = client.ask(name, kind, progress, order="list")
        except NotAnswered as error:
            if not known:
                raise
            return commit, known, f"{str(error).partition(';')[0]}; the cache says which commit this was before"
    return answer["commit"], {path: HubFile(**one) for path, one in answer["files"].items()}, ""


def _get(client: Client, pinned: HubName, kind: Kind, files: Mapping[str, HubFile]) -> None:
    """Fetches files of a commit. Raises ConfigError."""
    repository, total = Repository(pinned.repo, kind), sum(one.size for one in files.values())

    def done() -> int:
        """Returns their bytes on disk, from any process: `blobs/DIGEST`, or `DIGEST.RANDOM.incomplete`."""
        sizes = dict[str, int]()
        for blob in repository.blobs.glob("*"):
            with suppress(OSError):  # it has another name by now
                digest = blob.name.partition(".")[0]
                sizes[digest] = max(blob.stat().st_size, sizes.get(digest, 0))
        return sum(min(one.size, sizes.get(one.lfs_sha256 or one.blob_id, 0)) for one in files.values())

    with shown(f"{pinned.repo}@{pinned.revision[:12]}", total) as progress:
        rows = {path: asdict(one) for path, one in files.items()}
        client.ask(pinned, kind, progress, done=done, order="get", files=rows)


def _offline(name: HubName, kind: Kind, missing: Mapping[str, Any]) -> str:
    has = f"lacks {len(missing)} of its files, first {min(missing)}" if missing else "has nothing of it"
    fix = f"hf download {name.repo}{' --repo-type dataset' * (kind == 'dataset')}"
    fix += f" --revision {name.revision}" * bool(name.revision)
    return (
        f"{why_offline()}, and the cache ({cache_folder()}) {has}; fetch this {KINDS[kind]} where there is a network: "
        f"{fix}"
    )
