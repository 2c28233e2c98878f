"""What is learnt of a conversation: the assistant's turns and one end each, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from llamarl.config import ConfigError
from llamarl.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.parts.sft.documents import to_conversation
from llamarl.types import SampleGroup

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<|begin|>{% for m in messages %}<|im_start|>{{ m.role }}<|header|>

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|header|>

{% endif %}"""
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ "\n" }}
{%- else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role != "assistant" %}{{ m.content }}
{%- elif loop.last %}<think>
{{ m.content.split("</think>")[0].replace("<think>", "").strip() if "</think>" in m.content }}
</think>

{{ m.content.split("</think>")[-1].strip() }}
{%- else %}{{ m.content.split("</think>")[-1].strip() }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|header|>", "<|begin|>")
Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A small tokenizer with the special tokens of chats, and this template."""

    def made(template: str, arguments: dict[str, Any] | None = None, stop: str = "<|im_end|>") -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        train_byte_bpe(["user assistant system 1 + 1 = 2\n\nis it?\n <think>"] * 9, folder, 330)
        library = Library.from_file(str(folder / TOKENIZER_FILE))
        library.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
        library.save(str(folder / TOKENIZER_FILE))
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | {"eos_token": stop}))
        (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder, arguments)

    return made


def talk(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("system", "user", "assistant", "user", "assistant")
    return [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(contents)]


def learnt(document: SampleGroup, tokenizer: Tokenizer) -> list[str]:
    """Text of each run of learnt tokens."""
    (sample,) = document.samples
    edges = np.flatnonzero(np.diff(np.r_[0, sample.loss_mask_T.astype(int), 0]))
    spans = edges.reshape(-1, 2).tolist()
    return [tokenizer.decode(sample.token_ids_T[first:last], skip_special=False) for first, last in spans]


def whole(document: SampleGroup, tokenizer: Tokenizer) -> str:
    ids_T = np.append(document.prompt_token_ids_T, document.samples[0].token_ids_T)
    return tokenizer.decode(ids_T, skip_special=False)


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=12)
TALKS = st.lists(WORDS, min_size=2, max_size=7).map(lambda said: said[: len(said) // 2 * 2])


@pytest.fixture(scope="module")
def marked(make: Make) -> Tokenizer:
    return make(MARKED)


@given(said=TALKS)
def test_the_mask_is_that_of_generation_marks(marked: Tokenizer, said: list[str]) -> None:
    """In transformers, whose text as a whole is tokenized: the mask's text is the same always, and tokens too, where
    none of theirs lies across the beginning of a turn."""
    theirs = _transformers(marked)
    messages = talk(*(text.strip() + "." for text in said))
    document = to_conversation(messages, 0, marked, "r")
    found = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids_T, mask_T = np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)
    num_prompt, (sample,) = len(document.prompt_token_ids_T), document.samples
    ours_T = np.append(document.prompt_token_ids_T, sample.token_ids_T)
    ours_mask_T = np.append(np.zeros(num_prompt, bool), sample.loss_mask_T)
    assert marked.decode(ours_T[ours_mask_T], skip_special=False) == marked.decode(ids_T[mask_T], skip_special=False)
    trailing = len(ids_T) - len(ours_T)  # the line break after the last end, which nobody asks for
    assert marked.decode(ids_T[len(ids_T) - trailing :]) == "\n"
    np.testing.assert_array_equal(ours_T, ids_T[: len(ours_T)])
    np.testing.assert_array_equal(ours_mask_T, mask_T[: len(ours_T)])


_LOADED: dict[str, Any] = {}


def _transformers(tokenizer: Tokenizer) -> Any:
    from transformers import AutoTokenizer

    key = str(tokenizer.folder)
    if key not in _LOADED:
        _LOADED[key] = AutoTokenizer.from_pretrained(key)
    return _LOADED[key]


@pytest.fixture(scope="module", params=["chatml", "llama"])
def family(request: pytest.FixtureRequest, make: Make) -> tuple[str, Tokenizer]:
    return request.param, make({"chatml": CHATML, "llama": LLAMA}[request.param])


@given(said=TALKS, system=st.none() | WORDS)
def test_the_mask_of_chatml_and_llama_is_what_lies_between_their_headers_and_ends(
    family: tuple[str, Tokenizer], said: list[str], system: str | None
) -> None:
    """Built anew here, by the special tokens in the text of transformers."""
    name, tokenizer = family
    messages = talk(*said)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    assume(name == "chatml" or all(text.strip() for text in said[1::2]))  # a turn of nothing is refused
    document = to_conversation(messages, 0, tokenizer, "r")
    text = _transformers(tokenizer).apply_chat_template(messages, tokenize=False)
    header = "<|im_start|>assistant" + {"chatml": "\n", "llama": "<|header|>\n\n"}[name]
    expected = re.findall(re.escape(header) + r"(.*?<\|im_end\|>)", text, re.DOTALL)
    assert learnt(document, tokenizer) == expected
    assert len(expected) == len(said) // 2
    assert whole(document, tokenizer) == (text.removesuffix("\n") if name == "chatml" else text)
    end = tokenizer.eos_token_id
    (sample,) = document.samples
    assert int((sample.token_ids_T[sample.loss_mask_T] == end).sum()) == len(expected)
    # The first turn is asked for by the very tokens that a model is asked by.
    asked = tokenizer.apply_chat_template(messages[: 1 + (system is not None)])
    np.testing.assert_array_equal(document.prompt_token_ids_T, tokenizer.encode(asked))


def test_messages_that_are_given_are_not_learnt(make: Make) -> None:
    tokenizer = make(CHATML)
    document = to_conversation(talk("1?", "one", "2?", "two"), 2, tokenizer, "r")
    assert learnt(document, tokenizer) == ["two<|im_end|>"]
    assert tokenizer.decode(document.prompt_token_ids_T, skip_special=False).count("<|im_end|>") == 3


def test_what_a_template_drops_from_earlier_turns_is_not_learnt(make: Make) -> None:
    said = talk("1?", "<think>\nhm\n</think>\n\none", "2?", "<think>\nso\n</think>\n\ntwo")
    tokenizer = make(THINKS)
    assert learnt(to_conversation(said, 0, tokenizer, "r"), tokenizer) == [
        "one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]  # fmt: skip
    # Without thoughts the last turn begins as the model would have to.
    plain = talk("1?", "one", "2?", "two")
    assert learnt(to_conversation(plain, 0, tokenizer, "r"), tokenizer)[1] == "<think>\n\n</think>\n\ntwo<|im_end|>"
    quiet = make(THINKS, {"enable_thinking": False})
    document = to_conversation(plain, 0, quiet, "r")
    assert learnt(document, quiet) == ["one<|im_end|>", "two<|im_end|>"]
    assert "<think>\n\n</think>\n\ntwo" in whole(document, quiet)


def test_where_a_template_writes_no_end_one_is_learnt_nevertheless(make: Make) -> None:
    """As it is when a model answers: its stop token stays, and then comes what the template writes."""
    tokenizer = make(PLAIN)
    document = to_conversation(talk("1?", "one", "2?", "two"), 0, tokenizer, "r")
    assert learnt(document, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert whole(document, tokenizer) == "user: 1?\nassistant: one<|im_end|>\nuser: 2?\nassistant: two<|im_end|>"


def test_what_a_template_writes_before_the_end_is_not_learnt(make: Make) -> None:
    tokenizer = make(CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }} .<|im_end|>"))
    document = to_conversation(talk("1?", "one", "2?", "two"), 0, tokenizer, "r")
    assert learnt(document, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert "one<|im_end|> .<|im_end|>\n<|im_start|>user\n2?" in whole(document, tokenizer)


def test_the_end_that_the_template_writes_is_learnt_if_the_model_stops_there(make: Make) -> None:
    tokenizer = make(CHATML, stop="<|endoftext|>")
    assert learnt(to_conversation(talk("1?", "one"), 0, tokenizer, "r"), tokenizer) == ["one<|endoftext|>"]
    both = make(CHATML, stop="<|endoftext|>")
    end = both.encode("<|im_end|>").tolist()
    (both.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    both = Tokenizer(both.folder)
    assert learnt(to_conversation(talk("1?", "one"), 0, both, "r"), both) == ["one<|im_end|>"]


CALLS = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c }}{% endfor %}")


def test_calls_of_tools_are_learnt_with_their_turn(make: Make) -> None:
    tokenizer = make(CALLS)
    call = {"role": "assistant", "content": "", "tool_calls": ["f(1)"]}
    messages = [*talk("1?"), call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]
    assert learnt(to_conversation(messages, 0, tokenizer, "r"), tokenizer) == [
        "<call>f(1)<|im_end|>", "two<|im_end|>",
    ]  # fmt: skip


CUTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split("</think>")[-1] if m.role == "assistant" else m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.mark.parametrize(
    ("reply", "written"),
    [
        ("<think>\nhm\n</think>\n\none", "hm\n</think>\n\none"),
        ("\n<think>hm</think>one", "hm</think>one"),
        ("<think>\n\nhm</think>one", "\nhm</think>one"),
        ("hm\n</think>\n\none", "hm\n</think>\n\none"),
    ],
)
@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_the_reply_that_ends_a_row_is_learnt_whole_where_the_template_cuts_every_turn(
    make: Make, reply: str, written: str, stop: str
) -> None:
    """After the very text that asks a model for it, which has the tag that opens the thoughts once."""
    tokenizer = make(CUTS, stop=stop)
    said = talk("1?", "<think>\nso\n</think>one", "2?", reply)
    document = to_conversation(said, 0, tokenizer, "r")
    assert learnt(document, tokenizer) == [f"one{stop}", written + stop]
    assert whole(document, tokenizer).endswith(tokenizer.apply_chat_template(said[:3])[-40:] + written + stop)
    assert whole(document, tokenizer).count("<think>") == 1
    document = to_conversation(said[2:], 0, tokenizer, "r")
    np.testing.assert_array_equal(
        document.prompt_token_ids_T, tokenizer.encode(tokenizer.apply_chat_template(said[2:3]))
    )


def test_a_cut_reply_keeps_its_tag_where_nothing_asks_with_it_and_its_calls(make: Make) -> None:
    silent = make(CUTS.replace("assistant\n<think>\n", "assistant\n"))
    reply = "<think>\nhm\n</think>\n\none"
    assert learnt(to_conversation(talk("1?", reply), 0, silent, "r"), silent) == [f"{reply}<|im_end|>"]
    tokenizer = make(CUTS)
    call = {"role": "assistant", "content": reply, "tool_calls": ["f(1)"]}
    document = to_conversation([*talk("1?"), call], 0, tokenizer, "r")
    assert learnt(document, tokenizer) == ["hm\n</think>\n\none<call>f(1)<|im_end|>"]


def test_white_space_of_thoughts_is_the_template_s(make: Make) -> None:
    """It writes them as its model does."""
    tokenizer = make(THINKS)
    document = to_conversation(talk("1?", "<think>hm </think>one"), 0, tokenizer, "r")
    assert learnt(document, tokenizer) == ["<think>\nhm\n</think>\n\none<|im_end|>"]


BREAKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{%- if loop.last and m.role == "assistant" %}{{ "\n<think>\n\n</think>\n" }}{% endif %}
{%- if m.content %}{{ "\n" + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ "\n<call>" + c }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen's: what stands between header and calls depends on the content."""


def test_calls_without_content_are_learnt_from_where_the_model_is_asked(make: Make) -> None:
    tokenizer = make(BREAKS)
    call = {"role": "assistant", "content": "", "tool_calls": ["f(1)", "g(2)"]}
    messages = [*talk("1?"), call, {"role": "tool", "content": "2"}, call]
    text = "<call>f(1)\n<call>g(2)<|im_end|>"
    document = to_conversation(messages, 0, tokenizer, "r")
    assert learnt(document, tokenizer) == [text, f"<think>\n\n</think>\n\n{text}"]
    assert whole(document, tokenizer) + "\n" == tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    messages[1] = call | {"content": "I ask."}
    assert learnt(to_conversation(messages, 0, tokenizer, "r"), tokenizer)[0] == f"I ask.\n{text}"


@pytest.mark.parametrize("content", ["", "I ask."])
@pytest.mark.parametrize(
    "template",
    [
        CALLS.replace("<|im_end|>", ""),  # nothing says where calls end
        CALLS.replace("<|im_start|>assistant", "<|im_start|>model").replace("m.content }}", "m.content * 2 }}"),
    ],
)
def test_calls_that_cannot_be_told_from_the_rest(make: Make, template: str, content: str) -> None:
    call = {"role": "assistant", "content": content, "tool_calls": ["f(1)"]}
    with pytest.raises(ConfigError, match=r"r7: .* does not write message 2, an assistant's, verbatim"):
        to_conversation([*talk("1?"), call], 0, make(template), "r7")


def test_calls_do_not_end_where_a_later_turn_does(make: Make) -> None:
    ends = "{% if m.role == 'assistant' and not m.tool_calls %}<|im_end|>{% endif %}"
    call = {"role": "assistant", "content": "", "tool_calls": ["f(1)"]}
    messages = [*talk("1?"), call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]
    with pytest.raises(ConfigError, match=r"r7: .* does not write message 4, an assistant's, verbatim"):
        to_conversation(messages, 0, make(CALLS.replace("<|im_end|>", ends)), "r7")


def test_a_cut_reply_is_refused_where_what_asks_for_it_is_no_end_of_the_conversation(make: Make) -> None:
    template = "{% if add_generation_prompt %}ask {% endif %}" + CUTS
    said = talk("1?", "one", "2?", "<think>\nhm\n</think>two")
    with pytest.raises(ConfigError, match=r"r7: .* does not write message 4, an assistant's, verbatim"):
        to_conversation(said, 0, make(template), "r7")


@pytest.mark.parametrize(
    ("template", "said", "says"),
    [
        (CHATML, "", "r: message 2, an assistant's, is empty"),
        (LLAMA, " \n", "r: message 2, an assistant's, is empty"),
        (CHATML, "one<|im_end|>", "r: the assistant says a token that ends its turn"),
        (CHATML.replace("m.content }}", "m.content | upper }}"), "one", "does not write message 2, .* verbatim"),
        (CHATML.replace("m.content }}", "m.content | length }}"), "one", "does not write message 2, .* verbatim"),
        ("{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}", "one", "does not write message 2"),
    ],
)
def test_turns_that_cannot_be_learnt(make: Make, template: str, said: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        to_conversation(talk("1?", said), 0, make(template), "r")
