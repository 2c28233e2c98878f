"""`Rescorer`: scores sampled tokens again with the same weights and without cached keys and values.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from llamarl.generation.backend import GenerationBackend
from llamarl.training.probe import WHOLE_TOKENS
from llamarl.types import CandidateSets, GenerationRequest, Rollout, filled

_NAME = "fresh_logprobs"


class Rescorer:
    """Fills `fresh_logprobs` of a few rollouts: when they finish, and before the weights that sampled them are
    replaced."""

    def __init__(self, engine: GenerationBackend) -> None:
        self._engine = engine
        self._asked = dict[int, GenerationRequest]()
        """Requests whose first rollout is here, by group."""
        self._known = dict[int, np.ndarray]()
        """Known part of the column of decoding rollouts."""

    def submitted(self, requests: Iterable[GenerationRequest]) -> None:
        """Registers submitted requests."""
        asked = (one for one in requests if one.is_rescored and 0 in one.indices)
        self._asked.update((request.group_id, request) for request in asked)

    def update(self, version: int) -> None:
        """Scores tokens that the weights of `version` sampled. They are in use and about to be replaced."""
        if not self._asked:
            return
        decoding = [one for one in self._engine.so_far([*self._asked]) if one.index == 0]
        self._known.update(zip([one.group_id for one in decoding], self._filled(decoding, version), strict=True))

    def left(self, rollouts: Sequence[Rollout], version: int) -> Sequence[Rollout]:
        """Returns finished rollouts, with the column if it was requested. The weights of `version` are in use."""
        if not (asked := [one for one in rollouts if one.index == 0 and one.group_id in self._asked]):
            return rollouts
        columns = dict(zip([one.group_id for one in asked], self._filled(asked, version), strict=True))
        for one in asked:
            del self._asked[one.group_id]
            self._known.pop(one.group_id, None)
        return [
            replace(one, columns=one.columns | {_NAME: columns[one.group_id]})
            if one.index == 0 and one.group_id in columns and one.num_tokens
            else one
            for one in rollouts
        ]

    def _filled(self, rollouts: Sequence[Rollout], version: int) -> list[np.ndarray]:
        """Returns the column of each rollout. All are scored in one call, which computes common beginnings of prompts
        once."""
        found = [self._so_far(one) for one in rollouts]
        scored = [
            _Scored.of(self._asked[one.group_id], one, column_T, version)
            for one, column_T in zip(rollouts, found, strict=True)
        ]
        for temperature in {one.temperature for one in scored if len(one.places)}:
            same = [one for one in scored if one.temperature == temperature and len(one.places)]
            candidates = CandidateSets(temperature=temperature, cutoffs=[one.cutoffs_T for one in same])
            results = self._engine.score([one.ids_T for one in same], candidates)
            for one, (_, _, own_T) in zip(same, results, strict=True):
                one.column_T[one.places] = own_T[one.prompt_tokens - 1 + one.places]
        return found

    def _so_far(self, one: Rollout) -> np.ndarray:
        """Returns the known part of the column, and NaN elsewhere, float32 [T]."""
        column_T = np.full(one.num_tokens, np.nan, np.float32)
        for part_T in (one.columns.get(_NAME), self._known.get(one.group_id)):
            if part_T is not None:
                column_T[: len(part_T)] = np.where(np.isnan(part_T), column_T[: len(part_T)], part_T)
        return column_T


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    """A rollout whose new tokens need scores."""

    ids_T: np.ndarray
    """Prompt and response."""
    cutoffs_T: np.ndarray
    """Cutoffs of all tokens but the first."""
    temperature: float
    prompt_tokens: int
    places: np.ndarray
    """Indices of new response tokens."""
    column_T: np.ndarray
    """Receives the scores."""

    @classmethod
    def of(cls, request: GenerationRequest, one: Rollout, column_T: np.ndarray, version: int) -> Self:
        prompt_T = request.prompt_token_ids_T
        ids_T = np.concatenate((prompt_T, one.token_ids_T))[:WHOLE_TOKENS]
        is_new_T = (np.isnan(column_T) & (one.policy_versions_T == version))[: max(0, len(ids_T) - len(prompt_T))]
        of_prompt_T = np.full(len(prompt_T), -np.inf, np.float32)
        cutoffs_T = np.concatenate((of_prompt_T, filled(one.columns, "cutoffs", one.num_tokens)))[1 : len(ids_T)]
        return cls(
            ids_T=ids_T, cutoffs_T=cutoffs_T, temperature=request.sampling.temperature, prompt_tokens=len(prompt_T),
            places=np.flatnonzero(is_new_T), column_T=column_T,
        )  # fmt: skip
