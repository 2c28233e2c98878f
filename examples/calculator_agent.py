"""The calculator of `configs/calculator.toml` as an agent: a program that calls the policy over OpenAI's protocol.

llamarl train configs/calculator_agent.toml
"""

from __future__ import annotations

import re
from functools import cache

from openai import AsyncOpenAI

from llamarl.parts.episodes.environments import Task

ASKED = re.compile(r"(?:(\d{1,18})\+(\d{1,18}))?\?(=?)$")
MAX_TURNS = 16


@cache
def client(base_url: str) -> AsyncOpenAI:
    """Returns the client that all episodes of a worker share."""
    return AsyncOpenAI(base_url=base_url, api_key="of the episode")


async def run(task: Task, base_url: str, api_key: str) -> None:
    """Runs an episode. Returns None, so the run's `[reward]` scores it."""
    policy = client(base_url).with_options(api_key=api_key).completions
    text = task.prompt
    for _ in range(MAX_TURNS):
        answer = await policy.create(
            model="policy", prompt=text, stop=["?"], extra_body={"include_stop_str_in_output": True}
        )
        text += answer.choices[0].text
        asked = ASKED.search(text)
        if answer.choices[0].finish_reason == "length" or asked is None:
            return
        result = int(asked[1]) + int(asked[2]) if asked[1] else "error"
        text += f"{result}" if asked[3] else f"={result}"
