"""Whatever an agent asks for, each sampled token is learnt from exactly once, after the tokens it was sampled after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.parts.episodes.gateway.session import Session, Written
from llamarl.training.packing import pack, to_sample_group
from llamarl.types import OBSERVED, Columns, FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from tests.nightly import examples

FIRST_SAMPLED = 1000
"""Smaller tokens are observed; each sampled token is a number of its own."""
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "again", "back", "compact", "elsewhere", "cut"]),
        st.integers(0, 30),  # which call it goes back to
        st.integers(0, 3),  # tokens that are observed next
        st.integers(1, 4),  # tokens that are sampled
    ),
    min_size=1,
    max_size=25,
)


class Policy:
    """Samples numbers that were never sampled before, and knows what stood before each of them."""

    def __init__(self, first: int = FIRST_SAMPLED) -> None:
        self.first = self.next = first
        self.context = dict[int, tuple[int, ...]]()

    def __call__(self, prompt: list[int], count: int) -> Columns:
        ids = list(range(self.next, self.next + count))
        self.next += count
        self.context.update((token, (*prompt, *ids[:place])) for place, token in enumerate(ids))
        return {
            "token_ids": np.array(ids, np.int32),
            "behavior_logprobs": -np.array(ids, np.float32),
            "policy_versions": np.array(ids, np.int32) % 7,
        }


def play(actions: list[tuple[str, int, int, int]], policy: Policy) -> Session:
    """An agent that mostly goes on from what it has, and often does not."""
    session, asked = Session(), [[1, 2]]
    for number, (what, place, num_observed, num_sampled) in enumerate(actions):
        seen = [100 + number] * num_observed
        base = asked[place % len(asked)]
        prompt = {
            "go on": asked[-1] + seen,
            "again": base,
            "back": base + seen,
            "compact": [1, 3, *base[-2:], *seen],
            "elsewhere": [9 + number, *seen],
            "cut": base[: max(1, len(base) - 1)] + seen,
        }[what]
        sampled = policy(prompt, num_sampled)
        session.record(np.array(prompt, np.int32), sampled)
        asked += [prompt, prompt + sampled["token_ids"].tolist()]
    return session


def test_a_call_goes_on_with_the_longest_sequence_that_its_prompt_begins_with() -> None:
    session, policy = Session(), Policy()
    for prompt, number in (
        ([1, 2], 0),  # then 0 is 1 2 1000
        ([1, 2], 1),  # again: 1 is 1 2 1001
        ([1, 2, 1001], 1),  # no more than what it has: 1 is 1 2 1001 1002
        ([1, 2, 1001, 1002, 5], 1),
        ([1], 2),  # 2 is 1 1004
        ([1, 2, 1000, 7], 0),
        ([1, 1004, 2], 2),
        ([1, 3], 3),
    ):
        assert session.record(np.array(prompt, np.int32), policy(prompt, 1)) == number
    sampled = policy([], 3)
    short, long = (
        {name: values[:num] for name, values in sampled.items()} | {"token_ids": np.array([1, 9, 9][:num], np.int32)}
        for num in (2, 3)
    )
    session._sequences = [short, long, short]
    assert session.fitting(np.array([1, 9, 9, 9], np.int32))[0] == 1


def group_of(*episodes: Columns) -> RolloutGroup:
    return RolloutGroup(
        group_id=0,
        prompt=Prompt(prompt_id="p", text="", token_ids_T=np.array([5], np.int32), answer=""),
        rollouts=tuple(
            Rollout(group_id=0, index=n, columns=columns, finish_reason=FinishReason.STOP)
            for n, columns in enumerate(episodes)
        ),
        results=(RewardResult(outcome=Outcome.SCORE, value=1.0),) * len(episodes),
        responses=("",) * len(episodes),
    )


@settings(max_examples=examples(300), deadline=None)
@given(ACTIONS)
def test_each_sampled_token_is_learnt_once_after_its_own_context(actions: list[tuple[str, int, int, int]]) -> None:
    policy = Policy()
    session = play(actions, policy)
    columns = session.columns()
    trained = list[int]()
    starts = [0, *(np.flatnonzero(np.diff(columns["sequence"])) + 1)]
    for place, (token, version) in enumerate(zip(columns["token_ids"], columns["policy_versions"], strict=True)):
        logprob, begin = columns["behavior_logprobs"][place], max(start for start in starts if start <= place)
        if version == OBSERVED:
            assert logprob == 0
            continue
        assert logprob == -token and version == token % 7
        assert tuple(columns["token_ids"][begin:place]) == policy.context[token]
        trained.append(int(token))
    assert sorted(trained) == list(policy.context), "each exactly once"
    assert session.num_sampled == len(trained) and session.num_calls == len(actions)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=3), st.integers(8, 200))
def test_the_trainer_predicts_each_of_them_from_its_own_context(
    episodes: list[list[tuple[str, int, int, int]]], microbatch_tokens: int
) -> None:
    policy = Policy()
    group = group_of(*[play(actions, policy).columns() for actions in episodes])
    found = list[int]()
    for batch in pack([to_sample_group(group, np.arange(len(episodes)) + 1.0)], microbatch_tokens):
        rows, start = list[list[int]](), 0  # of each sample, the places of its inputs
        for prompt, responses in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
            prompt_rows, start = list(range(start, start + prompt)), start + prompt
            for response in responses:
                rows.append([*prompt_rows, *range(start, start + response)])
                start += response
        for place, target in enumerate(batch.targets_R.tolist()):
            if not batch.loss_mask_R[place]:
                assert target < FIRST_SAMPLED or target in policy.context  # or it is learnt from elsewhere
                continue
            inputs = rows[batch.sequence_R[place]]
            before = inputs[: inputs.index(int(batch.predictors_R[place])) + 1]
            assert tuple(batch.token_ids_N[before]) == policy.context[target]
            assert batch.positions_N[before].tolist() == list(range(len(before)))
            found.append(target)
    assert sorted(found) == list(policy.context)


def test_what_all_episodes_of_a_group_begin_with_is_computed_once() -> None:
    policy = Policy()
    episodes = [play([("go on", 0, 1, 2), ("go on", 0, 3, 2)], policy).columns() for _ in range(4)]
    (batch,) = pack([to_sample_group(group_of(*episodes), np.ones(4))], 1000)
    assert batch.prompt_lengths == (3,) and len(batch.response_lengths[0]) == 4


def test_a_retry_begins_another_sequence_and_the_longest_one_goes_on() -> None:
    session, policy = Session(), Policy()
    first = policy([1], 2)
    session.record(np.array([1], np.int32), first)
    session.record(np.array([1], np.int32), policy([1], 2))  # a retry
    history = [1, *first["token_ids"].tolist(), 7]
    session.record(np.array(history, np.int32), policy(history, 1))
    columns = session.columns()
    assert columns["sequence"].tolist() == [0] * 5 + [1] * 3
    assert columns["token_ids"].tolist() == [1, 1000, 1001, 7, 1004, 1, 1002, 1003]
    assert columns["policy_versions"][[0, 3, 5]].tolist() == [OBSERVED] * 3


def test_a_session_that_was_left_before_its_first_answer_has_no_tokens() -> None:
    assert len(Session().columns()["token_ids"]) == 0


@pytest.mark.parametrize(("text", "known"), [("ab!c", "ab!"), ("ab", "ab"), ("a", "")])
def test_the_longest_text_that_was_written_is_found(text: str, known: str) -> None:
    session = Session()
    for one in ("ab", "ab!", "abd"):
        session.remember(one, Written(np.array([len(one)], np.int32), False))
    found, written = session.longest(text)
    assert found == known and (written is session.recall(known))
