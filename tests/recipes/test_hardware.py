"""Recipes by hardware: with the shapes that are published they fit the machine that they are for, and with a model that
takes milliseconds they run.

A Hub on the loopback has the models under their names, and data sets with the columns that the published ones have.
Texts, tokenizers and weights are of this test alone.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.config.load import PACKAGED
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.folder import load_shape
from llamarl.models.hf import new_model, save_model
from llamarl.models.memory import total
from llamarl.models.shape import MIXTURES, ModelShape, MoeShape
from llamarl.parts.forecast.cli import plan
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.run.memory import MachineMemory, check_memory, run_holdings
from llamarl.run.placement import models_in_use
from tests.data.test_chat import QWEN
from tests.end_to_end.tiny import llamarl, llamarl_here, rows
from tests.nightly import nightly, some
from tests.parts.hub.server import HubServer, only_hub

GIB = 2**30
PAGE = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
CARDS = {
    "cpu": 0, "card24": 1, "card80": 1, "card140": 1, "cards2": 2, "cards4": 4, "cards8": 8, "hosts2": 8,
}  # fmt: skip
"""GPUs of a host, by the first word of a recipe's name."""
GB = {"card24": (24, 22), "card140": (140, 130), "hosts2_70b": (140, 130)}
"""GB of a card, by recipe or its first word, and GiB that drivers leave of them; others have 80 GB."""
RECIPES = sorted(one.stem for one in PACKAGED.glob("*.toml") if one.stem.split("_")[0] in CARDS)
PUBLISHED = {
    one["name"]: one["config"]
    for kind in ("loads", "mixtures")
    for one in json.loads((Path(__file__).parents[1] / "models/published.json").read_text())[kind]
}
NO_THOUGHTS = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
TEXTS = ["Tom has 3 apples and buys 4. How many are there? #### 7", "def add(a, b):\n    return a + b", "\\boxed{7}"]
SUM = {"question": "Tom has 3 apples and buys 4. How many are there?", "answer": "3 + 4 = 7\n#### 7"}
PROBLEM = {"problem": "What is $3 + 4$?", "solution": "It is \\boxed{7}.", "answer": "7"}
PROGRAM = {
    "text": "Write a function that adds.", "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(3, 4) == 7"], "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
HUMAN = {
    "prompt": 'def add(a, b):\n    """Adds."""\n', "canonical_solution": "    return a + b\n", "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(3, 4) == 7\n",
}  # fmt: skip
DATA = {
    "openai/gsm8k": {"main/train.jsonl": SUM, "main/test.jsonl": SUM},
    "agentica-org/DeepScaleR-Preview-Dataset": {"train.jsonl": PROBLEM},
    "HuggingFaceH4/aime_2024": {"data/train.jsonl": PROBLEM | {"id": 60, "url": "", "year": "2024"}},
    "openai/openai_humaneval": {"openai_humaneval/test.jsonl": HUMAN},
    "HuggingFaceH4/MATH-500": {"test.jsonl": PROBLEM | {"subject": "Algebra", "level": 1, "unique_id": "1"}},
    "google-research-datasets/mbpp": {"full/train.jsonl": PROGRAM, "full/test.jsonl": PROGRAM},
}
"""A row of each file of each data set, with the columns of the published one."""
SMALL = {
    "steps": 2, "rollout.prompts_per_step": 4, "rollout.group_size": 2, "rollout.max_new_tokens": 24,
    "rollout.window": 1, "generator.device": "cpu", "generator.max_running": 8, "generator.kv_cache_bytes": 1 << 24,
    "generator.threads": 1, "trainer.device": "cpu", "trainer.threads": 1, "trainer.microbatch_tokens": 2048,
    "critic.device": "cpu", "reference.device": "cpu", "eval.max_prompts": 2, "eval.every_steps": 1,
}  # fmt: skip
"""Settings of a small run; those of executors that a recipe lacks are left out."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with a chat template that writes conversations, tools and thoughts as Qwen's do."""
    folder = Path(train_byte_bpe(TEXTS, tmp_path_factory.mktemp("qwen"), 300).folder)
    settings = folder / "tokenizer_config.json"
    written = QWEN.removesuffix("{% endif %}") + NO_THOUGHTS + "{% endif %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": written}))
    return folder


@pytest.fixture
def stocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with all data sets, and an empty cache."""
    with only_hub(tmp_path / "hf", monkeypatch) as hub:
        add_data(hub)
        yield hub


def add_data(hub: HubServer) -> None:
    for name, files in DATA.items():
        many = {path: [row | ({"id": i} if "id" in row else {}) for i in range(8)] for path, row in files.items()}
        texts = {path: "".join(f"{json.dumps(row)}\n" for row in lines).encode() for path, lines in many.items()}
        hub.add(name, texts, kind="dataset")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("recipe", some(RECIPES, 4))
def test_its_machine_holds_it(tmp_path: Path, recipe: str) -> None:
    """With the published shape, by the sum that starts are refused by."""
    config, kind = load_config(recipe), recipe.split("_", maxsplit=1)[0]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[config.model.path]))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    shape = load_shape(tmp_path)
    card = size_of(recipe)[1]
    if kind == "hosts2":  # one host trains and the other generates, a rank on each card
        held = run_holdings(config, shape)
        assert sum(one.num_ranks for one in held if one.on_gpu) == config.cluster.num_hosts * CARDS[kind]
        assert all(total(one.parts) < card * GIB for one in held)
        return
    machine = MachineMemory(host=24 * GIB * max(1, 2 * CARDS[kind]), gpus=(card * GIB,) * CARDS[kind])
    check_memory(config, shape, machine)
    if CARDS[kind] > 1:
        fewer = MachineMemory(host=machine.host, gpus=machine.gpus[1:])
        with pytest.raises(ConfigError):
            check_memory(config, shape, fewer)


@pytest.mark.parametrize("recipe", some(RECIPES, 1))
def test_a_dry_run_for_its_machine(stocked: HubServer, tokenizer: Path, tmp_path: Path, recipe: str) -> None:
    """Made here, where there is no GPU."""
    options, kind = of_hosts(recipe, tmp_path), recipe.split("_", maxsplit=1)[0]
    name = load_config(recipe).model.path
    shape_file = {"config.json": json.dumps(PUBLISHED[name]).encode()}
    stocked.add(name, contents(tokenizer) | shape_file | {"model.safetensors": b""})
    there = ("--gpus", f"{CARDS[kind]}x{size_of(recipe)[0]}" if CARDS[kind] else "0")
    dry = llamarl_here("train", recipe, "--dry-run", "--output", tmp_path, *there, *options)
    assert dry.returncode == 0, dry.stderr
    assert "\nmemory:\n" in dry.stdout
    assert re.search(r"^  [\d.]+ s, if every group has a gradient, for prompts", dry.stdout, re.MULTILINE), (
        "a step's time is forecast"
    )
    if CARDS[kind]:
        check_expectation(recipe, dry.stdout)


@nightly("plans of dense models do, above")
def test_a_plan_of_a_mixture_passes_a_dry_run(stocked: HubServer, tokenizer: Path, tmp_path: Path) -> None:
    """235B on 32 hosts, by its name: all that a start checks but the weights, which are empty here."""
    name, run, data = "Qwen/Qwen3-235B-A22B", tmp_path / "run.toml", tmp_path / "train.jsonl"
    shape_file = {"config.json": json.dumps(PUBLISHED[name]).encode()}
    stocked.add(name, contents(tokenizer) | shape_file | {"model.safetensors": b""})
    data.write_text("".join(f"{json.dumps(SUM)}\n" for _ in range(8)))
    words = ("--model", "qwen3-235b-a22b", "--gpus", 256, "--rollout.max_staleness", 2, "--data", data)
    assert plan.main([*map(str, words), "--output", str(run)]) == 0
    there = ("--output", tmp_path, *of_controller(tmp_path))
    dry = llamarl_here("train", run, "--dry-run", *there)
    assert dry.returncode == 0, dry.stderr
    layout = load_config(run).trainer.parallelism
    assert layout.fsdp == 128 and layout.fsdp % layout.ep == 0 and layout.ep > 1
    each = [float(gib) for gib in re.findall(r"\d+  gpu +([\d.]+) GiB", dry.stdout)]
    assert len(each) == 17 and max(each) < 80e9 / GIB, "a trainer and 16 replicas"


def size_of(recipe: str) -> tuple[int, int]:
    """GB of a recipe's card, and GiB of it that a run can have."""
    return GB.get(recipe) or GB.get(recipe.partition("_")[0], (80, 79))


def check_expectation(recipe: str, said: str) -> None:
    """What the page on recipes, and the recipe's own first lines, expect is what the dry run says."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{recipe}` "))
    *_, of_card, of_step, of_run, measured, _ = (cell.strip() for cell in row.split("|"))
    assert measured == "", "nothing was measured"
    found = re.findall(r"cuda:\d+: ([\d.]+) GiB at least", said) or re.findall(r"\d+  gpu +([\d.]+) GiB \(", said)
    assert of_card == f"{max(map(float, found)):.0f} GiB"
    (seconds,) = re.findall(r"  ([\d.]+) s, if every group has a gradient, for", said)
    assert of_step == f"{float(seconds):.2g} s"
    steps, hours = load_config(recipe).steps, float(of_run.removesuffix(" h"))
    assert hours == pytest.approx(steps * float(seconds) / 3600, rel=0.06)
    first = "".join((PACKAGED / f"{recipe}.toml").read_text().partition("\n\nname")[0])
    assert f"{of_card} of" in first and f"{of_step} a step" in first and f"{of_run} in all" in first


def of_hosts(recipe: str, folder: Path) -> list[str]:
    """Options that `llamarl launch` adds to a recipe for several hosts: where the controller listens, and who it is."""
    if not recipe.startswith("hosts"):
        return []
    launched = llamarl_here("launch", "slurm", recipe, "--dry-run")
    assert launched.returncode == 0 and "#SBATCH --gpus-per-node=8" in launched.stdout, launched.stderr
    return of_controller(folder)


def of_controller(folder: Path) -> list[str]:
    """Options of a controller that listens here, with a certificate."""
    assert llamarl_here("certs", folder / "pki", "--hosts", "b=10.0.0.2", "--controller", "a=127.0.0.1").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["--cluster.listen", f"127.0.0.1:{port}", "--cluster.pki", str(folder / "pki")]


@nightly("a run of two steps for each")
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_runs_with_a_small_model(stocked: HubServer, tokenizer: Path, tmp_path: Path, recipe: str) -> None:
    """Model, devices and sizes change, and nothing else; axes of a layout and replicas are two where they were more.
    A mixture stays one."""
    on_one = ["--cluster", "{kind = 'monarch'}"] if recipe.startswith("hosts") else []
    config = load_config(recipe, on_one)
    family = PUBLISHED[config.model.path]["model_type"]
    moe = MoeShape(num_experts=4, experts_per_token=2, expert_size=16, sparse_layers=(0, 1), normalized=True)
    shape = ModelShape(
        family=family, moe=moe if family in MIXTURES else None, hidden_size=32, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=300, max_position_embeddings=2048,
        tie_embeddings=True, stop_token_ids=Tokenizer(str(tokenizer)).eos_token_ids,
    )  # fmt: skip
    save_model(new_model(shape, seed=1, std=0.1), tmp_path / "model", tokenizer)
    stocked.add(config.model.path, contents(tmp_path / "model"))
    layout = config.trainer.parallelism
    settings = {name: value for name, value in SMALL.items() if name.split(".")[0] in used(config)} | {
        "generator.replicas": min(2, config.generator.replicas), "trainer.parallelism.fsdp": min(2, layout.fsdp),
        "generator.tensor_parallel": min(2, config.generator.tensor_parallel), "output": tmp_path,
    }  # fmt: skip
    done = llamarl(
        "train", recipe, *on_one, *(word for name, value in settings.items() for word in (f"--{name}", value))
    )
    assert done.returncode == 0, done.stderr
    run = rows(tmp_path / recipe / "metrics.jsonl")
    assert [row["step"] for row in run if row["kind"] == "step"] == [1, 2]
    assert {row["num_prompts"] for row in run if row["kind"] == "eval"} == {2}
    assert sum(row["num_invalid"] for row in run if row["kind"] == "eval") == 0


def used(config: RunConfig) -> set[str]:
    """Sections of settings that a recipe may have."""
    return {"steps", "rollout", "generator", "trainer", "eval", *models_in_use(config)}
