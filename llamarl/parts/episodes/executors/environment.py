"""The environment executor: replies to turns of the policy, in worker processes that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np

from llamarl.cluster.api import Executor
from llamarl.config import Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.replies import Replied
from llamarl.parts.episodes.environments._base import Messages
from llamarl.parts.episodes.environments._crew import Crew
from llamarl.parts.episodes.environments._waiting_crew import WaitingCrew
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.ports import OpenTurn
from llamarl.parts.episodes.tool_calls import tool_calls
from llamarl.rewards._base import invalid, sound
from llamarl.sandbox.pool import Failure
from llamarl.types import Outcome, RewardResult, ToolCall

_NONE: Mapping[str, tuple[Ref, Mapping[str, Any]]] = MappingProxyType({})


class EnvironmentExecutor(Executor):
    """Receives episodes by `submit` and returns their replies by `collect`, as soon as they are ready. A slow reply
    delays no other as long as there are free workers."""

    def __init__(
        self,
        model_path: str,
        config: Ref | None,
        arguments: Mapping[str, Any] | None = None,
        today: str = "",
        of_sources: Mapping[str, tuple[Ref, Mapping[str, Any]]] = _NONE,
    ) -> None:
        """
        Args:
            config: the run's environment. None means that only sources have environments.
            arguments: arguments of the chat template, such as `today`.
            of_sources: environments of sources by label, each with the arguments of its chat template.
        """
        self._changed = threading.Condition()
        self._replies = list[Replied]()
        self._asked: Future[list[Replied]] | None = None
        wanted = ({"": (config, arguments)} if config else {}) | dict(of_sources)
        self._open = {
            label: OpenEnvironment(Tokenizer(model_path, given, today), ref, self._replied)
            for label, (ref, given) in wanted.items()
        }

    def submit(self, episodes: Sequence[OpenTurn]) -> None:
        """Queues episodes whose last turn needs a reply."""
        of_open = dict[str, list[OpenTurn]]()
        for one in episodes:
            of_open.setdefault(one.prompt.source if one.prompt.source in self._open else "", []).append(one)
        for label, own in of_open.items():
            self._open[label].ask(own)

    def leave(self, episodes: Sequence[tuple[int, int]]) -> None:
        """Closes the state of canceled episodes, given by group and index."""
        for one in self._open.values():  # which know their own by name
            one.crew.leave([_name(*episode) for episode in episodes])

    def collect(self) -> Future[list[Replied]]:
        """Returns the next replies as soon as there are any."""
        reply = Future[list[Replied]]()
        with self._changed:
            self._asked = reply
        self._hand_over()
        return reply

    def close(self) -> None:
        for one in self._open.values():
            one.crew.close()

    def _replied(self, replies: Sequence[Replied]) -> None:
        with self._changed:
            self._replies += replies
        self._hand_over()

    def _hand_over(self) -> None:
        with self._changed:
            if self._asked is None or not self._replies:
                return
            asked, self._asked = self._asked, None
            if not asked.set_running_or_notify_cancel():  # the caller gave up; the replies stay queued
                return
            replies, self._replies = self._replies, []
        asked.set_result(replies)


class OpenEnvironment:
    """One environment with its workers, and the tokenizer for its replies."""

    def __init__(self, tokenizer: Tokenizer, config: Ref, replied: Callable[[Sequence[Replied]], None]) -> None:
        """`replied` is called with replies, in any thread."""
        self._tokenizer, self._told = tokenizer, replied
        self._environment = build_environment(config)
        self._ref, self._tools = config.model_dump_json(), self._environment.tools()
        crew = WaitingCrew if self._environment.waits else Crew
        self.crew: Crew[OpenTurn] | WaitingCrew[OpenTurn] = crew(self._environment, self._item, self._replied)

    def ask(self, episodes: Sequence[OpenTurn]) -> None:
        """Queues episodes."""
        self.crew.ask([(_name(one.group_id, one.index), one) for one in episodes])

    def _replied(self, said: Sequence[tuple[OpenTurn, dict[str, Any] | Failure]], each_s: float) -> list[bool]:
        replies = [self._reply(episode, one, each_s) for episode, one in said]
        self._told(replies)
        return [one.observation_T is not None for one in replies]

    def _item(self, episode: OpenTurn) -> dict[str, Any]:
        prompt, turns = episode.prompt, list[list[Any]]()
        for is_sampled, token_ids_T in episode.turns:
            text = self._tokenizer.decode(token_ids_T)
            if is_sampled:
                turns.append([text, None, [asdict(call) for call in self._calls(token_ids_T)]])
            else:
                turns[-1][1] = text
        task = {"prompt": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        name = _name(episode.group_id, episode.index)
        over = {"is_over": True} if episode.is_over else {}
        return {"environment": self._ref, "episode": name, "task": task, "turns": turns, **over}

    def _calls(self, token_ids_T: np.ndarray) -> list[ToolCall]:
        """Returns the tool calls in one turn of the policy."""
        if not (written_in := self._tokenizer.tool_format):
            return []
        end = len(token_ids_T) - (int(token_ids_T[-1]) in self._tokenizer.eos_token_ids)
        return tool_calls(self._tokenizer.decode(token_ids_T[:end], skip_special=False), written_in, self._tools)[1]

    def _reply(self, episode: OpenTurn, said: dict[str, Any] | Failure, seconds: float) -> Replied:
        """Returns a worker's reply, with its text or messages as tokens, or with the end of the episode."""
        result: RewardResult | None = None
        observation_T: np.ndarray | None = None
        if isinstance(said, Failure):
            result = invalid(said.reason.replace("grader", "environment"))
        elif "reward" in said:
            fields = said["reward"] | {"outcome": Outcome(said["reward"]["outcome"])}
            result = sound(RewardResult(**fields))
        elif "text" in said:
            observation_T = self._tokenizer.encode(said["text"])
        elif "messages" in said:
            observation_T = self._rendered(said["messages"], ends_with_stop=self._ends_with_stop(episode))
        if observation_T is not None and not len(observation_T):
            result = invalid("an empty observation; reply None to end an episode")
        elif observation_T is not None and len(observation_T) > self._environment.observation_tokens:
            tokens, limit = len(observation_T), self._environment.observation_tokens
            result = invalid(f"an observation of {tokens} tokens (rollout.environment.observation_tokens = {limit})")
        elif episode.spent_s + seconds > self._environment.episode_s:
            result = invalid(f"replies took over {self._environment.episode_s:g} s (rollout.environment.episode_s)")
        if result is not None:
            observation_T = None
        num_tokens = sum(len(part) for _, part in episode.turns)
        num_calls = 0 if episode.is_over else len(self._calls(episode.turns[-1][1]))
        messages = [] if isinstance(said, Failure) else said.get("messages", [])
        num_errors = sum(bool(one.get("is_error")) for one in messages)
        calls = num_calls, num_errors
        earned = 0.0 if isinstance(said, Failure) else said.get("turn_reward", 0.0)
        return Replied(episode.group_id, episode.index, num_tokens, observation_T, result, seconds, calls, earned)

    def _ends_with_stop(self, episode: OpenTurn) -> bool:
        return int(episode.turns[-1][1][-1]) in self._tokenizer.eos_token_ids

    def _rendered(self, messages: Messages, *, ends_with_stop: bool) -> np.ndarray:
        """Returns the tokens between two turns of the policy, as the chat template writes them: the tokens after a
        sentinel in place of the turn. Sampled tokens are never encoded again."""
        return self._tokenizer.encode(
            self._tokenizer.after_turn(messages, without_stop=ends_with_stop, tools=self._tools)
        )


def _name(group_id: int, index: int) -> str:
    return f"{group_id}-{index}"
