"""`llamarl simulate`: files, bad input, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.forecast.cli import plan
from llamarl.parts.forecast.cli.simulate import main
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.hardware import find_gpu
from llamarl.parts.forecast.simulator.draws import ResponseLengths
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.split import best_split, choose_split
from tests.nightly import nightly
from tests.parts.forecast.simulator.conftest import run_config

RUN = """
steps = 4
name = "small"
output = {output!r}
[model]
path = "nowhere"
[data]
train = {{name = "jsonl", path = "nowhere.jsonl"}}
eval = {{name = "jsonl", path = "nowhere.jsonl"}}
[rollout]
prompts_per_step = 4
group_size = 2
[eval]
every_steps = 2
max_prompts = 8
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(output=str(tmp_path / "runs")))
    return str(path)


def test_files_and_summary(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the model nor the data that the run file names has to exist."""
    arguments = [run_file, "--gpus", "64", "--faults", "slow=0.2x2,die=0@3,join=1@1", "--steps", "60"]
    assert main([*arguments, "--cluster.on_failure.generator", "drop"]) == 0
    folder = tmp_path / "runs" / "small-simulation"
    found = json.loads((folder / "summary.json").read_text())
    assert found["end"] == "finished"
    assert (found["gpus"], found["steps"], found["deaths"], found["joins"]) == (64, 60, 1, 1)
    assert found["staleness_max"] <= found["staleness_bound"]
    assert {"idle_share.trainer", "idle_share.generator", "idle_share.reward", "step_s_p99"} <= set(found)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows].count("step") == 60
    assert [row["kind"] for row in rows].count("eval") == 29
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"generate", "train", "score", "weight_sync", "checkpoint"} <= {event["name"] for event in trace}
    assert Costs.load(folder / "costs.json") == Costs()
    text = json.loads((folder / "forecast.json").read_text())["text"]
    assert "proved bound" in text and text in capsys.readouterr().out
    start, work, end = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert (start["kind"], work["kind"], end["end"]) == ("start", "spans", "finished")
    assert {"trainer", "reward", "generator-1"} <= work["spans"].keys()
    assert end["at_s"] - start["at_s"] == pytest.approx(found["virtual_s"])


def test_a_failed_run_exits_1(run_file: str) -> None:
    assert main([run_file, "--gpus", "64", "--faults", "die=0@3", "--cluster.on_failure", "stop"]) == 1


def test_costs_of_a_planned_model(run_file: str, tmp_path: Path) -> None:
    assert find_gpu("h100-80g")
    assert main([run_file, "--gpus", "256", "--model", "llama3-70b", "--rollout.prompts_per_step", "64"]) == 0
    costs = Costs.load(tmp_path / "runs" / "small-simulation" / "costs.json")
    assert 0.001 < costs.decode_base_s < 0.1
    assert 1e-5 < costs.train_token_gpu_s < 1e-2


def test_a_runs_own_model_is_what_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's: made by a warm start that has not run yet, on processors."""
    assert main(["demo", "--steps", "2", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "70B" not in said and "on cpu-core" in said
    costs = Costs.load(tmp_path / "demo-simulation" / "costs.json")
    assert costs.save_bytes < 12e6 and costs.generator_gpus == 1
    assert main(["hosts2_14b", "--steps", "2", "--output", str(tmp_path), "--gpus", "16"]) == 0
    said = capsys.readouterr().out
    assert "70B" not in said and "14B" in said and "h100-80g" in said, "its shape is built in"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "`--gpus 0` is not a cluster; give 1 or more"),
        (["--gpus", "8"], "`--gpus 8` is too few by 1: .* give --gpus 9 or more"),
        (["--gpus", "16", "--trainer-gpus", "10"], "leaves 6 of 16 GPUs, .* give --trainer-gpus 8 or less"),
        (["--gpus", "4", "--trainer-gpus", "2"], "leaves 2 of 4 GPUs, .* give --gpus 9 or more"),
        (["--faults", "slw=1x2"], "`slw` is not a fault; did you mean `slow`.*slow=SHARExFACTOR"),
        (["--faults", "slow=1"], "`slow=1` cannot be read; write slow=0.01x4"),
        (["--faults", "slow=2x2"], "give at most 1"),
        (["--faults", "slow=0.5x0.5"], "0.5 times slower; give at least 1"),
        (["--faults", "die=1@5"], "`die=1` names no generator; there are 1, 0 to 0"),
        (["--faults", "deaths=1,deaths=2"], "`deaths` is given 2 times"),
        (["--costs", "a.json", "--model", "llama3-8b"], "give one"),
        (["--costs", "missing.json"], "cannot read missing.json"),
        (["--model", "llama3-8b"], "give --gpus N"),
        (["--model", "llama3-8b", "--gpus", "8", "--data.max_prompt_tokens", "131000"], "exceed the context"),
        (["--trainer.lora.rank", "8", "--trainer.advantage", "gae"], "not critic, trainer.lora; leave them out"),
        (["--cluster.placement", "colocated", "--rollout.max_staleness", "0"], "cluster.placement = 'colocated'"),
        (["--gpu", "8"], "--gpu chooses the kind of GPU .* give --model"),
        (["--rollout.prompt_per_step", "4"], "did you mean `prompts_per_step`"),
    ],
)
def test_bad_input(run_file: str, options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([run_file, *options])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no JSON object"),
        ('{"save_s": 10}', "`costs.save_s` of .* is gone; give `save_bytes` and `save_bandwidth` instead"),
        ('{"decode_base": 1}', "did you mean `decode_base_s`"),
        ('{"decode_base_s": 0}', "`costs.decode_base_s = 0` of .*greater than 0"),
        ('{"adopt_s": -1}', "greater than or equal to 0"),
        ('{"generator_gpus": 1.5}', "valid integer"),
        ('{"skips_equal_rewards": 1}', "valid boolean"),
        ('{"measured_groups": [[]]}', "at least 1 item"),
        ('{"measured_groups": [[[-1, 1.0]]]}', r"measured_groups.0.0.0 = -1"),
        ('{"call_s": "1"}', "valid number"),
        ('{"response_lengths": [0]}', r"`costs.response_lengths.0 = 0` .*greater than or equal to 1"),
    ],
)
def test_bad_costs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Costs.load(path)


def test_costs_survive_the_file(tmp_path: Path) -> None:
    costs = Costs(adopt_s=3.0, response_lengths=(3, 4))
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def test_lengths_depend_on_the_group_alone() -> None:
    lengths = ResponseLengths(Costs(response_tokens=200.0, response_sigma=0.5), 1000, seed=3)
    first = lengths.draw(17, 8)
    lengths.draw(18, 8)
    assert lengths.draw(17, 8) == first
    assert ResponseLengths(Costs(response_tokens=200.0, response_sigma=0.5), 1000, seed=4).draw(17, 8) != first
    many = [length for group in range(500) for length in lengths.draw(group, 8)]
    assert sum(many) / len(many) == pytest.approx(200, rel=0.03)
    assert max(many) <= 1000


def test_layout_balances_trainer_and_generators() -> None:
    config = run_config(prompts_per_step=128, max_staleness=1)
    layout = best_split(config, Costs(), 1024)
    assert layout.gpus == 1024
    more, fewer = choose_split(config, Costs(), 1024, 512), choose_split(config, Costs(), 1024, 64)
    assert fewer.replicas == 120
    assert more.replicas == 64


def test_slow_generators_are_spread_and_counted() -> None:
    faults = Faults(slow_share=0.01, slow_factor=4.0)
    factors = [faults.slowness(replica, 1000) for replica in range(1000)]
    assert factors.count(4.0) == 10
    assert [Faults(slow_share=0.01, slow_factor=4.0).slowness(replica, 3) for replica in range(3)].count(4.0) == 1
    assert faults.slowness(1000, 1000) == 1.0, "one that joins later is not slow"


@nightly("a process; architecture/test_imports.py reads imports by day")
def test_no_torch(run_file: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing it raises
        f"from llamarl.parts.forecast.cli.simulate import main; sys.exit(main([{run_file!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_first_line_says_whose_costs_these_are(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def first(*words: str) -> str:
        assert main([run_file, "--gpus", "64", *words]) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert "of a 70B model on H100s, built in, and not those of model.path = 'nowhere'" in first()
    assert "of qwen3-8b on a100-80g, by the tables" in first("--model", "qwen3-8b", "--gpu", "a100-80g")
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"costs": {"decode_base_s": 0.02}, "run": {"model": "mine", "device": "cpu-core"}}))
    assert f"as {path} has them, measured with mine on cpu-core" in first("--costs", str(path))


def test_limits_of_sources_are_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = "[{name = 'jsonl', path = 'a.jsonl'}, {name = 'jsonl', path = 'b.jsonl', max_new_tokens = 9}]"
    path = tmp_path / "mixture.toml"
    path.write_text(RUN.format(output=str(tmp_path)).replace('{name = "jsonl", path = "nowhere.jsonl"}', sources, 1))
    said = "data.train.1.max_new_tokens not counted: all sources are taken to have data.max_prompt_tokens and"
    assert main([str(path)]) == 0
    assert f"llamarl simulate: {said}" in capsys.readouterr().err
    assert plan.main(["--config", str(path), "--model", "qwen3-0.6b", "--gpus", "2"]) == 0
    assert f"llamarl plan: {said}" in capsys.readouterr().err
