"""The reward executor: decodes and scores responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, ClassVar

from llamarl.cluster.api import Executor
from llamarl.config.schema import RewardConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.replies import ScoredResponse
from llamarl.rewards._base import Reward, invalid, sound
from llamarl.rewards._build import build_reward
from llamarl.types import Prompt, RewardItem, RewardResult, Rollout

_NONE: Mapping[str, RewardConfig] = MappingProxyType({})


class RewardExecutor(Executor):
    """Rule-based rewards on the CPU. Graders that can hang run in separate workers."""

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, model_path: str, config: RewardConfig, of_sources: Mapping[str, RewardConfig] = _NONE) -> None:
        """`of_sources` has the settings of sources with their own rewards, by label."""
        self._tokenizer = Tokenizer(model_path)
        with ExitStack() as made:  # if one reward cannot be built, workers of the others end
            self._reward, self._of_sources = build_reward(config), dict[str, Reward]()
            made.callback(self._reward.close)
            for label, own in of_sources.items():
                self._of_sources[label] = build_reward(own)
                made.callback(self._of_sources[label].close)
            self._close = made.pop_all()

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[ScoredResponse]]:
        """Returns one list per group with one result per rollout."""
        responses = [[self._tokenizer.decode(rollout.token_ids_T) for rollout in rollouts] for _, rollouts in groups]
        items = dict[str, list[RewardItem]]()
        for (prompt, _), texts in zip(groups, responses, strict=True):
            items.setdefault(self._key(prompt), []).extend(
                RewardItem(prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata)
                for response in texts
            )
        results = {
            key: iter(checked(self._of_sources.get(key, self._reward).score(own), len(own)))
            for key, own in items.items()
        }
        return [
            [ScoredResponse(response=response, result=next(results[self._key(prompt)])) for response in texts]
            for (prompt, _), texts in zip(groups, responses, strict=True)
        ]

    def _key(self, prompt: Prompt) -> str:
        """Returns the label of a source with its own rewards. Sources without are scored together, by the empty
        label."""
        return prompt.source if prompt.source in self._of_sources else ""

    def close(self) -> None:
        self._close.close()


def checked(results: Sequence[Any], num_items: int) -> list[RewardResult]:
    """Returns a reward's results. If a user's reward returns something else, all responses are invalid."""
    if not isinstance(results, Sequence) or len(results) != num_items:
        number = f"{len(results)} results" if isinstance(results, Sequence) else f"a {type(results).__name__}"
        return [invalid(f"the reward gave {number} for {num_items} responses")] * num_items
    return [*map(sound, results)]
