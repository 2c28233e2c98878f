"""Groups and rollouts as records of a file, and back. Nothing that is read is executed.

A record is the xxh3-64 digest of all that follows, the sizes of header and arrays, a JSON header, and the arrays that
the header describes, end to end. A file holds nothing else.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash

from llamarl.observability.files import open_or_unpack
from llamarl.training.result import PolicyStepResult
from llamarl.types import Columns, FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup, continued

_FRAME = struct.Struct("<QQ")
Arrays = dict[int, Any]
"""Arrays by their digests."""
Named = tuple[str, int, int]
"""Type of an array's rows, as numpy writes it; its digest; its number of rows."""


def named(array: np.ndarray, into: Arrays) -> Named:
    """Name of an array, which `into` gets."""
    digest = xxhash.xxh3_64_intdigest(array.data)
    into[digest] = array
    return f"({array.shape[1]},){array.dtype.str}", digest, len(array)


def frames(arrays: Mapping[int, Any]) -> Iterator[bytes]:
    """Pieces of a file."""
    for digest, array in arrays.items():
        yield _FRAME.pack(digest, array.nbytes)
        yield array.tobytes()


class RouteFile:
    """Reads one; without the file, or where it is damaged, nothing is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._places: dict[int, tuple[int, int]] | None = None
        """Offset and size of each array by its digest; None: not read yet."""

    def find(self, name: Named) -> np.ndarray | None:
        """The array; None where it is not there as it was written."""
        kind, digest, num_rows = name
        dtype = np.dtype(kind)
        if self._places is None:
            self._places = dict(self._read())
        start, size = self._places.get(digest, (0, -1))
        if self._file is None or size != num_rows * dtype.itemsize:
            return None
        self._file.seek(start)
        data = self._file.read(size)
        if xxhash.xxh3_64_intdigest(data) != digest:
            return None
        width, base = dtype.shape[0], dtype.base
        return np.frombuffer(data, base).reshape(num_rows, width).copy()  # torch takes writable ones alone

    def _read(self) -> Iterator[tuple[int, tuple[int, int]]]:
        try:
            self._file = open_or_unpack(self._path)
        except OSError:
            return
        num_bytes, start = self._file.seek(0, os.SEEK_END), 0
        while start + _FRAME.size <= num_bytes:
            self._file.seek(start)
            digest, size = _FRAME.unpack(self._file.read(_FRAME.size))
            yield digest, (start + _FRAME.size, size)
            start += _FRAME.size + size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


_DIGEST, _SIZES = struct.Struct("<Q"), struct.Struct("<QQ")
_FRAME_BYTES = _DIGEST.size + _SIZES.size
ADVANTAGES = "of rollouts"
"""Name of those of whole rollouts in the record of a step."""
Key = tuple[int, int]
"""Group and index of a rollout; a greedy one has a group of its own."""


class TokenRun(NamedTuple):
    """Some tokens of a rollout."""

    start: int
    stop: int
    rollout: Rollout
    """Rollout with the columns of tokens `start` to `stop` alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One of a file."""

    start: int
    end: int
    """Offset in the file of the byte after its last; `start` is that of its first."""
    header: dict[str, Any]
    """Everything that a record says besides its rollouts."""
    parts: Sequence[TokenRun]
    rest: memoryview
    """Its arrays after those of the rollouts."""


_encoded = json.JSONEncoder(separators=(",", ":")).encode


def encode(
    header: Mapping[str, Any],
    parts: Sequence[tuple[int, Rollout]] = (),
    arrays: Sequence[Any] = (),
    routes: Arrays | None = None,
) -> bytes:
    """A record of these rollouts, each without so many of its first tokens, and of arrays that the header describes.
    `routes` gets the experts that were recorded, whose digests alone are in the record."""
    numbers, layouts = dict[tuple[Any, ...], int](), list[list[tuple[str, str]]]()
    described, columns_of = list[tuple[Any, ...]](), list[Any]()
    if routes is not None and any("routes" in one.columns for _, one in parts):
        prompts = dict[int, Named]()
        header = {**header, "routes": [_routes(start, one, routes, prompts) for start, one in parts]}
    for start, one in parts:
        by_name = {name: values_T for name, values_T in one.columns.items() if name != "routes"}
        columns = by_name.values()
        layout = (*by_name, *[values_T.dtype.char for values_T in columns])  # `dtype.str` takes ten times as long
        if (number := numbers.setdefault(layout, len(layouts))) == len(layouts):
            layouts.append([(name, values_T.dtype.str) for name, values_T in by_name.items()])
        columns_of += [values_T[start:] for values_T in columns] if start else columns
        size = one.num_tokens - start
        described.append((one.group_id, one.index, one.finish_reason, one.error, start, size, number, one.prefills))
    text = _encoded({**header, "layouts": layouts, "rollouts": described}).encode()
    rest = b"".join([*columns_of, *arrays])
    body = b"".join((_SIZES.pack(len(text), len(rest)), text, rest))
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(body)) + body


def _routes(start: int, one: Rollout, into: Arrays, prompts: dict[int, Named]) -> tuple[Named | None, Named | None]:
    """Names of what was recorded of a rollout's prompt, in its first part alone, and of its tokens from `start` on.
    `prompts` has those of arrays that several share."""
    prompt, routes, name = one.prompt_routes, one.columns.get("routes"), None
    if prompt is not None and not start:
        name = prompts[id(prompt)] = prompts.get(id(prompt)) or named(prompt, into)
    return name, None if routes is None else named(routes[start:], into)


def records(path: Path, start: int = 0, most: int = sys.maxsize) -> Iterator[Record]:
    """Records of a file from a byte on, or of what it was compressed to (of which about so many bytes are read), up to
    the first that is torn or damaged. Raises OSError."""
    with open_or_unpack(path, most) as file, closing(RouteFile(path.with_suffix(".routes"))) as routes:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(start)
        while len(frame := file.read(_FRAME_BYTES)) == _FRAME_BYTES:
            sizes = _SIZES.unpack_from(frame, _DIGEST.size)
            end = start + _FRAME_BYTES + sum(sizes)
            if end > num_bytes:
                return
            body = file.read(sum(sizes))
            digest = xxhash.xxh3_64(frame[_DIGEST.size :])
            digest.update(body)
            if digest.intdigest() != _DIGEST.unpack_from(frame)[0]:
                return
            header = json.loads(body[: sizes[0]])
            parts, offset = _parts(header.pop("layouts"), header.pop("rollouts"), body, sizes[0])
            if names := header.pop("routes", ()):
                pairs = zip(parts, names, strict=True)
                parts = [_with_routes(part, prompt, of_tokens, routes) for part, (prompt, of_tokens) in pairs]
            yield Record(start=start, end=end, header=header, parts=parts, rest=memoryview(body)[offset:])
            start = end


def _with_routes(part: TokenRun, prompt: Named | None, routes: Named | None, file: RouteFile) -> TokenRun:
    """The same with what is found of its experts."""
    found = file.find(routes) if routes else None
    columns = part.rollout.columns | ({} if found is None else {"routes": found})
    found_prompt = file.find(prompt) if prompt else None
    return part._replace(rollout=replace(part.rollout, columns=columns, prompt_routes=found_prompt))


def _parts(
    layouts: Sequence[Sequence[tuple[str, str]]], described: Sequence[Sequence[Any]], body: bytes, offset: int
) -> tuple[Sequence[TokenRun], int]:
    """The rollouts, and where their arrays end."""
    parts = list[TokenRun]()
    for group_id, index, finish_reason, error, start, num_tokens, layout, prefills in described:
        columns: Columns = {}
        for name, dtype in layouts[layout]:
            columns[name] = np.frombuffer(body, dtype, num_tokens, offset).copy()  # torch takes writable ones alone
            offset += columns[name].nbytes
        rollout = Rollout(
            group_id=group_id, index=index, columns=columns, finish_reason=FinishReason(finish_reason), error=error,
            prefills=tuple(map(tuple, prefills)),
        )  # fmt: skip
        parts.append(TokenRun(start, start + num_tokens, rollout))
    return parts, offset


def joined(before: Rollout | None, start: int, part: Rollout) -> Rollout | None:
    """A rollout of which `part` came after `start` tokens of `before`; None: these are not there."""
    if not start:
        return part
    if before is None or before.num_tokens < start:
        return None
    kept = {name: values_T[:start] for name, values_T in before.columns.items()}
    columns = continued(kept, part.columns) if part.num_tokens else kept
    return Rollout(
        group_id=part.group_id, index=part.index, columns=columns, finish_reason=part.finish_reason, error=part.error,
        prefills=part.prefills,
        prompt_routes=part.prompt_routes if before.prompt_routes is None else before.prompt_routes,
    )  # fmt: skip


def newest_version(rollouts: Sequence[Rollout]) -> int:
    """Largest policy version among their tokens; -1 when there is none."""
    versions = [one.policy_versions_T for one in rollouts if one.num_tokens]
    return int(np.concatenate(versions).max()) if versions else -1


def encode_group(
    group: RolloutGroup, prompt: int, known: Mapping[Key, Rollout], routes: Arrays, *, has_prompt: bool = False
) -> bytes:
    """A record of what the trainer gets, with the index of its prompt, and the prompt for who reads without the data,
    but for rollouts that are on record as they are `known`."""
    places = [n for n, one in enumerate(group.rollouts) if one is not known.get((group.group_id, n))]
    header = {
        "kind": "group",
        "group_id": group.group_id,
        "prompt": prompt,
        "newest": newest_version(group.rollouts),
        "tokens": [one.num_tokens for one in group.rollouts],
        "places": places,
        "results": list(map(_plain, group.results)),
        "responses": group.responses,
        "environment_s": group.environment_s,
        "baseline": _plain(group.baseline),
    }
    if has_prompt:
        header |= {"prompt_id": group.prompt.prompt_id, "text": group.prompt.text, "answer": group.prompt.answer}
        header |= {"source": group.prompt.source} if group.prompt.source else {}
    return encode(header, [(0, group.rollouts[place]) for place in places], routes=routes)


def decoded_group(header: Mapping[str, Any], prompt: Prompt, rollouts: Iterable[Rollout]) -> RolloutGroup:
    """The group that `encode_group` was given."""
    return RolloutGroup(
        group_id=header["group_id"],
        prompt=prompt,
        rollouts=tuple(rollouts),
        results=tuple(_result(one) for one in header["results"]),
        responses=tuple(header["responses"]),
        environment_s=tuple(header["environment_s"]),
        baseline=header["baseline"] and _result(header["baseline"]),
    )


def encode_step(header: Mapping[str, Any], result: PolicyStepResult | None) -> bytes:
    """A step, with what the trainer says of its rollouts, if that is kept."""
    said, arrays = list[tuple[str, str, list[tuple[int, int, int]]]](), list[np.ndarray]()
    columns = {ADVANTAGES: {one: {0: of_group} for one, of_group in result.advantages.items()}} if result else {}
    for name, of_groups in (columns | result.columns if result else {}).items():
        found = [(one, index, values) for one, of_group in of_groups.items() for index, values in of_group.items()]
        for dtype in sorted({values.dtype.str for _, _, values in found}):
            of_type = [one for one in found if one[2].dtype.str == dtype]
            said.append((name, dtype, [(one, index, len(values)) for one, index, values in of_type]))
            arrays += [values for _, _, values in of_type]
    return encode({"kind": "step", **header} | ({"trained": said} if result else {}), (), arrays)


def _plain(result: RewardResult | None) -> tuple[Any, ...] | None:
    if result is None:
        return None
    parts = (dict(result.parts),) if result.parts else ()
    return result.outcome, result.value, result.reason, _plain(result.first_part), *parts


def _result(plain: Sequence[Any]) -> RewardResult:
    outcome, value, reason, first_part, *parts = plain  # older journals have no parts
    first = first_part and _result(first_part)
    values = parts[0] if parts else {}
    return RewardResult(outcome=Outcome(outcome), value=value, reason=reason, first_part=first, parts=values)
