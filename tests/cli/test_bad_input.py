"""A user's mistake: exit code 2, one sentence on stderr that names it and the way out, and nothing is lost or left."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.tiny import LLAMARL, ROOT, environment, llamarl_here
from tests.nightly import nightly

Done = subprocess.CompletedProcess[str]


def check(done: Done, *parts: str, command: str = "train") -> None:
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.strip().splitlines() if not line.endswith("; Ctrl-C ends it")]
    assert len(lines) == 1, f"more than one line: {done.stderr}"
    assert lines[0].startswith(f"llamarl {command}: ")
    for part in parts:
        assert part in lines[0], lines[0]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--trainer.learning_rat", "1"], ["`trainer.learning_rat`", "did you mean `learning_rate`?"]),
        (["--rollout.group-sizes", "4"], ["did you mean `group_size`?"]),
        (["--steps", "many"], ["steps", "'many'", "integer"]),
        (["--trainer.learning_rate", "true"], ["trainer.learning_rate", "number"]),
        (["--steps", "0"], ["`steps = 0`"]),
        (["--rollout.group_size", "1"], ["rollout.group_size = 1", "group_mean", "2 or more"]),
        (["--rollout.window", "9"], ["rollout.window = 9", "4 groups", "lower the window"]),
        (["--trainer.decay", "linear"], ["trainer.decay = 'linear'", "set decay_steps"]),
        (["--trainer.loss.name", "aipoo"], ["trainer.loss", "aipo"]),
        (["--trainer.loss", "aipo", "--trainer.loss.rhos", "2"], ["trainer.loss", "did you mean `rho`?"]),
        (["--reward.parts", "[{name = 'exakt'}]"], ["reward.parts", "exact"]),
        (["--reward.parts", "['tests.cli.nowhere:Reward']"], ["reward.parts", "tests.cli.nowhere"]),
        (["--reward.weights", "[1.0, 2.0]"], ["reward.weights has 2 numbers for 1 parts"]),
        (["--cluster.kind", "slurm"], ["cluster.kind", "'monarch', 'processes', 'hosts' or 'inline'"]),
        (["--cluster.kind", "hosts", "--cluster.listen", "127.0.0.2:65536"], ["cluster.listen", "ports end at 65535"]),
        (["--name", "../escape"], ["name", "'../escape'"]),
        (["--data.template", "no place"], ["data.template", "use {question}"]),
        (["--steps"], ["--steps", "no value"]),
        (["--seed", "1" + "0" * 30], ["seed"]),
        (["--rollout.prompts_per_step", "1000000000"], ["rollout.prompts_per_step"]),
        (["--rollout.group_size", "1000000"], ["rollout.group_size"]),
        (["--rollout.temperature", "1e300"], ["rollout.temperature"]),
        (["--trainer.learning_rate", "1e300"], ["trainer.learning_rate"]),
        (["--trainer.lora.rank", "1000000"], ["trainer.lora.rank"]),
        (["--trainer.parallelism.fsdp", "1000000"], ["trainer.parallelism.fsdp"]),
        (["--trainer.threads", "1000000"], ["trainer.threads"]),
        (["--generator.replicas", "1000000"], ["generator.replicas"]),
        (["--generator.max_running", "1000000000"], ["generator.max_running"]),
        (["--reward.weights", "[0.0]"], ["reward.weights are all 0"]),
        (["--reward.weights", "[1e-300]"], ["reward.weights", "1e-300"]),
        (["--reward.parts", "['exact', 'gsm8k']", "--reward.weights", "[1e300, 1.0]"], ["reward.weights", "1e+300"]),
        (["--trainer.lora.rank", "2", "--trainer.lora.targets", "['q_proj', 'q_proj']"], ["trainer.lora.targets"]),
        (["--generator.device", "cuda:\u0663"], ["generator.device"]),
        (["--data.eval", "[{name = 'running_total', label = '..'}]"], ["data.eval", "label", "'..'"]),
        (["--data.eval", "[{name = 'running_total', label = '.'}]"], ["data.eval", "label", "'.'"]),
        (
            ["--data.train", "[{name = 'running_total', weight = 1e-9}, {name = 'exact', label = 'b', weight = 10}]"],
            ["data.train", "weight", "1e-09"],
        ),
        (["--data.train", "{name = 'file', path = 3}"], ["`data.train.path = 3`", "string"]),
        (["--data.train", "{name = 'file', path = ['README.md', './README.md']}"], ["path", "README.md", "twice"]),
        (["--dry-run", "--gpus", ""], ["--gpus = ''", "8x80"]),
        (["--dry-run", "--gpus", "00x80"], ["--gpus = '00x80'"]),
        (["--dry-run", "--gpus", "\u0668x80"], ["--gpus", "8x80"]),
        (["--data.train", "{name = 'running_total', count = 1000000000}"], ["data.train.count"]),
        (["--data.train", "{name = 'running_total', count = 4, first = 1000000000000}"], ["data.train.first"]),
        (["--resume", "--overwrite"], ["--resume and --overwrite contradict each other"]),
        (["--resume"], ["there is no run", "without --resume"]),
    ],
)
def test_settings(toml: Path, overrides: list[str], parts: list[str]) -> None:
    check(llamarl_here("train", toml, *overrides), *parts)
    assert not (toml.parent / "runs").exists()


def test_no_port_of_a_controller() -> None:
    check(llamarl_here("host", "127.0.0.2:65536"), "ADDRESS '127.0.0.2:65536' is not address:port", command="host")
    away = llamarl_here("host", "127.0.0.2:6700", "--address", "127.0.0.3", "--weights-address", "192.0.2.1")
    check(away, "--weights-address 192.0.2.1: this machine has no such IPv4 address", command="host")
    near = llamarl_here("host", "127.0.0.2:6700", "--address", "node-b", "--weights-address", "127.0.0.1")
    check(near, "--weights-address 127.0.0.1: other hosts do not reach it", command="host")
    away = llamarl_here("host", "127.0.0.2:6700", "--address", "192.0.2.1")
    check(away, "--address 192.0.2.1: this machine has no such IPv4 address", command="host")


def test_a_microbatch_that_is_too_small_for_a_sequence(toml: Path) -> None:
    """Refused with the size that it takes, before anything starts."""
    done = llamarl_here("train", toml, "--trainer.microbatch_tokens", "20")
    parts = ["trainer.microbatch_tokens = 20 is less than", "(rollout.max_new_tokens = 12)", "GiB for activations"]
    check(done, *parts)
    needed = re.search(r"raise it to (\d+),", done.stderr)
    assert needed is not None
    done = llamarl_here("train", toml, "--trainer.microbatch_tokens", needed[1], "--dry-run")
    assert done.returncode == 0, done.stderr


def test_compiling_without_a_compiler(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check(llamarl_here("train", toml, "--trainer.compile", "true"), "trainer.compile = true", "no-such-compiler")


def damaged(model: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(model, folder / "damaged"))
    change(copy)
    return copy


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fewer_embeddings(model: Path) -> None:
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"vocab_size": 270}))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda model: (model / "config.json").unlink(), ["damaged has no config.json"]),
        (lambda model: halve(model / "config.json"), ["config.json"]),
        (lambda model: (model / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (lambda model: halve(model / "tokenizer.json"), ["tokenizer.json"]),
        (fewer_embeddings, ["300 tokens", "vocab_size is 270", "use the tokenizer that the model was trained with"]),
    ],
)
def test_model_folder(
    toml: Path, model: Path, tmp_path: Path, change: Callable[[Path], object], parts: list[str]
) -> None:
    check(llamarl_here("train", toml, "--model.path", damaged(model, tmp_path, change)), *parts)
    assert not (toml.parent / "runs").exists()


def config_with(**values: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def rewritten(file: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(text)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (config_with(rope_theta=0), "`rope_theta` = 0"),
        (config_with(rope_theta="x"), "`rope_theta` = 'x'"),
        (config_with(rope_theta=float("nan")), "`rope_theta` = nan"),
        (config_with(rope_scaling="llama3"), "a table of names and values is needed"),
        (config_with(rms_norm_eps=-1), "`rms_norm_eps` = -1"),
        (config_with(rms_norm_eps=None), "`rms_norm_eps` = None"),
        (config_with(model_type=["llama"]), "is none of the families"),
        (rewritten("generation_config.json", '{"eos_token_id": 999999}'), "eos_token_id = 999999 is none of the 300"),
        (config_with(num_hidden_layers=10**6), "1000000 layers"),
        (config_with(use_sliding_window=True, sliding_window=8), "`sliding_window` = 8"),
        (rewritten("config.json", "[" * 10**5), "is not valid JSON"),
        (rewritten("config.json", '{"hidden_size": ' + "9" * 5000 + "}"), "is not valid JSON"),
        (rewritten("tokenizer.json", '{"model": {"type": "Rubbish"}}'), "tokenizer.json cannot be read"),
        (rewritten("tokenizer_config.json", '{"eos_token": 5}'), "eos_token = 5 is not text"),
        (rewritten("tokenizer_config.json", '{"eos_token": {"a": "b"}}'), "eos_token = {'a': 'b'} is not text"),
        (rewritten("generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id = {'a': 1}"),
        (rewritten("generation_config.json", '{"eos_token_id": ["a"]}'), "eos_token_id"),
    ],
)
def test_model_files_that_mean_nothing(
    toml: Path, model: Path, tmp_path: Path, change: Callable[[Path], object], part: str
) -> None:
    check(llamarl_here("train", toml, "--model.path", damaged(model, tmp_path, change)), part)
    assert not (toml.parent / "runs").exists()


@pytest.mark.parametrize(
    ("template", "part"),
    [("{{ messages[0].content.nothing() }}", "no attribute"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
     ("{{ 'a' + 1 }}", "TypeError")],
)  # fmt: skip
def test_chat_templates_that_fail(toml: Path, model: Path, tmp_path: Path, template: str, part: str) -> None:
    folder = damaged(model, tmp_path, rewritten("chat_template.jinja", template))
    done = llamarl_here("train", toml, "--model.path", folder, "--data.template", "chat")
    check(done, "the chat template refuses these messages", part)


@pytest.mark.parametrize(
    ("value", "dtype", "part"),
    [
        (float("nan"), torch.float32, "model.norm.weight` holds NaN or infinity"),
        (float("inf"), torch.bfloat16, "model.norm.weight` holds NaN or infinity"),
        (0.0, torch.float32, "model.norm.weight` is 0 throughout"),
        (1, torch.int8, "model.norm.weight` has the type I8"),
        (1, torch.bool, "model.norm.weight` has the type BOOL"),
        (1, torch.float8_e4m3fn, "model.norm.weight` has the type F8_E4M3"),
    ],
)
def test_weights_that_mean_nothing(
    toml: Path, model: Path, tmp_path: Path, value: float, dtype: torch.dtype, part: str
) -> None:
    """The model is blamed, by the name of the tensor, before anything is generated."""

    def change(copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        norm_D = torch.ones(weights["model.norm.weight"].shape).index_fill_(0, torch.tensor([3]), value)
        weights["model.norm.weight"] = (norm_D if value else 0 * norm_D).to(dtype)
        save_file(weights, copy / "model.safetensors")

    folder = damaged(model, tmp_path, change)
    check(llamarl_here("train", toml, "--model.path", folder, "--cluster.kind", "inline"), str(folder), part)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("raise KeyError('x')", "KeyError"),
        ("class Mine(Reward): ...", "abstract"),
        ("class Mine:\n    def score(self, items): ...", "has no method `close`"),
    ],
)
def test_rewards_of_the_user_s_own(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, part: str
) -> None:
    name = f"own_{abs(hash(body))}"
    head = "from dataclasses import dataclass\nfrom llamarl.rewards import Reward\n@dataclass\n"
    (tmp_path / f"{name}.py").write_text(head + body if body.startswith("class") else body)
    monkeypatch.syspath_prepend(tmp_path)
    check(llamarl_here("train", toml, "--reward.parts", f"['{name}:Mine']"), "reward.parts", part)


def test_missing_model_folder(toml: Path) -> None:
    check(llamarl_here("train", toml, "--model.path", "/nowhere/model"), "/nowhere/model")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["problems.jsonl:1", "empty"]),
        ("\n \n", ["problems.jsonl:1", "empty"]),
        ('{"question": "a", "answer": "1"}\n{"question": "b", \n', ["problems.jsonl:2", "malformed JSON"]),
        ('{"question": "a", "answer": "1"}\n[1, 2]\n', ["problems.jsonl:2", "list"]),
        ('{"question": "a", "answer": "1"}\n\n{"answer": "1"}\n', ["problems.jsonl:3", "`question`"]),
        ('{"question": "a"}\n', ["problems.jsonl:1", "`answer`"]),
        ('{"question": "a", "answer": NaN}\n', ["problems.jsonl:1", "NaN is not a number"]),
        ('{"question": "\\ud800", "answer": "1"}\n', ["problems.jsonl:1", "lone surrogate"]),
        ('{"question": "a", "answer": ' + "9" * 5000 + "}", ["problems.jsonl:1", "cannot be read"]),
        ("[" * 100_000, ["problems.jsonl:1", "cannot be read"]),
        ('{"question": "' + "a" * (2 << 20) + '", "answer": "1"}', ["problems.jsonl:1", "a row may have 1,048,576"]),
    ],
)
@pytest.mark.parametrize("which", ["train", "eval"])
def test_problem_files(toml: Path, tmp_path: Path, which: str, text: str, parts: list[str]) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(text)
    check(llamarl_here("train", toml, f"--data.{which}", f"{{name = 'jsonl', path = '{file}'}}"), *parts)
    assert not (toml.parent / "runs").exists()


def test_missing_problem_file(toml: Path) -> None:
    check(llamarl_here("train", toml, "--data.train", "{name = 'jsonl', path = '/nowhere.jsonl'}"), "/nowhere.jsonl")


def test_prompts_that_are_too_long_are_refused_or_skipped_and_counted(toml: Path, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    lines = [{"question": "x " * words, "answer": "1", "id": f"of-{words}"} for words in (3, 500, 4, 700)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["--data.train", f"{{name = 'jsonl', path = '{file}'}}", "--cluster.kind", "inline", "--steps", "1"]
    refused = llamarl_here("train", toml, *data, "--data.overlong_prompts", "refuse")
    check(refused, "data.train", "'of-500'", "at most 255 fit", "data.overlong_prompts = 'skip'")
    skipped = llamarl_here("train", toml, *data)
    assert skipped.returncode == 0, skipped.stderr
    assert "warning: data.train: 2 prompts are too long and were skipped" in skipped.stderr
    none_left = llamarl_here("train", toml, *data, "--data.max_prompt_tokens", "1", "--overwrite")
    check(none_left, "each of the 4 prompts has more than 1 tokens", "raise data.max_prompt_tokens")


def test_an_existing_run_is_not_touched(toml: Path) -> None:
    folder = toml.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("precious")
    check(llamarl_here("train", toml), str(folder), "--resume", "--overwrite", "--name")
    check(llamarl_here("train", toml, "--overwrite", "--model.path", "/nowhere"), "/nowhere")
    check(llamarl_here("train", toml, "--overwrite", "--trainer.loss", "aipoo"), "trainer.loss")
    assert (folder / "config.toml").read_text() == "precious", "a run that cannot start has deleted another"


@pytest.mark.parametrize("is_file", [False, True])
def test_overwrite_deletes_nothing_but_runs(toml: Path, is_file: bool) -> None:
    folder = toml.parent / "runs" / "tiny"
    if is_file:
        folder.parent.mkdir()
        folder.write_text("precious")
    else:
        folder.mkdir(parents=True)
        (folder / "thesis.tex").write_text("precious")
    check(llamarl_here("train", toml, "--overwrite"), str(folder), "not only a run folder")
    assert folder.read_text() == "precious" if is_file else (folder / "thesis.tex").exists()


def test_output_that_cannot_be_written(toml: Path) -> None:
    check(llamarl_here("train", toml, "--output", "/proc/nowhere"), "cannot write to /proc/nowhere/tiny", "--output")
    file = toml.parent / "file"
    file.write_text("")
    check(llamarl_here("train", toml, "--output", file), "cannot write to", "--output")


@pytest.mark.parametrize("who", ["generator", "trainer"])
def test_a_gpu_that_is_not_there(toml: Path, who: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    check(llamarl_here("train", toml, f"--{who}.device", "cuda", "--cluster.kind", "inline"), f"{who}.device", "cuda")


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    check(llamarl_here("train", tmp_path / "none.toml"), "none.toml", "cannot read")
    (tmp_path / "bad.toml").write_text("steps = \n")
    check(llamarl_here("train", tmp_path / "bad.toml"), "bad.toml", "not valid TOML")
    check(llamarl_here("train", tmp_path), str(tmp_path), "cannot read")


def test_unknown_commands() -> None:
    done = llamarl_here("trian")
    assert (done.returncode, done.stderr) == (2, done.stderr) and "unknown command `trian`" in done.stderr


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    check(llamarl_here("export", tmp_path), str(tmp_path), "config.toml", command="export")


def test_what_takes_long_says_where_it_is(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.observability.spans.DELAY_S", 0.2)
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(0.7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = llamarl_here("train", toml, "--reward.parts", "['sleeps:Mine']")
    assert done.returncode == 2
    assert "llamarl train: still importing the modules that the settings name; Ctrl-C ends it" in done.stderr


@pytest.mark.parametrize("output", ["ascii", "closed"])
def test_a_finished_run_is_one_wherever_its_output_goes(toml: Path, output: str) -> None:
    to = io.TextIOWrapper(io.BytesIO(), encoding="ascii") if output == "ascii" else None
    done = llamarl_here("train", toml, "--cluster.kind", "inline", "--steps", "1", to=to)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert json.loads((toml.parent / "runs/tiny/summary.json").read_text())["end"] == "finished"
    assert to is None or r"\u" in to.buffer.getvalue().decode("ascii")


@nightly("by day outputs of a finished run go nowhere in other ways, and end_to_end/test_disk.py fills a disk")
def test_a_finished_run_is_one_on_a_full_disk(toml: Path) -> None:
    command = f"{shlex.join(map(str, LLAMARL))} train {toml} --cluster.kind inline --steps 1 > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device while writing the output; the summary is in" in done.stderr


def test_surroundings_that_nothing_can_work_in(toml: Path, tmp_path: Path) -> None:
    for start, part in (("ulimit -n 40", "allows 40 open files"), ("cd $(mktemp -d); rmdir $PWD", "has been deleted")):
        command = f"{start}; {shlex.join(map(str, LLAMARL))} train {toml}"
        env = environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=tmp_path)
        check(done, part)
