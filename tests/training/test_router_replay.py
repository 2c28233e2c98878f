"""The policy computes each token with the experts that were recorded as it was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import ALONE, CPU, Axis
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.models.experts import Router
from llamarl.models.hf import new_model
from llamarl.models.transformer import Transformer
from llamarl.training.packing import NOT_RECORDED, Microbatch, pack, padded, to_sample_group, with_advantage
from llamarl.training.policy import Policy
from llamarl.training.routing import routing_of
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
    observed,
    unknown_routes,
)  # fmt: skip
from tests.generation.mixtures import QWEN3_MOE, mixture
from tests.generation.references import run
from tests.generation.test_model import loaded
from tests.generation.test_routes import full_routes

NAME = "qwen3_moe_odd"
TEMPERATURE = 1.0
PROMPTS = [np.arange(start, start + length, dtype=np.int32) for start, length in ((3, 1), (40, 7), (9, 12))]


@pytest.fixture(scope="module")
def groups() -> list[RolloutGroup]:
    """Sampled by the generator's float32 arithmetic."""
    engine = Engine(
        loaded(mixture(NAME), "float32"), EngineSettings(max_running=8, prefill_tokens=32, kv_bytes=1 << 22)
    )
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=9)
    requests = [
        GenerationRequest(group_id=n, prompt_token_ids_T=prompt_T, group_size=3, sampling=sampling)
        for n, prompt_T in enumerate(PROMPTS)
    ]
    found = run(engine, requests)
    return [group_of(n, [found[n, index] for index in range(3)]) for n in range(len(PROMPTS))]


def group_of(number: int, rollouts: list[Rollout]) -> RolloutGroup:
    return RolloutGroup(
        group_id=number,
        prompt=Prompt(prompt_id=str(number), text="", token_ids_T=PROMPTS[number], answer=""),
        rollouts=tuple(rollouts),
        results=tuple(RewardResult(outcome=Outcome.SCORE, value=float(n)) for n in range(len(rollouts))),
        responses=("",) * len(rollouts),
    )


def drifted() -> Transformer:
    """A policy whose routers choose otherwise than those that sampled."""
    model, generator = mixture(NAME), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(model):
            router.weight.add_(torch.empty_like(router.weight).normal_(0, 0.5, generator=generator))
    return model


def routers(model: nn.Module) -> list[Router]:
    return [one for one in model.modules() if isinstance(one, Router)]


def trainer_of(model: Transformer, **settings: object) -> Trainer:
    config = TrainerConfig(**{"learning_rate": 1e-3, "max_grad_norm": 1e9} | settings)
    return Trainer(model, config, Objective(loss=Aipo(), advantage=GroupMean(), temperature=TEMPERATURE))


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """Experts that each router has used, in the order of its layers."""
    used = list[Tensor]()
    hooks = [one.register_forward_hook(lambda _m, _a, answer: used.append(answer[0])) for one in routers(model)]
    yield used
    for hook in hooks:
        hook.remove()


def microbatch_of(groups: list[RolloutGroup]) -> Microbatch:
    (microbatch,) = pack([to_sample_group(group, np.ones(3)) for group in groups], 10_000)
    return microbatch


def without_routes(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(
        replace(one, columns={n: v for n, v in one.columns.items() if n != "routes"}, prompt_routes=None)
        for one in group.rollouts
    ))  # fmt: skip


def expected_routes(groups: list[RolloutGroup]) -> np.ndarray:
    """Of each packed input, by whole forwards of the model that sampled."""
    model, rows = mixture(NAME), list[np.ndarray]()
    for group in groups:
        num = len(group.prompt.token_ids_T)
        whole = [full_routes(model, np.concatenate((group.prompt.token_ids_T, one.token_ids_T)))
                 for one in group.rollouts]  # fmt: skip
        rows += [whole[0][:num], *(one[num:-1] for one in whole)]
    return np.concatenate(rows)


def test_every_packed_token_has_the_routes_of_its_own_position(groups: list[RolloutGroup]) -> None:
    """None is missing, none is one token off: the prompt's last token has those that predicted the first response."""
    np.testing.assert_array_equal(microbatch_of(groups).routes_N_W, expected_routes(groups))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_used_is_what_was_recorded(groups: list[RolloutGroup], checkpointing: bool) -> None:
    model, microbatch = drifted(), microbatch_of(groups)
    trainer = trainer_of(model, activation_checkpointing=checkpointing)
    with watched(model) as used:
        logprobs_R = trainer.logprobs(microbatch)
    np.testing.assert_array_equal(torch.cat(used, 1).numpy(), microbatch.routes_N_W)
    with watched(model) as used:
        logprobs_R.sum().backward()
    assert len(used) == (len(routers(model)) if checkpointing else 0)
    if used:  # computed once more, the last layer first
        np.testing.assert_array_equal(torch.cat(used[::-1], 1).numpy(), microbatch.routes_N_W)
    assert all(router.weight.grad.abs().max() > 1e-4 for router in routers(model)), "gates are the trainer's own"


def test_layers_have_their_own_columns_wherever_they_stand(groups: list[RolloutGroup]) -> None:
    """As those of a pipeline's stage, or of a model that was built in another order."""
    model, microbatch = drifted(), microbatch_of(groups)
    first, dense, last = model.model.layers
    model.model.layers = nn.ModuleList([last, dense, first])
    with watched(model) as used:
        trainer_of(model).logprobs(microbatch)
    np.testing.assert_array_equal(torch.cat(used[::-1], 1).numpy(), microbatch.routes_N_W)


def test_log_probabilities_are_those_of_the_generator(groups: list[RolloutGroup]) -> None:
    """By the weights that sampled, replayed or not; by drifted routers, replay keeps the experts and stays nearer."""
    microbatch, live = microbatch_of(groups), microbatch_of([without_routes(one) for one in groups])
    assert live.routes_N_W is None
    behavior_R = microbatch.behavior_logprobs_R
    same = trainer_of(mixture(NAME))
    for one in (microbatch, live):
        np.testing.assert_allclose(same.logprobs(one).detach().numpy(), behavior_R, atol=1e-4)
    trainer = trainer_of(drifted())
    with torch.no_grad():
        gaps = [np.abs(trainer.logprobs(one).numpy() - behavior_R).mean() for one in (microbatch, live)]
    assert gaps[0] < gaps[1]


def test_what_was_not_recorded_is_chosen(groups: list[RolloutGroup]) -> None:
    """One rollout without routes, in a group whose prompt has some."""
    first, *others = groups
    lost = replace(first, rollouts=(first.rollouts[0], *without_routes(first).rollouts[1:]))
    model, microbatch = drifted(), microbatch_of([lost, *others])
    unknown_N = (microbatch.routes_N_W == NOT_RECORDED).all(1)
    assert unknown_N.sum() == 2 * 8  # all their inputs; the prompt's last token is shared
    with watched(model) as used:
        trainer_of(model).logprobs(microbatch)
    found = torch.cat(used, 1).numpy()
    np.testing.assert_array_equal(found[~unknown_N], microbatch.routes_N_W[~unknown_N])
    assert (found[unknown_N] >= 0).all()


def test_a_step_learns_with_the_recorded_experts(groups: list[RolloutGroup]) -> None:
    model = drifted()
    trainer = trainer_of(model, microbatch_tokens=40, passes=2)
    with watched(model) as used:
        result = trainer.step(groups)
    assert not result.skipped
    samples, _, _ = trainer._samples(groups)
    packs = pack(with_advantage(samples), 40)
    assert len(packs) > 1
    assert len(used) == 2 * 2 * len(packs)  # passes, layers
    found = [torch.cat(pair, 1).numpy() for pair in zip(used[::2], used[1::2], strict=True)]
    for microbatch, *of_passes in zip(packs, found[: len(packs)], found[len(packs) :], strict=True):
        for one in of_passes:
            np.testing.assert_array_equal(one, microbatch.routes_N_W)


def test_two_bytes(groups: list[RolloutGroup]) -> None:
    """65535 is unknown there, and 255 an expert."""
    wide = [
        replace(group, rollouts=tuple(
            replace(one, columns=one.columns | {"routes": one.columns["routes"].astype(np.uint16) + 255},
                    prompt_routes=unknown_routes(len(one.prompt_routes), 6, np.uint16))
            for one in group.rollouts
        ))
        for group in groups
    ]  # fmt: skip
    microbatch = microbatch_of(wide)
    is_predictor_N = np.isin(np.arange(len(microbatch.token_ids_N)), microbatch.predictors_R)
    expected = np.where(is_predictor_N[:, None], expected_routes(groups) + 255, NOT_RECORDED)
    np.testing.assert_array_equal(microbatch.routes_N_W, expected)


def test_context_ranks_have_the_routes_of_their_tokens(groups: list[RolloutGroup]) -> None:
    microbatch, rows = microbatch_of(groups), list[tuple[Tensor, Tensor]]()
    for rank in range(2):
        policy = Policy(mixture(NAME), replace(ALONE, cp=Axis(rank, 2)))
        inputs = policy.place(microbatch, CPU)
        rows.append((inputs.token_ids_N, inputs.routes_N_W))
        whole = padded(microbatch, policy.multiple)
    assert (whole.routes_N_W[len(microbatch.token_ids_N) :] == NOT_RECORDED).all()
    found = np.concatenate([np.column_stack((ids, routes)) for ids, routes in rows])
    expected = np.column_stack((whole.token_ids_N, whole.routes_N_W))
    np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])
    assert sum(len(ids) for ids, _ in rows) == len(whole.token_ids_N)


def test_sequences_of_agents(groups: list[RolloutGroup]) -> None:
    """Their prompts are tokens of theirs: each row is of the token before it, and the first has none."""
    group = groups[2]
    prompt_T, sequences = group.prompt.token_ids_T, list[Rollout]()
    for one in group.rollouts:
        prompt = {"token_ids": prompt_T, "behavior_logprobs": np.zeros(len(prompt_T), np.float32),
                  "policy_versions": np.full(len(prompt_T), -1, np.int32),
                  "routes": np.concatenate((unknown_routes(1, 6, np.uint8), one.prompt_routes))}  # fmt: skip
        columns = {name: np.concatenate((prompt[name], one.columns[name])) for name in prompt}
        sequences.append(replace(one, columns=columns | {"sequence": np.zeros(len(columns["token_ids"]), np.int32)}))
    episodes = replace(group, rollouts=tuple(sequences))
    found = microbatch_of([episodes])
    np.testing.assert_array_equal(found.token_ids_N, microbatch_of([group]).token_ids_N)
    np.testing.assert_array_equal(found.routes_N_W, expected_routes([group]))


def test_the_prompt_s_last_token_has_what_any_sibling_knows(groups: list[RolloutGroup]) -> None:
    """Each rollout has a row of it, and the first one's may be lost."""
    group = groups[2]
    first, *others = group.rollouts
    lost = first.columns["routes"].copy()
    lost[0] = 255
    cut = replace(group, rollouts=(replace(first, columns=first.columns | {"routes": lost}), *others))
    place = len(group.prompt.token_ids_T) - 1
    expected = others[0].columns["routes"][0]
    assert microbatch_of([cut]).routes_N_W[place].tolist() == expected.tolist()


def test_what_an_environment_wrote_last_is_not_known(groups: list[RolloutGroup]) -> None:
    one = groups[1].rollouts[0]
    columns = observed(one.columns, np.arange(3))
    assert (columns["routes"][-3:] == 255).all()
    assert (columns["routes"][:-3] == one.columns["routes"]).all()
    assert one.finish_reason is FinishReason.LENGTH


def test_what_replay_changes(groups: list[RolloutGroup]) -> None:
    """By the weights that sampled the choice is the same, and so is the KL; by drifted ones replay takes some away."""
    same = routing_of(trainer_of(mixture(NAME)), groups, half=True)
    assert same.agreement == 1.0
    assert same.live_kl == pytest.approx(same.replayed_kl, abs=1e-9)
    assert abs(same.live_kl) < 1e-8
    model = drifted()
    with watched(model) as used:
        found = routing_of(trainer_of(model), groups, half=True)
    assert 0 < found.agreement < 1
    assert found.replayed_kl < found.live_kl
    first = [replace(one, rollouts=one.rollouts[:1], results=one.results[:1], responses=("",)) for one in groups]
    (microbatch,) = pack([to_sample_group(one, np.ones(1)) for one in first], 10_000)
    pairs = [(live.numpy(), microbatch.routes_N_W[:, 3 * n : 3 * n + 3]) for n, live in enumerate(used[:2])]
    agreed = np.array([(np.sort(one) == np.sort(other)).all(1) for one, other in pairs])
    assert found.agreement == pytest.approx(agreed[:, microbatch.predictors_R].mean(), abs=1e-12)
    assert found.agreement != pytest.approx(agreed.mean(), abs=1e-3), "prompts would count"
    assert routing_of(trainer_of(model), [without_routes(one) for one in groups], half=True) is None


def test_the_load_is_that_of_what_was_computed(groups: list[RolloutGroup]) -> None:
    """In a step, of recorded experts or of those that the routers choose; not in what comes between steps."""
    for given in (groups, [without_routes(one) for one in groups]):
        model = drifted()
        trainer = trainer_of(model, microbatch_tokens=40, passes=2)
        trainer.score([PROMPTS[2]])
        with watched(model) as used:
            metrics = trainer.step(given).metrics
        numbers = mixture(NAME).shape.moe.sparse_layers
        for place, number in enumerate(numbers):
            rows_E = np.bincount(torch.cat(used[place :: len(numbers)]).flatten().numpy(), minlength=8)
            assert metrics.pop(f"expert_load.{number}") == pytest.approx(rows_E.max() / rows_E.mean())
            assert metrics.pop(f"idle_experts.{number}") == (rows_E == 0).sum()
        assert not [name for name in metrics if "expert" in name]


def test_what_a_prompt_alone_chooses_otherwise_is_no_disagreement(groups: list[RolloutGroup]) -> None:
    """In the last layer nothing comes of it: the KL is the same with and without replay."""
    group, columns = groups[2], slice(3, 6)
    last = group.rollouts[0].prompt_routes.copy()
    last[0, columns] = [one for one in range(8) if one not in last[0, columns]][:3]
    other = replace(group, rollouts=(replace(group.rollouts[0], prompt_routes=last), *group.rollouts[1:]))
    found = routing_of(trainer_of(mixture(NAME)), [other], half=True)
    assert found.agreement == 1.0 and found.live_kl == found.replayed_kl


def test_replay_takes_most_of_the_gap_between_two_arithmetics() -> None:
    """The generator rounds to bfloat16, and few tokens go to other experts; these make most of the KL."""
    model = new_model(QWEN3_MOE, 0, std=0.08)  # calm enough that rounding changes few routes
    engine = Engine(loaded(model, "bfloat16"), EngineSettings(max_running=16, prefill_tokens=64, kv_bytes=1 << 22))
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=60)
    requests = [
        GenerationRequest(group_id=n, prompt_token_ids_T=PROMPTS[n], group_size=1, sampling=sampling) for n in range(3)
    ]
    rounded = [group_of(n, [one]) for (n, _), one in run(engine, requests).items()]
    found = routing_of(trainer_of(model), rounded, half=True)
    assert 0.8 < found.agreement < 1
    assert 3 * found.replayed_kl < found.live_kl
