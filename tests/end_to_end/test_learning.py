"""The whole loop, by the commands that a newcomer types, on a small version of the demo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli import doctor
from llamarl.cli.main import COMMANDS
from llamarl.config import load_config
from llamarl.data.prompts import PLAIN
from tests.end_to_end.learning import Trained
from tests.end_to_end.tiny import llamarl, llamarl_here, rows
from tests.nightly import nightly

GROUP, PROMPTS, STEPS = 8, 16, 40


def test_it_learns(trained: Trained) -> None:
    summary = trained.summary
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] > 0.8
    solved = [row["solve_rate"] for row in rows(trained.folder / "metrics.jsonl") if row["kind"] == "step"]
    assert sum(solved[-10:]) / 10 > sum(solved[:10]) / 10 + 0.3


def test_what_it_prints(trained: Trained) -> None:
    out, summary = trained.out, trained.summary
    assert re.search(rf"step {STEPS}/{STEPS}  reward ", out)
    table = rf"accuracy +{100 * summary['accuracy_before']:.1f}% +{100 * summary['accuracy_after']:.1f}% "
    assert re.search(table, out)
    for name in ("metrics.jsonl", "journal", "summary.json", "trace.json", "config.toml", "checkpoints", "logs"):
        assert name in out
    assert str(trained.folder) in out


def test_summary(trained: Trained) -> None:
    summary = trained.summary
    assert (summary["end"], summary["steps"], summary["staleness_limit"]) == ("finished", STEPS, 2)
    assert 0 < summary["staleness_max"] <= 2
    assert 0 <= summary["unaccounted_share"] < 0.5
    assert summary["samples_per_s"] == pytest.approx(STEPS * PROMPTS * GROUP / summary["wall_s"])
    assert summary["invalid_share"] == 0


def test_metrics(trained: Trained) -> None:
    metrics = rows(trained.folder / "metrics.jsonl")
    steps = [row for row in metrics if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [row["policy_version"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["step"] for row in metrics if row["kind"] == "eval"] == [0, 20, STEPS]
    for row in metrics:
        if row["kind"] == "eval":
            assert row["policy_version_min"] == row["step"] <= row["policy_version_max"]
            assert row["num_prompts"] == 60
    recorded = rows(trained.folder / "rollouts.jsonl")
    for row in steps:
        mine = [one for one in recorded if one["step"] == row["step"]]
        assert len(mine) == PROMPTS * GROUP
        assert row["reward_mean"] == pytest.approx(sum(one["reward"] for one in mine) / len(mine))
        assert row["staleness_max"] == max(one["staleness"] for one in mine) <= row["staleness_limit"]
        assert row["response_tokens_max"] == max(len(one["token_ids"]) for one in mine)
        assert row["num_loss_tokens"] == sum(len(one["token_ids"]) for one in mine)


def test_every_consumed_rollout_is_on_record_once(trained: Trained) -> None:
    recorded = rows(trained.folder / "rollouts.jsonl")
    assert len({(row["group_id"], row["index"]) for row in recorded}) == len(recorded) == STEPS * PROMPTS * GROUP
    answers = {f"{row['question']}\n": str(row["answer"]) for row in rows(trained.toml.parent / "train.jsonl")}
    for row in recorded:
        tokens = sum(count for _, count in row["policy_versions"])
        assert tokens == len(row["token_ids"]) == len(row["behavior_logprobs"]) > 0
        assert row["staleness"] == row["step"] - 1 - row["policy_versions"][0][0]
        assert row["policy_versions"] == sorted(row["policy_versions"])
        assert max(row["behavior_logprobs"]) <= 0
        assert row["answer"] == answers[row["prompt"]]
        assert row["reward"] == (row["response"].strip() == row["answer"])
        assert row["outcome"] == ("score" if row["reward"] else "wrong")
        assert row["finish_reason"] in ("stop", "length")
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in recorded:
        groups.setdefault(row["group_id"], []).append(row)
    for members in groups.values():
        mean = sum(row["reward"] for row in members) / GROUP
        assert [row["advantage"] for row in members] == pytest.approx([row["reward"] - mean for row in members])


def test_trace(trained: Trained) -> None:
    trace = json.loads((trained.folder / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"generate", "score", "train", "weight_sync"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")


def test_the_config_on_record_is_the_run_s_own(trained: Trained) -> None:
    resolved = load_config(trained.toml, settings={"data.template": PLAIN})  # `auto`, as the model has no chat template
    assert load_config(trained.folder / "config.toml") == resolved
    dry = llamarl_here("train", trained.toml, "--dry-run", "--settings", "--seed", 7, "--name", "again")
    assert dry.returncode == 0, dry.stderr
    again = trained.toml.parent / "again.toml"
    again.write_text(dry.stdout)
    assert load_config(again) == load_config(trained.toml, ["--seed", "7", "--name", "again"])


def test_a_model_that_other_settings_made_is_not_taken(trained: Trained) -> None:
    sft = trained.toml.with_name("sft.toml")
    other = trained.toml.parent / "other"
    other.mkdir()
    (other / "sft.toml").write_text(sft.read_text().replace("steps = 180", "steps = 181"))
    (other / "run.toml").write_text(trained.toml.read_text())
    done = llamarl_here("train", other / "run.toml", "--name", "other")
    assert done.returncode == 2
    assert "model.warm_start" in done.stderr
    assert not (trained.folder.parent / "other").exists()


@nightly("test_processes.py has runs of processes by day, and those of one process learn here")
def test_monarch_and_inline_do_the_same(trained: Trained) -> None:
    """Without staleness nothing depends on time: one key changes, and not one bit of what is generated, not even which
    groups are replaced, nor the rewards of greedy responses."""
    override = ("--steps", 5, "--rollout.max_staleness", 0, "--eval.max_prompts", 20)
    override += ("--recipe", "dapo", "--rollout.max_attempts", 2, "--trainer.advantage", "remax")
    kept = []
    for kind in ("monarch", "inline"):
        run = llamarl if kind == "monarch" else llamarl_here
        done = run("train", trained.toml, *override, "--cluster.kind", kind, "--name", kind)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        kept.append(rows(trained.folder.with_name(kind) / "rollouts.jsonl"))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 5 * PROMPTS * GROUP
    assert max(row["group_id"] for row in kept[0]) >= 5 * PROMPTS
    logs = trained.folder.with_name("monarch") / "logs"
    assert {path.name for path in logs.iterdir()} == {
        f"{name}.log" for name in ("generator-0", "reward", "trainer", "monarch")
    }


@pytest.fixture(scope="session")
def exported(trained: Trained) -> Path:
    done = llamarl_here("export", trained.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"step {STEPS}: {trained.folder / 'export'}\n")
    return trained.folder / "export"


def test_export_loads_in_transformers_with_the_same_logits(exported: Path) -> None:
    import torch
    import transformers

    from llamarl.models.attention import causal_attend
    from llamarl.models.hf import load_model

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, torch_dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    token_ids = torch.tensor(tokenizer("27+8\n35").input_ids)
    ours = load_model(exported, torch.float32, "cpu")
    attend = causal_attend([len(token_ids)])
    with torch.no_grad():
        logits = ours.logits(ours(token_ids, torch.arange(len(token_ids)), attend))
        torch.testing.assert_close(logits, theirs(token_ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_eval_of_the_export(trained: Trained, exported: Path, tmp_path: Path) -> None:
    """Greedy it repeats the end of the run; with a config or with a file; several samples give pass@k."""
    accuracy = f"accuracy {100 * trained.summary['accuracy_after']:.1f}%"
    config, answers = trained.folder / "config.toml", tmp_path / "said.jsonl"
    greedy = llamarl_here("eval", exported, "--config", config, "--output", answers)
    assert greedy.returncode == 0, greedy.stderr
    assert accuracy in greedy.stdout and "60 prompts" in greedy.stdout
    said = rows(answers)
    assert len(said) == 60
    assert sum(row["right"] for row in said) / 60 == pytest.approx(trained.summary["accuracy_after"])

    file = trained.toml.parent / "held_out.jsonl"
    sampled = llamarl_here(
        "eval", exported, file, "--reward.parts", "['exact']", "--rollout.max_new_tokens", 6, "--eval.samples", 4
    )
    assert sampled.returncode == 0, sampled.stderr
    one, four = (
        float(number) for number in re.search(r"accuracy ([\d.]+)% ± .* pass@4 ([\d.]+)%", sampled.stdout).groups()
    )
    assert 50 < one <= four <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = llamarl_here(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: llamarl {command}")


@nightly("a command beside a run; cli tests ask the doctor by day")
def test_doctor() -> None:
    done = llamarl_here("doctor")
    assert done.returncode == 0, done.stderr
    for part in ("python 3.", "torch 2.", "torchmonarch 0.", "bfloat16 weights: ", "GPUs: ", "free disk here: "):
        assert part in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "can run llamarl" in last and "missing: " in last


def test_doctor_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    done = llamarl_here("doctor")
    assert done.returncode == 1 and "no-such-package" in done.stdout.splitlines()[-1]
