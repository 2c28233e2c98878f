"""Groups and rollouts as records of a file, and back. Nothing that is read is executed.

A record is the xxh3-64 digest of all that follows, the sizes of header and arrays, a JSON header, and the arrays that
the header describes, end to end. A file holds nothing else.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llamarl.types import Columns, FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup, continued

_DIGEST, _SIZES = struct.Struct("<Q"), struct.Struct("<QQ")
_FRAME_BYTES = _DIGEST.size + _SIZES.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One of a file."""

    header: dict[str, Any]
    """What it says besides its rollouts."""
    parts: Sequence[tuple[int, Rollout]]
    """Rollouts, each from one of its tokens on."""
    end: int
    """Of its bytes in the file."""


def encode(header: dict[str, Any], parts: Sequence[tuple[int, Rollout]] = ()) -> bytes:
    """A record of these rollouts, each without so many of its first tokens."""
    numbers, layouts = dict[tuple[Any, ...], int](), list[list[tuple[str, str]]]()
    described, arrays = list[tuple[Any, ...]](), list[Any]()
    for start, one in parts:
        columns = one.columns.values()
        layout = (*one.columns, *[values_T.dtype.char for values_T in columns])  # `dtype.str` takes ten times as long
        if (number := numbers.setdefault(layout, len(layouts))) == len(layouts):
            layouts.append([(name, values_T.dtype.str) for name, values_T in one.columns.items()])
        arrays += [values_T[start:] for values_T in columns] if start else columns
        size = one.num_tokens - start
        described.append((one.group_id, one.index, one.finish_reason, one.error, start, size, number, one.prefills))
    text, rest = json.dumps(header | {"layouts": layouts, "rollouts": described}).encode(), b"".join(arrays)
    body = b"".join((_SIZES.pack(len(text), len(rest)), text, rest))
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(body)) + body


def records(path: Path, start: int = 0) -> Iterator[tuple[int, Record]]:
    """Those of a file with where they begin, from the byte `start` on, up to the first that is torn or damaged.

    Raises OSError: it cannot be read.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
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
            parts = _parts(header.pop("layouts"), header.pop("rollouts"), body, sizes[0])
            yield start, Record(parts=parts, header=header, end=end)
            start = end


def _parts(
    layouts: Sequence[Sequence[tuple[str, str]]], described: Sequence[Sequence[Any]], body: bytes, offset: int
) -> Sequence[tuple[int, Rollout]]:
    parts = list[tuple[int, Rollout]]()
    for group_id, index, finish_reason, error, start, num_tokens, layout, prefills in described:
        columns: Columns = {}
        for name, dtype in layouts[layout]:
            columns[name] = np.frombuffer(body, dtype, num_tokens, offset).copy()  # torch takes writable ones alone
            offset += columns[name].nbytes
        rollout = Rollout(
            group_id=group_id, index=index, columns=columns, finish_reason=FinishReason(finish_reason), error=error,
            prefills=tuple(map(tuple, prefills)),
        )  # fmt: skip
        parts.append((start, rollout))
    return parts


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
    )  # fmt: skip


def newest_version(rollouts: Sequence[Rollout]) -> int:
    """Largest policy version among their tokens; -1 when there is none."""
    versions = [one.policy_versions_T for one in rollouts if one.num_tokens]
    return int(np.concatenate(versions).max()) if versions else -1


def encode_group(group: RolloutGroup, prompt: int) -> bytes:
    """All that the trainer gets, with the index of its prompt instead of the prompt."""
    header = {
        "kind": "group",
        "group_id": group.group_id,
        "prompt": prompt,
        "results": list(map(_plain, group.results)),
        "responses": group.responses,
        "environment_s": group.environment_s,
        "baseline": _plain(group.baseline),
    }
    return encode(header, [(0, one) for one in group.rollouts])


def decoded_group(record: Record, prompt: Prompt) -> RolloutGroup:
    """What `encode_group` was given."""
    header = record.header
    return RolloutGroup(
        group_id=header["group_id"],
        prompt=prompt,
        rollouts=tuple(rollout for _, rollout in record.parts),
        results=tuple(_result(one) for one in header["results"]),
        responses=tuple(header["responses"]),
        environment_s=tuple(header["environment_s"]),
        baseline=header["baseline"] and _result(header["baseline"]),
    )


def _plain(result: RewardResult | None) -> tuple[Any, ...] | None:
    if result is None:
        return None
    return result.outcome, result.value, result.reason, _plain(result.first_part)


def _result(plain: Sequence[Any]) -> RewardResult:
    outcome, value, reason, first_part = plain
    first = first_part and _result(first_part)
    return RewardResult(outcome=Outcome(outcome), value=value, reason=reason, first_part=first)
