"""`llamarl generate`: every prompt is answered or says why not; nothing done is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamarl.parts.answers.answering import generate
from llamarl.parts.answers.cli.generate import read_prompts
from llamarl.types import GenerationRequest, Rollout, SamplingParams
from tests.end_to_end.tiny import LLAMARL, ROOT, Command, environment, llamarl_here, rows
from tests.nightly import nightly

PROMPTS = ["Ann has 12 apples: a+3.", "Bob has 7 pens: b+4. How many pens now?", "x " * 500]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(PROMPTS)))
    return path


def test_json_lines(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("what was here\n")
    words = "--eval.samples 3 --rollout.max_new_tokens 9 --generator.max_running 2 --seed 4"
    arguments = ["--prompts", prompts, *words.split()]
    done = llamarl_here("generate", model, *arguments, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "9 of 9 responses" in done.stderr and "tokens/s" in done.stderr and "3 failed" in done.stderr
    assert "decode slots" in done.stderr and done.stdout == ""
    found = {(row["number"], row["index"]): row for row in rows(output)}
    assert found.keys() == {(number, index) for number in range(3) for index in range(3)}
    for (number, _), row in found.items():
        assert row["prompt"] == PROMPTS[number]
        if number == 2:
            assert (row["finish_reason"], row["num_tokens"], row["text"]) == ("failed", 0, "")
            assert "context 256" in row["error"]
        else:
            assert row["finish_reason"] in ("stop", "length") and 0 < row["num_tokens"] <= 9
            assert row["logprob"] < 0 and row["error"] == ""
    assert len({found[0, index]["text"] for index in range(3)}) > 1, "samples differ"
    llamarl_here("generate", model, *arguments, "--output", output)
    assert {(row["number"], row["index"]): row for row in rows(output)} == found, "the seed decides"


@nightly("a command in a process of its own; the same command runs in this one by day")
def test_text_in_another_process_to_standard_output(model: Path, tmp_path: Path) -> None:
    """Nothing but JSON is on standard output, and what a redirected one held is kept."""
    file, out = tmp_path / "prompts.txt", tmp_path / "out"
    file.write_text("first prompt\n\n  second\r\n")
    out.write_text("{}\n")
    with out.open("a") as stdout:
        done = subprocess.run(
            [*LLAMARL, "generate", model, "--prompts", file, "--eval.temperature=0", "--rollout.max_new_tokens=4"],
            cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240, env=environment(),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {row.get("prompt") for row in rows(out)} == {None, "first prompt", "  second"}


def test_stop_text_and_chat_template(model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("hello\n")
    arguments = ["--prompts", file, "--output", output, "--eval.temperature", "0", "--rollout.max_new_tokens", "30"]
    refused = llamarl_here("generate", model, *arguments, "--chat")
    assert refused.returncode == 2 and "has no chat template" in refused.stderr
    assert llamarl_here("generate", model, *arguments).returncode == 0
    (plain,) = rows(output)
    stop = plain["text"][8:10]
    arguments += ["--rollout.stop_strings", json.dumps([stop, "never said"])]
    assert llamarl_here("generate", model, *arguments).returncode == 0
    (stopped,) = rows(output)
    assert stopped["finish_reason"] == "stop" and stop in stopped["text"]
    assert plain["text"].startswith(stopped["text"]) and stopped["num_tokens"] < plain["num_tokens"]
    chatty = Path(shutil.copytree(model, tmp_path / "chatty"))
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert llamarl_here("generate", chatty, *arguments[:-2], "--chat").returncode == 0
    (chat,) = rows(output)
    assert (chat["prompt"], chat["text"] != plain["text"]) == ("hello", True)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_precisions(model: Path, prompts: Path, tmp_path: Path, dtype: str) -> None:
    output = tmp_path / "out.jsonl"
    done = llamarl_here("generate", model, "--prompts", prompts, "--output", output, "--generator.dtype", dtype)
    assert done.returncode == 0, done.stderr
    assert sum(row["num_tokens"] > 0 for row in rows(output)) == 2


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--prompts", "/nowhere.jsonl"], ["cannot read /nowhere.jsonl", "--prompts"]),
        (["--field", "question"], ["prompts.jsonl:1", "no `question`", "id, prompt"]),
        (["--field", "id"], ["prompts.jsonl:1", "`id` is 0, not text"]),
        (["--eval.samples", "0"], ["eval.samples = 0"]),
        (["--rollout.max_new_tokens", "0"], ["rollout.max_new_tokens = 0"]),
        (["--eval.temperature", "-1"], ["eval.temperature = -1"]),
        (["--rollout.top_p", "0"], ["rollout.top_p = 0"]),
        (["--rollout.stop_strings", "['']"], ["rollout.stop_strings.0 = ''"]),
        (["--max-new-tokens", "9"], ["--max-new-tokens is now --rollout.max_new_tokens"]),
        (["--stop", "x"], ["--stop is now --rollout.stop_strings"]),
        (["--generator.dtype", "int4"], ["generator.dtype = 'int4'", "int8"]),
        (["--generator.dtype", "fp8"], ["generator.dtype = 'fp8' needs a GPU", "use 'int8'"]),
        (["--generator.device", "tpu"], ["`generator.device`: 'tpu'", "use 'cpu'"]),
        (["--output", "/nowhere/x"], ["cannot write /nowhere/x", "--output"]),
        (["--output", "/dev/full"], ["cannot write /dev/full: No space left on device", "it holds 0 responses"]),
    ],
)
def test_one_sentence_says_what_is_wrong(model: Path, prompts: Path, overrides: list[str], parts: list[str]) -> None:
    done = llamarl_here("generate", model, "--prompts", prompts, "--rollout.max_new_tokens", "2", *overrides)
    lines = [line for line in done.stderr.splitlines() if line.startswith("llamarl generate: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"prompt": "a"}\n{"prompt": \n', ":2: malformed JSON"),
        (b'{"prompt": "a"}\n\n[1]\n', ":3: holds a JSON list"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_files_that_are_no_prompts(model: Path, tmp_path: Path, data: bytes, part: str) -> None:
    file, output = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(data)
    output.write_text("precious")
    done = llamarl_here("generate", model, "--prompts", file, "--output", output)
    assert done.returncode == 2 and part in done.stderr and len(done.stderr.splitlines()) == 1
    assert output.read_text() == "precious"


def test_damaged_weights_leave_the_old_responses(model: Path, prompts: Path, tmp_path: Path) -> None:
    damaged, output = Path(shutil.copytree(model, tmp_path / "damaged")), tmp_path / "out.jsonl"
    (damaged / "model.safetensors").write_bytes(b"nothing")
    output.write_text("precious")
    done = llamarl_here("generate", damaged, "--prompts", prompts, "--output", output)
    assert done.returncode == 2 and "model.safetensors" in done.stderr
    assert output.read_text() == "precious"


@nightly("a command in a process of its own; the same command runs in this one by day")
def test_ctrl_c_keeps_what_is_done(model: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("tell me a story\n" * 20000)
    command = Command.start(
        tmp_path, "generate", model, "--prompts", file, "--output", output, "--generator.max_running", "8"
    )
    command.until(lambda: output.exists() and output.stat().st_size > 2000)
    code, said = command.end(signal.SIGINT)
    assert code == 130
    found = rows(output)
    assert f"interrupted: {len(found)} of 20000 responses" in said and "Traceback" not in said


class Endless:
    """An engine that is slow to finish: what waits in it is what `generate` puts there."""

    def __init__(self) -> None:
        self.waiting, self.most = 0, 0

    @property
    def has_work(self) -> bool:
        return self.waiting > 0

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(waiting=self.waiting)

    def submit(self, requests: list[GenerationRequest]) -> None:
        self.waiting += sum(request.group_size for request in requests)
        self.most = max(self.most, self.waiting)

    def step(self) -> list[Rollout]:
        self.waiting -= 1
        return [None]  # type: ignore[list-item]


def test_the_engine_never_holds_a_large_file() -> None:
    def endless() -> Iterator[GenerationRequest]:
        for number in range(2000):
            yield GenerationRequest(
                group_id=number, prompt_token_ids_T=np.ones(1, np.int32), group_size=3, sampling=SamplingParams()
            )

    engine = Endless()
    assert sum(len(rollouts) for rollouts in generate(engine, endless(), ahead=16)) == 6000
    assert engine.most < 16 + 3


@nightly("a command in a process of its own; the same command runs in this one by day")
def test_a_hundred_thousand_prompts_are_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(100_000)))
    assert read_prompts(file, "prompt")[99_999] == "number 99999"


@nightly("a process; architecture/test_imports.py reads imports by day")
def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom llamarl.cli.main import main\nsys.argv = ['llamarl', 'generate', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "--prompts FILE" in done.stdout, done.stderr
