"""`llamarl plan` as a user types it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from llamarl.config import ConfigError, load_config
from llamarl.models.folder import load_shape
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes
from llamarl.parts.forecast.cli.plan import main
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import GPUS
from llamarl.parts.forecast.report import choose
from llamarl.parts.forecast.run_file import run_toml
from llamarl.parts.forecast.shapes import MODELS, find_model
from llamarl.parts.hosts.hosting import imagined
from llamarl.run.memory import MachineMemory, check_memory
from tests.end_to_end.tiny import llamarl_here
from tests.nightly import nightly, some
from tests.parts.forecast.conftest import make_request

SMALL = ["--model", "llama3-8b", "--gpus", "16", "--rollout.prompts_per_step", "32"]
PROBE = """
import sys
from llamarl.parts.forecast.cli.plan import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


@pytest.mark.parametrize(("gpus", "limit_s"), some([(1024, 60.0), (16_384, 240.0)], 1))
def test_answers_in_time_without_torch(gpus: int, limit_s: float) -> None:
    words = ["--model", "llama3-405b", "--gpus", str(gpus), "--rollout.max_new_tokens", "4096"]
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start_s < limit_s
    assert "Use the asynchronous plan" in done.stdout


def test_report_says_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    for word in (
        "step time, s",
        "samples per s",
        "$ per 1M samples",
        "bound by",
        "GB/GPU",
        "staleness",
        "busy",
        "Use the",
    ):
        assert word in text


def test_writes_a_run_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    main([*SMALL, "--output", str(path), "--data", "problems.jsonl"])
    config = load_config(path)
    assert config.rollout.prompts_per_step == 32
    assert config.rollout.max_staleness >= 1
    assert config.cluster.placement == "disaggregated"
    assert config.data.train.options == {"path": "problems.jsonl"}


SHAPES = {"llama3-8b": 64, "llama3-405b": 1024, "qwen3-235b-a22b": 256, "glm-4.5-air": 64}
"""GPUs of each plan that a run is asked to take over."""


def write_shape(folder: Path, name: str) -> Path:
    """A model folder without weights: what decides a layout is in `config.json`."""
    folder.mkdir()
    shape = ModelShape(**{field.name: getattr(MODELS[name], field.name) for field in dataclasses.fields(DecoderSizes)})
    (folder / "config.json").write_text(json.dumps(shape.to_hf()))
    return folder


@pytest.mark.parametrize(
    ("name", "gpus", "kind", "tokens", "is_less"),
    [
        ("qwen3-1.7b", 1, "h100-80g", 4096, False), ("llama3-8b", 8, "a100-40g", 4096, False),
        ("qwen3-4b", 8, "a100-40g", 1024, True), ("qwen2.5-0.5b", 1, "h100-80g", 1024, False),
    ],
)  # fmt: skip
def test_a_shared_cache_is_one_that_a_start_accepts(
    tmp_path: Path, name: str, gpus: int, kind: str, tokens: int, is_less: bool
) -> None:
    """In turns with activations, as in the plan; a start counts more."""
    path, words = tmp_path / "run.toml", ("--rollout.max_staleness", "0", "--rollout.max_new_tokens", str(tokens))
    model = write_shape(tmp_path / name, name)
    main(["--model", str(model), "--gpus", str(gpus), "--gpu", kind, "--output", str(path), *words])
    config, shape, each = load_config(path), load_shape(str(model)), int(GPUS[kind].memory_bytes)
    machine = MachineMemory(host=1e13, gpus=(each,) * gpus)
    check_memory(config, shape, machine)
    cache = config.generator.kv_cache_bytes
    assert config.cluster.placement == "colocated" and cache
    text = path.read_text()
    assert ("counts more than the plan" in text) == is_less
    if is_less:
        planned = float(re.findall(r"GB \(planned: ([0-9.]+)\)", text)[0]) * 1e9
        tokens = int(re.findall(r"tokens \(planned: (\d+)", text)[0])
        assert planned > cache or tokens > config.trainer.microbatch_tokens
    kept = tmp_path / "kept.toml"
    path.write_text(re.sub(r"kv_cache_bytes = \d+", "kv_cache_bytes = 2000000000", text))
    main(["--config", str(path), "--gpus", str(gpus), "--gpu", kind, "--output", str(kept)])
    assert load_config(kept).generator.kv_cache_bytes == 2_000_000_000, "one that the user has set stays"


def test_a_synchronous_plan_is_a_run_of_one_machine() -> None:
    """Its roles share GPUs, which those of several hosts cannot."""
    wanted = {
        "prompt_tokens": 512,
        "prompts_per_step": 32,
        "max_staleness": 4,
        "mean_tokens": 400,
        "limit_tokens": 1024,
    }
    for gpus, is_refused in ((8, False), (16, True)):
        request = make_request("llama3-8b", gpus, **wanted)
        synchronous, _ = plans(request)
        assert synchronous and synchronous.gpus == gpus
        if is_refused:
            cause = f"shares {gpus} GPUs, and cluster.placement = 'colocated' is for one machine of 8"
            with pytest.raises(ConfigError, match=cause):
                run_toml(synchronous, data_path="d.jsonl")
        else:
            found = tomllib.loads(run_toml(synchronous, data_path="d.jsonl"))["cluster"]
            assert (found["placement"], found["num_hosts"]) == ("colocated", 1)


@nightly("starts a run for each plan; by day settings of a plan are accepted")
@pytest.mark.parametrize(("name", "gpus"), SHAPES.items())
def test_a_plan_is_a_run_that_train_accepts(tmp_path: Path, name: str, gpus: int) -> None:
    """Every choice of the plan is a setting, and `explain` holds it against the model's sizes."""
    path, model = tmp_path / "run.toml", write_shape(tmp_path / name, name)
    main(["--model", str(model), "--gpus", str(gpus), "--output", str(path)])
    shape = find_model(str(model))
    work = {"prompt_tokens": 512, "prompts_per_step": 256, "max_staleness": 4}
    request = make_request(shape, gpus, mean_tokens=0.3 * 4096, limit_tokens=4096, **work)
    plan = choose(*plans(request))
    said = llamarl_here("explain", path, "--json")
    assert said.returncode == 0, said.stderr
    found = load_config(path).model_dump()
    trainer, generator = plan.trainer, plan.generator
    layout = {"fsdp": trainer.dp, "tp": trainer.tp, "pp": trainer.pp, "cp": trainer.cp, "ep": trainer.ep}
    assert found["trainer"]["parallelism"] == layout
    assert found["trainer"]["microbatch_tokens"] == trainer.microbatch_tokens
    assert found["trainer"]["activation_checkpointing"], "the plan's memory counts on it"
    assert (found["generator"]["tensor_parallel"], found["generator"]["replicas"]) == (generator.tp, generator.replicas)
    assert (found["generator"]["dtype"], found["generator"]["max_running"]) == ("fp8", generator.slots)
    assert found["rollout"]["max_staleness"] == plan.staleness
    assert trainer.gpus + generator.tp * generator.replicas <= gpus
    assert "have none" not in said.stderr, "every rank of the trainer has a group"
    assert (found["cluster"]["kind"], found["cluster"]["num_hosts"]) == ("hosts", plan.num_hosts)
    assert gpus // 8 - 1 <= plan.num_hosts <= gpus // 8
    hosting, per_host = imagined(load_config(path))
    assert per_host <= 8
    assert len(hosting.of_role("generator")) == generator.replicas
    wrong = llamarl_here("explain", path, "--trainer.parallelism.tp", "3")
    assert wrong.returncode == 2
    cannot = rf"parallelism.tp = \d cannot share the ({shape.num_heads} attention heads|\d+ columns of the experts) of"
    assert re.search(cannot, wrong.stderr)


def test_settings_that_do_not_go_with_the_plan_are_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    main([*SMALL, "--output", str(first)])
    first.write_text(first.read_text().replace('kind = "hosts"', 'kind = "inline"').replace("tensor_parallel", "#"))
    left_out = r"(?m)^(fsdp|tp|pp|cp|ep|listen|pki|num_hosts) = .*$"
    first.write_text(re.sub(left_out, "", first.read_text()))
    with pytest.raises(ConfigError, match=r"cluster.kind = 'inline' has only one; use cluster.kind = 'monarch'"):
        main(["--config", str(first), "--gpus", "64", "--output", str(second)])


def test_takes_a_run_and_keeps_its_other_settings(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    main([*SMALL, "--output", str(first)])
    first.write_text(first.read_text().replace("learning_rate = 1e-06", "learning_rate = 3e-06"))
    main(["--config", str(first), "--gpus", "2", "--gpu", "h200-141g", "--output", str(second)])
    config = load_config(second)
    assert config.trainer.learning_rate == 3e-6
    assert config.rollout.prompts_per_step == 32
    assert (config.cluster.placement, config.rollout.max_staleness) == ("colocated", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], r"0 GPUs .* use --gpus 1"),
        (["--gpus", "-3"], r"-3 GPUs"),
        (
            ["--gpus", "8", "--rollout.max_new_tokens", "200000"],
            r"exceed the context .* by 69440; use --rollout.max_new_tokens 130560",
        ),
        (["--gpus", "8", "--data.max_prompt_tokens", "200000"], r"use --data.max_prompt_tokens 65536 or less"),
        (["--gpus", "8", "--rollout.max_new_tokens", "0"], r"rollout.max_new_tokens = 0"),
        (["--gpus", "8", "--rollout.group_size", "0"], r"rollout.group_size = 0"),
        (["--gpus", "8", "--response-tokens", "9"], r"--response-tokens is now --rollout.max_new_tokens"),
        (["--gpus", "8", "--gpu", "h100"], r"did you mean `h100-80g`"),
        (["--gpus", "8", "--mean-response-tokens", "9000"], r"limit of 4096"),
        (["--gpus", "8", "--output", "/nowhere/run.toml"], r"cannot write"),
        (["--gpus", "8", "--price", "-1"], r"not a price"),
        (["--gpus", "8", "--rollouts", "/nowhere"], r"cannot read /nowhere: .*give the folder of a run"),
    ],
)
def test_a_wrong_request_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["--model", "llama3-8b", *words])


@nightly("plans of large models; by day a plan for one machine is made and accepted")
def test_a_model_that_does_not_fit_gets_the_nearest_cluster_that_works() -> None:
    words = ["--model", "llama3-405b", "--rollout.max_staleness", "1"]
    with pytest.raises(ConfigError, match=r"trainer needs at least .* GB more .* usable; use --gpus (\d+)") as caught:
        main([*words, "--gpus", "4"])
    fewest = int(str(caught.value).split("use --gpus ")[1].split(",")[0])
    assert main([*words, "--gpus", str(fewest)]) == 0
    with pytest.raises(ConfigError):
        main([*words, "--gpus", str(fewest - 1)])


def test_a_folder_for_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "here"
    assert main([*SMALL, "--folder", str(folder)]) == 0
    found = json.loads((folder / "forecast.json").read_text())
    said = capsys.readouterr().out
    assert said == f"{found['text']}\nllamarl report {folder} shows it\n"
    assert json.loads((folder / "summary.json").read_text())["verdict"] == found["text"].splitlines()[0]
    assert [len(chart["rows"]) > 3 for chart in found["charts"]] == [True, True]


def test_a_run_of_a_short_context_is_planned_as_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data.max_prompt_tokens` is more than the context by default, and a run cuts it."""
    model = write_shape(tmp_path / "m", "qwen3-0.6b")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{model}"\n[data]\ntrain = "jsonl"\n[rollout]\nmax_new_tokens = 144\n')
    assert main(["--config", str(path), "--gpus", "2"]) == 0
    assert "prompt 368 tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="1024 prompt and 144 response tokens exceed the context"):
        main(["--config", str(path), "--gpus", "2", "--data.max_prompt_tokens", "1024"])


def test_a_plan_by_name_is_written_with_the_name_of_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    main(["--model", "qwen3-1.7b", "--gpus", "1", "--trainer.lora", "{rank = 8}", "--output", str(path)])
    config = load_config(path)
    assert config.model.path == "Qwen/Qwen3-1.7B" and config.trainer.lora and config.trainer.lora.rank == 8


def test_time_and_cost_stand_together(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)
    said = capsys.readouterr().out
    assert "GPU-hours per step" in said and "$ per step" in said and "$ per day" in said
    assert re.search(r"s a step\) at .*USD\), on \d+ GPUs", said)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("plan", "--model", "qwen3-1.7b", "--gpus", "8", "--folder")
    for folder in (tmp_path / "file", tmp_path / "file/below", "/proc/nowhere"):
        done = llamarl_here(*words, folder)
        assert done.returncode == 2 and str(folder) in done.stderr
