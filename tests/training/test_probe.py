"""Which tokens are compared after a weight sync, and which tell causes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamarl.config import RunConfig
from llamarl.training.probe import (
    NUM_SEQUENCES,
    WHOLE_TOKENS,
    CauseProbe,
    is_probed,
    is_rescored,
    over_kept,
    probe_sequences,
)
from llamarl.types import OBSERVED, Rollout, RolloutGroup


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


def with_first(group: RolloutGroup, prompt_tokens: int | None = None, **columns: np.ndarray) -> RolloutGroup:
    """The group with more columns of its first rollout, and maybe another prompt."""
    first, prompt = group.rollouts[0], group.prompt
    if prompt_tokens is not None:
        prompt = replace(prompt, token_ids_T=np.arange(prompt_tokens, dtype=np.int32))
    rollouts = (replace(first, columns=first.columns | columns), *group.rollouts[1:])
    return replace(group, prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize(("every", "first", "expected"), [(4, 1, [1, 4, 8]), (4, 6, [4, 6, 8]), (0, 1, [])])
def test_versions_that_are_probed(every: int, first: int, expected: list[int]) -> None:
    """Not the one that everybody has read from the same files."""
    assert [version for version in range(10) if is_probed(every, version, first)] == expected


def test_whole_sequences_with_their_prompts_as_context(make_group) -> None:
    groups = [with_first(make_group(n), 5) for n in range(NUM_SEQUENCES + 2)]
    found, is_sampled_N = probe_sequences(groups)
    wholes = [np.concatenate([one.prompt.token_ids_T, one.rollouts[0].token_ids_T]) for one in groups[:NUM_SEQUENCES]]
    assert [one.tolist() for one in found] == [one.tolist() for one in wholes]
    assert is_sampled_N.tolist() == [n >= 5 for whole in wholes for n in range(1, len(whole))]


def test_so_many_tokens_in_all(make_group) -> None:
    groups = [with_first(make_group(n), WHOLE_TOKENS - 20) for n in range(3)]
    found, _ = probe_sequences(groups)
    whole = WHOLE_TOKENS - 20 + groups[0].rollouts[0].num_tokens
    assert [*map(len, found)] == [whole, WHOLE_TOKENS - whole]


def test_where_nothing_sampled_has_room_all_of_a_prompt_is_compared(make_group) -> None:
    (found,), is_sampled_N = probe_sequences([with_first(make_group(0), WHOLE_TOKENS + 5)])
    assert len(found) == WHOLE_TOKENS and is_sampled_N.all() and len(is_sampled_N) == WHOLE_TOKENS - 1


def test_of_an_episode_the_first_sequence_alone(make_group) -> None:
    """It has its prompt in it. All of them after the group's prompt may be longer than the context."""
    (found,), is_sampled_N = probe_sequences([with_sequences(make_group(0), 8, 5, 9)])
    assert found.tolist() == [*range(8)]
    assert is_sampled_N.tolist() == [False] * 2 + [True] * 5


def test_groups_that_were_asked_tell_causes(make_group) -> None:
    groups = [with_first(make_group(n), 5) for n in range(3)]
    assert CauseProbe.of(groups, 0.7) is None
    count = groups[1].rollouts[0].num_tokens
    fresh_T, cutoffs_T = (np.linspace(start, -1, count, dtype=np.float32) for start in (-3, -2))
    fresh_T[0] = np.nan
    groups[1] = with_first(groups[1], fresh_logprobs=fresh_T, cutoffs=cutoffs_T)
    first = replace(groups[1].rollouts[0], prefills=((0, 0, 4, -7),))
    groups[1] = replace(groups[1], rollouts=(first, *groups[1].rollouts[1:]))
    probe = CauseProbe.of(groups, 0.7)
    assert probe is not None and probe.groups == [groups[1]] and probe.candidates.temperature == 0.7
    assert [len(one) for one in probe.sequences] == [5 + count]
    np.testing.assert_array_equal(probe.fresh_N, [*[np.nan] * 4, *fresh_T])
    np.testing.assert_array_equal(probe.candidates.cutoffs[0], [*[-np.inf] * 4, *cutoffs_T])
    np.testing.assert_array_equal(probe.behavior_N[4:], first.behavior_logprobs_T)
    assert probe.is_over_kept_N.tolist() == [False] * 4 + [True] * count


@pytest.mark.parametrize(
    ("versions", "prefills", "expected"),
    [
        ([1, 1, 2, 2], [(0, 0, 5, 1)], [0, 0, 1, 1]),
        ([1, 1, 2, 2], [(0, 0, 5, 1), (2, 0, 7, 2)], [0, 0, 0, 0]),  # recomputed, or moved to another generator
        ([1, 1, 2, 3], [(0, 0, 5, 1), (2, 0, 7, 2)], [0, 0, 0, 1]),
        ([2, 2, 2, 2], [(0, 0, 3, 1), (0, 3, 5, 2)], [1, 1, 1, 1]),  # the weights changed within the prompt
        ([1, 1, -1, 2], [(0, 0, 5, 1), (3, 5, 8, 2)], [0, 0, 0, 1]),  # an environment has answered
        ([1, 1, 2, 2], [], [0, 0, 0, 0]),
    ],
)
def test_which_tokens_saw_what_older_weights_had_computed(
    versions: list[int], prefills: list[tuple[int, int, int, int]], expected: list[int]
) -> None:
    rollout = Rollout.empty(0, 0)
    columns = {name: np.zeros(4, values.dtype) for name, values in rollout.columns.items()}
    columns["policy_versions"] = np.array(versions, np.int32)
    assert over_kept(replace(rollout, columns=columns, prefills=tuple(prefills))).tolist() == [*map(bool, expected)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [24, 25, 26, 27, 152, 153, 154, 155]),
        ({"weight_sync": {"probe_every_steps": 1}}, [24, 25, 26, 27, 152, 153, 154, 155]),
        ({"weight_sync": {"probe_every_steps": 5}}, [32, 33, 34, 35, 152, 153, 154, 155]),
        ({"weight_sync": {"probe_every_steps": 20}}, [152, 153, 154, 155]),
        ({"weight_sync": {"probe_every_steps": 0}}, []),
        ({"generator": {"backend": "vllm", "vllm": {"python": "python"}}}, []),
    ],
)
def test_few_groups_of_one_step_in_sixteen_are_asked(
    settings: dict[str, dict[str, object]], expected: list[int]
) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": "nowhere"}, "data": {"train": "jsonl"}, "rollout": {"prompts_per_step": 8}} | settings
    )
    assert [number for number in range(160) if is_rescored(config, number)] == expected
