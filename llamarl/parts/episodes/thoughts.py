"""Splits the thoughts of a thinking model from its answer, as vLLM's reasoning parsers do. No torch.

think     <think>thoughts</think>answer        the prompt may already have opened the tag
gpt_oss   <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from llamarl.data.tokenizer import SENTINEL

ThoughtFormat = Literal["think", "gpt_oss"]
OPEN, CLOSE = "<think>", "</think>"


def thought_format(template: str | None) -> ThoughtFormat | None:
    """Returns the format of thoughts in a chat template. None means that it knows none."""
    if template and "<|channel|>" in template:
        return "gpt_oss"
    return "think" if template and CLOSE in template else None


def split_thoughts(text: str, written_in: ThoughtFormat | None, *, is_open: bool = False) -> tuple[str | None, str]:
    """Splits a text into thoughts and answer. None means that the text has no thoughts.

    Args:
        text: for `gpt_oss` with special tokens.
        is_open: the prompt ends with the opening tag.
    """
    if written_in == "gpt_oss":
        return _by_channel(text)
    has_tag = text.lstrip().startswith(OPEN)
    if written_in is None or not (has_tag or is_open):
        return None, text
    body = text.lstrip().removeprefix(OPEN) if has_tag else text
    thoughts, _, answer = body.partition(CLOSE)  # thoughts that were cut have no closing tag
    return thoughts.strip("\n"), answer.lstrip("\n")


def _by_channel(text: str) -> tuple[str | None, str]:
    thoughts, answer = list[str](), list[str]()
    for message in text.split("<|start|>assistant"):
        header, there, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body)[0] if there else header
        if "analysis" in header and there:
            thoughts.append(body)
        elif "to=functions." not in header:
            answer.append(body)
    return ("\n".join(thoughts) if thoughts else None), "".join(answer)


def with_marked_thoughts(message: Mapping[str, Any], written_in: ThoughtFormat) -> dict[str, Any]:
    """Returns an assistant's message whose only thoughts are `SENTINEL`."""
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    if written_in == "gpt_oss":
        return bare | {"thinking": SENTINEL}
    return bare | {"content": f"{OPEN}\n{SENTINEL}\n{CLOSE}\n\n{message.get('content') or ''}"}
