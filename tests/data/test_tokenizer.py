"""The tokenizer against transformers', which is the oracle."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import ConfigError
from llamarl.data.tokenizer import Tokenizer, check_vocabulary
from llamarl.parts.sft.bpe import train_byte_bpe
from tests.nightly import nightly

MakeTokenizer = Callable[..., Tokenizer]
TEMPLATE = """{%- if not messages %}{{ raise_exception("no messages") }}{% endif %}
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    <|{{ message["role"] }}|>
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
{% endfor %}
{{ {"é": "<&>", "tools": tools} | tojson }} {{ strftime_now("%Y") }}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
MESSAGES = [
    {"role": "system", "content": " Be <brief>. "},
    {"role": "skip", "content": "never"},
    {"role": "user", "content": "What is 17 + 5?\n  Ünï & 'quotes'"},
]


@given(text=st.text())
def test_text_survives_tokens(base_tokenizer: Tokenizer, text: str) -> None:
    token_ids = base_tokenizer.encode(text)
    assert token_ids.dtype == np.int32
    assert base_tokenizer.decode(token_ids, skip_special=False) == text


@given(texts=st.lists(st.text(), max_size=5))
def test_batches_encode_alike(base_tokenizer: Tokenizer, texts: list[str]) -> None:
    for text, token_ids in zip(texts, base_tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(token_ids, base_tokenizer.encode(text))


def test_digits_are_single_tokens_and_merges_are_learnt(base_tokenizer: Tokenizer) -> None:
    assert len(base_tokenizer.encode("1987")) == 4
    assert len(base_tokenizer.encode(" coins")) == 1
    assert base_tokenizer.vocab_size == 331


def test_special_tokens_are_left_out_of_text(base_tokenizer: Tokenizer) -> None:
    (eos,) = base_tokenizer.eos_token_ids
    token_ids = np.append(base_tokenizer.encode("ok"), eos)
    assert base_tokenizer.decode(token_ids) == "ok"
    assert base_tokenizer.decode(token_ids, skip_special=False) == "ok<|endoftext|>"


@pytest.mark.parametrize("eos", [-1, 331, [0, 331], "a"])
def test_an_end_that_is_no_token_is_refused(base_tokenizer: Tokenizer, tmp_path: Path, eos: object) -> None:
    """Also where the model has more columns than the tokenizer has tokens: nothing would decode it."""
    folder = shutil.copytree(base_tokenizer.folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id = "):
        _ = Tokenizer(folder).eos_token_ids


def test_ten_thousand_byte_strings_survive(base_tokenizer: Tokenizer) -> None:
    """With a byte that is no text as its replacement; what is decoded and encoded again has the same text."""
    random = np.random.default_rng(0)
    texts = [random.bytes(length).decode(errors="replace") for length in random.integers(0, 60, 10_000)]
    encoded = base_tokenizer.encode_batch(texts)
    assert all(
        base_tokenizer.decode(token_ids, skip_special=False) == text
        for text, token_ids in zip(texts, encoded, strict=True)
    )


def test_a_special_token_in_a_prompt_is_one_token(base_tokenizer: Tokenizer) -> None:
    """As in transformers, of which templates make use; its text is kept."""
    from transformers import AutoTokenizer

    text = "a<|endoftext|>b"
    token_ids = base_tokenizer.encode(text)
    assert np.count_nonzero(token_ids == base_tokenizer.eos_token_ids[0]) == 1
    assert AutoTokenizer.from_pretrained(str(base_tokenizer.folder))(text)["input_ids"] == token_ids.tolist()
    assert base_tokenizer.decode(token_ids, skip_special=False) == text


def test_half_a_character_is_marked(base_tokenizer: Tokenizer) -> None:
    assert base_tokenizer.decode(base_tokenizer.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_transformers_loads_the_trained_folder(base_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(base_tokenizer.folder))
    text = "Leo has 10 coins: a+3 b+6.\nŽluť 漢字 \u2028 #### 19"
    assert theirs(text)["input_ids"] == base_tokenizer.encode(text).tolist()
    assert theirs.decode(base_tokenizer.encode(text)) == text
    assert (theirs.eos_token_id,) == base_tokenizer.eos_token_ids


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_chat_template_renders_as_in_transformers(make_tokenizer: MakeTokenizer, place: str) -> None:
    from transformers import AutoTokenizer

    eos = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    template = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    in_config = {"config": TEMPLATE, "list": template, "file": "replaced by the file"}[place]
    ours = make_tokenizer(bos_token="<|endoftext|>", eos_token=eos, chat_template=in_config)
    if place == "file":
        (ours.folder / "chat_template.jinja").write_text(TEMPLATE)
        ours = Tokenizer(ours.folder)
    theirs = AutoTokenizer.from_pretrained(str(ours.folder))
    for add in (True, False):
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
        assert ours.apply_chat_template(MESSAGES, add_generation_prompt=add) == text
    assert "<|skip|>" not in text


def test_chat_template_errors_are_the_users(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    with pytest.raises(ConfigError, match="refuses these messages: no messages"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template; set data.template"),
        ("{% if %}", "line 1 of the chat template is malformed"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_bad_chat_template_is_refused(make_tokenizer: MakeTokenizer, template: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_tokenizer(chat_template=template).apply_chat_template(MESSAGES)


def test_stop_tokens_are_those_of_the_generation_config_too(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    (tokenizer.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert tokenizer.eos_token_ids == (0, 5, 7)


def test_stop_tokens_must_exist(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ConfigError, match="names no `eos_token`"):
        make_tokenizer(eos_token=None).eos_token_ids  # noqa: B018


def test_unknown_stop_token_is_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ConfigError, match="eos_token = '<end>' is not in the vocabulary"):
        make_tokenizer(eos_token="<end>").eos_token_ids  # noqa: B018


def test_vocabulary_must_fit_the_model(base_tokenizer: Tokenizer) -> None:
    check_vocabulary(base_tokenizer, 331)
    with pytest.raises(ConfigError, match=r"has 331 tokens and the model's vocab_size is 330"):
        check_vocabulary(base_tokenizer, 330)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read .*tokenizer.json"),
        ("{", "is not valid JSON"),
        ("{}", "has no tokenizer"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_damaged_folder(tmp_path: Path, content: str | bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=says):
        Tokenizer(tmp_path)


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size = 256 cannot hold"):
        train_byte_bpe(["a"], tmp_path, 256)


@nightly("times two threads; by day every other property of the tokenizer")
def test_other_threads_work_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """An event loop among them answers others meanwhile; so it is with decoding."""
    tokenizer = train_byte_bpe(["12 34"], tmp_path, 300)
    text = "".join(map(str, range(60_000)))
    tokens_T = tokenizer.encode(text)
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(np.tile(tokens_T, 10))):
        begun, turns = threading.Event(), list[int]()
        thread = threading.Thread(target=lambda work=work, begun=begun: (begun.wait(), work()))
        thread.start()
        begun.set()
        while thread.is_alive():
            turns.append(0)
            time.sleep(0.001)
        assert len(turns) > 5
