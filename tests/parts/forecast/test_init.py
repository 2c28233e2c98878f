"""`llamarl init`: a file that fits by the core's own sum, over a Hub on the loopback."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.models.folder import load_shape
from llamarl.models.shape import ModelShape
from llamarl.parts.forecast.cli import init, plan, profile, simulate
from llamarl.parts.forecast.columns import SAMPLED, found_data
from llamarl.parts.forecast.hardware import GPUS
from llamarl.parts.forecast.shapes import MODELS
from llamarl.run.memory import MachineMemory, check_memory, run_holdings, shares
from tests.end_to_end.tiny import llamarl_here, make_model
from tests.nightly import nightly, some
from tests.parts.forecast.run_folder import write_run
from tests.parts.hub.conftest import hub
from tests.parts.hub.server import HubServer

__all__ = ["hub"]
PROBLEMS = [{"problem": f"1+{number}?", "final_answer": str(1 + number)} for number in range(100)]
GSM8K = [{"question": f"1+{number}?", "answer": f"So\n#### {1 + number}"} for number in range(100)]
README = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files:\n"
    + "".join(f"  - split: {split}\n    path: {name}/{split}.jsonl\n" for split in ("train", "test"))
    for name in ("main", "socratic")
)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def config_json(name: str) -> dict[str, Any]:
    """As published, of a built-in shape."""
    shape = MODELS[name]
    fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
              "max_position_embeddings", "tie_embeddings", "moe")  # fmt: skip
    family = {"qwen3": "qwen3", "qwen2.5": "qwen2", "llama3": "llama", "glm": "glm4_moe"}[
        name.split("-", maxsplit=1)[0]
    ]
    family += "_moe" * (family == "qwen3" and shape.moe is not None)
    return ModelShape(family=family, **{field: getattr(shape, field) for field in fields}).to_hf()


def write_model(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(name)))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines(PROBLEMS))
    return path


def written(tmp_path: Path, model: Path | str, data: Path | str, *words: object) -> RunConfig:
    path = tmp_path / "run.toml"
    assert init.main([*map(str, ("--model", model, "--data", data, "--output", path, *words))]) == 0
    return load_config(path)


CLUSTERS = [
    ("qwen3-1.7b", 1, "rtx4090-24g", True), ("qwen3-0.6b", 1, "l4-24g", False), ("qwen3-8b", 8, "h100-80g", False),
    ("qwen3-8b", 1, "h100-80g", True), ("qwen2.5-7b", 8, "a100-40g", False), ("llama3-70b", 8, "h100-80g", True),
    ("llama3-3b", 2, "a6000-48g", False), ("qwen2.5-0.5b", 2, "a10-24g", False), ("qwen3-30b-a3b", 8, "h100-80g", True),
    ("qwen3-30b-a3b", 8, "h200-141g", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpus", "kind", "adapters"), some(CLUSTERS, 2))
def test_the_file_fits_by_the_sum_of_a_start(
    tmp_path: Path, data: Path, name: str, gpus: int, kind: str, adapters: bool
) -> None:
    config = written(tmp_path, write_model(tmp_path / name, name), data, "--gpus", gpus, "--gpu", kind)
    assert (config.trainer.lora is not None) == adapters
    shape, memory = load_shape(config.model.path), int(GPUS[kind].memory_bytes)
    check_memory(config, shape, MachineMemory(host=1e13, gpus=(memory,) * gpus))
    held = shares(config, run_holdings(config, shape), gpus)
    fullest = max(sum(sum(parts.values()) for parts in held[place].values()) for place in held if place != "this host")
    assert 0.3 * memory < fullest <= 0.92 * memory, "what the planner keeps free is free, and the cache is not starved"
    assert config.generator.kv_cache_bytes and config.trainer.device == "cuda"
    assert llamarl_here("explain", tmp_path / "run.toml").returncode == 0
    ranks = config.trainer.parallelism.num_ranks, config.generator.replicas * config.generator.tensor_parallel
    assert (max if config.cluster.placement == "colocated" else sum)(ranks) <= gpus


def test_several_hosts(tmp_path: Path, data: Path) -> None:
    config = written(tmp_path, write_model(tmp_path / "m", "qwen3-8b"), data, "--gpus", 16)
    assert (config.cluster.kind, config.cluster.num_hosts) == ("hosts", 2)
    text = (tmp_path / "run.toml").read_text()
    assert "put this machine's address" in text and "tp = 1\npp = 1\n" in text, "layouts are stated whole"
    assert llamarl_here("explain", tmp_path / "run.toml").returncode == 0


def test_a_file_for_cores_passes_a_dry_run(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "tiny")
    config = written(tmp_path, model, data, "--gpus", 0, "--steps", 3, "--rollout.prompts_per_step", 2)
    said = capsys.readouterr().out
    assert "all weights" in said and "for 3 steps" in said
    assert (config.steps, config.trainer.device, config.rollout.prompts_per_step) == (3, "cpu", 2)
    dry = llamarl_here("train", tmp_path / "run.toml", "--dry-run", "--output", tmp_path / "runs")
    assert dry.returncode == 0, dry.stderr
    assert "  | 1+" in dry.stdout, "the column `problem` is the question"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_file_for_gpus_passes_a_dry_run_where_they_are(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """The host is a pretended one: what a start asks of it is how many GPUs it has, and how large they are."""
    monkeypatch.setattr("llamarl.run.placement.count_devices", lambda: gpus)
    monkeypatch.setattr("llamarl.run.memory.device_bytes", lambda: (int(24e9),) * gpus)
    words = ("--gpus", gpus, "--gpu", "l4-24g", "--rollout.max_staleness", gpus - 1, "--rollout.prompts_per_step", 4)
    config = written(
        tmp_path, make_model(tmp_path / "tiny", context=4096), data, *words, "--rollout.max_new_tokens", 2000
    )
    dry = llamarl_here("train", tmp_path / "run.toml", "--dry-run", "--output", tmp_path / "runs")
    assert dry.returncode == 0, dry.stderr
    assert "cuda:0: " in dry.stdout and "are there" in dry.stdout
    assert gpus == 2 or (config.cluster.placement, config.rollout.max_staleness) == ("colocated", 0)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "qwen3-0.6b"])
def test_a_built_in_shape_needs_no_hub(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    config = written(tmp_path, model, data, "--gpus", 1)
    assert config.model.path == "Qwen/Qwen3-0.6B"
    done = llamarl_here("explain", "card24_1.7b", "--gpus", "1x24", "--json")
    assert done.returncode == 0 and "not known" not in done.stderr, done.stderr
    follows = json.loads(done.stdout)["consequences"]
    assert follows["memory"] and follows["step time"][0].split()[1] == "s,"


def test_a_file_of_the_users_stays(tmp_path: Path, data: Path) -> None:
    path, model = tmp_path / "run.toml", write_model(tmp_path / "m", "qwen3-0.6b")
    path.write_text("mine")
    with pytest.raises(ConfigError, match="already exists; give another --output, or --force"):
        written(tmp_path, model, data, "--gpus", 1)
    assert path.read_text() == "mine"
    written(tmp_path, model, data, "--gpus", 1, "--force")


@nightly("plans several machines; by day files of other sizes fit by the same sums")
def test_what_does_not_fit_gets_what_does(tmp_path: Path, data: Path) -> None:
    """Each way that is named is taken, and works."""
    model = write_model(tmp_path / "m", "qwen3-8b")
    with pytest.raises(ConfigError) as refused:
        written(tmp_path, model, data, "--gpus", 1, "--adapters", "never")
    said = str(refused.value)
    assert "trainer needs at least" in said and "leave out --adapters never" in said
    lightly = said.split("train all weights with ")[1].split(",", maxsplit=1)[0].split()
    light = written(tmp_path, model, data, "--gpus", 1, "--adapters", "never", *lightly)
    kept = light.trainer.weights, light.trainer.moments, light.trainer.moments_on, light.trainer.lora
    assert kept == ("bfloat16", "8bit", "device", None)
    (tmp_path / "run.toml").unlink()
    other = said.split("use --model ")[1].split(",", maxsplit=1)[0]
    count = said.split("use --gpus ")[1].split(",", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    name = next(name for name, shape in MODELS.items() if shape.path == other)
    written(tmp_path, write_model(tmp_path / "n", name), data, "--gpus", 1, "--adapters", "never")
    larger = [shape.name for shape in MODELS.values() if shape.name.startswith("qwen3-") and shape.moe is None
              and MODELS[name].num_parameters < shape.num_parameters < MODELS["qwen3-8b"].num_parameters]  # fmt: skip
    for one in larger:
        with pytest.raises(ConfigError):
            written(tmp_path, write_model(tmp_path / one, one), data, "--gpus", 1, "--adapters", "never", "--force")
    written(tmp_path, model, data, "--gpus", count, "--adapters", "never", "--force")
    with pytest.raises(ConfigError):
        written(tmp_path, model, data, "--gpus", int(count) - 1, "--adapters", "never", "--force")


@nightly("plans several machines; by day files of other sizes fit by the same sums")
def test_adapters_are_chosen_with_the_way_to_train_all_weights(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lightly = ("--trainer.weights", "bfloat16", "--trainer.moments", "8bit")
    card = ("--gpus", 1, "--gpu", "rtx4090-24g")
    assert written(tmp_path, write_model(tmp_path / "m", "qwen3-1.7b"), data, *card).trainer.lora
    assert f"; they fit with {' '.join(lightly)}" in capsys.readouterr().out
    assert not written(tmp_path, tmp_path / "m", data, *card, *lightly, "--force").trainer.lora
    with pytest.raises(ConfigError, match="fits in no layout") as refused:  # too large, lightly too
        written(tmp_path, write_model(tmp_path / "n", "qwen3-4b"), data, *card, "--adapters", "never", "--force")
    assert "train all weights" not in str(refused.value)


@nightly("plans several machines; by day files of other sizes fit by the same sums")
def test_turns_on_several_hosts_are_refused_with_the_way_out(tmp_path: Path, data: Path) -> None:
    words = ("--gpus", 16, "--rollout.max_staleness", 0)
    with pytest.raises(ConfigError, match=r"for one machine of 8.*; plan for at most 8 GPUs, or for more with rollout"):
        written(tmp_path, write_model(tmp_path / "m", "qwen3-8b"), data, *words)


@nightly("plans several machines; by day files of other sizes fit by the same sums")
def test_a_larger_card_is_named(tmp_path: Path, data: Path) -> None:
    model = write_model(tmp_path / "m", "qwen2.5-14b")
    with pytest.raises(ConfigError, match=r"\(nor with adapters\); .*, or use --gpu h200-141g with adapters"):
        written(tmp_path, model, data, "--gpus", 1, "--gpu", "l4-24g")
    with pytest.raises(ConfigError):
        written(tmp_path, model, data, "--gpus", 1, "--gpu", "h100-80g")
    assert written(tmp_path, model, data, "--gpus", 1, "--gpu", "h200-141g").trainer.lora


def test_by_names_of_the_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of -h; of the model one file is asked for, and no row of the other configuration."""
    for name in ("qwen3-0.6b", "qwen3-8b"):
        files = {
            "config.json": json.dumps(config_json(name)).encode(),
            "model.safetensors": b"-",
            "tokenizer.json": b"{}",
        }
        hub.add(MODELS[name].path, files)
    rows = {f"{name}/{split}.jsonl": lines(GSM8K) for name in ("main", "socratic") for split in ("train", "test")}
    hub.add("openai/gsm8k", rows | {"README.md": f"{README}---\n".encode()}, kind="dataset")
    monkeypatch.chdir(tmp_path)
    for example in examples(init.EPILOG):
        assert init.main([*example[1:], "--force"]) == 0
        config = load_config("run.toml")
        assert config.data.train.options["config"] == "main" and config.data.eval
        assert (config.data.train.options["split"], config.data.eval.options["split"]) == ("train", "test")
        assert config.reward.parts[0].name == "gsm8k"
    assert "of its configurations main, socratic, 'main' was taken" in Path("run.toml").read_text()
    resolved = [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    assert not [path for path in resolved if "safetensors" in path or "tokenizer" in path or "socratic" in path]
    with pytest.raises(ConfigError, match=r"--model nobody/nothing: .*"):
        init.main(["--model", "nobody/nothing", "--data", "openai/gsm8k", "--gpus", "1", "--force"])


def test_a_large_file_is_not_fetched_for_its_columns(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("a/large", {"train.jsonl": lines(PROBLEMS)}, kind="dataset")
    monkeypatch.setattr("llamarl.parts.forecast.columns.MOST_BYTES", 100)
    found = found_data("a/large", question="problem")
    assert found.train["question"] == "problem" and "answer" not in found.train
    assert any("was not fetched for its columns" in one for one in found.why)
    assert any("no row was read" in one for one in found.why)
    assert not hub.asked("train.jsonl")


@pytest.mark.parametrize(
    ("row", "columns", "reward"),
    [
        ({"question": "q", "answer": "1"}, {}, "math"),
        ({"prompt": "q", "answer": "a #### 2"}, {}, "gsm8k"),
        ({"problem": "q", "solution": "2", "answer": 2}, {"question": "problem"}, "math"),
        ({"instruction": "q", "output": "2"}, {"question": "instruction", "answer": "output"}, "math"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "3"}},
         {"answer": "reward_model.ground_truth"}, "math"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, {}, "math"),
    ],
)  # fmt: skip
def test_columns_by_their_names(tmp_path: Path, row: dict[str, Any], columns: dict[str, str], reward: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([row] * (SAMPLED + 1)))
    found = found_data(str(path))
    assert found.train == {"name": "file", "path": str(path)} | columns and found.reward == reward
    path.write_bytes(lines([row, row | {"answer": "plain"}]))
    assert found_data(str(path)).reward == "math", "one answer has no mark"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "-1"), "--gpus -1: give 1 or more"),
        (("--gpus", "0", "--gpu", "h100-80g"), "--gpus 0 with --gpu h100-80g"),
        (("--gpus", "1", "--gpu", "cpu-core"), "--gpus 1 with --gpu cpu-core: give 1 or more"),
        (("--gpus", "1", "--rollout.group_size", "1"), "rollout.group_size = 1 with trainer.advantage"),
        (("--gpus", "1", "--gpu", "h100"), "did you mean `h100-80g`"),
        (("--gpus", "1", "--question", "frage"), "--question frage: it is not among the columns"),
        (("--gpus", "1", "--data", "nothing"), "neither a file nor a name of the Hub"),
        (("--gpus", "1", "--model", "nowhere"), "--model nowhere: there is no folder"),
        (("--gpus", "1", "--rollout.max_new_tokens", "99999"), "exceed the context"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, data: Path, words: tuple[str, ...], said: str) -> None:
    model = write_model(tmp_path / "m", "qwen3-0.6b")
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, model, data, *words)
    data.write_bytes(lines([{"text": "x", "answer": "1"}]))
    with pytest.raises(
        ConfigError, match="no column that is known to hold the question is there; name it by --question"
    ):
        written(tmp_path, model, data, "--gpus", 1)
    assert not (tmp_path / "run.toml").exists()


def examples(text: str) -> list[list[str]]:
    """Words of the commands in a help text."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  llamarl ")]


@nightly("plans several machines; by day files of other sizes fit by the same sums")
def test_examples_of_help_texts_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('"none"', '"running_total"'))
    monkeypatch.chdir(tmp_path)
    assert llamarl_here("profile", run, "--cores", 2).returncode == 0
    shown = [words for one in (plan.EXAMPLE, profile.EPILOG, simulate.EPILOG) for words in examples(one)]
    assert len(shown) >= 4
    for example in shown:
        words = [word.replace("RUN.toml", f"{run}/config.toml").replace("RUN/", f"{run}/") for word in example]
        done = llamarl_here(*words, *(("--steps", "2") if words[0] == "simulate" else ()))
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
