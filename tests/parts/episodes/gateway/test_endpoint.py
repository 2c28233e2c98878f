"""Calls in OpenAI's shape: what was sampled is never encoded again, what is not there is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.gateway import protocol
from llamarl.parts.episodes.gateway.protocol import CallRefused, OutOfTokens
from llamarl.types import OBSERVED
from tests.architecture.repository import ROOT
from tests.parts.episodes.gateway.conftest import tool_schema

Make = Callable[..., Any]


def say(endpoint: Any, session: Any, **body: Any) -> Any:
    call = endpoint.chat if "messages" in body else endpoint.complete
    return asyncio.run(call(session, body))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_is_one_sequence_of_what_was_sampled(scripted: Make, tokenizer: Tokenizer) -> None:
    odd = [token for byte in "12" for token in tokenizer.encode(byte).tolist()]  # as a sampler may cut it
    policy, endpoint, session = scripted(odd, "ok")
    first = say(endpoint, session, messages=[user("hi")])
    assert first["choices"][0] | {"message": None} == {
        "index": 0, "message": None, "finish_reason": "stop", "logprobs": None
    }  # fmt: skip
    said = first["choices"][0]["message"]
    assert said == {"role": "assistant", "content": "12"}
    # Another client writes the same otherwise.
    again = {"role": "assistant", "content": [{"type": "text", "text": "12"}], "tool_calls": None, "refusal": None}
    say(endpoint, session, messages=[user("hi"), again, user("go on")])
    before = [*policy.prompts[0].tolist(), *odd, tokenizer.eos_token_id]
    assert policy.prompts[1].tolist() == before + tokenizer.encode("\n[user]go on<|endoftext|>\n[assistant]").tolist()
    columns = session.columns()
    assert set(columns["sequence"]) == {0}
    sampled = columns["policy_versions"] != OBSERVED
    assert columns["token_ids"][sampled].tolist()[:3] == [*odd, tokenizer.eos_token_id]
    assert columns["behavior_logprobs"][sampled].tolist()[:3] == [-1, -2, -3]
    assert first["usage"]["completion_tokens"] == 3 and session.num_sampled == sampled.sum()


def test_a_turn_that_was_cut_or_changed_is_written_by_the_template(scripted: Make, tokenizer: Tokenizer) -> None:
    policy, endpoint, session = scripted("long enough", "x", "y", limit=100)
    cut = say(endpoint, session, messages=[user("hi")], max_tokens=2)["choices"][0]
    assert cut["finish_reason"] == "length"
    say(endpoint, session, messages=[user("hi"), cut["message"], user("more")])
    say(endpoint, session, messages=[user("hi"), {"role": "assistant", "content": "else"}, user("more")])
    text = "[user]hi<|endoftext|>\n[assistant]else<|endoftext|>\n[user]more<|endoftext|>\n[assistant]"
    assert policy.prompts[2].tolist() == tokenizer.encode(text).tolist()
    cut_text = f"[assistant]{cut['message']['content']}<|endoftext|>"
    assert cut_text in tokenizer.decode(policy.prompts[1], skip_special=False)
    assert sorted(set(session.columns()["sequence"])) == [0, 1]  # the template wrote the very tokens that were cut


def test_a_turn_that_was_cut_is_not_gone_on_with(scripted: Make, tokenizer: Tokenizer) -> None:
    """Nobody sampled its end."""
    odd = [token for byte in "Roy has" for token in tokenizer.encode(byte).tolist()]
    _, endpoint, session = scripted(odd, "x")
    cut = say(endpoint, session, messages=[user("hi")], max_tokens=len(odd) - 1)["choices"][0]
    assert cut["finish_reason"] == "length" and len(tokenizer.encode(cut["message"]["content"])) < len(odd) - 1
    say(endpoint, session, messages=[user("hi"), cut["message"], user("more")])
    assert sorted(set(session.columns()["sequence"])) == [0, 1]


def test_tools_are_called_and_what_they_say_follows(scripted: Make, tokenizer: Tokenizer) -> None:
    called = 'so <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    policy, endpoint, session = scripted(called, "3", "<tool_call>{oops</tool_call>")
    history = [user("1+2")]
    choice = say(endpoint, session, messages=history, tools=[tool_schema()])["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
    assert call["function"] == {"name": "add", "arguments": '{"b": 2, "a": 1}'}
    call["function"]["arguments"] = '{"a":1,"b":2}'  # another client's JSON
    history += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    assert say(endpoint, session, messages=history, tools=[tool_schema()])["choices"][0]["finish_reason"] == "stop"
    assert policy.prompts[1].tolist()[: len(policy.prompts[0])] == policy.prompts[0].tolist()
    assert set(session.columns()["sequence"]) == {0}
    bad = say(endpoint, session, messages=[user("?")], tools=[tool_schema()])["choices"][0]
    assert bad["message"] == {"role": "assistant", "content": "<tool_call>{oops</tool_call>"}


def test_other_tools_are_another_conversation(scripted: Make, tokenizer: Tokenizer) -> None:
    """The policy would else answer a prompt that tells of the tools before."""
    odd = [token for byte in "Roy has" for token in tokenizer.encode(byte).tolist()]
    policy, endpoint, session = scripted(odd, "x", "y")
    said = say(endpoint, session, messages=[user("hi")], tools=[tool_schema()])["choices"][0]["message"]
    for name, is_same in (("subtract", False), ("add", True)):
        say(endpoint, session, messages=[user("hi"), said, user("more")], tools=[tool_schema(name)])
        assert (policy.prompts[-1].tolist()[: len(policy.prompts[0]) + len(odd)][-len(odd) :] == odd) is is_same


def test_one_malformed_call_makes_all_of_a_turn_text(scripted: Make) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{oops</tool_call>'
    _, endpoint, session = scripted(text)
    choice = say(endpoint, session, messages=[user("?")], tools=[tool_schema()])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


def test_text_goes_on_from_what_was_written(scripted: Make, without_template: Tokenizer) -> None:
    policy, endpoint, session = scripted("17+5?", "end", of=without_template)
    first = say(endpoint, session, prompt="a:", stop=["?"], return_token_ids=True, logprobs=0)
    choice = first["choices"][0]
    assert choice["text"] == "17+5" and choice["finish_reason"] == "stop"
    assert (
        choice["token_ids"] == without_template.encode("17+5?").tolist() == session.columns()["token_ids"].tolist()[-5:]
    )
    assert choice["prompt_token_ids"] == policy.prompts[0].tolist()
    assert choice["logprobs"]["tokens"] == ["1", "7", "+", "5", "?"]
    assert choice["logprobs"]["token_logprobs"] == [-1, -2, -3, -4, -5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    second = say(endpoint, session, prompt="a:17+5?=22", stop="?", include_stop_str_in_output=True)
    assert second["choices"][0]["text"] == "end"
    expected = [*policy.prompts[0], *choice["token_ids"], *without_template.encode("=22")]
    assert policy.prompts[1].tolist() == expected and set(session.columns()["sequence"]) == {0}
    with pytest.raises(CallRefused, match="has no chat template"):
        say(endpoint, session, messages=[user("hi")])


def test_tokens_as_a_prompt(scripted: Make) -> None:
    policy, endpoint, session = scripted("x", "y")
    first = say(endpoint, session, prompt=[3, 4], return_token_ids=True)["choices"][0]
    say(endpoint, session, prompt=[3, 4, *first["token_ids"], 9])
    assert policy.prompts[1].tolist() == [3, 4, *first["token_ids"], 9] and set(session.columns()["sequence"]) == {0}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages = .*at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is read"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"messages\[0\].content = .*only text is read",
        ),
        ({"messages": [{"role": "banana"}]}, r"messages\[0\].role = 'banana'"),
        ({"messages": [{"role": "user", "colour": 1}]}, r"messages\[0\].colour = 1: is not supported"),
        (
            {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            r"tools\[0\].function.strict = True",
        ),
        ({"messages": [user("x")], "tool_choice": "required"}, "tool_choice = 'required'"),
        ({"prompt": "x", "n": 0}, "n = 0"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty = 0.5: is not supported"),
        ({"prompt": "x", "seed": 1}, "seed = 1, but this run samples with 0"),
        ({"prompt": "x", "temperature": -1}, "temperature = -1"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens = True: Input should be a valid integer"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens = '5': Input should be a valid integer"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options without stream = true"),
        ({"prompt": "x", "stream": True, "stream_options": {"all": True}}, "stream_options.all = True"),
        ({"prompt": [-1]}, r"prompt\[0\] = -1: Input should be greater"),
        ({"prompt": [10**30]}, r"prompt\[0\] = 10+\.*0+: Input should be less"),
        ({"prompt": []}, r"prompt = \[\]: List should have at least 1 item"),
        ({"prompt": 5}, "prompt = 5: Input should be a valid string"),
        ({"prompt": ["a", 5]}, r"prompt\[1\] = 5: Input should be a valid string"),
        ({"prompt": ["a"] * 1025}, r"prompt = .*at most 1024"),
        ({"prompt": ["a"] * 9, "n": 128}, "n.*1024"),
        ({"prompt": "x", "logprobs": 21}, "logprobs = 21"),
        ({"prompt": "x", "logprobs": 2}, "logprobs = 2: this endpoint has log-probabilities of sampled tokens only"),
        ({"prompt": "x", "logprobs": 1, "echo": True}, "logprobs = 1: this endpoint"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens = 0"),
        ({"prompt": "x", "echo": True, "stream": True}, "echo"),
        ({"prompt": "x", "temperature": 0.5}, "temperature = 0.5, but this run samples with 1: leave it out"),
    ],
)
def test_what_is_not_there_is_refused_by_name(scripted: Make, body: dict[str, Any], said: str) -> None:
    policy, endpoint, session = scripted("x", is_fixed=True)
    with pytest.raises(CallRefused, match=said) as refused:
        say(endpoint, session, **body)
    assert refused.value.status == 400 and not policy.prompts and not session.num_calls
    assert refused.value.param and f"{refused.value}".startswith(refused.value.param)


def test_what_is_as_the_run_does_it_anyway_is_accepted(scripted: Make) -> None:
    policy, endpoint, session = scripted("x", "y", is_fixed=True)
    say(endpoint, session, prompt="x", temperature=1.0, top_p=1, top_k=-1, n=1, user="me")
    assert policy.asked[0].temperature == 1
    nothing = {
        "seed": None,
        "stream": None,
        "frequency_penalty": 0,
        "top_logprobs": 0,
        "logit_bias": {},
        "echo": False,
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "tools": None,
    }
    say(endpoint, session, prompt=["one"], model="m", **nothing)  # fmt: skip
    assert policy.prompts[1].tolist() == endpoint.tokenizer.encode("one", add_special_tokens=True).tolist()
    _, endpoint, session = scripted("x")
    say(endpoint, session, prompt="x", temperature=0.5, top_k=3)


def test_all_calls_together_are_bounded_and_failures_teach_nothing(scripted: Make) -> None:
    policy, endpoint, session = scripted("abc", "abc", limit=5)
    say(endpoint, session, prompt="x")
    assert say(endpoint, session, prompt="y")["choices"][0]["finish_reason"] == "length"
    assert session.num_sampled == 5
    assert not session.is_full
    with pytest.raises(OutOfTokens, match=r"has sampled its 5 tokens \(rollout.max_new_tokens\)") as refused:
        say(endpoint, session, prompt="x")
    assert session.is_full and refused.value.body["error"]["code"] == "context_length_exceeded"
    policy, endpoint, session = scripted("x")
    policy.error = "the prompt has 500 tokens and the context 256; no token can be generated"
    with pytest.raises(CallRefused, match="context 256"):
        say(endpoint, session, prompt="x")
    assert not session.is_full
    assert not session.num_calls and not len(session.columns()["token_ids"])


def test_log_probabilities_and_ids_of_chats(scripted: Make, tokenizer: Tokenizer) -> None:
    _, endpoint, session = scripted("12")
    found = say(endpoint, session, messages=[user("hi")], logprobs=True, return_token_ids=True)
    content = found["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"], one["bytes"]) for one in content[:2]] == [("1", -1, [49]), ("2", -2, [50])]
    assert content[2]["token"] == "<|endoftext|>"
    assert np.array_equal(found["prompt_token_ids"], tokenizer.encode("[user]hi<|endoftext|>\n[assistant]"))


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("text", "more", "shown"),
    [
        ("a é日 b", {}, None),
        ("one END", {"stop": ["ENDING", "END"]}, "one "),
        ("one EN two ENDI", {"stop": "ENDING"}, "one EN two ENDI"),
        ("one END", {"stop": "END", "include_stop_str_in_output": True}, "one END"),
        ("", {}, ""),
        ("12345", {"max_tokens": 3}, "123"),
    ],
)
def test_pieces_of_a_stream_are_the_whole_answer(
    scripted: Make, tokenizer: Tokenizer, is_chat: bool, text: str, more: dict[str, Any], shown: str | None
) -> None:
    ids = [token for byte in text for token in tokenizer.encode(byte).tolist()]
    body = {"logprobs": True, "return_token_ids": True, "stream": True, **more}
    body |= {"stream_options": {"include_usage": True}}
    body |= {"messages": [user("hi")]} if is_chat else {"prompt": "x"}
    found = []
    for tell in (None, (events := list[bytes]()).append):
        _, endpoint, session = scripted(ids)
        found.append(asyncio.run((endpoint.chat if is_chat else endpoint.complete)(session, body, tell)))
    whole, choice = found[1], found[1]["choices"][0]
    assert found[0] | {"id": 0, "created": 0} == whole | {"id": 0, "created": 0}
    assert events.pop() == b"data: [DONE]\n\n"
    *pieces, end, usage = [json.loads(one.removeprefix(b"data: ")) for one in events]
    assert usage["usage"] == whole["usage"] and end["choices"][0]["finish_reason"] == choice["finish_reason"]
    pieces = [one["choices"][0] for one in pieces]
    texts = [one["delta"]["content"] if is_chat else one["text"] for one in pieces]
    assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"]) == (
        text if shown is None else shown
    )  # fmt: skip
    assert not any("\ufffd" in one for one in texts) and len(pieces) >= min(3, len(choice["token_ids"]))
    assert [token for one in pieces for token in one["token_ids"]] == choice["token_ids"]
    assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    for name in ("content",) if is_chat else ("tokens", "token_logprobs", "text_offset"):
        assert [value for one in pieces for value in one["logprobs"][name]] == choice["logprobs"][name]


def test_calls_of_tools_are_one_piece(scripted: Make) -> None:
    called = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    _, endpoint, session = scripted(called)
    events = list[bytes]()
    asyncio.run(endpoint.chat(session, {"messages": [user("1+2")], "tools": [tool_schema()]}, events.append))
    deltas = [json.loads(one.removeprefix(b"data: "))["choices"][0]["delta"] for one in events[:-2]]
    assert [one["content"] for one in deltas if one["content"]] == ["so"]
    ((call,),) = [one["tool_calls"] for one in deltas if "tool_calls" in one]
    assert call["index"] == 0 and call["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_the_table_of_what_is_not_there(scripted: Make) -> None:
    """docs/episodes.md: each is refused by name, and accepted as it asks for nothing."""
    page = (ROOT / "docs/episodes.md").read_text(encoding="utf-8").partition("| not there | accepted as |")[2]
    rows = [line.split("|")[1:3] for line in page.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    options = {
        name: json.loads(value.replace(' or `"none"`', "").strip("` "))
        for names, values in rows
        for name, value in zip(re.findall(r"`(\w+)`", names), re.split(r", (?!\d*})", values), strict=True)
    }
    assert options.keys() - {"prompt_logprobs", "tool_choice"} == protocol._CHANGES_NOTHING.keys()
    for name, value in options.items():
        _, endpoint, session = scripted("x")
        assert say(endpoint, session, messages=[user("hi")], **{name: value})["choices"]
        with pytest.raises(CallRefused, match=f"^{name} = ") as refused:
            say(endpoint, session, messages=[user("hi")], **{name: {"odd": 1}})
        assert refused.value.status == 400 and refused.value.param == name


def test_a_prompt_over_the_context_is_too_long_and_long_ones_are_not_encoded(
    scripted: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, endpoint, session = scripted("x", context=20)
    with pytest.raises(OutOfTokens, match="the prompt has 20 tokens and the context 20: it has no room for 1 more"):
        say(endpoint, session, prompt=[1] * 20)
    with pytest.raises(OutOfTokens, match="the prompt has 19 tokens and the context 20: it has no room for 2 more"):
        say(endpoint, session, prompt=[1] * 19, max_tokens=2)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("this takes long"))
    for body in ({"prompt": "x" * 641}, {"messages": [user("x" * 641)]}):
        with pytest.raises(OutOfTokens, match="characters are too many for a context of 20 tokens") as refused:
            say(endpoint, session, **body)
        assert refused.value.body["error"]["code"] == "context_length_exceeded"
    assert session.is_full and not policy.prompts
    with pytest.raises(CallRefused, match=r"messages = .*at most 2048 items"):
        say(endpoint, session, messages=[user("hi")] * 20_000)


def test_a_conversation_is_looked_up_in_linear_time(scripted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each beginning there is a digest, and each message is written for them once; of a new session not at all."""
    written = list[str]()
    dumps = json.dumps
    monkeypatch.setattr(
        protocol.json, "dumps", lambda value, **how: written.append(text := dumps(value, **how)) or text
    )
    _, endpoint, session = scripted("a", "b")
    history = [user(f"{n}") for n in range(500)]
    said = say(endpoint, session, messages=history)["choices"][0]["message"]
    assert len(written) == 502, "for the answer"
    say(endpoint, session, messages=[*history, said, user("more")])
    assert len(written) == 502 + 502 + 504 and set(session.columns()["sequence"]) == {0}


def test_several_choices_of_a_call(scripted: Make, tokenizer: Tokenizer) -> None:
    """Each is a sequence of its own; together they have what the session has left."""
    policy, endpoint, session = scripted("one", "two", limit=40)
    events = list[bytes]()
    body = {"prompt": "x", "n": 2, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    whole = asyncio.run(endpoint.complete(session, body, events.append))
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(0, "one"), (1, "two")]
    assert [(one.seed, one.is_repeatable, one.max_new_tokens) for one in policy.asked] == [(7, True, 20), (8, True, 20)]
    assert whole["usage"]["completion_tokens"] == session.num_sampled == len(tokenizer.encode("onetwo")) + 2
    assert events.pop() == b"data: [DONE]\n\n"
    pieces = [json.loads(one.removeprefix(b"data: ")) for one in events]
    assert pieces.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in pieces if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"] and own[-1]["finish_reason"] == "stop"
    assert sorted(set(session.columns()["sequence"])) == [0, 1]
    policy.error = "it cannot"
    with pytest.raises(CallRefused, match="it cannot"):
        say(endpoint, session, prompt="x", n=3)
