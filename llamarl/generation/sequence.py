"""`Group` and `Sequence`: the mutable state of a request and of its rollouts inside the engine. No torch.

A prompt is split in two. All its tokens but the last are the group's *prefix*: prefilled once, shared by every rollout.
The last prompt token and the response are the rollout's *own* tokens. So the first decode step of a rollout feeds the
last prompt token like any later one, every token is sampled on one path, and with the weights of that very step.

Shape suffixes: T tokens of one sequence, W experts of a token in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from llamarl.generation.stop import StopStrings
from llamarl.types import Columns, FinishReason, GenerationRequest, Rollout


@dataclass(slots=True)
class Segment:
    """Consecutive tokens whose keys and values lie, or will lie, in blocks."""

    blocks: list[int] = field(default_factory=list)
    """Block ids, in token order."""
    num_cached: int = 0
    """Tokens whose keys and values have been written."""
    num_outdated: int = 0
    """So many first tokens had been computed with older weights; computing them again is the cost of an update."""
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, token after the last, policy version), in order."""
    routes_T_W: np.ndarray | None = None
    """Experts of a prefix's tokens, as far as it is cached; None: not recorded."""

    def prefilled(self, start: int, stop: int, version: int) -> None:
        """Notes that tokens `start` to `stop` are computed next."""
        if self.prefills and self.prefills[-1][1:] == (start, version):
            start = self.prefills.pop()[0]
        self.prefills.append((start, stop, version))

    def outdate(self) -> None:
        """The weights have changed: everything is to be computed again, in the same blocks."""
        self.num_outdated = max(self.num_outdated, self.num_cached)
        self.num_cached = 0
        self.prefills = []


@dataclass(slots=True, eq=False)
class Group:
    """One request in the engine, and its prompt's prefix as some weights computed it."""

    request: GenerationRequest
    prompt_T: np.ndarray
    """int32, a copy."""
    limit: int
    """Most tokens that a rollout may get: `max_new_tokens`, cut at the end of the context."""
    stop_strings: StopStrings | None = None
    prefix: Segment = field(default_factory=Segment)
    num_active: int = 0
    """Rollouts that hold blocks: prefilling or running."""
    num_held: int = 0
    """Rollouts that wait for their environment, and hold their blocks."""
    unfinished: dict[int, Sequence] = field(default_factory=dict)
    """Rollout index -> rollout, for those not returned yet."""

    @property
    def prefix_tokens(self) -> int:
        return len(self.prompt_T) - 1

    def renewed(self) -> Group:
        """The same request with a prefix of its own, for rollouts that are admitted under newer weights."""
        return replace(self, prefix=Segment(num_outdated=self.prefix.num_cached), num_active=0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One rollout in the engine. While it runs, its tokens lie in its row of `Rows`."""

    group: Group
    index: int
    limit: int
    """Number of tokens with which it leaves: `group.limit`, or as many as `segment_tokens` allow."""
    own: Segment = field(default_factory=Segment)
    running: bool = False
    """Whether it decodes one token per step."""
    row: int = -1
    """Its row in `Rows`; -1 when it has none."""
    columns: Columns = field(default_factory=lambda: Rollout.empty(0, 0).columns)
    """Columns of its tokens so far."""
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    """Prefills so far, as in `Rollout`."""
    prompt_routes: np.ndarray | None = None
    """Experts of the prefix with which it began; None: not known."""

    @classmethod
    def of(cls, group: Group, start: Rollout) -> Sequence:
        """A rollout that goes on from the tokens of `start`, perhaps none."""
        segment_tokens = group.request.segment_tokens or group.limit
        limit = min(group.limit, start.num_tokens + segment_tokens)
        return cls(
            group=group, index=start.index, limit=limit, columns=start.columns, prefills=start.prefills,
            prompt_routes=start.prompt_routes,
        )  # fmt: skip

    def note_prefills(self, version: int) -> None:
        """Notes, as it begins to decode, what was computed for that."""
        own, prefix, num_tokens = self.own.prefills, self.group.prefix_tokens, len(self.token_ids_T)
        found = [(start + prefix, stop + prefix, of) for start, stop, of in own]
        if not own or own[0][0] == 0:  # not held, so that the cache began anew
            found = self.group.prefix.prefills + found or [(0, 0, version)]
        self.prefills += tuple((num_tokens, *one) for one in found)
        self.own.prefills = []

    @property
    def token_ids_T(self) -> np.ndarray:
        """The response so far, int32; valid while it is not running."""
        return self.columns["token_ids"]

    @property
    def own_tokens(self) -> int:
        """The last prompt token and the response so far; valid while it is not running."""
        return 1 + len(self.token_ids_T)

    def own_token_ids(self, start: int, stop: int) -> np.ndarray:
        """Own tokens `start` to `stop`, int32."""
        return np.concatenate((self.group.prompt_T[-1:], self.token_ids_T))[start:stop]

    def rollout(self, reason: FinishReason, error: str = "") -> Rollout:
        """The rollout as the engine hands it out; who is not learnt from need not tell its experts."""
        columns, is_trained_on = self.columns, self.group.request.purpose == "train"
        if not is_trained_on:
            columns = {name: values_T for name, values_T in columns.items() if name != "routes"}
        return Rollout(
            group_id=self.group.request.group_id,
            index=self.index,
            columns=columns,
            finish_reason=reason,
            error=error,
            prefills=self.prefills,
            prompt_routes=self.prompt_routes if is_trained_on else None,
        )
