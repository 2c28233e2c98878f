"""`llamarl explain`: every setting with its value, its origin and its meaning, and what follows."""

from __future__ import annotations

import json
from pathlib import Path

from llamarl.config import RunConfig
from tests.architecture.test_settings import _settings
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import nightly
from tests.parts.forecast.run_folder import COSTS


def test_every_setting_with_its_origin(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    overrides = ("--recipe", "ppo", "--trainer.learning_rate", 2e-4, "--seed=3")
    overrides += ("--trainer.loss", "aipo", "--trainer.loss.rho", 8.0)
    done = llamarl_here("explain", toml, *overrides, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["settings"]}
    named = {name for name, _ in _settings(RunConfig)}
    assert {name for name in named if name not in rows and not any(name.startswith(f"{one}.") for one in rows)} == set()
    assert all(row["meaning"] for row in rows.values())
    origins = {
        "rollout.group_size": "file", "model.path": "file", "trainer.learning_rate": "command line",
        "trainer.loss": "command line", "seed": "command line", "trainer.advantage": "recipe ppo",
        "reference.kl_coefficient": "recipe ppo", "rollout.max_staleness": "default", "trainer.beta1": "default",
    }  # fmt: skip
    assert {name: rows[name]["origin"] for name in origins} == origins
    assert rows["trainer.learning_rate"]["value"] == 2e-4 and rows["seed"]["value"] == 3
    assert rows["weight_sync.patience_s"]["unit"] == "seconds" and rows["rollout.max_new_tokens"]["unit"] == "tokens"
    follows = said["consequences"]
    assert follows["staleness"] == ["tokens are at most 2 optimizer steps old when they are trained on"]
    assert [line.split()[0] for line in follows["executors"]] == [
        "executor", "trainer", "critic", "generator-0", "reward", "reference",
    ]  # fmt: skip
    assert " s, if every group has a gradient, for prompts of 29 and responses of" in follows["step time"][0]
    assert any(line.startswith("critic ") and " MiB (" in line for line in follows["memory"])


def test_as_text_and_as_a_dry_run(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    done = llamarl_here("explain", toml, "--rollout.max_staleness", 0, "--rollout.window", 1)
    assert done.returncode == 0, done.stderr
    assert "rollout.max_staleness = 0 optimizer steps  (command line)\n    S, in optimizer steps" in done.stdout
    assert "\nstaleness:\n  tokens are at most 0 optimizer steps old" in done.stdout
    dry = llamarl_here("train", toml, "--dry-run")
    assert dry.returncode == 0 and "  tokens are at most 2 optimizer steps old" in dry.stdout
    both = [llamarl_here(*one, "--json") for one in (("explain", toml), ("train", toml, "--dry-run"))]
    explained, tried = (json.loads(one.stdout) for one in both)
    for one in (explained, tried):
        assert one["consequences"].pop("memory")[-1].startswith("this host: "), "with what is free, which changes"
        assert len(one["consequences"].pop("disk")) == 3, "with what is free"
    assert {"first prompt", "answers", "start"} == tried["consequences"].keys() - explained["consequences"].keys()
    assert explained["settings"] and explained["settings"] == tried["settings"]
    assert explained["consequences"].items() <= tried["consequences"].items()
    alone = llamarl_here("train", toml, "--json")
    assert alone.returncode == 2 and "--json is for --dry-run" in alone.stderr
    wrong = llamarl_here("explain", toml, "--trainer.decay_floor", 0.1)
    assert wrong.returncode == 2 and "do nothing with trainer.decay = 'constant'" in wrong.stderr


def _step_s(toml: Path, *options: object) -> tuple[float, str]:
    done = llamarl_here("explain", toml, "--json", *options)
    (line,) = json.loads(done.stdout)["consequences"]["step time"]
    return float(line.split()[0]), line


@nightly("by day the step time is that of the run's devices")
def test_the_step_time_is_that_of_the_run_s_work(tmp_path: Path) -> None:
    """Of its prompts and not the longest that may come, with what a CPU takes for a call, or by what was measured."""
    model, runs = make_model(tmp_path / "model"), tmp_path / "runs"
    toml, output = write_toml(tmp_path, model), ("--output", runs, "--rollout.prompts_per_step", 256)
    plain, line = _step_s(toml, *output)
    assert line.endswith("estimated from the tables of `llamarl plan`")
    assert _step_s(toml, *output, "--data.max_prompt_tokens", 200) == (plain, line)
    assert _step_s(toml, *output, "--data.template", "{question}" * 5)[0] > 2 * plain
    assert _step_s(toml, *output, "--trainer.activation_checkpointing", "true")[0] > 1.1 * plain
    assert 0.02 < _step_s(toml, "--output", runs)[0] < 0.2, "no half second beside the work"
    (runs / "tiny").mkdir(parents=True)
    (runs / "tiny" / "profile.json").write_text(json.dumps({"constants": {"step_overhead_s": 70.0}}))
    seconds, line = _step_s(toml, *output)
    assert seconds > 70 and line.endswith(f"by {runs}/tiny/profile.json")
    costs = COSTS | {"train_base_s": 0.5, "cores": 2, "response_tokens": 8.0}
    (runs / "tiny" / "profile.json").write_text(json.dumps({"costs": costs}))
    seconds, line = _step_s(toml, "--output", runs)
    assert line == f"{seconds:.3g} s, the mean of 4 steps simulated by {runs}/tiny/profile.json"
    assert 0.5 < seconds < 0.6, "nothing else takes long, and hides behind it"
    assert " s, if every group has a gradient, " in _step_s(toml, "--output", runs, "--recipe", "ppo")[1], "a critic"
    missing = llamarl_here("explain", toml, "--data.train", "{name = 'jsonl', path = 'nowhere.jsonl'}", "--json")
    (line,) = json.loads(missing.stdout)["consequences"]["step time"]
    assert line.startswith("not known: ") and "nowhere.jsonl" in line


def test_the_step_time_is_that_of_the_run_s_devices(tmp_path: Path) -> None:
    """A GPU that trains and generates is one, and of the size that was said; cores share the memory of a host."""
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    gpus = {
        name: ("--trainer.device", "cuda", "--generator.device", "cuda", "--gpus", name) for name in ("1x24", "2x40")
    }
    together = ("--cluster.placement", "colocated", "--rollout.max_staleness", 0, "--rollout.window", 1)
    assert " on 1 x rtx4090-24g, " in _step_s(toml, *gpus["1x24"], *together)[1]
    assert " on 2 x a100-40g, " in _step_s(toml, *gpus["2x40"])[1]
    assert " on 2 x cpu-core, " in _step_s(toml, "--gpus", "0")[1]


def test_of_several_sources_what_each_settles(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    several = "[{label = 'a', name = 'running_total', count = 4, samples = 2}, {name = 'running_total', count = 5}]"
    done = llamarl_here("explain", toml, f"--data.eval={several}", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"] if row["name"].startswith("data.eval")}
    assert {name: row["value"] for name, row in rows.items()} == {
        "data.eval.0.source": {"name": "running_total", "count": 4}, "data.eval.0.label": "a",
        "data.eval.0.samples": 2, "data.eval.1.source": {"name": "running_total", "count": 5},
        "data.eval.1.label": "running_total",
    }  # fmt: skip
    assert {row["origin"] for row in rows.values()} == {"command line"}


def test_code_of_the_file_is_imported_only_where_it_is_trusted(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    own = ("--reward.parts", "['nowhere:Reward']", "--trainer.loss", "nowhere:Loss")
    done = llamarl_here("explain", toml, *own)
    assert done.returncode == 0 and "nowhere:Reward" in done.stderr and "nowhere:Loss" in done.stderr
    for arguments in ((*own, "--trust"), ("--recipe", "nowhere:recipe", "--trust")):
        done = llamarl_here("explain", toml, *arguments)
        assert done.returncode == 2 and "nowhere" in done.stderr and "imported" in done.stderr
    done = llamarl_here("explain", toml, "--recipe", "nowhere:recipe")
    assert done.returncode == 2 and "--trust" in done.stderr
    done = llamarl_here("explain", toml, "--trainer.loss", "no_such_loss")
    assert done.returncode == 2 and "trainer.loss" in done.stderr
