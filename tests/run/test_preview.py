"""What `--dry-run` says of prompts and answers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError, RunConfig, resolved
from llamarl.kernels import build
from llamarl.parts.cuda import joint
from llamarl.rewards import Reward
from llamarl.run.preview import MOST_CHARS, answers, first_prompt
from llamarl.types import Prompt, RewardItem, RewardResult
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import also, nightly


def settings(*parts: Any, **more: Any) -> RunConfig:
    return resolved({"model": {"path": "m"}, "data": {"train": "jsonl"}, "reward": {"parts": list(parts)}} | more)


def prompt(number: int, answer: str, **metadata: Any) -> Prompt:
    token_ids_T = np.arange(number + 1, dtype=np.int32)
    return Prompt(prompt_id=f"p{number}", text="How many?", token_ids_T=token_ids_T, answer=answer, metadata=metadata)


def said(config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    return list(answers(config, prompts))


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ("gsm8k", "6 * 7 = 42\n#### 42"), ("exact", "forty-two"), ("math", r"so \boxed{7}"),
        *also(("gsm8k", "42"), ("math", r"\frac{1}{2}"), ("math", "x\n#### 7")),
    ],
)  # fmt: skip
def test_a_reward_knows_the_answers_that_it_writes(reward: str, answer: str) -> None:
    right = "3 of the first 3 rows' own answers are right by the reward"
    prompts = [prompt(number, answer) for number in range(3)]
    assert said(settings(reward), prompts) == [right]
    assert said(settings(reward, {"name": "regex_format", "pattern": "no such"}), prompts) == [right], (
        "the first decides"
    )


def test_worked_solutions_come_first_and_64_are_enough() -> None:
    prompts = [prompt(number, "7", solution="#### 7" if number else "####", way="#### 8") for number in range(99)]
    assert said(settings("gsm8k"), prompts) == ["63 of the first 64 rows' own answers are right by the reward"]
    data = {"train": "jsonl", "solution": "way"}
    share, warning = said(settings("gsm8k", data=data), prompts)
    assert share.startswith("0 of the first 64 ")
    assert warning.startswith("warning: reward and data do not match. For example '#### 8' to the answer '7' is ")
    assert warning.endswith("wrong: 8 is not 7")


def test_five_in_a_hundred_may_be_wrong() -> None:
    for num_wrong, is_warned in ((1, False), (2, True)):
        prompts = [prompt(number, "x" if number < num_wrong else "7") for number in range(20)]
        assert len(said(settings("gsm8k"), prompts)) == 1 + is_warned


@dataclass
class Odd(Reward):
    """Does anything."""

    mode: str = "none"

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        if self.mode == "raise":
            raise ZeroDivisionError("of their own")
        return []

    def written(self, answer: str) -> str | None:
        return answer if self.mode != "none" else None


def test_what_cannot_be_scored_is_said() -> None:
    odd, prompts = f"{__name__}:Odd", [prompt(1, "7")]
    assert said(settings(odd), prompts) == [
        "not scored: rows have no `solution`, and the reward does not say how an answer is written"
    ]
    judge = {"name": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    for parts in ((judge,), ("gsm8k", judge)):
        assert said(settings(*parts), prompts) == [
            "not scored: the reward asks another model, which a preview does not do"
        ]
    assert "an episode has turns" in said(settings("gsm8k", rollout={"environment": "calculator"}), prompts)[0]
    share, warning = said(settings({"name": odd, "mode": "few"}), prompts)
    assert share.startswith("0 of the first 1 ") and "0 results" in warning
    with pytest.raises(
        ConfigError, match=r"raised ZeroDivisionError: of their own \(.*test_preview.py, line \d+\); fix"
    ):
        said(settings({"name": odd, "mode": "raise"}), prompts)


def test_a_long_prompt_loses_its_middle() -> None:
    heading, *lines = first_prompt(prompt(3, "7"))
    assert (heading, lines) == ("row 'p3', 4 tokens: 0 1 2 3", ["| How many?"])
    long = Prompt(
        prompt_id="p", text="a" * MOST_CHARS + "\nmiddle\n" + "z" * MOST_CHARS,
        token_ids_T=np.arange(5000, dtype=np.int32), answer="", metadata={},
    )  # fmt: skip
    heading, line = first_prompt(long)
    assert heading.startswith("row 'p', 5000 tokens: 0 1 2 ") and " 11 ... 4988 " in heading
    assert len(line) < MOST_CHARS + 60 and line.startswith("| aaa") and line.endswith("zzz") and "middle" not in line
    assert "[... 1,208 characters ...]" in line


@nightly("a command with a model; by day the same preview is asked for rewards and refusals")
def test_a_dry_run(tmp_path: Path) -> None:
    """It shows what is there, writes nothing, and ends with 2 where the run could not start."""
    toml = write_toml(tmp_path, model := make_model(tmp_path / "model"))
    toml.write_text(toml.read_text().replace("steps = 4", f"steps = 4\noutput = '{tmp_path / 'runs'}'"))
    before = sorted(tmp_path.rglob("*"))
    done = llamarl_here("train", toml, "--dry-run", "--reward.parts", "['gsm8k']")
    assert done.returncode == 0, done.stderr
    assert "\nfirst prompt:\n  row 'running_total-0-100', " in done.stdout
    assert "\nanswers:\n  64 of the first 64 rows' own answers are right" in done.stdout
    follows = json.loads(llamarl_here("train", toml, "--dry-run", "--json").stdout)["consequences"]
    assert len(follows["answers"]) == 2 and "do not match" in follows["answers"][1], "`exact` wants no way"
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/mine").touch()
    done = llamarl_here("train", toml, "--dry-run")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and all(one in last for one in ("runs/tiny", "--resume", "--overwrite", "--name")), done
    both = llamarl_here("train", toml, "--dry-run", "--settings").stdout
    assert tomllib.loads(both)["trainer"]["threads"] >= 1 and both.splitlines()[-1] == f"# {last.strip()}"
    assert "learning_rate" not in done.stdout
    for asked, cause in (
        (("--name=other", "--trainer.device=cuda"), "torch sees no GPU"),
        (("--name=other", "--data.max_prompt_tokens=3"), "each of the 300 prompts has more than 3 tokens"),
    ):
        done = llamarl_here("train", toml, "--dry-run", *asked)
        assert done.returncode == 2 and cause in done.stderr, done
    (model / "model.safetensors").write_bytes(b"no weights")
    done = llamarl_here("train", toml, "--dry-run", "--name=other")
    assert done.returncode == 2 and "not a whole safetensors file" in done.stderr


@pytest.mark.parametrize("has_model", [True, False])
def test_a_dry_run_is_refused_as_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_model: bool) -> None:
    """For what this machine lacks, also before a base model is made; not for what is to run elsewhere."""
    file = write_toml(tmp_path, make_model(tmp_path / "model")) if has_model else "demo"
    words = ("train", file, "--output", tmp_path / "runs", "--weight_sync.transport", "nixl", "--cluster.kind=monarch")
    words += () if has_model else ("--model.path", tmp_path / "base")
    assert llamarl_here(*words, "--dry-run").returncode == 0
    monkeypatch.setattr(joint, "NIXL", ("no_such_package",))
    for asked in ((), ("--dry-run",)):
        done = llamarl_here(*words, *asked)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr == f"llamarl train: {joint.NO_NIXL}\n"
    assert llamarl_here(*words, "--dry-run", "--gpus=1x80").returncode == 0
    monkeypatch.setattr(build, "processor", lambda: "avx2 fma")
    monkeypatch.setenv(build.VARIABLE, "amx")
    for asked in ((), ("--dry-run",)):
        done = llamarl_here("train", file, "--output", tmp_path / "runs", *asked)
        said = "LLAMARL_KERNELS=amx: this processor offers avx2, torch; unset it to measure them"
        assert (done.returncode, done.stderr) == (2, f"llamarl train: {said}\n"), done
    assert not (tmp_path / "runs").exists()


def test_a_source_without_turns_is_scored_beside_a_set_that_has_some() -> None:
    sets = [{"name": "jsonl", "environment": "calculator"}]
    config = settings("gsm8k", data={"train": [{"name": "jsonl", "label": "a"}], "eval": sets})
    assert config.has_episodes
    assert said(config.by_source["a"], [prompt(1, "7")]) == [
        "1 of the first 1 rows' own answers are right by the reward"
    ]
