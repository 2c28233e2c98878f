from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import ConfigError
from llamarl.data.sampler import MixtureSampler, PromptSampler


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


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, float]]:
    """Sizes and weights of sources, by label."""
    labels = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True))
    weight = st.sampled_from([0.1, 0.3, 1.0, 2.0, 7.0]) | st.floats(1e-3, 1e3)
    return {one: draw(st.integers(1, 12)) for one in labels}, {one: draw(weight) for one in labels}


def _mixture(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> MixtureSampler:
    samplers = {label: PromptSampler(size, seed, fingerprint=size, label=label) for label, size in sizes.items()}
    return MixtureSampler(samplers, weights, sizes)


def _named(sizes: dict[str, int], index: int) -> tuple[str, int]:
    """Source and own index of a prompt of the mixture."""
    for label, size in sizes.items():
        if index < size:
            return label, index
        index -= size
    raise AssertionError("no such prompt")


@given(mixtures(), st.integers(0, 2**40), st.integers(1, 150))
def test_each_source_gives_its_share_within_one_draw_and_its_epochs_are_whole(
    mixture: tuple[dict[str, int], dict[str, float]], seed: int, num: int
) -> None:
    """After each draw: n times its share, rounded up or down; exact numbers, as weights are those of the settings."""
    sizes, weights = mixture
    sampler, total = _mixture(sizes, weights, seed), sum(map(Fraction, weights.values()))
    drawn = dict[str, list[int]]({label: [] for label in sizes})
    for n in range(1, num + 1):
        label, own = _named(sizes, sampler.next())
        drawn[label].append(own)
        for one, weight in weights.items():
            assert abs(len(drawn[one]) - n * Fraction(weight) / total) < 1, (n, one)
    for label, size in sizes.items():
        for start in range(0, len(drawn[label]) - size + 1, size):
            assert sorted(drawn[label][start : start + size]) == list(range(size))


@given(mixtures(), st.integers(0, 1000), st.integers(0, 80))
def test_a_restored_mixture_goes_on_where_the_state_was_taken(
    mixture: tuple[dict[str, int], dict[str, float]], seed: int, drawn: int
) -> None:
    sampler, again = (_mixture(*mixture, seed) for _ in range(2))
    for _ in range(drawn):
        sampler.next()
    again.restore(json.loads(json.dumps(sampler.state())))
    assert [again.next() for _ in range(60)] == [sampler.next() for _ in range(60)]


def test_sources_of_one_size_come_in_orders_of_their_own() -> None:
    """Two views of one data set would else show the same problem twice in a row, all along."""
    sizes = {"a": 50, "b": 50}
    sampler = _mixture(sizes, {"a": 1.0, "b": 1.0})
    drawn = [_named(sizes, sampler.next()) for _ in range(100)]
    assert [own for label, own in drawn if label == "a"] != [own for label, own in drawn if label == "b"]


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ({"a": 3, "b": 4}, {"a": 1.0, "b": 2.0}, "source 'b' with weight = 1, now it has 2"),
        ({"a": 3, "c": 4}, {"a": 1.0, "c": 1.0}, "drew from the sources a, b, and data.train now has a, c"),
        ({"b": 4, "a": 3}, {"a": 1.0, "b": 1.0}, "drew from the sources a, b, and data.train now has b, a"),
        ({"a": 3, "b": 5}, {"a": 1.0, "b": 1.0}, "source 'b': the checkpoint drew prompts with num_prompts = 4"),
    ],
)
def test_another_mixture_is_refused(sizes: dict[str, int], weights: dict[str, float], message: str) -> None:
    state = _mixture({"a": 3, "b": 4}, {"a": 1.0, "b": 1.0}).state()
    with pytest.raises(ConfigError, match=re.escape(message)):
        _mixture(sizes, weights).restore(state)


def test_a_mixture_and_a_single_source_are_not_exchanged() -> None:
    mixture, single = _mixture({"a": 3}, {"a": 1.0}), PromptSampler(3, 0)
    with pytest.raises(ConfigError, match=r"the mixture of a, and data\.train is a single source"):
        single.restore(mixture.state())
    with pytest.raises(ConfigError, match=r"a single source, and data\.train now mixes a"):
        mixture.restore(single.state())
