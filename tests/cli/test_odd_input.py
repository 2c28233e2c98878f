"""Odd values of settings, odd model folders, odd data files, odd paths: exit code 2, one sentence, no hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_bad_input import check, config_with, damaged, rewritten
from tests.end_to_end.tiny import llamarl_here
from tests.nightly import crossed

LIMIT_S = 240.0
Done = subprocess.CompletedProcess[str]
HUGE, DIGITS, LETTERS = str(10**30), "9" * 10_000, "a" * 5_000


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """What hangs fails: by a signal of its own, as a command may set alarms."""

    def end(*_: object) -> None:
        raise AssertionError(f"it hangs: nothing after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(LIMIT_S, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    yield
    timer.cancel()
    timer.join()
    signal.signal(signal.SIGUSR1, before)


def refused(done: Done, *parts: str, command: str = "train") -> None:
    check(done, *parts, command=command)
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr) < 1500, done.stderr[:3000]


def odd_files(folder: Path) -> dict[str, Path]:
    """In place of a file that is to be read."""
    fifo, empty = folder / "fifo", folder / "empty"
    os.mkfifo(fifo)
    empty.touch()
    return {"folder": folder, "fifo": fifo, "device": Path("/dev/zero"), "empty": empty, "long": Path(LETTERS)}


NUMBERS = (
    "steps", "seed", "trainer.learning_rate", "trainer.threads", "rollout.temperature", "rollout.max_new_tokens",
    "rollout.group_size", "generator.kv_cache_bytes", "eval.temperature", "eval.max_prompts", "checkpoint.keep",
)  # fmt: skip
TEXTS = ("name", "model.path", "output", "data.template", "trainer.loss", "cluster.listen", "screen.kind")


@pytest.mark.parametrize("value", ["nan", "inf", HUGE, "-" + HUGE, "-1e300", DIGITS])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers(toml: Path, key: str, value: str) -> None:
    refused(llamarl_here("train", toml, f"--{key}={value}", "--dry-run"), key)


@pytest.mark.parametrize("value", ['"a\\u0000b"', "a\udcffb", LETTERS])
@pytest.mark.parametrize("key", TEXTS)
def test_texts(toml: Path, key: str, value: str) -> None:
    if (key, value) == ("data.template", LETTERS):
        pytest.skip("a template may be long")
    done = llamarl_here("train", toml, "--dry-run", f"--{key}", value)
    if done.returncode == 0:  # what only a run writes to
        done = llamarl_here("train", toml, f"--{key}", value)
    refused(done)
    assert key in done.stderr or LETTERS[:150] in done.stderr


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--rollout.temperature", "1e-300"], ["rollout.temperature"]),
        (["--eval.temperature", "1e-300"], ["eval.temperature", "0 (greedy)"]),
        (["--rollout.max_new_tokens", "100000", "--trainer.microbatch_tokens", "200000"], ["rollout.max_new_tokens"]),
        (["--reward.parts", f"[{{name = 'code', memory_bytes = {HUGE}}}]"], ["reward.parts", "bits"]),
        (["--reward.parts", "[{name = 'code', cpu_s = 0}]"], ["cpu_s"]),
        (["--" + LETTERS, "1"], ["unknown option"]),
        (["--" + ".".join("a" * 5000), "1"], []),
        (["--steps", "[" * 100_000], ["steps"]),
    ],
)
def test_settings_that_cannot_work(toml: Path, overrides: list[str], parts: list[str]) -> None:
    refused(llamarl_here("train", toml, *overrides), *parts)


@pytest.mark.parametrize(
    ("command", "text"),
    crossed(
        ["train", "sft", "explain", "simulate"],
        ["x = " + "[" * 100_000, f"steps = {DIGITS}", "a." * 5000 + "a = 1", "\0", "a = '\ufffe", f"[{LETTERS}]"],
    ),
)
def test_toml_files(tmp_path: Path, command: str, text: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    refused(llamarl_here(command, path), command=command)


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "long"])
@pytest.mark.parametrize(
    ("command", "before"),
    [("train", ()), ("sft", ()), ("explain", ()), ("simulate", ()), ("plan", ("--gpus", "8", "--run")),
     ("generate", ("--model", "MODEL", "--prompts")), ("eval", ("--data",))],
)  # fmt: skip
def test_files_to_read(model: Path, tmp_path: Path, command: str, before: tuple[str, ...], kind: str) -> None:
    words = [str(model) if word == "MODEL" else word for word in before]
    if command == "eval":
        words = [model, *words]
    done = llamarl_here(command, *words, odd_files(tmp_path)[kind])
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "empty", "long"])
@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_data_files(toml: Path, tmp_path: Path, key: str, kind: str) -> None:
    path = odd_files(tmp_path)[kind]
    refused(llamarl_here("train", toml, f"--{key}", f"{{name = 'jsonl', path = '{path}'}}"), str(path)[:100])


ROW = {"question": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"question": "a", "answer": "1", "answer": "2"}', "'answer' appears twice"),
        ('{"question": "a", "answer": ' + DIGITS + "}", "cannot be read"),
        ('{"question": "a", "answer": "1", "x": ' + "[" * 100_000, "cannot be read"),
        ('{"question": "a", "answer": NaN}', "NaN is not a number"),
        (json.dumps(ROW | {"question": "a" * (1 << 21)}), "too long"),
        ("a" * (1 << 21), "too long"),
        ('{"question": "\\ud800", "answer": "1"}', "lone surrogate"),
        ("\0", "malformed JSON"),
        ("[]", "not an object"),
        ('{"question": ["a"], "answer": "1"}', "not text"),
        ('{"question": "a", "answer": true}', "not text or a number"),
    ],
)
def test_rows(toml: Path, tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    refused(llamarl_here("train", toml, "--data.train", f"{{name = 'jsonl', path = '{path}'}}"), f"{path}:1", part)


def replaced_by(kind: str, file: str) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        (model / file).unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(model / file)
        elif kind == "folder":
            (model / file).mkdir()
        elif kind == "device":
            (model / file).symlink_to("/dev/zero")
        else:
            (model / file).touch()

    return change


def two_of_one_id(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    names = list(content["model"]["vocab"])
    content["model"]["vocab"][names[-1]] = content["model"]["vocab"][names[0]]
    path.write_text(json.dumps(content))


def header_with(**values: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        data = (model / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.dumps(json.loads(data[8 : 8 + size]) | values).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (config_with(tie_word_embeddings="x"), "tie_word_embeddings"),
        (config_with(num_experts=8), "num_experts"),
        (config_with(num_local_experts=8), "num_local_experts"),
        (config_with(architectures=["Qwen2ForCausalLM"]), "architectures"),
        (config_with(max_position_embeddings=10**12), "max_position_embeddings"),
        (config_with(max_position_embeddings=10**30), "max_position_embeddings"),
        (config_with(vocab_size=10**30), "vocab_size"),
        (config_with(hidden_size=True), "hidden_size"),
        (config_with(num_attention_heads=-1), "num_attention_heads"),
        (config_with(head_dim=0.5), "head_dim"),
        (config_with(intermediate_size="a" * 5000), "intermediate_size"),
        (rewritten("config.json", '{"model_type": "llama", "model_type": "qwen2"}'), "'model_type' appears twice"),
        (rewritten("generation_config.json", '{"eos_token_id": 400}'), "eos_token_id"),
        (rewritten("generation_config.json", '{"eos_token_id": -1}'), "eos_token_id"),
        (two_of_one_id, "two tokens the same id"),
        (header_with(__metadata__="x"), "model.safetensors"),
        (rewritten("chat_template.jinja", "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4), "took over"),
        (rewritten("model.safetensors", ""), "model.safetensors"),
        *[
            (replaced_by(kind, file), file.split(".")[0])
            for kind in ("folder", "fifo", "device", "empty")
            for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
            if (kind, file) != ("folder", "generation_config.json")
        ],
        *[(replaced_by(kind, "model.safetensors"), "model.safetensors") for kind in ("folder", "fifo", "device")],
    ],
)
def test_model_folders(
    toml: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
    part: str,
) -> None:
    monkeypatch.setattr("llamarl.data.tokenizer._MOST_RENDER_S", 1.0)  # a template without end is computed until then
    path = damaged(model, tmp_path, change)
    template = ["--data.template", "chat"] if (path / "chat_template.jinja").exists() else []
    refused(llamarl_here("train", toml, *template, "--model.path", path), part)


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "journal.jsonl", "config.toml"])
@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_run_folders(toml: Path, tmp_path: Path, file: str, kind: str) -> None:
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    shutil.copy(toml, run / "config.toml")
    replaced_by(kind, file)(run)
    refused(llamarl_here("train", toml, "--resume"), str(run / file))


OUTPUTS = (
    ("plan", "--model", "llama3-8b", "--gpus", "8", "--output"), ("export", "RUN", "--rollouts", "--output"),
    ("report", "RUN", "--output"), ("eval", "MODEL", "DATA", "--output"), ("eval", "MODEL", "DATA", "--rates"),
    ("generate", "MODEL", "--prompts", "DATA", "--field", "question", "--output"),
)  # fmt: skip


@pytest.mark.parametrize("words", OUTPUTS, ids=lambda words: "".join(words[::3]))
def test_outputs_take_the_place_of_nothing_that_is_needed(
    toml: Path, model: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """And what cannot be written is told before anything is computed."""
    (run := tmp_path / "runs" / "tiny").mkdir(parents=True)
    shutil.copy(toml, run / "config.toml")
    (data := tmp_path / "data.jsonl").write_text(json.dumps(ROW) + "\n")
    for name in (".lock", "metrics.jsonl", "metrics-00001.jsonl.gz", "journal/00000001.groups", "checkpoints/step"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    command, *rest = [{"RUN": str(run), "MODEL": str(model), "DATA": str(data)}.get(word, word) for word in words]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in sorted(set(before) - {data, toml}):
        refused(llamarl_here(command, *rest, path), words[-1], f"{path} belongs to the record of run", command=command)
    refused(llamarl_here(command, *rest, tmp_path / "none" / "x"), "there is no folder", command=command)
    if str(data) in rest:
        refused(llamarl_here(command, *rest, data), f"{data} is a file that this command reads", command=command)
    assert {path: path.read_bytes() for path in before} == before


def test_no_files(toml: Path) -> None:
    refused(llamarl_here("train", toml, "--data.train", "{name = 'file', path = []}"), "path = [] names no file")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--against", "RUN", "--only", "train"], "leave --only and --steps out"),
        (["--against", "RUN", "--steps", "1:2"], "leave --only and --steps out"),
        (["--name", "other"], "--trainer.learning_rate VALUE"),
        (["--overwrite"], "--trainer.learning_rate VALUE"),
        (["--name", "../other", "--trainer.learning_rate", "1.0"], "`name = '../other'`"),
    ],
)
def test_what_replay_would_not_heed(toml: Path, tmp_path: Path, words: list[str], part: str) -> None:
    shutil.copy(toml, tmp_path / "config.toml")
    (tmp_path / "journal.jsonl").write_text('{"step": 1, "groups": [0]}\n')
    rest = [str(tmp_path) if word == "RUN" else word for word in words]
    refused(llamarl_here("replay", tmp_path, *rest), part, command="replay")


@pytest.mark.parametrize("jobs", ["0", "-3"])
def test_replay_by_nobody(tmp_path: Path, jobs: str) -> None:
    refused(llamarl_here("replay", tmp_path, "--jobs", jobs), f"--jobs {jobs}", command="replay")
