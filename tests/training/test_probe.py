"""Which tokens are compared after a weight sync."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamarl.training.probe import NUM_SEQUENCES, SEQUENCE_TOKENS, WHOLE_TOKENS, probe_sequences, whole_sequences
from llamarl.types import OBSERVED, RolloutGroup


def with_sequences(group: RolloutGroup, *lengths: int) -> RolloutGroup:
    """As an agent's episode: sequences end to end, each with a prompt of three tokens of its own."""
    ids = [np.arange(100 * n, 100 * n + length, dtype=np.int32) for n, length in enumerate(lengths)]
    versions = [np.array([OBSERVED] * 3 + [7] * (length - 3), np.int32) for length in lengths]
    columns = {
        "token_ids": np.concatenate(ids),
        "behavior_logprobs": np.zeros(sum(lengths), np.float32),
        "policy_versions": np.concatenate(versions),
        "sequence": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
    }
    first, *others = group.rollouts
    return replace(group, rollouts=(replace(first, columns=columns), *others))


def test_a_prompt_and_a_response(make_group) -> None:
    groups = [make_group(n) for n in range(NUM_SEQUENCES + 2)]
    wholes = [np.concatenate([one.prompt.token_ids_T, one.rollouts[0].token_ids_T]) for one in groups[:NUM_SEQUENCES]]
    first = groups[0].rollouts[0]
    cutoffs_T = np.linspace(-3, -1, first.num_tokens, dtype=np.float32)
    rollouts = (replace(first, columns=first.columns | {"cutoffs": cutoffs_T}), *groups[0].rollouts[1:])
    groups[0] = replace(groups[0], rollouts=rollouts)
    ids, versions_N, cutoffs = whole_sequences(groups)
    assert [len(one) + 1 for one in cutoffs] == [len(one) for one in ids]
    assert (
        cutoffs[0][-first.num_tokens :].tolist()
        == cutoffs_T[: WHOLE_TOKENS - len(groups[0].prompt.token_ids_T)].tolist()
    )
    assert np.isneginf(cutoffs[0][: -first.num_tokens]).all() and np.isneginf(np.concatenate(cutoffs[1:])).all()
    for found, ends, whole in zip(ids, probe_sequences(groups), wholes, strict=True):
        assert found.tolist() == whole[:WHOLE_TOKENS].tolist()
        assert ends.tolist() == whole[-SEQUENCE_TOKENS:].tolist()
    assert len(versions_N) == sum(len(one) - 1 for one in ids)
    count = len(groups[0].prompt.token_ids_T) - 1
    assert (versions_N[:count] == OBSERVED).all() and versions_N[count] != OBSERVED


def test_of_an_episode_the_first_sequence_alone(make_group) -> None:
    """It has its prompt in it. All of them after the group's prompt may be longer than the context."""
    group = with_sequences(make_group(0), 8, 5, 9)
    ids, versions_N, (cutoffs_T,) = whole_sequences([group])
    assert len(cutoffs_T) == 7 and np.isneginf(cutoffs_T).all()
    assert [one.tolist() for one in ids] == [one.tolist() for one in probe_sequences([group])] == [[*range(8)]]
    assert versions_N.tolist() == [OBSERVED] * 2 + [7] * 5
