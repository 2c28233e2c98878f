"""A policy that says what it is told to, behind the endpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.data.sources.running_total import RunningTotal
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.gateway.endpoint import Endpoint
from llamarl.parts.episodes.gateway.session import Session
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.types import FinishReason, Rollout, SamplingParams

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|endoftext|>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"{row.question}\n{row.solution}" for row in RunningTotal(count=100)]
    folder = train_byte_bpe(texts, tmp_path_factory.mktemp("tokenizer"), 300).folder
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


@pytest.fixture
def without_template(tokenizer: Tokenizer, tmp_path: Path) -> Tokenizer:
    folder = Path(shutil.copytree(tokenizer.folder, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    return Tokenizer(folder)


@dataclass
class Scripted:
    """Says `texts` one after the other; each ends by a stop token, or by a stop string, or by its length."""

    tokenizer: Tokenizer
    texts: list[str | list[int]]
    prompts: list[np.ndarray] = field(default_factory=list)
    asked: list[SamplingParams] = field(default_factory=list)
    error: str = ""

    async def __call__(self, prompt_T: np.ndarray, sampling: SamplingParams, more: Any = None) -> Rollout:
        self.prompts.append(prompt_T)
        self.asked.append(sampling)
        if self.error:
            return Rollout.empty(1, 0, FinishReason.FAILED, self.error)
        text = self.texts.pop(0)
        ids = self.tokenizer.encode(text).tolist() if isinstance(text, str) else list(text)
        reason = FinishReason.STOP
        if not (isinstance(text, str) and text.endswith(sampling.stop_strings or ("\0",))):
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], FinishReason.LENGTH
        columns = {
            "token_ids": np.array(ids, np.int32),
            "behavior_logprobs": -np.arange(len(ids), dtype=np.float32) - 1,
            "policy_versions": np.full(len(ids), len(self.prompts), np.int32),
        }
        whole = Rollout(group_id=len(self.prompts), index=0, columns=columns, finish_reason=reason)
        for count in range(1, len(ids)) if more else ():
            more(replace(whole, columns={name: values_T[:count] for name, values_T in columns.items()}))
        return whole


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Callable[..., tuple[Scripted, Endpoint, Session]]:
    def make(*texts: Any, of: Tokenizer = tokenizer, **more: Any) -> tuple[Scripted, Endpoint, Session]:
        policy = Scripted(of, list(texts))
        sampling = SamplingParams(max_new_tokens=more.pop("limit", 100), stop_token_ids=of.eos_token_ids)
        return (
            policy,
            Endpoint(tokenizer=of, model="m", generate=policy, sampling=sampling, **{"context": 10_000} | more),
            Session(),
        )

    return make


def tool_schema(name: str = "add") -> dict[str, Any]:
    return json.loads(f'{{"type": "function", "function": {{"name": "{name}", "parameters": {{"type": "object"}}}}}}')
