"""`Replayer`: samples recorded rollouts again, all tokens of one policy version at once.

The tokens are known, so each one is sampled given the recorded tokens before it. If all of them are equal, sequential
sampling would give the same result, because the bits of a row do not depend on other rows (`docs/generation.md`). The
record contains which version computed which keys and values, and where a cache was rebuilt. The part of a rollout
between two rebuilds is a *life*. Lives are independent.

Shape suffixes: T tokens of one response, B tokens that are checked, N packed tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import torch

from llamarl.config.errors import ConfigError
from llamarl.generation.attention import BLOCK_SIZE
from llamarl.generation.engine import Engine
from llamarl.generation.sampler import SamplingRows, noise_key
from llamarl.generation.scheduler import EMPTY, Chunk, Group, Segment, Sequence
from llamarl.parts.replay.replayed import Difference, Replayed
from llamarl.types import GenerationRequest, Rollout

_CHECKED = 256
"""Tokens whose logits are in memory at a time."""
_Span = tuple[int, int, int]
"""First token, end, policy version."""


@dataclass(slots=True, eq=False)
class _Life:
    """Part of a rollout with the same cache."""

    rollout: Rollout
    sequence: Sequence
    prefix: list[_Span]
    """Spans of the prompt without its last token."""
    versions_T: np.ndarray
    """Policy version that processed each token: the last one of the prompt, then those of the response except the
    last."""
    is_checked_T: np.ndarray
    """Whether the token that follows must be sampled again."""
    prompt_routes: np.ndarray | None = None
    """Recorded experts of the prefix in this cache. None means not recorded."""


def _lives(prefix_tokens: int, rollout: Rollout) -> Iterator[tuple[list[_Span], np.ndarray, np.ndarray]]:
    """Yields for each life: spans of the prefix, versions, and which tokens to check. Raises ValueError for an
    impossible record."""
    num_tokens, starts = rollout.num_tokens, [number for number, one in enumerate(rollout.prefills) if one[1] == 0]
    if num_tokens and (not starts or rollout.prefills[0][1]):
        raise ValueError("it is not on record which keys and values were computed when")
    for first, last in pairwise([*starts, len(rollout.prefills)]):
        born = rollout.prefills[first][0]
        end = rollout.prefills[last][0] if last < len(rollout.prefills) else num_tokens
        end = int(np.flatnonzero(rollout.is_sampled_T[:end])[-1]) + 1 if rollout.is_sampled_T[:end].any() else 0
        spans = [(start, stop, version) for _, start, stop, version in rollout.prefills[first:last] if stop > start]
        versions_T = rollout.policy_versions_T[:end].copy()
        is_checked_T = rollout.is_sampled_T[:end] & (np.arange(end) >= born)
        for start, stop, version in spans:
            if start >= prefix_tokens:
                versions_T[start - prefix_tokens : stop - prefix_tokens] = version
        prefix = [one for one in spans if one[1] <= prefix_tokens]
        in_order = [*(version for *_, version in prefix), *versions_T.tolist()]
        if in_order != sorted(in_order) or (versions_T < 0).any():
            raise ValueError("one cache holds keys and values in an order that no engine computes them in")
        if end > born:
            yield prefix, versions_T, is_checked_T


class Replayer:
    """Uses the cache of an engine that receives no other requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lives = list[_Life]()
        self._groups = dict[tuple[int, tuple[_Span, ...]], Group]()
        """Lives with the same computation of the prefix share it."""

    def add(self, items: Iterable[tuple[GenerationRequest, Rollout]]) -> list[Difference]:
        """Adds rollouts to sample again, each with its request. Returns differences for incomplete records."""
        faults = list[Difference]()
        for request, rollout in items:
            try:
                found = list(_lives(len(request.prompt_token_ids_T) - 1, rollout))
            except ValueError as error:
                faults.append(Difference(rollout.group_id, rollout.index, 0, -1, "", str(error), math.inf))
                continue
            # A rollout records the experts of its first prefix, which is another one if it produced no token.
            num_first = sum(born == 0 and not start for born, start, *_ in rollout.prefills)
            for number, (prefix, versions_T, is_checked_T) in enumerate(found):
                key = rollout.group_id, tuple(prefix)
                if (group := self._groups.get(key)) is None:
                    prompt_T = np.array(request.prompt_token_ids_T, np.int32)
                    group = self._groups[key] = Group(request=request, prompt_T=prompt_T, limit=0)
                group.num_active += 1
                sequence = Sequence(group=group, index=rollout.index, limit=0, columns=rollout.columns)
                prompt_routes = rollout.prompt_routes if number == 0 and num_first == 1 else None
                self._lives.append(_Life(rollout, sequence, prefix, versions_T, is_checked_T, prompt_routes))
        return faults

    def advance(self, version: int) -> Replayed:
        """Repeats all computations under `version`, whose weights are in use."""
        budget, num_checked, found = self._engine._scheduler.prefill_tokens, 0, list[Difference]()
        work = list(self._chunks(version))
        batch_of = np.cumsum([chunk.stop - chunk.start for chunk, _ in work]) // budget
        for _, batch in groupby(zip(batch_of.tolist(), work, strict=True), key=itemgetter(0)):
            num_checked += self._compute(version, [one for _, one in batch], found)
        ended = [one for one in self._lives if int(one.versions_T[-1]) <= version]
        self._lives = [one for one in self._lives if int(one.versions_T[-1]) > version]
        for life in ended:
            self._end(life)
        return Replayed(num_checked, found)

    def _chunks(self, version: int) -> Iterator[tuple[Chunk, _Life]]:
        """Yields chunks in an order that satisfies their dependencies, each no larger than a step of an engine."""
        budget = self._engine._scheduler.prefill_tokens
        for life in self._lives:
            group, own = life.sequence.group, life.sequence.own
            parts = list[tuple[Sequence | None, Segment, int, int]]()
            parts += [(None, group.prefix, start, stop) for start, stop, of in life.prefix if of == version]
            if len(places_T := np.flatnonzero(life.versions_T == version)):
                parts.append((life.sequence, own, int(places_T[0]), int(places_T[-1]) + 1))
            for sequence, segment, start, stop in parts:
                self._allocate(segment, group.prefix_tokens if sequence is None else len(life.versions_T))
                while (begin := max(start, segment.num_cached)) < stop:
                    segment.num_cached = min(stop, begin + budget)
                    yield Chunk(group, sequence, begin, segment.num_cached), life

    @torch.inference_mode()
    def _compute(self, version: int, batch: list[tuple[Chunk, _Life]], found: list[Difference]) -> int:
        engine, offset = self._engine, 0
        hidden_N_D, _, routes, _ = engine._forward([chunk for chunk, _ in batch])
        routes_N_W = None if routes is None else routes.cpu().numpy()
        places, rows = list[int](), list[tuple[_Life, int]]()
        for chunk, life in batch:
            if chunk.sequence is None and routes_N_W is not None:
                found += _other_prompt(life, chunk, version, routes_N_W[offset : offset + chunk.stop - chunk.start])
            elif chunk.sequence is not None:
                at = np.flatnonzero(life.is_checked_T[chunk.start : chunk.stop])
                places += (offset + at).tolist()
                rows += [(life, token) for token in (chunk.start + at).tolist()]
            offset += chunk.stop - chunk.start
        for start in range(0, len(rows), _CHECKED):
            part = rows[start : start + _CHECKED]
            logits_B_V = engine.model.logits(hidden_N_D[places[start : start + _CHECKED]])
            sampling = SamplingRows(len(part))
            for row, (life, _) in enumerate(part):
                request = life.sequence.group.request
                key = noise_key(request.sampling.seed, request.group_id, life.sequence.index)
                sampling.set(row, request.sampling, key)
            drawn = engine._sampler(logits_B_V, sampling, np.array([token for _, token in part]))
            sampled = zip(part, drawn.token_ids_B, drawn.logprobs_B, strict=True)
            for row, ((life, at), token, logprob) in enumerate(sampled):
                one = life.rollout
                was, said = one.token_ids_T[at], one.behavior_logprobs_T[at]
                if was != token or said.tobytes() != logprob.tobytes():
                    texts = f"token {was} with log-probability {said:.9g}", f"token {token} with {logprob:.9g}"
                    gap = float(abs(said - logprob)) if was == token else math.inf
                    found.append(Difference(one.group_id, one.index, at, version, *texts, gap))
                elif other := _other_routes(one, at, routes_N_W, places[start + row]):
                    found.append(Difference(one.group_id, one.index, at, version, *other, 0.0))
        return len(rows)

    def _allocate(self, segment: Segment, num_tokens: int) -> None:
        pool, new = self._engine._scheduler.pool, list[int]()
        if (slots := self._engine._scheduler.slots) is not None and num_tokens and segment.slot == EMPTY:
            if not slots.num_free:
                self._engine.add_states()
            segment.slot = slots.take()
        while len(segment.blocks) * BLOCK_SIZE < num_tokens:
            if not pool.num_free:
                raise ConfigError(f"{pool.num_blocks * BLOCK_SIZE} cached tokens are too few; replay with more memory")
            new.append(pool.take())
            segment.blocks.append(new[-1])
        if new:
            assert self._engine._cache is not None, "it sleeps"
            self._engine._cache.clear(new)

    def _end(self, life: _Life) -> None:
        group = life.sequence.group
        self._engine._scheduler.free(life.sequence.own)
        group.num_active -= 1
        if not group.num_active:
            self._engine._scheduler.free(group.prefix)
            del self._groups[life.rollout.group_id, tuple(life.prefix)]


def _other_prompt(life: _Life, chunk: Chunk, version: int, now_T_W: np.ndarray) -> Iterator[Difference]:
    """Yields the first token of a part of a prompt whose recorded experts differ."""
    if life.prompt_routes is None or not len(life.prompt_routes):
        return
    one, was_T_W = life.rollout, life.prompt_routes[chunk.start : chunk.stop]
    is_known_T = (was_T_W != np.iinfo(was_T_W.dtype).max).any(1)
    for at in np.flatnonzero((was_T_W != now_T_W).any(1) & is_known_T)[:1].tolist():
        now = f"experts {now_T_W[at].tolist()} of the prompt's token {chunk.start + at}"
        yield Difference(one.group_id, one.index, 0, version, f"experts {was_T_W[at].tolist()}", now, 0.0)


def _other_routes(one: Rollout, at: int, routes_N_W: np.ndarray | None, place: int) -> tuple[str, str] | None:
    """Returns recorded and computed experts of the token. None means equal or not recorded."""
    if routes_N_W is None or "routes" not in one.columns:
        return None
    was_W, now_W = one.columns["routes"][at], routes_N_W[place]
    if (was_W == np.iinfo(was_W.dtype).max).all() or was_W.tobytes() == now_W.tobytes():
        return None
    return f"experts {was_W.tolist()}", f"experts {now_W.tolist()}"
