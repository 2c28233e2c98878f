"""The prompt format of a run as a chat template: what transformers renders by it is what the run was trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.config.data import DataConfig
from llamarl.data.chat_format import chat_template_of, of_run, resolved_format, text_chat_template
from llamarl.data.prompts import CHAT, header_warning, load_prompts, render
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer

MakeTokenizer = Callable[..., Tokenizer]
CHATTY = (
    "{%- if tone is defined %}{{ tone }}{% endif %}\n"
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PREFIX = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
QUESTIONS = ("What is 1 + 1?", 'He said "no" \\ and\nleft {{ it }} 😀 {% x %} é', " ")
EXAMPLES = [{"question": "1+1?", "answer": "2"}, {"question": 'quote " and 😀\n', "answer": "{{ x }}"}]


def theirs(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"system": 'Be "brief".\n'},
        {"examples": EXAMPLES},
        {"system": "s", "examples": EXAMPLES, "template_arguments": {"tone": "kind"}},
        {"template": "Q: {question}\n{{A}}: "},
        {"template": "{question}", "examples": EXAMPLES},
        {"template": "{question}{question}\n"},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_others_render_what_the_run_trained_on(
    make_tokenizer: MakeTokenizer, tmp_path: Path, settings: dict[str, Any], is_chat: bool
) -> None:
    if not is_chat and settings.keys() & {"system", "template_arguments"}:
        pytest.skip("for chat templates")
    base = make_tokenizer(eos_token="<|endoftext|>", **({"chat_template": CHATTY} if is_chat else {}))
    run = Tokenizer(base.folder, settings.get("template_arguments"))
    data = resolved_format(DataConfig(train="jsonl", **settings), run)
    text = chat_template_of(data, run)
    assert (text is None) == (is_chat and not settings)
    folder = shutil.copytree(base.folder, tmp_path / "export")
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    exported = Tokenizer(folder)
    for question in QUESTIONS:
        row = ProblemRow(problem_id="1", question=question, answer="")
        (trained,) = run.encode_prompts([render(row, data, run)], is_chat=data.template == CHAT)
        asked = [{"role": "user", "content": question}]
        (ours,) = exported.encode_prompts([exported.apply_chat_template(asked)], is_chat=True)
        assert ours.tolist() == trained.tolist() == theirs(folder, asked)
    # A run from the export with the same settings asks the same again, without a second copy of the examples.
    if is_chat and text is not None and "template" not in settings:
        again = Tokenizer(folder)
        assert again.apply_chat_template([{"role": "user", "content": "x"}]) == render(
            ProblemRow(problem_id="1", question="x", answer=""), data, again
        )
        assert chat_template_of(resolved_format(data, again), again) is None


def test_callers_win_over_the_runs_system_message(make_tokenizer: MakeTokenizer) -> None:
    base = make_tokenizer(eos_token="<|endoftext|>", chat_template=CHATTY)
    data = resolved_format(DataConfig(train="jsonl", system="of the run", examples=EXAMPLES[:1]), base)
    text = chat_template_of(data, base)
    assert text is not None
    said = base.with_template(text).apply_chat_template([
        {"role": "system", "content": "mine"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"},
    ])  # fmt: skip
    assert said.startswith("<system>mine") and "of the run" not in said and said.count("1+1?") == 1


def test_a_conversation_in_a_text_format_is_as_examples_are(make_tokenizer: MakeTokenizer) -> None:
    base = make_tokenizer(eos_token="<|endoftext|>")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    asked = base.with_template(text_chat_template("{question}\n", "x\ny\n\n"))
    assert asked.apply_chat_template(messages) == "x\ny\n\na\nb\n\nc\n"
    assert asked.apply_chat_template([{"role": "system", "content": "s"}, *messages]) == "s\n\nx\ny\n\na\nb\n\nc\n"


def test_fields_that_no_chat_has_are_named(make_tokenizer: MakeTokenizer) -> None:
    base = make_tokenizer(eos_token="<|endoftext|>")
    data = DataConfig(train="jsonl", template="{question} {hint}")
    with pytest.raises(ConfigError, match=r"data\.template = .*'hint'"):
        chat_template_of(data, base)


def test_sources_that_agree_decide_the_format() -> None:
    entries = [{"name": "jsonl", "label": str(number), "template": "{question}!"} for number in range(2)]
    alike = DataConfig.model_validate({"train": entries, "template": "{question}?"})
    assert of_run(alike, for_agent=False)["template"] == "{question}!"
    entries[1]["template"] = "{question}."
    other = DataConfig.model_validate({"train": entries, "template": "{question}?"})
    assert of_run(other, for_agent=False)["template"] == "{question}?"
    assert of_run(other, for_agent=True)["template"] == "auto"


@pytest.mark.parametrize(
    ("template", "warns"),
    [
        (CHATTY, False),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>", False),
        (PREFIX, False),
        (text_chat_template("{question}\n"), False),
    ],
    ids=["opens", "ignores", "always opens", "prefix", "text"],
)  # fmt: skip
def test_a_template_that_does_not_open_the_answer_is_told(
    make_tokenizer: MakeTokenizer, template: str, warns: bool
) -> None:
    tokenizer = make_tokenizer(eos_token="<|endoftext|>", chat_template=template)
    said = header_warning(DataConfig(train="jsonl", template=CHAT), tokenizer)
    assert ("add_generation_prompt" in said and "<assistant>" in said) == warns == bool(said)


def test_the_start_warns_of_it(make_tokenizer: MakeTokenizer) -> None:
    config = {"train": {"name": "running_total", "count": 3}}
    for template, warns in (
        (CHATTY, False),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", True),
    ):
        tokenizer = make_tokenizer(eos_token="<|endoftext|>", chat_template=template)
        found = load_prompts(DataConfig.model_validate(config), tokenizer, 1 << 10)
        assert any("add_generation_prompt" in said for said in found.warnings) == warns
        shutil.rmtree(tokenizer.folder)
