"""Mixtures of experts from files to files: trained with recorded experts, saved, resumed, exported, replayed; and what
is refused of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.models.hf import load_model, save_model
from llamarl.models.shape import MoeShape
from tests.end_to_end.learning import write_task
from tests.end_to_end.test_layouts import learn_alike
from tests.end_to_end.test_restarts import Faulty, steps
from tests.end_to_end.test_resume import SYNCHRONOUS
from tests.end_to_end.tiny import llamarl, llamarl_here, make_model, rows, write_toml
from tests.nightly import nightly

GLM4 = MoeShape(
    num_experts=4, experts_per_token=2, expert_size=16, sparse_layers=(1,), scoring="sigmoid", normalized=True,
    num_groups=2, groups_per_token=1, shared_size=16, has_selection_bias=True,
)  # fmt: skip
GATE, BIAS = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4's: a dense layer before, groups, a bias, a shared expert, half of each head rotated."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_model(folder, family="glm4_moe", moe=GLM4, partial_rotary_factor=0.5, attention_bias=True)
    model = load_model(folder, torch.float32, "cpu")
    model.state_dict()[BIAS].copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    save_model(model, folder.with_name("biased"), folder)
    return folder.with_name("biased")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, torch.float32, "cpu").state_dict())


@nightly(
    "runs of their own; by day a mixture is trained, served and sent in tests/training, generation and weight_sync"
)
def test_a_mixture_is_trained_saved_resumed_exported_and_replayed(tmp_path: Path, mixture: Path) -> None:
    toml, whole, cut = write_toml(tmp_path, mixture), tmp_path / "whole", tmp_path / "cut"
    done = llamarl_here("train", toml, "--output", whole, "--steps", 4, *SYNCHRONOUS)
    assert done.returncode == 0, done.stderr
    steps = [row for row in rows(whole / "tiny/metrics.jsonl") if row["kind"] == "step"]
    assert all(row["kl_to_behavior"] < 1e-6 for row in steps), "the trainer computes with the generator's experts"
    told = {name for row in steps for name in row if "expert" in name}
    assert told == {"extra.expert_load.1", "extra.idle_experts.1"}, "there is one layer with experts"
    most = GLM4.num_experts / GLM4.experts_per_token
    assert all(1 <= row["extra.expert_load.1"] <= most and row["extra.idle_experts.1"] < 3 for row in steps)
    (probed,) = (row for row in steps if "extra.routes_agreement" in row)
    assert probed["step"] == 4 and probed["extra.routes_agreement"] > 0.99, "by the weights that sampled"
    assert probed["extra.kl_replayed_routes"] < 1e-6
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "tiny/checkpoints/step-00000004")
    done = llamarl_here("train", toml, "--output", cut, "--steps", 4, "--resume", *SYNCHRONOUS)
    assert done.returncode == 0, done.stderr
    files = [path.relative_to(cut) for path in cut.rglob("*.safetensors")]
    assert len(files) == 2
    assert all((whole / file).read_bytes() == (cut / file).read_bytes() for file in files)
    assert llamarl_here("export", whole / "tiny", tmp_path / "made").returncode == 0
    before, after = weights_of(mixture), weights_of(tmp_path / "made")
    assert torch.equal(after[BIAS], before[BIAS]) and not torch.equal(after[GATE], before[GATE])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).state_dict()
    assert all(
        torch.equal(one, theirs[name]) for name, one in after.items() if ".experts." not in name and "lm" not in name
    )
    gate_up = torch.cat([after[f"model.layers.1.mlp.experts.{kind}_proj"] for kind in ("gate", "up")], 1)
    assert torch.equal(theirs["model.layers.1.mlp.experts.gate_up_proj"], gate_up)
    replayed = llamarl_here("replay", whole / "tiny")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all equal" in replayed.stdout


@nightly("two runs of two ranks; tests/training/test_expert_parallel.py computes and moves states so")
def test_experts_are_shared_out_and_then_cut_otherwise(tmp_path: Path, mixture: Path) -> None:
    """Each of two ranks has half of the experts, and after three steps half of the columns of each, for a generator of
    two ranks."""
    first = ("--trainer.parallelism.fsdp", 2, "--trainer.parallelism.ep", 2)
    then = ("--trainer.parallelism.tp", 2, "--generator.tensor_parallel", 2)
    learn_alike(tmp_path, write_toml(tmp_path, mixture), first, then)


@nightly("two runs of two ranks; deaths of one rank, and what ranks share, have tests of their own")
def test_a_rank_with_half_of_the_experts_dies(tmp_path: Path, mixture: Path) -> None:
    """Nothing is lost, and every token is drawn again with the same experts."""
    toml, shared = write_toml(tmp_path, mixture), ("--trainer.parallelism.fsdp", 2, "--trainer.parallelism.ep", 2)
    more = (*shared, "--checkpoint.mirror", "true", "--steps", 8)
    (tmp_path / "whole").mkdir()
    (tmp_path / "faulty").mkdir()
    whole, faulty = (Faulty(tmp_path / name, toml, *more) for name in ("whole", "faulty"))
    faulty.strike("trainer.1", 3)
    faulty.strike("trainer.0", 6)
    said = faulty.end()
    whole.end()
    assert steps(faulty.folder) == steps(whole.folder)
    assert said.count("trainer continues") == 2
    replayed = llamarl_here("replay", faulty.folder / "tiny")
    assert replayed.returncode == 0 and "all equal" in replayed.stdout, replayed.stdout + replayed.stderr


@nightly(
    "runs of their own; by day a mixture is trained, served and sent in tests/training, generation and weight_sync"
)
def test_routers_stay_where_they_are_not_trained(tmp_path: Path, mixture: Path) -> None:
    """With weights and moments that take less memory, and in a generator that has 8 bits."""
    light = ("--trainer.dtype", "bfloat16", "--trainer.weights", "bfloat16", "--trainer.moments", "8bit")
    run = ("train", write_toml(tmp_path, mixture), "--output", tmp_path, "--steps", 2, *SYNCHRONOUS, *light)
    done = llamarl_here(*run, "--trainer.train_router", "false", "--generator.dtype", "int8")
    assert done.returncode == 0, done.stderr
    assert llamarl_here("export", tmp_path / "tiny", tmp_path / "made").returncode == 0
    before, after = weights_of(mixture), weights_of(tmp_path / "made")
    assert torch.equal(after[GATE], before[GATE])
    assert not torch.equal(after["model.layers.1.mlp.experts.up_proj"], before["model.layers.1.mlp.experts.up_proj"])


def test_other_commands_take_a_mixture(tmp_path: Path, mixture: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Leo has 10 coins: a+3. How many coins now?\n"}) + "\n")
    done = llamarl_here("generate", mixture, "--prompts", prompts, "--rollout.max_new_tokens", 8)
    assert done.returncode == 0, done.stderr
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    done = llamarl_here("eval", mixture, problems, "--rollout.max_new_tokens", 8)
    assert done.returncode == 0, done.stderr


ATTENTION = "['q_proj', 'k_proj', 'v_proj', 'o_proj']"
SHARED = ("--trainer.parallelism.fsdp", 6, "--trainer.parallelism.ep")
CRITIC_SHARED = ("--critic.parallelism.ep", 3)
LORA = ("--trainer.lora.rank", 2, "--trainer.lora.targets", ATTENTION)


@nightly("a run of its own; tests/training trains adapters beside experts by day")
def test_adapters_of_a_mixture_are_beside_its_attention(tmp_path: Path, mixture: Path) -> None:
    toml = write_toml(tmp_path, mixture)
    done = llamarl_here("train", toml, "--output", tmp_path, "--steps", 2, *SYNCHRONOUS, *LORA)
    assert done.returncode == 0, done.stderr
    assert llamarl_here("export", tmp_path / "tiny", tmp_path / "made", "--merge").returncode == 0
    before, after = weights_of(mixture), weights_of(tmp_path / "made")
    changed = {name.split(".")[-2] for name, one in before.items() if not torch.equal(one, after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--trainer.lora.rank", 2), "trainer.lora.targets has gate_proj, which "),
        ((*LORA, "--trainer.train_router", "false"), "trainer.train_router = false with trainer.lora"),
        (("--trainer.compile", "true"), "trainer.compile = true with "),
        (("--trainer.parallelism.ep", 2), "ep = 2 does not divide the 1 ranks of fsdp and cp"),
        ((*SHARED, 3), "trainer.parallelism.ep = 3 cannot share the 4 experts of "),
        ((*SHARED, 1, "--trainer.parallelism.tp", 3), "trainer.parallelism.tp = 3 cannot share the "),
        ((*SHARED, 2), "3 ranks of fsdp and cp have the same experts"),
        (("--recipe", "ppo", "--critic.parallelism.fsdp", 3, *CRITIC_SHARED), "critic.parallelism.ep = 3 "),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_mixture_cannot_do_is_refused(
    tmp_path: Path, mixture: Path, options: tuple[object, ...], said: str
) -> None:
    done = llamarl_here("train", write_toml(tmp_path, mixture), "--output", tmp_path, *options)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ('{name = "qwen3_moe", num_experts = 4}', "`num_experts_per_tok` is missing"),
        (
            '{name = "mixtral", num_local_experts = 4, num_experts_per_tok = 2, experts = 9}',
            "`experts` = 9",
        ),
        ('{name = "olmoe"}', "shape.family = 'olmoe' cannot be made from scratch; use one of llama, mistral"),
        (
            '"gpt2"',
            "shape.family = 'gpt2' cannot be made from scratch; use one of llama, mistral, qwen2, qwen3, or {name",
        ),
    ],
)
def test_a_warm_start_says_what_experts_lack(tmp_path: Path, family: str, said: str) -> None:
    write_task(tmp_path, family)
    done = llamarl_here("sft", tmp_path / "sft.toml")
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


@nightly("takes a minute")
def test_a_mixture_from_scratch_learns(tmp_path: Path) -> None:
    experts = "num_experts = 4, num_experts_per_tok = 2, moe_intermediate_size = 64, norm_topk_prob = true"
    done = llamarl("train", write_task(tmp_path, f'{{name = "qwen3_moe", {experts}}}'))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/additions/summary.json").read_text())
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] > 0.8
