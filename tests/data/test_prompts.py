from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.config.schema import DataConfig
from llamarl.data.prompts import load_prompts
from llamarl.data.tokenizer import Tokenizer
from tests.data.test_chat import ADD, TEMPLATES
from tests.nightly import nightly

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Two rows, the second with a longer question; options of `data` may be changed."""

    def make(**options: Any) -> DataConfig:
        path = tmp_path / "rows.jsonl"
        rows = [
            {"id": "short", "question": "1+1?", "answer": "2", "level": 3},
            {"id": "long", "question": "1+1+1+1+1+1+1?", "answer": "7", "level": 4},
        ]
        path.write_text("\n".join(map(json.dumps, rows)))
        return DataConfig.model_validate({"train": {"name": "jsonl", "path": str(path)}} | options)

    return make


def test_prompts_are_rendered_and_tokenized(base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig]) -> None:
    loaded = load_prompts(make_config(template="{{L{level}}} {question}\n"), base_tokenizer, 512)
    assert not loaded.warnings
    first, second = loaded.prompts
    assert (first.prompt_id, first.text, first.answer) == ("short", "{L3} 1+1?\n", "2")
    assert first.metadata == {"level": 3}
    np.testing.assert_array_equal(second.token_ids_T, base_tokenizer.encode(second.text))


def test_overlong_prompts_are_skipped_and_counted(
    base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig]
) -> None:
    loaded = load_prompts(make_config(max_prompt_tokens=8), base_tokenizer, 512)
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["short"]
    assert loaded.warnings == ("data.train: 1 prompts are too long and were skipped (data.max_prompt_tokens = 8)",)
    (said,) = load_prompts(make_config(), base_tokenizer, 9).warnings
    assert said.startswith("data.train: 1 prompts are too long")


def test_overlong_prompts_are_refused_on_wish(
    base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig]
) -> None:
    config = make_config(max_prompt_tokens=8, overlong_prompts="refuse")
    with pytest.raises(ConfigError, match=r"row 'long' has \d+ tokens and at most 8 fit; raise data.max_prompt_tokens"):
        load_prompts(config, base_tokenizer, 512)


def test_prompt_leaves_room_for_a_token(base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig]) -> None:
    length = len(base_tokenizer.encode("1+1?\n"))
    assert len(load_prompts(make_config(), base_tokenizer, length + 1).prompts) == 1
    with pytest.raises(ConfigError, match="each of the 2 prompts has more than"):
        load_prompts(make_config(), base_tokenizer, length)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{question} {levle}", "no field 'levle'.*answer, id, level, prompt, question"),
        ("{question.__class__}", "no field 'question.__class__'"),
        ("{}", "no field ''"),
        ("{question!r}", "no field 'question'"),
        ("{question", "malformed"),
        ("no place", "has no {field}"),
    ],
)
def test_bad_template_is_refused(
    base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig], template: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_prompts(make_config(template=template), base_tokenizer, 512)


def test_chat_template_gets_one_user_message(
    make_tokenizer: Callable[..., Tokenizer], make_config: Callable[..., DataConfig]
) -> None:
    tokenizer = make_tokenizer(
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    first = load_prompts(make_config(template="chat"), tokenizer, 512).prompts[0]
    assert first.text == "user: 1+1?<|endoftext|>"
    assert first.token_ids_T[-1] == tokenizer.eos_token_ids[0]


def test_tools_are_told_of_by_a_chat_template_that_writes_them(
    make_tokenizer: Callable[..., Tokenizer], make_config: Callable[..., DataConfig], base_tokenizer: Tokenizer
) -> None:
    chat = make_tokenizer(chat_template=TEMPLATES["qwen"])
    first = load_prompts(make_config(template="chat"), chat, 4096, tools=[ADD]).prompts[0]
    assert first.text == chat.apply_chat_template([{"role": "user", "content": "1+1?"}], tools=[ADD])
    assert '"name": "add"' in first.text
    with pytest.raises(ConfigError, match="cannot describe tools to the policy; use 'chat'"):
        load_prompts(make_config(template="{question}"), chat, 512, tools=[ADD])
    (chat.folder / "chat_template.jinja").write_text(TEMPLATES["plain"])
    with pytest.raises(ConfigError, match="writes tools neither as Qwen nor as Llama"):
        load_prompts(make_config(template="chat"), Tokenizer(chat.folder), 512, tools=[ADD])


def test_held_out_source_is_its_own(base_tokenizer: Tokenizer, make_config: Callable[..., DataConfig]) -> None:
    config = make_config(eval={"name": "running_total", "count": 3})
    assert len(load_prompts(config, base_tokenizer, 512, "eval").prompts) == 3


def test_gsm8k_loads(base_tokenizer: Tokenizer) -> None:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not here")
    config = DataConfig.model_validate({"train": {"name": "jsonl", "path": str(GSM8K)}, "max_prompt_tokens": 2048})
    loaded = load_prompts(config, base_tokenizer, 4096)
    assert len(loaded.prompts) == 1319 and not loaded.warnings
    for prompt in loaded.prompts[:200]:
        assert base_tokenizer.decode(prompt.token_ids_T) == prompt.text


@nightly("a process; architecture/test_imports.py reads imports by day")
def test_data_imports_no_torch() -> None:
    code = "import sys, llamarl.data.prompts, llamarl.data.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
