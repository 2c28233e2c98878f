"""Previews a run before it starts: its first prompt, and whether the reward accepts the answers in the data."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence

from llamarl.config import ConfigError, RunConfig
from llamarl.config.schema import RewardConfig
from llamarl.data.sources import row_name
from llamarl.executors.reward import checked
from llamarl.observability.spans import stage
from llamarl.rewards._base import Reward, written
from llamarl.rewards._build import as_part, build_reward
from llamarl.types import Outcome, Prompt, RewardItem

NUM_SCORED = 64
"""Number of rows, from the first, whose own answers are scored."""
ENOUGH_RIGHT = 0.95
"""Share of right answers below which reward and data do not fit together."""
MOST_CHARS, MOST_TOKENS = 1200, 12


def first_prompt(prompt: Prompt) -> list[str]:
    """Returns a prompt's text as the model sees it, and its first and last tokens. Long texts lose their middle."""
    text, token_ids = prompt.text, prompt.token_ids_T.tolist()
    if len(text) > MOST_CHARS:
        half, left_out = MOST_CHARS // 2, len(text) - MOST_CHARS
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    shown = [*map(str, token_ids)]
    if len(shown) > 2 * MOST_TOKENS:
        shown[MOST_TOKENS:-MOST_TOKENS] = ["..."]
    return [
        f"{row_name(prompt.prompt_id)}, {len(token_ids)} tokens: {' '.join(shown)}",
        *(f"| {line}" for line in text.split("\n")),
    ]


def answers(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yields sentences on how the reward scores the rows' own answers: worked solutions, or the answer in the reward's
    format. Closes the reward."""
    if config.rollout.agent or config.rollout.environment:
        yield "not scored: an episode has turns, which rows do not show"
        return
    reward = build_reward(config.reward)
    try:
        yield from _scored(config, reward, prompts)
    finally:
        reward.close()


def check_reward(config: RunConfig) -> None:
    """Builds and closes the rewards of a config. Raises ConfigError if either fails."""
    reward = build_reward(config.reward)
    try:
        reward.close()
    except Exception as error:  # a user's class may raise anything
        names = ", ".join(repr(part.name) for part in config.reward.parts)
        raise ConfigError(f"reward.parts = {names}: `close` raises {type(error).__name__}: {error}") from error


@stage("trying the reward on a row")
def check_functions(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Tries a user's functions on the first row with an answer. Raises ConfigError if one fails."""
    parts = [ref for ref in map(as_part, config.reward.parts) if ref.name == "function"]
    prompt = next((one for one in prompts if one.answer), None)
    if not parts or prompt is None:
        return
    item = RewardItem(prompt=prompt.text, response=prompt.answer, answer=prompt.answer, metadata=prompt.metadata)
    reward = build_reward(RewardConfig(parts=parts))
    try:
        (result,) = checked(reward.score([item]), 1)
    except RuntimeError as error:  # from its worker pool
        raise ConfigError(f"reward.parts: {error}; its module takes too long to import, or ends the process") from None
    finally:
        reward.close()
    if result.outcome is Outcome.INVALID and not result.is_absent:
        raise ConfigError(f"reward.parts: tried on {row_name(prompt.prompt_id)} with its own answer, {result.reason}")


def _scored(config: RunConfig, reward: Reward, prompts: Sequence[Prompt]) -> Iterator[str]:
    if getattr(reward, "asks_others", False):
        yield "not scored: the reward asks another model, which a preview does not do"
        return
    field, items = config.data.solution, list[RewardItem]()
    for prompt in prompts[:NUM_SCORED]:
        solution = prompt.metadata.get(field)
        response = solution if isinstance(solution, str) and solution else written(reward, prompt.answer)
        if response is not None:
            items.append(
                RewardItem(prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata)
            )
    if not items:
        yield f"not scored: rows have no `{field}`, and the reward does not say how an answer is written"
        return
    try:
        results = checked(reward.score(items), len(items))
    except Exception as error:  # a user's reward may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        raise ConfigError(f"reward.parts: scoring the rows' own answers raised {cause}; fix it") from error
    faults = [(item, result) for item, result in zip(items, results, strict=True) if not result.is_right]
    num_right = len(items) - len(faults)
    yield f"{num_right} of the first {len(items)} rows' own answers are right by the reward"
    if num_right < ENOUGH_RIGHT * len(items):
        item, result = faults[0]
        yield (
            f"warning: reward and data do not match. For example {item.response[-200:]!r} to the answer "
            f"{item.answer[-100:]!r} is {result.outcome.value}: {result.reason or 'no reason given'}"
        )
