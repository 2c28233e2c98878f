"""Fetches what a name of the Hub means, in a process of its own, as the client ends only with the file in flight."""

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
    """Files of a model besides its weights, and their index. Raises ConfigError: it is none, or has pickles only."""
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
    """Files of a model: of the top folder, by exact names, so neither code nor pickles nor other formats. Raises
    ConfigError: it is no model, weights are missing, or there are pickles only."""
    found = small_files(files)
    if _WHOLE in files:
        return [*found, _WHOLE]
    shards = {path: int(match[1]) for path in sorted(files) if (match := _SHARD.fullmatch(path))}
    if _INDEX in files and shards and len(shards) == max(shards.values()):
        return [*found, *shards]
    has = f"{len(shards)} shards of {max(shards.values())}" if shards else f"neither {_WHOLE} nor {_INDEX}"
    raise ConfigError(f"its repository has {has}, so its weights are not whole; name another revision or repository")


def listing(name: HubName, kind: Kind = "model") -> tuple[str, dict[str, int]]:
    """The commit that the name means now, and the bytes of all its files by path; a commit that was listed before asks
    nobody. Where the Hub gives no answer, that of the last time.

    Raises:
        ConfigError: there is no such repository or revision, nobody may see it, or there is no answer.
    """
    with Client() as client:
        commit, files, note = _listed(client, name, kind)
    if note:
        sys.stderr.write(f"{name}: {note}\n")
    return commit, {path: one.size for path, one in files.items()}


def cached(name: HubName, kind: Kind = "model", choose: Choose = model_files) -> Snapshot | None:
    """The snapshot that the name meant when it was asked for last, if its files are in the cache, by their sizes. Asks
    nobody."""
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
    """The files that `choose` takes of what the name means now, in the cache of this machine, whole.

    A commit that is listed and whole asks nobody. Each file is compared with its digest as it comes. Ctrl-C ends
    it at once; the next start goes on with the files that are missing.

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
    """Commit, files by path, and a sentence about an answer from the cache. Raises ConfigError."""
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
        """Bytes of them on this machine's disk, whoever fetches them: `blobs/DIGEST`, or `DIGEST.RANDOM.incomplete`."""
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
