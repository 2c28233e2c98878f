"""Every response token is a target exactly once, predicted from where it should be, within the budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.training.packing import (
    Microbatch,
    num_loss_sequences,
    num_loss_tokens,
    pack,
    to_sample_group,
    valid_rollouts,
    with_advantage,
)
from llamarl.types import FinishReason, Outcome, SampleGroup, TrainSample

LAYOUTS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), max_size=6)),  # prompt tokens, tokens of each response
    max_size=6,
)


def sample_group(prompt_tokens: int, lengths: list[int], names: list[int]) -> SampleGroup:
    """Responses whose tokens and log-probs are numbers taken from `names`, so that each can be followed."""

    def sample(length: int) -> TrainSample:
        ids = np.array([names.pop() for _ in range(length)])
        return TrainSample(
            columns={
                "token_ids": ids.astype(np.int32),
                "behavior_logprobs": -ids.astype(np.float32),
                "policy_versions": ids.astype(np.int32) + 1,
                "advantages": ids.astype(np.float32) / 2,
                "loss_mask": ids % 3 > 0,
                "reference_logprobs": -ids.astype(np.float32) / 4,
                "values": ids.astype(np.float32) / 8,
            },
        )

    prompt = np.array([names.pop() for _ in range(prompt_tokens)], np.int32)
    return SampleGroup(prompt_token_ids_T=prompt, samples=tuple(sample(length) for length in lengths))


def beginning_with(beginning_T: np.ndarray, group: SampleGroup) -> SampleGroup:
    prompt_T = np.concatenate((beginning_T.astype(np.int32), group.prompt_token_ids_T))
    return replace(group, prompt_token_ids_T=prompt_T)


def sample_groups(layout: list[tuple[int, list[int]]]) -> list[SampleGroup]:
    names = list(range(5000, 0, -1))
    return [sample_group(prompt, lengths, names) for prompt, lengths in layout]


def unpack(batch: Microbatch) -> list[tuple[list[int], list[int]]]:
    """(inputs of the whole sequence, targets' predictors) of every sample, by the layout in the module's docstring."""
    found, start = [], batch.shared_tokens
    for prompt, responses in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        prompt_rows = [*range(batch.shared_tokens), *range(start, start + prompt)]
        start += prompt
        for response in responses:
            rows = list(range(start, start + response))
            start += response
            found.append((prompt_rows + rows, [prompt_rows[-1], *rows]))
    assert start == len(batch.token_ids_N) == len(batch.positions_N)
    return found


@given(layout=LAYOUTS, budget=st.integers(1, 60), common=st.sampled_from([0, 15, 16, 30]), shares=st.booleans())
def test_any_layout(layout: list[tuple[int, list[int]]], budget: int, common: int, shares: bool) -> None:
    groups = [beginning_with(np.arange(common), group) for group in sample_groups(layout)]
    batches = pack(groups, budget, shares=shares)
    is_shared = shares and common >= 16 and sum(bool(group.samples) for group in groups) > 1
    assert {batch.shared_tokens for batch in batches} <= {common if is_shared else 0}
    expected = [(group.prompt_token_ids_T, sample) for group in groups for sample in group.samples]
    position = 0
    for batch in batches:
        sequences = unpack(batch)
        assert batch.predictors_R.tolist() == [row for _, predictors in sequences for row in predictors]
        taken = 0
        for sequence, (rows, predictors) in enumerate(sequences):
            prompt, sample = expected[position]
            tokens = np.concatenate((prompt, sample.token_ids_T))
            position += 1
            np.testing.assert_array_equal(batch.token_ids_N[rows], tokens[:-1])
            np.testing.assert_array_equal(batch.positions_N[rows], np.arange(len(tokens) - 1))
            own = slice(taken, taken + len(predictors))
            taken += len(predictors)
            np.testing.assert_array_equal(batch.targets_R[own], sample.token_ids_T)
            assert (batch.sequence_R[own] == sequence).all()
            np.testing.assert_array_equal(batch.behavior_logprobs_R[own], sample.behavior_logprobs_T)
            np.testing.assert_array_equal(batch.policy_versions_R[own], sample.policy_versions_T)
            np.testing.assert_array_equal(batch.advantages_R[own], sample.advantages_T)
            np.testing.assert_array_equal(batch.loss_mask_R[own], sample.loss_mask_T)
            np.testing.assert_array_equal(batch.columns_R["reference_logprobs"][own], sample.reference_logprobs_T)
            np.testing.assert_array_equal(batch.values_R[own], sample.values_T)
            # The predictor of token t stands right before it in the sample's own sequence.
            np.testing.assert_array_equal(
                batch.positions_N[predictors] + 1, np.arange(len(prompt), len(tokens)), "a predictor is misplaced"
            )
        lengths = {len(array) for array in (batch.predictors_R, batch.targets_R, batch.sequence_R)}
        assert lengths | {len(array) for array in batch.columns_R.values()} == {taken}
    assert position == len(expected), "a sample was lost"


@given(layout=LAYOUTS, budget=st.integers(1, 60))
def test_the_budget_holds(layout: list[tuple[int, list[int]]], budget: int) -> None:
    """Only a single sample, with such as add no input, may be over it."""
    for batch in pack(sample_groups(layout), budget):
        if len(batch.token_ids_N) > budget:
            assert len(batch.prompt_lengths) == 1
            assert sum(length > 0 for length in batch.response_lengths[0]) <= 1


@given(layout=LAYOUTS, budget=st.integers(1, 60))
def test_no_room_is_wasted(layout: list[tuple[int, list[int]]], budget: int) -> None:
    """What opens a microbatch did not fit into the one before."""
    batches = pack(sample_groups(layout), budget)
    for before, batch in pairwise(batches):
        first_sample = batch.prompt_lengths[0] + batch.response_lengths[0][0]
        # A group that is small enough moves on whole instead of being cut.
        first_group = batch.prompt_lengths[0] + sum(batch.response_lengths[0])
        assert len(before.token_ids_N) + max(first_sample, first_group) > budget


def test_types() -> None:
    (batch,) = pack(sample_groups([(2, [3, 1])]), 100)
    arrays = {name: getattr(batch, name) for name in type(batch).__slots__ if name[-2:] in ("_N", "_R")}
    arrays |= arrays.pop("columns_R")
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "token_ids_N": "int64",
        "positions_N": "int64",
        "predictors_R": "int64",
        "targets_R": "int64",
        "sequence_R": "int64",
        "behavior_logprobs": "float32",
        "policy_versions": "int32",
        "advantages": "float32",
        "loss_mask": "bool",
        "reference_logprobs": "float32",
        "values": "float32",
    }


def test_a_group_over_the_budget_is_cut_and_repeats_its_prompt() -> None:
    batches = pack(sample_groups([(4, [5, 5, 5, 5])]), 12)  # 4 inputs a response: two fit beside the prompt
    assert [batch.response_lengths for batch in batches] == [((4, 4),), ((4, 4),)]
    assert [batch.prompt_lengths for batch in batches] == [(4,), (4,)]
    np.testing.assert_array_equal(batches[0].token_ids_N[:4], batches[1].token_ids_N[:4])


def test_single_token_responses_have_no_inputs() -> None:
    """All are predicted by the prompt's last position; they fit even where the prompt alone is over the budget."""
    (batch,) = pack(sample_groups([(5, [1, 1, 1])]), 3)
    assert batch.response_lengths == ((0, 0, 0),)
    assert batch.predictors_R.tolist() == [4, 4, 4]
    assert len(batch.targets_R) == 3


def test_nothing_to_learn_from() -> None:
    assert pack([], 10) == []
    assert pack(sample_groups([(3, []), (2, [])]), 10) == []


@pytest.mark.parametrize(
    ("sequences", "shared"),
    [
        ([[1, 2, 3, 4, 50], [1, 2, 9, 4, 60]], [[1, 2]]),
        ([[1, 2, 3, 50], [1, 2, 3, 60], [1, 7, 3, 60]], [[1]]),
        ([[1, 2, 3, 50], [1, 2, 3, 60]], [[1, 2, 3]]),
        ([[1, 2, 50, 3], [1, 2, 3, 60]], [[1, 2]]),
        ([[1, 2, 50], [8, 2, 50], [1, 3, 50]], [[1], [8, 2]]),
        ([[1, 2, -3, 50], [1, 2, 3, 60]], [[1, 2]]),
    ],
)
def test_sequences_share_what_they_begin_with_alike_and_no_more(
    sequences: list[list[int]], shared: list[list[int]]
) -> None:
    """Tokens from 50 on were sampled, and -3, which is a 3."""
    samples = []
    for number, tokens in enumerate(sequences):
        ids, is_sampled = np.abs(np.array(tokens, np.int32)), [token < 0 or token >= 50 for token in tokens]
        advantages = np.full(len(ids), number, np.float32)
        columns = {"token_ids": ids, "loss_mask": np.array(is_sampled), "advantages": advantages}
        samples.append(TrainSample(columns=columns))
    (batch,) = pack([SampleGroup(prompt_token_ids_T=np.array([], np.int32), samples=tuple(samples))], 100)
    starts = [tokens for tokens in shared for sequence in sequences if sequence[0] == tokens[0]]
    assert list(batch.prompt_lengths) == [len(tokens) for tokens in shared]
    found = dict[int, list[int]]()
    for number, (rows, _) in enumerate(unpack(batch)):
        at = np.flatnonzero(batch.sequence_R == number)
        of = int(batch.columns_R["advantages"][at[0]])
        found[of] = [*batch.token_ids_N[rows].tolist(), int(batch.targets_R[at[-1]])]
        assert batch.token_ids_N[rows][: len(starts[number])].tolist() == starts[number]
    assert found == {number: [*map(abs, tokens)] for number, tokens in enumerate(sequences)}, (
        "each is predicted from its own tokens"
    )


class TestToSampleGroup:
    def test_tokens_may_have_advantages_of_their_own(self, make_group) -> None:
        group = make_group(responses=[(4, 5), (6,)])
        samples = to_sample_group(group, [np.array([0.5, -1.0]), np.array([2.0])]).samples
        assert [sample.advantages_T.tolist() for sample in samples] == [[0.5, -1.0], [2.0]]

    def test_invalid_failed_and_empty_rollouts_are_left_out(self, make_group) -> None:
        group = make_group(
            responses=[(4, 5), (6,), (7, 8, 9), (), (10, 11), (12,)],
            outcomes=[Outcome.SCORE, Outcome.WRONG, Outcome.INVALID, Outcome.SCORE, Outcome.SCORE, Outcome.SCORE],
            finish=[
                FinishReason.STOP,
                FinishReason.LENGTH,
                FinishReason.STOP,
                FinishReason.STOP,
                FinishReason.FAILED,
                FinishReason.ABORTED,
            ],
        )
        np.testing.assert_array_equal(valid_rollouts(group), [True, True, False, False, False, True])
        samples = to_sample_group(group, np.array([0.5, -0.5, 9, 9, 9, 0.25])).samples
        assert [sample.token_ids_T.tolist() for sample in samples] == [[4, 5], [6], [12]]
        assert [sample.advantages_T.tolist() for sample in samples] == [[0.5, 0.5], [-0.5], [0.25]]
        for sample, index in zip(samples, (0, 1, 5), strict=True):
            rollout = group.rollouts[index]
            np.testing.assert_array_equal(sample.behavior_logprobs_T, rollout.behavior_logprobs_T)
            np.testing.assert_array_equal(sample.policy_versions_T, rollout.policy_versions_T)
            assert sample.loss_mask_T.tolist() == [True] * rollout.num_tokens

    def test_the_global_count_is_that_of_the_targets(self, make_group) -> None:
        groups = [make_group(0), make_group(1, outcomes=[Outcome.INVALID] * 2), make_group(2, responses=[(4, 5, 6)])]
        samples = [to_sample_group(group, np.zeros(len(group.rollouts))) for group in groups]
        assert num_loss_tokens(samples) == 6
        assert num_loss_sequences(samples) == 3
        assert sum(int(part.loss_mask_R.sum()) for part in pack(samples, 4)) == 6

    def test_samples_without_advantage_vanish(self, make_group) -> None:
        groups = [
            to_sample_group(make_group(responses=[(4, 5), (6,), (7, 8)]), np.array([0.5, 0.0, -0.5])),
            to_sample_group(make_group(), np.zeros(2)),
        ]
        kept = with_advantage(groups)
        assert [[sample.token_ids_T.tolist() for sample in group.samples] for group in kept] == [
            [[4, 5], [7, 8]],
            [],
        ]
        assert len(pack(kept, 100)[0].targets_R) == 4

    def test_one_result_per_rollout(self, make_group) -> None:
        group = make_group()
        with pytest.raises(ValueError, match="zip"):
            to_sample_group(group, np.zeros(3))


@pytest.mark.parametrize("shares", [False, True])
def test_prompts_that_are_empty_share_nothing(shares: bool) -> None:
    """A sequence of which nobody sampled a token has no prompt."""
    (known,), others = sample_groups([(30, [3])]), sample_groups([(1, [3]), (1, [25])])
    empty = [replace(one, prompt_token_ids_T=one.prompt_token_ids_T[:0]) for one in others]
    for one in empty:
        one.samples[0].columns["loss_mask"][:] = False
    batches = pack([known, *empty], 10_000, shares=shares)
    assert [batch.shared_tokens for batch in batches] == [0]
    assert sum(map(len, (batch.targets_R for batch in batches))) == 3 + 3 + 25


def test_only_what_all_prompts_have_in_common_is_shared() -> None:
    first, *others = sample_groups([(30, [3]), (30, [3]), (30, [3])])
    for place, one in zip((20, 25), others, strict=True):
        one.prompt_token_ids_T[:place] = first.prompt_token_ids_T[:place]
    assert pack([first, *others], 10_000, shares=True)[0].shared_tokens == 20
