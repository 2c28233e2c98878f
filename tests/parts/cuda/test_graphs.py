"""Steps in fixed buffers are those of the engine without them, token for token.

No graph is captured here: instead of a replay the captured function runs again, on the same buffers and by the weights
of the capture. Not covered: what a GPU adds, that each operation can be captured and that it is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel
from llamarl.models.transformer import Transformer
from llamarl.parts.cuda.graphs import DecodeGraphs, sizes
from llamarl.types import GenerationRequest, Rollout
from tests.generation import conformance
from tests.generation.conftest import CONTEXT, VOCAB
from tests.generation.native import GREEDY, SAMPLED, assert_same, drain, make_engine, run, serve
from tests.generation.references import by_key
from tests.kernels.engines import engine as computed_by
from tests.nightly import nightly

SAMPLINGS = (
    GREEDY,
    SAMPLED,
    replace(SAMPLED, temperature=1.3, max_new_tokens=40, stop_token_ids=(3, 7)),
    replace(SAMPLED, top_p=0.8, top_k=9),
    replace(GREEDY, top_p=0.5),
)


@pytest.fixture(scope="module", autouse=True)
def _no_kernels() -> Iterator[None]:
    """As on a GPU, where torch computes everything."""
    with computed_by("torch"):
        yield


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Transformer]) -> list[Transformer]:
    return [make_model(seed) for seed in range(3)]


def engines(model: Transformer, **options: object) -> tuple[Engine, Engine]:
    """Without and with graphs, each over its own copy of the weights."""
    made = []
    for graphs in (False, True):
        served = GeneratorModel(model.shape, "float32", "cpu")
        served.load(model)
        made.append(make_engine(served, graphs=graphs, **options))
    return made[0], made[1]


def traffic(engine: Engine, models: list[Transformer], seed: int) -> list[Rollout]:
    """Requests, aborts and new weights at random steps; everything that came out."""
    random, rollouts = np.random.default_rng(seed), list[Rollout]()
    for step in range(70):
        if random.random() < 0.12:
            engine.submit(
                [
                    GenerationRequest(
                        group_id=step,
                        prompt_token_ids_T=random.integers(0, VOCAB, random.integers(1, 40)).astype(np.int32),
                        group_size=int(random.integers(1, 5)),
                        sampling=SAMPLINGS[random.integers(len(SAMPLINGS))],
                        segment_tokens=int(random.choice([0, 11])),
                    )
                ]
            )
        if random.random() < 0.04:
            rollouts += engine.abort([int(random.integers(step + 1))])
        if random.random() < 0.06:
            assert isinstance(engine.model, GeneratorModel)
            engine.model.load(models[random.integers(len(models))])
            engine.set_version(step)
        rollouts += engine.step()
    return rollouts + drain(engine)


@nightly("Triton's interpreter is slow; by day graphs serve steps of other tests here")
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6), kv_on_update=st.sampled_from(["keep", "recompute"]), blocks=st.sampled_from([16, 400])
)
def test_random_traffic(models: list[Transformer], seed: int, kv_on_update: str, blocks: int) -> None:
    eager, graphed = engines(models[0], kv_on_update=kv_on_update, blocks=blocks)
    expected, found = (by_key(traffic(engine, models, seed)) for engine in (eager, graphed))
    assert_same(found, expected)
    for key, rollout in expected.items():
        assert found[key].policy_versions_T.tolist() == rollout.policy_versions_T.tolist()
    assert eager.stats() == replace(graphed.stats(), recompute_s=eager.stats().recompute_s)


def mixed_requests() -> list[GenerationRequest]:
    """Greedy, sampled and truncated rows, and the longest contexts."""
    long = replace(SAMPLED, max_new_tokens=CONTEXT, top_p=0.9, min_p=0.01)
    return [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=np.arange(1, 2 + 7 * i, dtype=np.int32), group_size=(4, 2, 4, 3)[i],
            sampling=[GREEDY, long, SAMPLINGS[3], SAMPLED][i],
        )
        for i in range(4)
    ]  # fmt: skip


def test_graphs_are_made_at_first_use_and_serve_every_step(models: list[Transformer]) -> None:
    """Truncated sampling and the longest contexts included; only steps that prefill go without. A size that is used a
    few times is padded to a larger one, and traffic that comes again captures nothing."""
    eager, graphed = engines(models[0], max_running=13)
    graphs = graphed._graphs
    assert isinstance(graphs, DecodeGraphs) and graphs.sizes == [1, 2, 4, 8, 13]
    assert graphs.num_captured == 0, "none when it wakes"
    expected = run(eager, mixed_requests())
    assert_same(run(graphed, mixed_requests()), expected)
    assert max(len(one.token_ids_T) for one in expected.values()) > 80
    (replays,) = graphs._replays.values()
    assert {size for size, _ in replays} == {2, 13} and graphs.num_captured == 2, [*replays]
    before = graphed.stats().steps
    ran = list[int]()
    for key, run_step in list(replays.items()):
        replays[key] = lambda key=key, run_step=run_step: (ran.append(key[0]), run_step())[1]
    graphed._graphs._captured = None  # never again
    assert_same(run(graphed, mixed_requests()), expected)
    assert {2, 13} == set(ran)
    assert graphed.stats().steps - before - len(ran) < 8


def test_a_waking_engine_captures_few_graphs(models: list[Transformer]) -> None:
    """A batch of 64 rollouts that ends one by one. All sizes, with both kinds of sampling, would be 22 captures."""
    _, graphed = engines(models[0], max_running=64)
    captured = list[int]()
    for _ in range(2):
        run(graphed, [
            GenerationRequest(
                group_id=i, prompt_token_ids_T=np.array([1 + i], np.int32), group_size=1,
                sampling=replace(SAMPLED, max_new_tokens=4 + i),
            )
            for i in range(64)
        ])  # fmt: skip
        assert isinstance(graphed._graphs, DecodeGraphs)
        captured.append(graphed._graphs.num_captured)
        graphed.sleep()
        graphed.model.load(models[0])
        graphed.wake()
    assert captured[0] == captured[1] <= 4


AHEAD = {"graphs": True, "goes_ahead": True}


@nightly("Triton's interpreter is slow; by day graphs are captured and used by tests here")
@pytest.mark.parametrize("blocks", [16, 400], ids=["short of memory", "ample"])
def test_steps_launched_ahead_draw_the_same(models: list[Transformer], blocks: int) -> None:
    """Rollouts stop when the next step is on its way; others wait for their blocks, and are parked."""
    eager, _ = engines(models[0], blocks=blocks)
    served = GeneratorModel(models[0].shape, "float32", "cpu")
    served.load(models[0])
    ahead = make_engine(served, blocks=blocks, **AHEAD)
    requests = [
        GenerationRequest(
            group_id=i, prompt_token_ids_T=np.arange(1, 3 + 5 * i, dtype=np.int32), group_size=3,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
        )
        for i in range(7)
    ]  # fmt: skip
    launched, launch = list[bool](), ahead._launch
    ahead._launch = lambda chunks, after=None: (launched.append(after is not None), launch(chunks, after))[1]
    assert_same(run(ahead, requests), run(eager, requests))
    assert sum(launched) > (20 if blocks == 400 else 5)
    assert ahead._ahead is None


def test_new_weights_and_aborts_drop_what_was_launched_ahead(models: list[Transformer]) -> None:
    """Tokens have the version that computed them: the same ones as where nothing goes ahead."""
    found = list[list[Rollout]]()
    for goes_ahead in (False, True):
        served = GeneratorModel(models[0].shape, "float32", "cpu")
        served.load(models[0])
        engine = make_engine(served, graphs=True, goes_ahead=goes_ahead)
        engine.submit(
            GenerationRequest(
                group_id=i, prompt_token_ids_T=np.array([5, 6 + i], np.int32), group_size=3,
                sampling=replace(SAMPLED, max_new_tokens=60),
            )
            for i in range(2)
        )  # fmt: skip
        rollouts = list[Rollout]()
        for version in range(1, 4):
            for _ in range(8):
                rollouts += engine.step()
            assert (engine._ahead is not None) is goes_ahead
            if version == 2:
                rollouts += engine.abort([1])
                assert engine._ahead is None
            served.load(models[version % 3])
            engine.set_version(version)
        found.append(sorted(rollouts + drain(engine), key=lambda one: (one.group_id, one.index)))
    for one, other in zip(*found, strict=True):
        assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
        assert one.policy_versions_T.tolist() == other.policy_versions_T.tolist()
        assert one.finish_reason == other.finish_reason
    assert len(found[0][-1].token_ids_T) < 24 < len(found[0][0].token_ids_T), "group 1 was aborted"


def test_the_steps_between_sizes() -> None:
    assert sizes(1) == [1]
    assert sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert sizes(300)[-5:] == [248, 256, 272, 288, 300]


def adopt(engine: Engine, version: int, weights: dict[str, torch.Tensor]) -> None:
    model = engine.model
    assert isinstance(model, GeneratorModel)
    model.use(model.hold(weights))
    engine.set_version(version)


@pytest.mark.parametrize("stale", [False, True], ids=["by address", "mutant"])
def test_no_graph_computes_with_weights_of_before(
    models: list[Transformer], stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are copied to and fro between two buffers, as on a GPU; the mutant replays whatever graph there is."""
    if stale:
        monkeypatch.setattr(GeneratorModel, "weights_at", property(lambda _: 0, lambda *_: None), raising=False)
    eager, graphed = engines(models[0])
    for engine in (eager, graphed):
        monkeypatch.setattr(engine.model, "_are_here", lambda tensors: False)
    request = GenerationRequest(
        group_id=1, prompt_token_ids_T=np.array([5, 6], np.int32), group_size=3,
        sampling=replace(GREEDY, max_new_tokens=60),
    )  # fmt: skip
    out = list[list[Rollout]]()
    for engine in (eager, graphed):
        engine.submit([request])
        rollouts = list[Rollout]()
        for version in range(1, 7):
            for _ in range(8):
                rollouts.extend(engine.step())
            adopt(engine, version, {name: p.detach() for name, p in models[version % 3].named_parameters()})
        out.append(rollouts + drain(engine))
    same = all(
        found.token_ids_T.tolist() == expected.token_ids_T.tolist() for found, expected in zip(*out, strict=True)
    )
    assert same is not stale
    assert graphed._graphs is not None and len(graphed._graphs._replays) == (1 if stale else 2)


def test_held_weights_stay_until_the_next_but_one(models: list[Transformer], monkeypatch: pytest.MonkeyPatch) -> None:
    model = GeneratorModel(models[0].shape, "float32", "cpu")
    model.load(models[0])
    weights = [{name: p.detach() for name, p in one.named_parameters()} for one in models]
    assert all(tensor is weights[1][key] for key, tensor in model.hold(weights[1]).items()), "they are here"
    monkeypatch.setattr(model, "_are_here", lambda tensors: False)
    token, position = torch.tensor([4]), torch.tensor([0])

    def logits() -> torch.Tensor:
        return model.logits(model(token, position, lambda layer, q, k, v: q))

    places = set[int]()
    for number in (1, 2, 0, 1):
        before = logits()
        held = model.hold(weights[2 - number])  # is dropped
        held = model.hold(weights[number])
        assert torch.equal(logits(), before), "weights in use were overwritten"
        model.use(held)
        places.add(model.weights_at)
        whole = GeneratorModel(models[0].shape, "float32", "cpu")
        whole.load(models[number])
        assert torch.equal(logits(), whole.logits(whole(token, position, lambda layer, q, k, v: q)))
    assert len(places) == 2


@nightly("Triton's interpreter is slow; by day graphs serve steps of other tests here")
@pytest.mark.parametrize("goes_ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: conformance.Check, goes_ahead: bool) -> None:
    check(serve("keep", graphs=True, goes_ahead=goes_ahead))
