"""A per-token column that this package does not know: a row in the table, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses._base import LossInputs, LossOutput
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.schema import TrainerConfig
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import COLUMNS, Column, Rollout, RolloutGroup, add_column, continued, packed_columns
from tests.controller.fakes import Run, config
from tests.executors.ledger import Generator, Model
from tests.training.conftest import MakeModel

SURPRISE = Column(name="surprise", dtype=np.float32, filled_by="surprised", default=-1.0, is_recorded=True)


@pytest.fixture(autouse=True)
def column() -> Iterator[None]:
    add_column(SURPRISE)
    yield
    del COLUMNS["surprise"]


def surprise(rollout: Rollout) -> np.ndarray:
    return (rollout.token_ids_T % 7).astype(np.float32)


def test_a_name_has_one_meaning() -> None:
    add_column(SURPRISE)
    with pytest.raises(ValueError, match="'surprise' exists"):
        add_column(Column(name="surprise", dtype=np.int32, filled_by="surprised"))


def test_it_is_filled_recorded_and_delivered(tmp_path: Path) -> None:
    """By an executor of that name; responses are cut into segments, parked and resumed on the way."""
    generators = [Generator(num_tokens=lambda *_: 7) for _ in range(2)]
    settings = config(tmp_path, steps=3, rollout={"segment_tokens": 3})
    run = Run(settings, tmp_path, generators, models={"surprised": Model(surprise)}).train()
    rollouts = [rollout for group in run.trainer.consumed for rollout in group.rollouts]
    assert len(rollouts) == 3 * 2 * 2 and {rollout.num_tokens for rollout in rollouts} == {7}
    for rollout in rollouts:
        assert np.array_equal(rollout.columns["surprise"], surprise(rollout))
    for row in run.rollouts:
        assert row["surprise"] == [float(token % 7) for token in row["token_ids"]]


@dataclass(frozen=True)
class Curious(Aipo):
    """Keeps what it was given."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        GIVEN.append(inputs.columns_N["surprise"])
        return super().__call__(inputs)


GIVEN = list[torch.Tensor]()


def test_it_is_packed_and_handed_to_a_loss(make_model: MakeModel, make_groups) -> None:
    """Rollouts that lack it get its default."""
    groups: Sequence[RolloutGroup] = make_groups(((5, 2), (3, 4)))
    first = groups[0].rollouts[0]
    first.columns["surprise"] = surprise(first)
    expected = np.concatenate([surprise(first), np.full(9, -1.0)]).astype(np.float32)
    (batch,) = pack([to_sample_group(group, [1.0, -1.0]) for group in groups], 1000)
    np.testing.assert_array_equal(batch.columns_R["surprise"], expected)
    GIVEN.clear()
    trainer = Trainer(
        make_model(),
        TrainerConfig(learning_rate=1e-3),
        Objective(loss=Curious(), advantage=GroupMean(), temperature=1.0),
    )
    trainer.step(groups)
    np.testing.assert_array_equal(torch.cat(GIVEN), expected)


def test_it_may_begin_with_any_response() -> None:
    ids, numbers = np.zeros(2, np.int32), np.ones(2, np.float32)
    without, having = {"token_ids": ids}, {"token_ids": ids, "surprise": numbers}
    for make in (packed_columns, lambda responses: continued(*responses)):
        assert make([without, having])["surprise"].tolist() == [-1.0, -1.0, 1.0, 1.0]
        assert make([having, without])["surprise"].tolist() == [1.0, 1.0, -1.0, -1.0]


def test_without_a_default_a_missing_one_is_no_zero() -> None:
    COLUMNS["surprise"] = Column(name="surprise", dtype=np.float32, filled_by="surprised")

    ids = np.zeros(2, np.int32)
    with pytest.raises(AssertionError, match="surprise is missing, and has no default"):
        packed_columns([{"token_ids": ids, "surprise": ids.astype(np.float32)}, {"token_ids": ids}])
