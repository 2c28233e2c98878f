"""Experts that the engine records are those of a fresh forward over the whole rollout, whatever came between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from llamarl.generation.attention import BLOCK_SIZE, KVCache
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.models.attention import causal_attend
from llamarl.models.experts import Router
from llamarl.models.hf import new_model
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams, observed
from tests.generation.mixtures import MIXTURES, QWEN3_MOE, mixture
from tests.generation.references import drain, run
from tests.generation.test_model import loaded
from tests.nightly import NIGHTLY, nightly

STOP = 7
UNKNOWN = 255


@cache
def served(name: str = "qwen3_moe_odd") -> tuple[Transformer, GeneratorModel]:
    model = mixture(name)
    return model, loaded(model, "float32")


def full_routes(model: Transformer, token_ids_T: np.ndarray) -> np.ndarray:
    """Experts of each token, layer after layer, by the trainer's forward, [T, W]."""
    chosen = list[torch.Tensor]()

    def keep(_module: nn.Module, _args: object, answer: tuple[torch.Tensor, torch.Tensor]) -> None:
        chosen.append(answer[0])

    hooks = [one.register_forward_hook(keep) for one in model.modules() if isinstance(one, Router)]
    ids = torch.from_numpy(token_ids_T.astype(np.int64))
    with torch.no_grad():
        model(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    for hook in hooks:
        hook.remove()
    return torch.cat(chosen, 1).numpy()


def check(model: Transformer, request: GenerationRequest, rollout: Rollout) -> None:
    """Row t is of the position that predicts token t: the prompt's last for the first."""
    prompt_T = request.prompt_token_ids_T
    expected = full_routes(model, np.concatenate((prompt_T, rollout.token_ids_T)))[:-1]
    assert rollout.prompt_routes is not None
    np.testing.assert_array_equal(rollout.prompt_routes, expected[: len(prompt_T) - 1])
    np.testing.assert_array_equal(rollout.columns["routes"], expected[len(prompt_T) - 1 :])


def blocks_of(model: GeneratorModel) -> Callable[[int], int]:
    shape = model.shape
    size = KVCache.block_bytes(shape, model.kv_dtype)
    return lambda count: count * size


class Driver:
    """Sends rollouts back as a controller does: those that were parked, and those whose environment has answered."""

    def __init__(self, engine: Engine, requests: list[GenerationRequest], answers: int) -> None:
        self.engine, self.requests = engine, {one.group_id: one for one in requests}
        self.done, self.answers = list[Rollout](), answers
        engine.submit(requests)

    def take(self, rollouts: list[Rollout]) -> None:
        for one in rollouts:
            request, is_full = self.requests[one.group_id], one.num_tokens >= 24
            if one.finish_reason in (FinishReason.PARKED, FinishReason.ABORTED):
                self.engine.submit([replace(request, partials=(one,))])
            elif one.finish_reason is FinishReason.STOP and one.num_turns <= self.answers and not is_full:
                answer_T = np.arange(3) + one.num_turns
                columns = observed(one.columns, answer_T)
                partial = replace(one, columns=columns, finish_reason=FinishReason.PARKED)
                self.engine.submit([replace(request, partials=(partial,))])
            else:
                assert one.finish_reason is not FinishReason.FAILED, one.error
                self.done.append(one)


@nightly("many forwards; by day experts are recorded and travel")
@settings(max_examples=40 if NIGHTLY else 6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_recorded_experts_are_those_of_a_fresh_forward(data: st.DataObject) -> None:
    model, generator = served()
    bytes_of = blocks_of(generator)
    engine = Engine(
        generator,
        EngineSettings(
            max_running=data.draw(st.integers(1, 5)),
            prefill_tokens=data.draw(st.sampled_from((3, 16, 64))),
            kv_bytes=bytes_of(data.draw(st.integers(-(-39 // BLOCK_SIZE) + -(-30 // BLOCK_SIZE), 14))),
            kv_on_update=data.draw(st.sampled_from(("keep", "recompute"))),
        ),
    )
    requests = [
        GenerationRequest(
            group_id=group, group_size=data.draw(st.integers(1, 3)), has_turns=data.draw(st.booleans()),
            prompt_token_ids_T=(np.arange(data.draw(st.integers(1, 40))) * 11 % 130).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=30, stop_token_ids=(STOP, *range(40, 50))),
            segment_tokens=data.draw(st.sampled_from((0, 4))),
        )
        for group in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    driver, version = Driver(engine, requests, data.draw(st.integers(0, 2))), 0
    while engine.has_work:
        event = data.draw(st.sampled_from(("step",) * 12 + ("version", "abort")))
        if event == "version":  # the same weights once more: what is recorded must not change
            version += 1
            engine.set_version(version)
        elif event == "abort":
            driver.take(engine.abort([data.draw(st.integers(0, 2))]))
        driver.take(engine.step())
    assert len(driver.done) == sum(one.group_size for one in requests)
    for rollout in driver.done:
        check(model, driver.requests[rollout.group_id], rollout)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_family(name: str) -> None:
    model, generator = served(name)
    engine = Engine(generator, EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22))
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=np.arange(3, 24, dtype=np.int32), group_size=3,
        sampling=SamplingParams(max_new_tokens=12),
    )  # fmt: skip
    found = run(engine, [request])
    for rollout in found.values():
        check(model, request, rollout)
    first, *others = (one.prompt_routes for one in found.values())
    assert all(one is first for one in others)  # one array for the group


def test_more_than_255_experts_take_two_bytes() -> None:
    moe = replace(QWEN3_MOE.moe, num_experts=300, expert_size=8)
    model = new_model(replace(QWEN3_MOE, moe=moe, num_layers=3), 0, std=0.2)
    engine = Engine(loaded(model, "float32"), EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22))
    prompt_T = np.arange(9, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=8)
    request = GenerationRequest(group_id=0, prompt_token_ids_T=prompt_T, group_size=1, sampling=sampling)
    rollout = run(engine, [request])[0, 0]
    assert rollout.columns["routes"].dtype == np.uint16
    assert rollout.columns["routes"].max() > UNKNOWN
    check(model, request, rollout)


def test_what_was_recorded_stays_and_what_was_lost_is_prefilled() -> None:
    """Without the column, a parked rollout goes on: its prefill tells what is not known. With it, nothing changes."""
    model, generator = served()
    engine = Engine(generator, EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22))
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=np.arange(3, 24, dtype=np.int32), group_size=1, segment_tokens=6,
        sampling=SamplingParams(max_new_tokens=12),
    )  # fmt: skip
    parked = run(engine, [request])[0, 0]
    lost = replace(
        parked, columns={name: one for name, one in parked.columns.items() if name != "routes"}, prompt_routes=None
    )
    check(model, request, run(engine, [replace(request, partials=(lost,))])[0, 0])
    other = np.zeros_like(parked.columns["routes"])
    kept = replace(parked, columns=parked.columns | {"routes": other}, prompt_routes=parked.prompt_routes * 0)
    ended = run(engine, [replace(request, partials=(kept,))])[0, 0]
    assert not ended.columns["routes"][:6].any()
    assert not ended.prompt_routes.any()
    wrong = replace(parked, columns=parked.columns | {"routes": other[:, 1:]})
    failed = run(engine, [replace(request, partials=(wrong,))])[0, 0]
    assert failed.finish_reason is FinishReason.FAILED
    assert "this model 6" in failed.error


def test_nobody_asks() -> None:
    engine = Engine(
        served()[1], EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22, records_routes=False)
    )
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=np.arange(9, dtype=np.int32), group_size=1,
        sampling=SamplingParams(max_new_tokens=4),
    )  # fmt: skip
    measured = Engine(served()[1], EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22))
    for rollout in (run(engine, [request])[0, 0], run(measured, [replace(request, purpose="eval")])[0, 0]):
        assert "routes" not in rollout.columns
        assert rollout.prompt_routes is None


def test_updates_in_flight_leave_what_was_recorded() -> None:
    """Each token has the experts of the weights that sampled it, also where all before it was computed anew; and
    rollouts that have left keep the experts of the prefix that they began with."""
    models = [mixture("qwen3_moe_odd", seed) for seed in (0, 7)]
    engine = Engine(
        loaded(models[0], "float32"),
        EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 22, kv_on_update="recompute"),
    )
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=np.arange(3, 24, dtype=np.int32), group_size=2,
        sampling=SamplingParams(max_new_tokens=20),
    )  # fmt: skip
    engine.submit([request])
    for _ in range(10):
        assert engine.step() == []
    (early, _) = engine.so_far([0])
    prompt = early.prompt_routes.copy()
    engine.model = loaded(models[1], "float32")
    engine.set_version(1)
    rollouts = drain(engine)
    np.testing.assert_array_equal(early.prompt_routes, prompt)
    for one in rollouts:
        ids_T = np.concatenate((request.prompt_token_ids_T, one.token_ids_T))
        before, after = (full_routes(model, ids_T)[:-1] for model in models)
        assert (before != after).any()
        versions_T = one.policy_versions_T
        assert set(versions_T.tolist()) == {0, 1}
        expected = np.where(versions_T[:, None] == 0, before[20:], after[20:])
        np.testing.assert_array_equal(one.columns["routes"], expected)
        np.testing.assert_array_equal(one.prompt_routes, before[:20])
