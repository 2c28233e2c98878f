"""The format of a journal's files: groups, rollouts and steps as records, and recorded experts as frames.

`journal/00000001.groups` holds records only. A record is the xxh3-64 digest of the rest, the sizes of header and
arrays, a JSON header, and the arrays that the header describes. Reading a file executes nothing.

`journal/00000001.routes` holds the experts that were recorded with the rollouts of a mixture, in frames: the xxh3-64
digest of an array, its size, its bytes. Recorded experts are most of the bytes of such a rollout, and the only part
that a run can do without: if they are lost, the router chooses. So records name these arrays by digest, and the reader
ignores an array that it cannot find. Equal arrays, such as those of a shared prompt, are stored once.
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
from llamarl.types import (
    Columns,
    FinishReason,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    continued,
)

_DIGEST, _SIZES = struct.Struct("<Q"), struct.Struct("<QQ")
_HEAD_BYTES = _DIGEST.size + _SIZES.size
_FRAME = struct.Struct("<QQ")
ADVANTAGES = "of rollouts"
"""Name of the advantages of whole rollouts in the record of a step."""
Key = tuple[int, int]
"""Group id and index of a rollout. A greedy response has the group id of its separate request."""
Arrays = dict[int, Any]
"""Arrays by digest."""
ArrayName = tuple[str, int, int]
"""Type of an array's rows as numpy writes it, digest, and number of rows."""


class TokenRun(NamedTuple):
    """Consecutive tokens of a rollout."""

    start: int
    stop: int
    rollout: Rollout
    """The rollout with the columns of tokens `start` to `stop` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record of a file."""

    start: int
    """Offset of its first byte."""
    end: int
    """Offset of the byte after its last."""
    header: dict[str, Any]
    """All that it holds except its rollouts."""
    parts: Sequence[TokenRun]
    rest: memoryview
    """The arrays after those of the rollouts."""


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(
    header: Mapping[str, Any],
    parts: Sequence[tuple[int, Rollout]] = (),
    arrays: Sequence[Any] = (),
    routes: Arrays | None = None,
) -> bytes:
    """Encodes a record.

    Args:
        parts: rollouts, each with the number of its first tokens to leave out.
        arrays: further arrays, which the header describes.
        routes: gets the recorded experts; the record holds only their names.
    """
    numbers, layouts = dict[tuple[Any, ...], int](), list[list[tuple[str, str]]]()
    described, all_columns = list[tuple[Any, ...]](), list[Any]()
    if routes is not None and any("routes" in rollout.columns for _, rollout in parts):
        prompts = dict[int, ArrayName]()
        header = {**header, "routes": [_name_routes(start, rollout, routes, prompts) for start, rollout in parts]}
    for start, rollout in parts:
        by_name = {name: values_T for name, values_T in rollout.columns.items() if name != "routes"}
        columns = by_name.values()
        layout = (*by_name, *[values_T.dtype.char for values_T in columns])  # `dtype.str` takes ten times as long
        if (number := numbers.setdefault(layout, len(layouts))) == len(layouts):
            layouts.append([(name, values_T.dtype.str) for name, values_T in by_name.items()])
        all_columns += [values_T[start:] for values_T in columns] if start else columns
        place = rollout.group_id, rollout.index, rollout.finish_reason, rollout.error
        described.append((*place, start, rollout.num_tokens - start, number, rollout.prefills))
    text = _encode_json({**header, "layouts": layouts, "rollouts": described}).encode()
    rest = b"".join([*all_columns, *arrays])
    body = b"".join((_SIZES.pack(len(text), len(rest)), text, rest))
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(body)) + body


def _name_routes(
    start: int, rollout: Rollout, into: Arrays, prompts: dict[int, ArrayName]
) -> tuple[ArrayName | None, ArrayName | None]:
    """Returns the names of a rollout's recorded experts: of its prompt, if the part is its first, and of its tokens
    from `start` on.

    Args:
        into: gets the arrays.
        prompts: names of arrays that several rollouts share, by object id.
    """
    prompt, routes, name = rollout.prompt_routes, rollout.columns.get("routes"), None
    if prompt is not None and not start:
        name = prompts[id(prompt)] = prompts.get(id(prompt)) or named(prompt, into)
    return name, None if routes is None else named(routes[start:], into)


def records(path: Path, start: int = 0, most: int = sys.maxsize) -> Iterator[Record]:
    """Yields the records of a file from byte `start` up to the first damaged one. Raises OSError.

    Args:
        path: of the file, which may have been compressed.
        most: bytes to read, about, if it was.
    """
    with open_or_unpack(path, most) as file, closing(RouteFile(path.with_suffix(".routes"))) as routes:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(start)
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            sizes = _SIZES.unpack_from(head, _DIGEST.size)
            end = start + _HEAD_BYTES + sum(sizes)
            if end > num_bytes:
                return
            body = file.read(sum(sizes))
            digest = xxhash.xxh3_64(head[_DIGEST.size :])
            digest.update(body)
            if digest.intdigest() != _DIGEST.unpack_from(head)[0]:
                return
            header = json.loads(body[: sizes[0]])
            parts, offset = _decode_rollouts(header.pop("layouts"), header.pop("rollouts"), body, sizes[0])
            if names := header.pop("routes", ()):
                pairs = zip(parts, names, strict=True)
                parts = [_with_routes(part, prompt, tokens, routes) for part, (prompt, tokens) in pairs]
            yield Record(start=start, end=end, header=header, parts=parts, rest=memoryview(body)[offset:])
            start = end


def _with_routes(part: TokenRun, prompt: ArrayName | None, tokens: ArrayName | None, file: RouteFile) -> TokenRun:
    routes = file.find(tokens) if tokens else None
    columns = part.rollout.columns | ({} if routes is None else {"routes": routes})
    prompt_routes = file.find(prompt) if prompt else None
    return part._replace(rollout=replace(part.rollout, columns=columns, prompt_routes=prompt_routes))


def _decode_rollouts(
    layouts: Sequence[Sequence[tuple[str, str]]], described: Sequence[Sequence[Any]], body: bytes, offset: int
) -> tuple[Sequence[TokenRun], int]:
    """Returns the rollouts, and the offset at which their arrays end."""
    parts = list[TokenRun]()
    for group_id, index, finish_reason, error, start, num_tokens, layout, prefills in described:
        columns: Columns = {}
        for name, dtype in layouts[layout]:
            columns[name] = np.frombuffer(body, dtype, num_tokens, offset).copy()  # torch requires writable arrays
            offset += columns[name].nbytes
        rollout = Rollout(
            group_id=group_id, index=index, columns=columns, finish_reason=FinishReason(finish_reason), error=error,
            prefills=tuple(map(tuple, prefills)),
        )  # fmt: skip
        parts.append(TokenRun(start, start + num_tokens, rollout))
    return parts, offset


def joined(before: Rollout | None, start: int, part: Rollout) -> Rollout | None:
    """Appends `part` to the first `start` tokens of `before`. Returns None if `before` has fewer tokens."""
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
    """Returns the largest policy version of their tokens, or -1 if they have none."""
    versions = [rollout.policy_versions_T for rollout in rollouts if rollout.num_tokens]
    return int(np.concatenate(versions).max()) if versions else -1


def encode_group(
    group: RolloutGroup, prompt: int, known: Mapping[Key, Rollout], routes: Arrays, *, has_prompt: bool = False
) -> bytes:
    """Encodes a scored group.

    Args:
        prompt: index of its prompt.
        known: rollouts on record, which are left out if they have not changed.
        routes: gets the recorded experts.
        has_prompt: whether the record holds the prompt, for readers without the dataset.
    """
    places = [n for n, rollout in enumerate(group.rollouts) if rollout is not known.get((group.group_id, n))]
    header = {
        "kind": "group",
        "group_id": group.group_id,
        "prompt": prompt,
        "newest": newest_version(group.rollouts),
        "tokens": [rollout.num_tokens for rollout in group.rollouts],
        "places": places,
        "results": list(map(_encode_result, group.results)),
        "responses": group.responses,
        "environment_s": group.environment_s,
        "baseline": _encode_result(group.baseline),
    }
    if has_prompt:
        header |= {"prompt_id": group.prompt.prompt_id, "text": group.prompt.text, "answer": group.prompt.answer}
        header |= {"source": group.prompt.source} if group.prompt.source else {}
    return encode(header, [(0, group.rollouts[place]) for place in places], routes=routes)


def decoded_group(header: Mapping[str, Any], prompt: Prompt, rollouts: Iterable[Rollout]) -> RolloutGroup:
    """Decodes the header of a group."""
    return RolloutGroup(
        group_id=header["group_id"],
        prompt=prompt,
        rollouts=tuple(rollouts),
        results=tuple(_decode_result(result) for result in header["results"]),
        responses=tuple(header["responses"]),
        environment_s=tuple(header["environment_s"]),
        baseline=header["baseline"] and _decode_result(header["baseline"]),
    )


def encode_step(header: Mapping[str, Any], result: PolicyStepResult | None) -> bytes:
    """Encodes a step, with the advantages and columns of `result` if it is given."""
    described, arrays = list[tuple[str, str, list[tuple[int, int, int]]]](), list[np.ndarray]()
    columns = {ADVANTAGES: {group_id: {0: values} for group_id, values in result.advantages.items()}} if result else {}
    for name, by_group in (columns | result.columns if result else {}).items():
        rows = [(group_id, index, values) for group_id, group in by_group.items() for index, values in group.items()]
        for dtype in sorted({values.dtype.str for _, _, values in rows}):
            of_type = [row for row in rows if row[2].dtype.str == dtype]
            described.append((name, dtype, [(group_id, index, len(values)) for group_id, index, values in of_type]))
            arrays += [values for _, _, values in of_type]
    return encode({"kind": "step", **header} | ({"trained": described} if result else {}), (), arrays)


def _encode_result(result: RewardResult | None) -> tuple[Any, ...] | None:
    if result is None:
        return None
    parts = (dict(result.parts),) if result.parts else ()
    return result.outcome, result.value, result.reason, _encode_result(result.first_part), *parts


def _decode_result(plain: Sequence[Any]) -> RewardResult:
    outcome, value, reason, first_part, *parts = plain  # older journals have no parts
    first = first_part and _decode_result(first_part)
    values = parts[0] if parts else {}
    return RewardResult(outcome=Outcome(outcome), value=value, reason=reason, first_part=first, parts=values)


def named(array: np.ndarray, into: Arrays) -> ArrayName:
    """Adds an array to `into`. Returns its name."""
    digest = xxhash.xxh3_64_intdigest(array.data)
    into[digest] = array
    return f"({array.shape[1]},){array.dtype.str}", digest, len(array)


def frames(arrays: Mapping[int, Any]) -> Iterator[bytes]:
    """Yields the bytes of a file with these arrays."""
    for digest, array in arrays.items():
        yield _FRAME.pack(digest, array.nbytes)
        yield array.tobytes()


class RouteFile:
    """Reads a file of recorded experts, which may be missing or damaged.

    Example::

        with closing(RouteFile(path)) as file:
            routes = file.find(name)    # None if the file does not have it
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._places: dict[int, tuple[int, int]] | None = None
        """Offset and size of each array by digest; None means that the file was not read yet."""

    def find(self, name: ArrayName) -> np.ndarray | None:
        """Returns an array, or None if it is missing or damaged."""
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
        return np.frombuffer(data, base).reshape(num_rows, width).copy()  # torch requires writable arrays

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
