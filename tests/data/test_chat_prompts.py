"""Prompts that chat templates write: which template, what stands before the question, days, and where prompts begin."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from llamarl.config import ConfigError, RunConfig, load_config, resolved
from llamarl.config.schema import DataConfig
from llamarl.data.prompts import load_prompts, open_tokenizer, resolved_data
from llamarl.data.tokenizer import TOKENIZER_FILE, Tokenizer
from llamarl.run.prepare import resolve

MakeTokenizer = Callable[..., Tokenizer]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
DROPS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
THINKS = PLAIN + "{% if not enable_thinking %}<no thought>{% endif %}"
DATED = "{{ strftime_now('%d %b %Y') }}" + PLAIN


def config_of(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> DataConfig:
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig.model_validate({"train": {"name": "jsonl", "path": str(path)}} | options)


ROW = {"id": "r", "question": "1+1?", "answer": "2"}
TALK = [
    {"role": "system", "content": "Own."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def texts(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    tokenizer = open_tokenizer(str(tokenizer.folder), config)
    return [prompt.text for prompt in load_prompts(config, tokenizer, 4096).prompts]


@pytest.fixture
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    real, today = time.strftime, datetime.date(2026, 3, 1).timetuple()
    monkeypatch.setattr(time, "strftime", lambda form, *given: real(form, *(given or (today,))))


def test_auto_is_the_chat_template_where_there_is_one(
    base_tokenizer: Tokenizer, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    config, chat = config_of(tmp_path, ROW), make_tokenizer(chat_template=PLAIN)
    assert config.template == "auto"
    assert texts(config, base_tokenizer) == ["1+1?\n"]
    assert texts(config, chat) == ["<user>1+1?<assistant>"]
    assert texts(config_of(tmp_path, ROW, template="{question}\n"), chat) == ["1+1?\n"]


def test_the_first_prompt_is_shown_as_the_model_sees_it(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    chat = make_tokenizer(chat_template="{{ eos_token }}" + PLAIN)
    config = config_of(tmp_path, ROW | {"question": "x" * 500})
    said = load_prompts(config, chat, 4096).first_prompt
    assert said.startswith("data.template = 'auto' is 'chat'; the first prompt: '<|endoftext|><user>xxx")
    assert said.endswith("xxx<assistant>'") and " ... " in said and len(said) < 400
    config = config_of(tmp_path, ROW, template="{question}\n")
    assert (
        load_prompts(config, chat, 4096).first_prompt == "data.template = '{question}\\n'; the first prompt: '1+1?\\n'"
    )


def test_system_examples_and_a_conversation_in_their_order(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    chat, examples = make_tokenizer(chat_template=PLAIN), [{"question": "0+0?", "answer": "0"}]
    given = {"system": "Be brief.", "examples": examples}
    shown = "<user>0+0?<assistant>0"
    assert texts(config_of(tmp_path, ROW, **given), chat) == [f"<system>Be brief.{shown}<user>1+1?<assistant>"]
    talk = {"messages": TALK}
    expected = f"<system>Own.{shown}<user>2+2?<assistant>4<user>3+3?<assistant>"
    assert texts(config_of(tmp_path, talk, examples=examples), chat) == [expected]
    with pytest.raises(ConfigError, match=r"row 'rows-1' has its own message of role system; leave data\.system out"):
        texts(config_of(tmp_path, talk, **given), chat)


def test_examples_of_a_text_template(base_tokenizer: Tokenizer, tmp_path: Path) -> None:
    examples = [{"question": "0+0?", "answer": "0", "level": "1"}, {"question": "0+1?", "answer": "1", "level": "2"}]
    config = config_of(tmp_path, ROW | {"level": 3}, template="Q{level}: {question} A: ", examples=examples)
    assert texts(config, base_tokenizer) == ["Q1: 0+0? A: 0\n\nQ2: 0+1? A: 1\n\nQ3: 1+1? A: "]
    config = config_of(
        tmp_path, ROW | {"level": 3}, template="{level}{question}", examples=[{"question": "", "answer": ""}]
    )
    with pytest.raises(ConfigError, match=r"row 'of data\.examples' has no field 'level'"):
        texts(config, base_tokenizer)
    config = config_of(tmp_path, ROW, examples=[{"question": "a", "answr": "b"}])
    with pytest.raises(ConfigError, match=r"data\.examples: number 1 needs `question` and `answer`; it has"):
        texts(config, base_tokenizer)


def test_an_agent_is_told_the_question_alone(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    """It writes chats itself, for which date and arguments are."""
    chat, config = make_tokenizer(chat_template=DATED + THINKS), config_of(tmp_path, ROW, date="2024-07-06")
    given = config.model_copy(update={"template_arguments": {"enable_thinking": False}})
    loaded = load_prompts(given, chat, 4096, for_agent=True)
    assert loaded.prompts[0].text == "1+1?\n"
    assert loaded.first_prompt == "data.template = 'auto' is '{question}\\n'; the first prompt: '1+1?\\n'"
    open_day = config.model_copy(update={"date": ""})
    kept = resolved_data(open_day, chat, config, for_agent=True)
    assert (kept.template, kept.date) == ("{question}\n", "2024-07-06")
    with pytest.raises(ConfigError, match=r"data\.system = 'x' is for chat templates"):
        load_prompts(config.model_copy(update={"system": "x"}), chat, 4096, for_agent=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"system": "Be brief."}, "data.system = 'Be brief.' is for chat templates, and data.template = "),
        ({"template_arguments": {"a": 1}}, "data.template_arguments = {'a': 1} is for chat templates"),
        ({"date": "2026-07-26"}, "data.date = '2026-07-26' is for chat templates"),
    ],
)
def test_what_is_for_chat_templates_is_refused_elsewhere(
    base_tokenizer: Tokenizer, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        texts(config_of(tmp_path, ROW, **options), base_tokenizer)


def test_a_conversation_needs_a_chat_template_unless_it_is_one_question(
    base_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert texts(config_of(tmp_path, {"messages": TALK[1:3]}), base_tokenizer) == ["2+2?\n"]
    with pytest.raises(ConfigError, match=r"row 'rows-1' is a conversation of 4 messages, .*use 'chat' with a model"):
        texts(config_of(tmp_path, {"messages": TALK}), base_tokenizer)


@pytest.mark.parametrize(
    ("template", "says"),
    [(NO_SYSTEM, "System role not supported; it accepts them without role 'system'"),
     (DROPS_SYSTEM, "data.system is not in the prompts: the chat template drops it")],
)  # fmt: skip
def test_a_template_without_the_role_system(
    make_tokenizer: MakeTokenizer, tmp_path: Path, template: str, says: str
) -> None:
    chat = make_tokenizer(chat_template=template)
    with pytest.raises(ConfigError, match=says):
        texts(config_of(tmp_path, ROW, system="Be brief."), chat)
    assert len(texts(config_of(tmp_path, ROW), chat)) == 1


def test_arguments_reach_the_template_if_it_knows_them(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    chat = make_tokenizer(chat_template=THINKS)
    thinks, no = ({"template_arguments": {"enable_thinking": value}} for value in (True, False))
    assert texts(config_of(tmp_path, ROW, **thinks), chat) == ["<user>1+1?<assistant>"]
    assert texts(config_of(tmp_path, ROW, **no), chat) == ["<user>1+1?<assistant><no thought>"]
    for name, says in (
        ("enable_think", "the chat template of .* does not use 'enable_think'; leave it out"),
        ("add_generation_prompt", "every chat template gets 'add_generation_prompt'"),
        ("bos_token", "every chat template gets 'bos_token'"),
    ):
        with pytest.raises(ConfigError, match=f"data.template_arguments: {says}"):
            texts(config_of(tmp_path, ROW, template_arguments={name: False}), chat)


@pytest.mark.usefixtures("_today")
def test_a_date_is_what_the_settings_say(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    chat = make_tokenizer(chat_template=DATED)
    assert texts(config_of(tmp_path, ROW, date="2024-07-06"), chat) == ["06 Jul 2024<user>1+1?<assistant>"]
    assert texts(config_of(tmp_path, ROW), chat) == ["01 Mar 2026<user>1+1?<assistant>"]
    as_toml = config_of(tmp_path, ROW, date=datetime.date(2024, 7, 6))
    assert as_toml == config_of(tmp_path, ROW, date="2024-07-06")
    for day in ("2024-7-6", "20240706", "2024-02-30", "yesterday"):
        with pytest.raises(ValueError, match="date"):
            config_of(tmp_path, ROW, date=day)
    (chat.folder / "chat_template.jinja").write_text(PLAIN)
    with pytest.raises(ConfigError, match=r"data\.date = '2024-07-06': the chat template of .* does not use a date"):
        texts(config_of(tmp_path, ROW, date="2024-07-06"), chat)


@pytest.mark.usefixtures("_today")
def test_a_run_keeps_the_template_and_the_day_that_it_began_with(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    dated = make_tokenizer(chat_template=DATED)
    config = config_of(tmp_path, ROW)
    began = resolved_data(config, dated)
    assert (began.template, began.date) == ("chat", "2026-03-01")
    before = config.model_copy(update={"template": "chat", "date": "2024-07-06"})
    assert resolved_data(config, dated, before) == before
    assert resolved_data(before.model_copy(update={"date": "2025-01-01"}), dated, before).date == "2025-01-01"
    old = config.model_copy(update={"template": "{question}\n"})
    assert resolved_data(config, dated, old) == old
    assert resolved_data(old, dated, before) == old
    (dated.folder / "chat_template.jinja").write_text(PLAIN)
    undated = resolved_data(config, Tokenizer(dated.folder))
    assert (undated.template, undated.date) == ("chat", "")


@pytest.mark.usefixtures("_today")
def test_sources_of_both_kinds_of_template(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    """The day is kept for those that are chats; what is for chats is refused of the others, unless they say no."""
    dated, ref = make_tokenizer(chat_template=DATED), config_of(tmp_path, ROW).train.model_dump()
    sources = [ref | {"label": "a", "template": "auto"}, ref | {"label": "b", "template": "Q: {question}"}]
    config = config_of(tmp_path, ROW, train=sources, template="{question}")
    began = resolved_data(config, dated)
    assert (began.template, began.date) == ("{question}", "2026-03-01")
    assert [source.template for source in began.sources] == ["chat", "Q: {question}"]
    later = resolved_data(config, dated, began.model_copy(update={"date": "2024-07-06"}))
    assert later.date == "2024-07-06"
    found = [texts(later.of(source), dated) for source in later.sources]
    assert found == [["06 Jul 2024<user>1+1?<assistant>"], ["Q: 1+1?"]]
    spoken = later.model_copy(update={"system": "Be brief."})
    assert texts(spoken.of(spoken.sources[0]), dated) == ["06 Jul 2024<system>Be brief.<user>1+1?<assistant>"]
    with pytest.raises(ConfigError, match=r"data\.system = 'Be brief\.' is for chat templates"):
        texts(spoken.of(spoken.sources[1]), dated)
    assert texts(spoken.of(spoken.sources[1].model_copy(update={"system": ""})), dated) == ["Q: 1+1?"]


@pytest.mark.usefixtures("_today")
def test_a_run_that_goes_on_asks_its_own_record(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    data = config_of(tmp_path, ROW).model_dump(exclude_none=True)
    chat = make_tokenizer(chat_template=DATED)
    run = {"name": "old", "output": str(tmp_path), "model": {"path": str(chat.folder)}, "data": data}
    config: RunConfig = resolved(run)
    assert resolve(config, config, resume=True)[1].data.template == "chat"  # nothing is on record
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text(
        "[model]\npath = 'x'\n[data]\ntrain = 'jsonl'\ntemplate = 'chat'\ndate = '2024-07-06'\n"
    )
    assert load_config(tmp_path / "old" / "config.toml").data.date == "2024-07-06"
    assert resolve(config, config, resume=True)[1].data.date == "2024-07-06"
    assert resolve(config, config, resume=False)[0].data.date == "2026-03-01"


def begins_with_bos(folder: Path, chat_template: str) -> Tokenizer:
    """The small tokenizer, which then puts `<|endoftext|>` before each text."""
    library = json.loads((folder / TOKENIZER_FILE).read_text())
    bos = "<|endoftext|>"
    processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    library["post_processor"] = json.loads(processor.__getstate__())
    (folder / TOKENIZER_FILE).write_text(json.dumps(library))
    (folder / "chat_template.jinja").write_text(chat_template)
    return Tokenizer(folder)


@pytest.mark.parametrize("written", [0, 1])
def test_there_is_one_bos_whatever_the_template_writes(
    make_tokenizer: MakeTokenizer, tmp_path: Path, written: int
) -> None:
    chat = begins_with_bos(make_tokenizer().folder, "{{ eos_token }}" * written + PLAIN)
    (prompt,) = load_prompts(config_of(tmp_path, ROW), chat, 4096).prompts
    assert chat.decode(prompt.token_ids_T, skip_special=False) == "<|endoftext|><user>1+1?<assistant>"
    template = "<|endoftext|>" * written + "{question}"
    (prompt,) = load_prompts(config_of(tmp_path, ROW, template=template), chat, 4096).prompts
    assert chat.decode(prompt.token_ids_T, skip_special=False) == "<|endoftext|>1+1?"
