"""`Rescorer`: what the weights that sampled a token say of it when no cached keys and values are read.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from llamarl.generation.backend import GenerationBackend
from llamarl.training.probe import WHOLE_TOKENS
from llamarl.types import CandidateSets, GenerationRequest, Rollout, filled

_NAME = "fresh_logprobs"


class Rescorer:
    """Fills `fresh_logprobs` of a few rollouts: as they leave, and each time before the weights go that sampled."""

    def __init__(self, engine: GenerationBackend) -> None:
        self._engine = engine
        self._asked = dict[int, GenerationRequest]()
        """Requests whose first rollout is here, by group."""
        self._known = dict[int, np.ndarray]()
        """The column of those that decode, as far as it is known."""

    def submitted(self, requests: Iterable[GenerationRequest]) -> None:
        """These have been submitted."""
        asked = (one for one in requests if one.is_rescored and 0 in one.indices)
        self._asked.update((request.group_id, request) for request in asked)

    def update(self, version: int) -> None:
        """The weights of this version, which are in use, are about to go."""
        for one in self._engine.so_far([*self._asked]) if self._asked else ():
            if one.index == 0:
                self._known[one.group_id] = self._filled(one, version)

    def left(self, rollouts: Sequence[Rollout], version: int) -> Sequence[Rollout]:
        """These leave while the weights of this version are in use; the same with what is to be told."""
        return [self._told(one, version) for one in rollouts] if self._asked else rollouts

    def _told(self, one: Rollout, version: int) -> Rollout:
        if one.index or one.group_id not in self._asked:
            return one
        columns = one.columns | ({_NAME: self._filled(one, version)} if one.num_tokens else {})
        del self._asked[one.group_id]
        self._known.pop(one.group_id, None)
        return replace(one, columns=columns)

    def _filled(self, one: Rollout, version: int) -> np.ndarray:
        request, column_T = self._asked[one.group_id], np.full(one.num_tokens, np.nan, np.float32)
        for part_T in (one.columns.get(_NAME), self._known.get(one.group_id)):
            if part_T is not None:
                column_T[: len(part_T)] = np.where(np.isnan(part_T), column_T[: len(part_T)], part_T)
        prompt_T = request.prompt_token_ids_T
        ids_T = np.concatenate((prompt_T, one.token_ids_T))[:WHOLE_TOKENS]
        is_new_T = (np.isnan(column_T) & (one.policy_versions_T == version))[: max(0, len(ids_T) - len(prompt_T))]
        if is_new_T.any():
            of_prompt_T = np.full(len(prompt_T), -np.inf, np.float32)
            cutoffs_T = np.concatenate((of_prompt_T, filled(one.columns, "cutoffs", one.num_tokens)))[1 : len(ids_T)]
            candidates = CandidateSets(temperature=request.sampling.temperature, cutoffs=[cutoffs_T])
            _, _, own_T = self._engine.score([ids_T], candidates)[0]
            places = np.flatnonzero(is_new_T)
            column_T[places] = own_T[len(prompt_T) - 1 + places]
        return column_T
