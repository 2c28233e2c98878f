"""`llamarl serve` as clients of others ask it: OpenAI's package, and the requests of lm-eval's `local-completions`."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.data.chat_format import sample_chat, with_chat
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.attention import causal_attend
from llamarl.models.hf import load_model
from tests.parts.episodes.gateway.asgi import ask
from tests.parts.episodes.test_serve import served_here

TEXTS = ["Ann has 3 apples", "Bob", "How many pens now?"]


def asked(model: Path, *bodies: dict[str, Any], path: str = "completions") -> list[Any]:
    async def main() -> list[Any]:
        async with served_here(model) as app:
            found = [await ask(app, f"/v1/{path}", body) for body in bodies]
        assert all(one.status == 200 for one in found), found
        return [one.json for one in found]

    return asyncio.run(asyncio.wait_for(main(), 120))


def exact(model: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens behind each of `ids` [T, V], by the whole model."""
    whole, ids_T = load_model(model, torch.float32, "cpu"), torch.tensor(ids)
    with torch.no_grad():
        hidden = whole(ids_T, torch.arange(len(ids)), causal_attend([len(ids)]))
        return whole.logits(hidden).log_softmax(1)


def test_the_scores_that_lm_eval_asks_for(model: Path) -> None:
    """`loglikelihood`: token ids, several prompts, echo, one token more than wanted."""
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(text).tolist() for text in TEXTS]
    body = {
        "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    (found,) = asked(model, body)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for choice, ids, text in zip(found["choices"], prompts, TEXTS, strict=True):
        assert choice["text"].startswith(text)
        said, wanted = choice["logprobs"], exact(model, ids)
        assert len(said["token_logprobs"]) == len(said["tokens"]) == len(said["top_logprobs"]) == len(ids) + 1
        assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
        own = said["token_logprobs"][1:-1]
        np.testing.assert_allclose(own, [float(wanted[at, one]) for at, one in enumerate(ids[1:])], atol=1e-3)
        for at, (mine, top) in enumerate(zip(own, said["top_logprobs"][1:-1], strict=True)):
            is_greedy = int(wanted[at].argmax()) == ids[at + 1]
            assert (mine == max(top.values())) == is_greedy and len(top) in (1, 2)
            assert max(top.values()) == pytest.approx(float(wanted[at].max()), abs=1e-3)
    # The sampled token is greedy, so that it is the likeliest itself.
    assert all(len(one["logprobs"]["top_logprobs"][-1]) == 1 for one in found["choices"])


def test_the_answers_that_lm_eval_asks_for(model: Path) -> None:
    """`generate_until`: several prompts in one call say what each says alone."""
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(text).tolist() for text in TEXTS]
    rest = {"max_tokens": 9, "temperature": 0, "stop": ["\n\n", "<|endoftext|>"], "seed": 1234, "model": "tiny"}
    together, *alone = asked(model, *({"prompt": prompt} | rest for prompt in (prompts, *prompts)))
    assert [one["text"] for one in together["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert together["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)


def test_echo_without_an_answer(model: Path) -> None:
    body = {"prompt": "Ann has", "echo": True, "max_tokens": 0, "logprobs": 0}
    (found,) = asked(model, body)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], found["usage"]["completion_tokens"]) == ("Ann has", "length", 0)
    assert choice["logprobs"]["top_logprobs"] is None and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][0] == 0 and "".join(choice["logprobs"]["tokens"]) == "Ann has"


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_likeliest_tokens_beside_sampled_ones(model: Path, temperature: float) -> None:
    body = {"prompt": "Ann has", "max_tokens": 6, "logprobs": 5, "temperature": temperature, "seed": 3}
    body |= {"return_token_ids": True}
    (found,) = asked(model, body)
    said = found["choices"][0]["logprobs"]
    columns = said["tokens"], found["choices"][0]["token_ids"], said["token_logprobs"], said["top_logprobs"]
    for text, token, own, top in zip(*columns, strict=True):
        assert 5 <= len(top) <= 6
        assert top[text if text in top else f"token_id:{token}"] == pytest.approx(own, abs=1e-3)
        assert own <= max(top.values()) + 1e-3


def test_several_answers_of_several_prompts(model: Path) -> None:
    body = {"prompt": TEXTS[:2], "n": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    (found,) = asked(model, body)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    texts = [one["text"] for one in found["choices"]]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    prompts = [one["prompt_token_ids"] for one in found["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3] and "prompt_token_ids" not in found


def test_a_chat_where_the_model_has_no_template(model: Path) -> None:
    """The plain text format of training."""
    tokenizer = with_chat(Tokenizer(model))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Ann"}]) == "Ann\n"


def test_openai_package(model: Path) -> None:
    """Its own requests and answers, without a port."""
    openai = pytest.importorskip("openai", reason="the package `openai` is not installed")
    httpx: Any = sys.modules.get("httpx") or sys.modules["httpx2"]  # whichever that package has imported

    async def main() -> None:
        async with served_here(model) as app:
            transport = httpx.ASGITransport(app=app)
            web = httpx.AsyncClient(transport=transport, base_url="http://test")
            async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=web) as client:
                found = await client.completions.create(
                    model="tiny", prompt=["Ann", "Bob"], max_tokens=3, logprobs=3, echo=True, temperature=0
                )
                assert [one.text[:3] for one in found.choices] == ["Ann", "Bob"]
                assert found.choices[0].logprobs.token_logprobs[0] is None
                stream = await client.completions.create(
                    model="tiny", prompt=["Ann", "Bob"], max_tokens=3, temperature=0, stream=True, logprobs=1
                )
                texts = ["", ""]
                async for piece in stream:
                    texts[piece.choices[0].index] += piece.choices[0].text
                assert texts == [one.text[3:] for one in found.choices]
                chat = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "Ann has 3"}], max_tokens=3, temperature=0
                )
                assert chat.choices[0].message.content is not None

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_refusal_names_the_model_and_no_folder(model: Path, tmp_path: Path) -> None:
    """The folder of a run's model is one for a while."""
    folder = Path(shutil.copytree(model, tmp_path / "while"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only with tools') }}")

    async def main() -> None:
        async with served_here(folder) as app:
            found = await ask(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        message = found.json["error"]["message"]
        assert found.status == 400 and "only with tools" in message
        assert str(tmp_path) not in message and message.startswith("tiny: ")

    asyncio.run(asyncio.wait_for(main(), 120))
    assert "only with tools" in sample_chat(Tokenizer(folder))
