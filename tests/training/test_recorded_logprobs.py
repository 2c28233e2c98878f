"""What the trainer says of each token that it learnt from, for the record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from llamarl.algorithms.advantages.gae import Gae
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.trainer import Trainer
from llamarl.types import RolloutGroup


def trainer_logprobs(trainer: Trainer, group: RolloutGroup) -> Iterator[np.ndarray]:
    """Of each rollout of a group, computed alone, [T]."""
    for rollout in group.rollouts:
        alone = replace(group, rollouts=(rollout,), results=group.results[:1], responses=group.responses[:1])
        (microbatch,) = pack([to_sample_group(alone, np.ones(1))], 1000)
        yield trainer.logprobs(microbatch).detach().numpy()


@pytest.mark.parametrize("microbatch_tokens", [9, 1000])
def test_log_probabilities_of_what_was_computed(make_trainer, make_groups, microbatch_tokens: int) -> None:
    """Those under the weights that the step began with, each with its rollout."""
    equal, *others = groups = make_groups(((2, 3), (5, 1, 9), (3, 3)))
    same = tuple(replace(one, value=1.0) for one in equal.results)
    groups[0] = replace(equal, results=same)
    trainer = make_trainer(passes=2, microbatch_tokens=microbatch_tokens)
    expected = {group.group_id: list(trainer_logprobs(make_trainer(), group)) for group in others}
    found = trainer.step(groups).logprobs
    assert found.pop(equal.group_id) == {}, "equal rewards teach nothing, so nothing is computed"
    assert {group_id: sorted(of_group) for group_id, of_group in found.items()} == {1: [0, 1, 2], 2: [0, 1]}
    for group_id, of_group in found.items():
        for index, logprobs_T in of_group.items():
            np.testing.assert_allclose(logprobs_T, expected[group_id][index], atol=1e-5)


def test_advantages_of_tokens_where_they_differ(make_trainer, make_groups) -> None:
    """Of a critic each token has its own; of a group all tokens have that of their rollout, which is told anyway."""
    groups = make_groups(((2, 3), (5, 1)))
    assert make_trainer().step(groups).token_advantages == {0: {}, 1: {}}
    groups = [
        replace(group, rollouts=tuple(
            replace(one, columns=one.columns | {"values": np.arange(one.num_tokens, dtype=np.float32)})
            for one in group.rollouts
        ))
        for group in groups
    ]  # fmt: skip
    trainer = make_trainer()
    trainer.objective = replace(trainer.objective, advantage=Gae(normalize=False))
    result = trainer.step(groups)
    assert {group_id: sorted(of_group) for group_id, of_group in result.token_advantages.items()} == {0: [0, 1], 1: [0]}
    np.testing.assert_allclose(result.columns["advantages"][0][1], 1.0 - np.arange(3))
    assert result.advantages[0][1] == 0.0, "their mean"


def test_log_probabilities_of_sequences_of_agents(make_trainer, make_groups) -> None:
    """Two sequences with prompts of their own in one rollout: each token that is a target has its own."""
    (group,) = make_groups(((9, 8),))
    cuts = [np.repeat([0, 1], [5, 4]).astype(np.int32), np.zeros(8, np.int32)]
    versions = [np.array([-1, -1, 0, 0, 0, -1, 0, -1, 0], np.int32), np.array([-1] * 3 + [0] * 5, np.int32)]
    rollouts = tuple(
        replace(one, columns=one.columns | {"sequence": cut_T, "policy_versions": versions_T})
        for one, cut_T, versions_T in zip(group.rollouts, cuts, versions, strict=True)
    )
    trainer = make_trainer()
    trainer.objective = replace(trainer.objective, temperature=1.0)
    alone = make_trainer().score([rollouts[0].token_ids_T[5:]])[0]
    found = trainer.step([replace(group, rollouts=rollouts)]).logprobs[group.group_id]
    assert all(np.isfinite(found[index][versions[index] == 0]).all() for index in (0, 1))
    assert np.isnan(found[0][[0, 5]]).all(), "what a sequence begins with is no target"
    np.testing.assert_allclose(found[0][6:], alone, atol=1e-5)
