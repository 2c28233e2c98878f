"""`llamarl eval`: what is wrong is said in a sentence, and so is an end before the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.controller.supervision import Interrupted
from llamarl.parts.answers import evaluate
from llamarl.parts.answers.cli import eval as command
from tests.cli.test_bad_input import check, damaged, halve
from tests.end_to_end.tiny import llamarl_here


def test_one_sentence_says_what_is_wrong(model: Path, tmp_path: Path) -> None:
    check(llamarl_here("eval", model), "DATA is missing", command="eval")
    check(llamarl_here("eval", "/nowhere", "x.jsonl"), "/nowhere", command="eval")
    check(llamarl_here("eval", model, "/nowhere.jsonl"), "/nowhere.jsonl", command="eval")
    check(llamarl_here("eval", model, "/nowhere.jsonl", "--eval.samples", "0"), "eval.samples = 0", command="eval")
    check(
        llamarl_here("eval", model, "/nowhere.jsonl", "--rollout.max_new_tokens", "0"),
        "max_new_tokens = 0",
        command="eval",
    )
    sft = llamarl_here("eval", model, "--config", "demo_sft")
    check(sft, "--config demo_sft: `model.path` is missing; set it", command="eval")
    assert "--model" not in sft.stderr, "there is no such option"
    weights = damaged(model, tmp_path, lambda copy: halve(copy / "model.safetensors"))
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n')
    check(llamarl_here("eval", model, file, "--reward.parts", "['gsm9k']"), "gsm9k", "gsm8k", command="eval")
    check(llamarl_here("eval", weights, file), "not a whole safetensors file", command="eval")
    check(
        llamarl_here("eval", model, file, "--output", "/nowhere/x"),
        "cannot write /nowhere/x",
        "--output",
        command="eval",
    )
    done = llamarl_here("eval", model, file, "--rates", "/proc/self/x", "--eval.samples", "1")
    check(done, "cannot write /proc/self/x", "give --rates a path", command="eval")


def test_an_interrupt_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupted("ended by SIGINT")

    monkeypatch.setattr(evaluate, "evaluate_checkpoint", interrupted)
    data = tmp_path / "problems.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    assert command.main([str(model), str(data)]) == 130
    assert "llamarl eval: ended by SIGINT" in capsys.readouterr().err
