from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import ConfigError
from llamarl.data.sampler import PromptSampler


@given(num_prompts=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_each_epoch_draws_each_prompt_once(num_prompts: int, seed: int) -> None:
    sampler = PromptSampler(num_prompts, seed)
    for _ in range(3):
        assert sorted(sampler.next() for _ in range(num_prompts)) == list(range(num_prompts))


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 1000), drawn=st.integers(0, 60))
def test_restored_sampler_goes_on_where_the_state_was_taken(num_prompts: int, seed: int, drawn: int) -> None:
    sampler = PromptSampler(num_prompts, seed)
    for _ in range(drawn):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))
    ahead = [sampler.next() for _ in range(50)]
    again = PromptSampler(num_prompts, seed)
    again.restore(state)
    assert [again.next() for _ in range(50)] == ahead


def test_epochs_and_seeds_differ_and_a_seed_repeats() -> None:
    def draw(seed: int) -> list[int]:
        sampler = PromptSampler(50, seed)
        return [sampler.next() for _ in range(100)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert draw(0)[:50] != draw(0)[50:]


def test_state_of_other_data_is_refused() -> None:
    state = PromptSampler(5, 0).state()
    with pytest.raises(ConfigError, match="num_prompts = 5 and this run has 6"):
        PromptSampler(6, 0).restore(state)
    with pytest.raises(ConfigError, match="seed = 0 and this run has 1"):
        PromptSampler(5, 1).restore(state)
    with pytest.raises(ConfigError, match="at least one"):
        PromptSampler(0, 0)
