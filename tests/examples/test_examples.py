"""Every example runs as its first lines say, and does what it says."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.own_advantage import Rank
from examples.own_loss import Faded
from examples.own_reward.reward import Brevity
from llamarl.algorithms.losses._base import LossInputs
from llamarl.types import Outcome, RewardItem
from tests.architecture.repository import ROOT, tree
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("own_*.py"))


def command_of(path: Path) -> list[str]:
    """The one in the example's docstring, without the run file."""
    text = tree(path).body[0].value.value
    start = text.index("llamarl train")
    words = shlex.split(text[start:].split("\n\n")[0].replace("\\\n", " "))
    assert words[:3] == ["llamarl", "train", "configs/demo.toml"]
    return words[3:]


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    return write_toml(folder, make_model(folder / "model"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_as_it_says(path: Path, toml: Path, tmp_path: Path) -> None:
    done = llamarl_here(
        "train", toml, "--output", tmp_path, "--cluster.kind", "inline", "--steps", 2, *command_of(path)
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()) >= 2


def test_brevity() -> None:
    items = [RewardItem(prompt="", response="x" * length, answer="", metadata={}) for length in (0, 50, 100, 400)]
    results = Brevity(limit=100).score(items)
    assert [result.value for result in results] == [1.0, 0.5, 0.0, 0.0]
    assert [result.outcome for result in results] == [Outcome.SCORE] * 2 + [Outcome.WRONG] * 2


def test_rank() -> None:
    valid = np.array([True, True, True, False])
    assert Rank()(np.array([5.0, 1.0, 1.0, 9.0]), valid).tolist() == [1.0, -0.5, -0.5, 0.0]
    assert Rank()(np.array([5.0, 1.0]), np.array([True, False])).tolist() == [0.0, 0.0]


def test_faded() -> None:
    """The gradient is the closed form's, in float64."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-1.5, -2.0, -4.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    inputs = LossInputs(
        logprobs_N=logprobs, behavior_logprobs_N=behavior, advantages_N=advantages,
        loss_mask_N=torch.ones(3, dtype=torch.bool), sequence_N=torch.zeros(3, dtype=torch.int64), num_sequences=1,
    )  # fmt: skip
    Faded(scale=2.0)(inputs).loss.backward()
    ratio = (logprobs.detach() - behavior).exp()
    torch.testing.assert_close(logprobs.grad, -2.0 * (ratio / 2.0).tanh() * advantages)
