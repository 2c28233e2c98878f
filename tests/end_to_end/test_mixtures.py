"""Several sources in one run: exact shares, what each has of its own, a resume and a replay that change nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_resume import SYNCHRONOUS
from tests.end_to_end.tiny import Command, llamarl_here, rows
from tests.nightly import nightly

EVEN = "tests.executors.rewards:EvenLength"
MIXTURE = f"""
name = "tiny"
model = {{{{path = "{{model}}"}}}}

[[data.train]]
name = "running_total"
count = 40
label = "sums"
weight = 3
reward = "{EVEN}"

[[data.train]]
name = "list_functions"
count = 9
template = "write {{{{question}}}}: "
reward = {{{{parts = ["{EVEN}", "exact"], weights = [0.5, 1.0]}}}}
max_new_tokens = 20

[rollout]
prompts_per_step = 4
group_size = 3
max_new_tokens = 8

[screen]
kind = "lines"
"""
SHARES = {"sums": 3, "list_functions": 1}


@pytest.fixture
def mixture(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "mixture.toml"
    path.write_text(MIXTURE.format(model=model))
    return path


def _options(*without: str) -> list[object]:
    """Those of a run that repeats itself, but for some."""
    pairs = zip(SYNCHRONOUS[::2], SYNCHRONOUS[1::2], strict=True)
    return [word for name, value in pairs if name not in ("--reward.parts", *without) for word in (name, value)]


def test_each_source_has_its_share_its_prompts_its_limit_and_its_rewards(tmp_path: Path, mixture: Path) -> None:
    done = llamarl_here("train", mixture, "--output", tmp_path, "--steps", 5, *_options())
    assert done.returncode == 0, done.stderr
    recorded = rows(tmp_path / "tiny/rollouts.jsonl")
    for step in range(1, 6):
        of_step = Counter(row["source"] for row in recorded if row["step"] == step)
        assert of_step == {label: 3 * share for label, share in SHARES.items()}, step
    own = {label: [row for row in recorded if row["source"] == label] for label in SHARES}
    assert {row["prompt"].startswith("write ") for row in own["list_functions"]} == {True}
    assert {row["prompt"].startswith("write ") for row in own["sums"]} == {False}
    assert {row["prompt_id"].partition("/")[0] == label for label in own for row in own[label]} == {True}
    assert max(len(row["token_ids"]) for row in own["sums"]) == 8
    assert max(len(row["token_ids"]) for row in own["list_functions"]) == 20
    assert {row["reward"] for row in own["sums"]} == {0.0, 1.0}
    assert {row["reward"] for row in own["list_functions"]} == {0.0, 0.5}
    steps = [row for row in rows(tmp_path / "tiny/metrics.jsonl") if row["kind"] == "step"]
    for step in steps:
        for label, of in own.items():
            rewards = [row["reward"] for row in of if row["step"] == step["step"]]
            assert step[f"extra.source_reward.{label}"] == pytest.approx(sum(rewards) / len(rewards))
            assert step[f"extra.source_share.{label}"] == SHARES[label] / 4
    assert "(sums " in done.stdout and ", list_functions " in done.stdout
    assert "sources             sums: reward 0." in done.stdout and "75% of the groups" in done.stdout
    assert "source 'list_functions': data.template = 'write {question}: '; the first prompt" in done.stdout
    summary = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert summary["extra.source_share.sums"] == 0.75
    replayed = llamarl_here("replay", tmp_path / "tiny")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "60 rollouts" in replayed.stdout and "all equal" in replayed.stdout


@nightly("a run of its own; controller/test_restart.py goes on by day")
def test_a_run_that_goes_on_is_the_one_that_was_never_interrupted(tmp_path: Path, mixture: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert llamarl_here("train", mixture, "--output", whole, "--steps", 6, *_options()).returncode == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "tiny/journal")
    for folder in cut.rglob("step-*"):
        if folder.name > "step-00000002":
            shutil.rmtree(folder)
    done = llamarl_here("train", mixture, "--output", cut, "--steps", 6, "--resume", *_options())
    assert done.returncode == 0, done.stderr
    recorded = [
        [(row["step"], row["prompt_id"], row["token_ids"], row["advantage"]) for row in found if row["step"] > 2]
        for found in (rows(folder / "tiny/rollouts.jsonl") for folder in (whole, cut))
    ]
    assert recorded[0] == recorded[1] and len(recorded[0]) == 4 * 12
    files = [path.relative_to(cut) for path in cut.rglob("*.safetensors")]
    assert len(files) >= 3
    assert all((whole / file).read_bytes() == (cut / file).read_bytes() for file in files)


@nightly("runs of their own; controller/test_restart.py and data/test_sampler.py go on with a mixture by day")
def test_a_run_that_is_killed_draws_nothing_twice(tmp_path: Path, mixture: Path) -> None:
    """Asynchronous: groups in flight keep their prompts."""
    options = ("--output", tmp_path, "--steps", 12, "--checkpoint.every_steps", 3, "--data.train.0.count", 30)
    options += ("--cluster.kind", "inline")
    command, metrics = Command.start(tmp_path, "train", mixture, *options), tmp_path / "tiny/metrics.jsonl"
    command.until(lambda: metrics.exists() and '"step": 5,' in metrics.read_text())
    command.process.kill()
    command.process.wait()
    done = llamarl_here("train", mixture, *options, "--resume")
    assert done.returncode == 0, done.stderr
    groups = {row["group_id"]: row for row in rows(tmp_path / "tiny/rollouts.jsonl")}
    drawn = Counter(row["source"] for row in groups.values())
    assert drawn == {"sums": 36, "list_functions": 12}
    first = Counter(row["prompt_id"] for _, row in sorted(groups.items())[:40] if row["source"] == "sums")
    assert set(first.values()) == {1}, "30 prompts of an epoch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--data.train.0.weight", 2), "drew from source 'sums' with weight = 3, now it has 2"),
        (
            ("--data.train.1.label", "code"),
            "drew from the sources sums, list_functions, and data.train now has sums, code",
        ),
        (("--data.train.1.count", 8), "source 'list_functions': the checkpoint drew prompts with num_prompts = 9"),
        (("--data.train", "{name = 'running_total', count = 40}"), "and data.train is a single source"),
    ],
)
def test_another_mixture_does_not_go_on(
    tmp_path: Path, mixture: Path, change: tuple[object, ...], message: str
) -> None:
    run = ("train", mixture, "--output", tmp_path, *_options())
    assert llamarl_here(*run, "--steps", 2).returncode == 0
    done = llamarl_here(*run, "--steps", 4, "--resume", *change)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--data.train.0.wieght", 2), "`data.train.0.wieght` is not a setting, and `running_total` has none; did"),
        (("--data.train", "['json:loads']"), "source 'loads': `data.train = 'json:loads'` must be a dataclass"),
        (("--data.train.1.reward", "nope"), "source 'list_functions': `reward.parts = 'nope'` is unknown"),
        (("--data.train.1.environment", "no"), "source 'list_functions': `rollout.environment = 'no'` is unknown"),
        (("--data.train.1.max_new_tokens", 999), "source 'list_functions': rollout.max_new_tokens = 999: prompt and"),
        (("--data.train.1.template", "{no}"), "source 'list_functions': data.template = '{no}': row"),
        (("--trainer.microbatch_tokens", 40), "source 'sums': trainer.microbatch_tokens = 40 is less than the"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_one_source_names_it(
    tmp_path: Path, mixture: Path, change: tuple[object, ...], message: str
) -> None:
    done = llamarl_here("train", mixture, "--output", tmp_path, *change)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


@nightly("runs of their own; controller/test_restart.py and data/test_sampler.py go on with a mixture by day")
def test_one_source_has_turns_and_the_other_has_none(tmp_path: Path, mixture: Path) -> None:
    """The environment says three times something, within the limit of its source."""
    world = "tests.parts.episodes.environments.worlds:Chatty"
    options = ("--data.train.1.environment", world, "--data.train.1.max_new_tokens", 60)
    stops = ("--rollout.stop_strings", "['a', 'e', 'o', ' ', '1']", "--rollout.max_new_tokens", 30)
    done = llamarl_here("train", mixture, "--output", tmp_path, "--steps", 4, *options, *stops, *_options())
    assert done.returncode == 0, done.stderr
    recorded = rows(tmp_path / "tiny/rollouts.jsonl")
    turns = {label: {row["turns"] for row in recorded if row["source"] == label} for label in SHARES}
    assert turns["sums"] == {1} and max(turns["list_functions"]) > 1
    replayed = llamarl_here("replay", tmp_path / "tiny")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@nightly("runs of their own; controller/test_restart.py and data/test_sampler.py go on with a mixture by day")
def test_pass_rates_are_measured_and_chosen_by(tmp_path: Path, mixture: Path, model: Path) -> None:
    rates, where = tmp_path / "rates.jsonl", "--data.filter"
    (filtered := tmp_path / "filtered.toml").write_text(
        f"{mixture.read_text()}[data]\nfilter = {{path = 'none yet'}}\n"
    )
    measured = llamarl_here("eval", model, "--config", filtered, "--rates", rates, "--eval.samples", 4)
    assert measured.returncode == 0, measured.stderr
    assert f"{rates}: 49 problems: " in measured.stdout and " in between" in measured.stdout
    head, *found = rows(rates)
    assert head["kind"] == "pass rates" and (head["model"], head["samples"]) == (str(model), 4)
    assert Counter(row["source"] for row in found) == {"sums": 40, "list_functions": 9}
    wanted = {row["id"] for row in found if 0.3 <= row["right"] / row["samples"] <= 0.7}
    assert 0 < len(wanted) < len(found), "else nothing is chosen"
    run = ("train", mixture, "--output", tmp_path, "--steps", 14, *_options())
    done = llamarl_here(*run, where, f"{{path = '{rates}', min = 0.3, max = 0.7}}")
    assert done.returncode == 0, done.stderr
    assert "of 40 prompts are kept; left out: " in done.stdout
    asked = {row["prompt_id"] for row in rows(tmp_path / "tiny/rollouts.jsonl")}
    assert asked <= wanted and {one.partition("/")[0] for one in asked} == set(SHARES)
    refused = llamarl_here(*run, "--resume", where, f"{{path = '{rates}', min = 0.2}}", "--steps", 15)
    assert refused.returncode == 2 and "the checkpoint drew " in refused.stderr.splitlines()[-1]
    resumed = llamarl_here(*run, "--resume", where, f"{{path = '{rates}', min = 0.3, max = 0.7}}", "--steps", 15)
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--data.train.0.first", 35), "source 'sums': data.filter: {rates} lacks 35 of 40 problems, such as"),
        (("--data.filter.min", 1, "--data.filter.max", 1), "source 'sums': data.filter leaves none of 40 prompts: 40 "),
        (("--data.filter.path", "{model}/config.json"), "{model}/config.json:1: malformed JSON"),
        (("--data.filter.path", "{rates}.none"), "cannot read {rates}.none: No such file"),
    ],
)  # fmt: skip
def test_a_filter_that_cannot_be_used_is_refused(
    tmp_path: Path, mixture: Path, model: Path, option: tuple[Any, ...], message: str
) -> None:
    rates = tmp_path / "rates.jsonl"
    (strict := tmp_path / "strict.toml").write_text(mixture.read_text().replace(EVEN, "exact"))
    assert llamarl_here("eval", model, "--config", strict, "--rates", rates, "--eval.samples", 1).returncode == 0
    names = {"rates": rates, "model": model}
    given = [str(one).format(**names) for one in option]
    run = ("train", mixture, "--output", tmp_path, "--data.filter.path", rates, "--data.filter.min", 0)
    done = llamarl_here(*run, *given)
    assert done.returncode == 2
    assert message.format(**names) in done.stderr and done.stderr.count("\n") == 1
