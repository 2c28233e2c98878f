"""Hybrids of attention and delta nets in the engine: transformers and the trainer's forward decide what is right."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, load_generator_model
from llamarl.generation.scheduler import EMPTY, Schedule
from llamarl.generation.states import StateCache
from llamarl.kernels import delta
from llamarl.kernels.delta import convolved, heads, step
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.hf import save_model
from llamarl.models.memory import SHARED_STATES
from llamarl.models.transformer import Transformer
from llamarl.types import GenerationRequest, SamplingParams
from tests.generation.hybrids import HYBRIDS, hybrid
from tests.generation.native import assert_same, drain, make_engine, run
from tests.generation.references import assert_greedy, full_logits, gathered, response_logits, run_segments
from tests.generation.test_model import Alone, Meeting, Rank, loaded, logits, slot
from tests.generation.test_turns import STOP, talk
from tests.kernels.engines import engine
from tests.nightly import NIGHTLY, also, crossed, some

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=24, seed=5)
DENSE = "qwen3_5_text"


def requests_of(sampling: SamplingParams, count: int = 5, group_size: int = 3) -> list[GenerationRequest]:
    """Prompts of one token, of a block and one token, and of others."""
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            group_id=10 + i, prompt_token_ids_T=rng.integers(0, 130, length).astype(np.int32), group_size=group_size,
            sampling=sampling,
        )
        for i, length in enumerate([1, 17, 40, 2, 33][:count])
    ]  # fmt: skip


@pytest.mark.parametrize("name", some(HYBRIDS, 2))
def test_float32_equals_the_trainer(computed_by: str, name: str) -> None:
    model = hybrid(name)
    ours, theirs = logits(loaded(model, "float32")), logits(model)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.03), ("int8", 0.1)])
@pytest.mark.parametrize("name", ["qwen3_next_dense", "qwen3_5_text_odd"])
def test_rounded_projections_are_near(computed_by: str, name: str, precision: str, tolerance: float) -> None:
    model = hybrid(name)
    generator = loaded(model, precision)
    types = {spec.name: spec.dtype for spec in generator.specs() if spec.part == "values"}
    layer = f"model.layers.{HYBRIDS[name].delta.layers[0]}.linear_attn"
    for kind in ("in_proj_q", "in_proj_v", "in_proj_z", "out_proj"):
        assert types[f"{layer}.{kind}.weight"] == precision
    for kind in ("A_log", "dt_bias", "conv_k.weight", "in_proj_b.weight", "norm.weight"):
        assert types[f"{layer}.{kind}"] == "float32"
    ours, theirs = logits(generator), logits(model)
    assert 0 < (ours - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("name", HYBRIDS if NIGHTLY else ["qwen3_5_text_odd"])
def test_greedy_tokens_are_those_of_transformers_from_the_same_files(name: str, tmp_path: Path) -> None:
    save_model(hybrid(name), tmp_path / "model", None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    generator = load_generator_model(tmp_path / "model", "float32", "cpu")
    served = Engine(generator, EngineSettings(max_running=8, prefill_tokens=16, kv_bytes=1 << 24))
    requests = requests_of(GREEDY, group_size=2)
    found = run(served, requests)
    for request in requests:
        ids = torch.from_numpy(request.prompt_token_ids_T).long()[None]
        with torch.no_grad():
            ends = {"eos_token_id": -1, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
            whole = theirs.generate(ids, do_sample=False, max_new_tokens=20, **ends)
        for index in range(2):
            assert found[request.group_id, index].token_ids_T.tolist() == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("served", "kernels", "blocks"),
    [("generator", "torch", 6),
     *also(("generator", "best", 400), ("trainer", "best", 6), ("generator", "best", 6),
           ("generator", "torch", 400), ("trainer", "best", 400), ("trainer", "torch", 6),
           ("trainer", "torch", 400))],
)  # fmt: skip
def test_each_token_is_what_a_full_forward_says(served: str, kernels: str, blocks: int) -> None:
    """Prompts prefilled in pieces, samples forked from them, and rollouts that lose their blocks and states."""
    model = hybrid("qwen3_next_dense")
    with engine("torch" if kernels == "torch" else "avx2"):
        computed = model if served == "trainer" else loaded(model, "float32")
        backend = make_engine(computed, blocks=blocks, max_running=6, prefill_tokens=7)
        requests = requests_of(GREEDY)
        found = run(backend, requests)
    assert bool(backend.stats().parked) == (blocks == 6)
    for request in requests:
        for index in range(3):
            rollout = found[request.group_id, index]
            assert_greedy(response_logits(model, request.prompt_token_ids_T, rollout), rollout)


def test_a_rollout_does_not_depend_on_how_it_was_cut() -> None:
    model = loaded(hybrid(DENSE), "float32")
    whole = run(make_engine(model), requests_of(SAMPLED))
    cut = [replace(request, segment_tokens=5) for request in requests_of(SAMPLED)]
    found, num_parked = run_segments(make_engine(model), cut)
    assert num_parked == 4 * 15
    assert_same(found, whole)


def test_the_same_steps_give_the_same_bits() -> None:
    results = [run(make_engine(loaded(hybrid(DENSE), "float32")), requests_of(SAMPLED)) for _ in range(2)]
    for key, rollout in results[0].items():
        assert rollout.behavior_logprobs_T.tobytes() == results[1][key].behavior_logprobs_T.tobytes()


def test_what_an_environment_answers_goes_on_from_its_state() -> None:
    """Held with its blocks, and computed anew where these are lost: the same tokens."""
    model, found = loaded(hybrid(DENSE), "float32"), list[dict]()
    prompts = requests_of(replace(STOP, temperature=1.0), count=3, group_size=2)
    for held in (True, False):
        backend = make_engine(model, max_running=4)
        found.append(talk(backend, [replace(one, has_turns=held) for one in prompts]))
        backend.release([(one.group_id, index) for one in prompts for index in range(2)])
        slots = backend._scheduler.slots
        assert slots is not None and slots.num_free == slots.num_blocks == 2 * 4
    assert_same(*found)
    assert any(len(set(np.diff(rollout.prefills, axis=0)[:, 0])) for rollout in found[0].values())


def test_held_states_are_given_up_for_active_rollouts() -> None:
    """Twice as many slots as running rollouts suffice, whatever waits."""
    model = loaded(hybrid(DENSE), "float32")
    backend = make_engine(model, max_running=2)
    sampling = replace(SAMPLED, stop_token_ids=tuple(range(130)))
    held = [replace(one, has_turns=True) for one in requests_of(sampling, group_size=4)]
    backend.submit(held)
    stopped = drain_held(backend)
    assert len(stopped) == 20 and len(backend._scheduler.held) <= 4
    others = [replace(one, group_id=one.group_id + 100) for one in requests_of(GREEDY, group_size=1)]
    assert len(run_all(backend, others)) == 5


def drain_held(backend: Engine) -> list:
    return [rollout for _ in iter(lambda: backend.has_work, False) for rollout in backend.step()]


def run_all(backend: Engine, requests: list[GenerationRequest]) -> list:
    backend.submit(requests)
    return drain_held(backend)


def scored(model: Transformer, ids: np.ndarray) -> np.ndarray:
    return gathered(full_logits(model, ids)[:-1], ids[1:])


def test_with_recompute_new_weights_have_seen_everything() -> None:
    models = [hybrid("qwen3_next", seed) for seed in range(2)]
    generator = loaded(models[0], "float32")
    backend = Engine(
        generator, EngineSettings(max_running=8, prefill_tokens=16, kv_bytes=1 << 24, kv_on_update="recompute")
    )
    requests = requests_of(SAMPLED)
    backend.submit(requests)
    rollouts = [one for _ in range(12) for one in backend.step()]
    generator.use(generator.hold(slot(generator, models[1])))
    backend.set_version(1)
    rollouts += drain(backend)
    prompts = {request.group_id: request.prompt_token_ids_T for request in requests}
    assert any(len(set(one.policy_versions_T.tolist())) == 2 for one in rollouts)
    for rollout in rollouts:
        prompt = prompts[rollout.group_id]
        for version, model in enumerate(models):
            own = rollout.policy_versions_T == version
            expected = scored_at(model, np.concatenate((prompt, rollout.token_ids_T)), 0.9)[len(prompt) - 1 :]
            np.testing.assert_allclose(rollout.behavior_logprobs_T[own], expected[own], atol=1e-4)


def scored_at(model: Transformer, ids: np.ndarray, temperature: float) -> np.ndarray:
    return gathered(full_logits(model, ids)[:-1] / temperature, ids[1:])


class Continued:
    """Attention and delta nets of one sequence whose parts are computed by different weights."""

    def __init__(self) -> None:
        self._seen = dict[int, list[tuple[Tensor, Tensor]]]()
        self._states, self._inputs = dict[int, Tensor](), dict[int, Tensor]()

    def __call__(self, place: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = self._seen.setdefault(place, [])
        seen.append((k, v))
        keys, values = (torch.cat(part).transpose(0, 1)[None] for part in zip(*seen, strict=True))
        mask = torch.ones(len(q), keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - len(q))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def recur(
        self, place: int, delta: DeltaShape, mixed: Tensor, conv: Tensor, decay: Tensor, strength: Tensor
    ) -> Tensor:
        width, num = conv.shape[1], len(mixed)
        seen = torch.cat((self._inputs.get(place, mixed.new_zeros(width - 1, mixed.shape[1])), mixed))
        self._inputs[place] = seen[num:]
        q, k, v = heads(convolved([seen[first : first + num] for first in range(width)], conv), delta)
        state = self._states.get(place, mixed.new_zeros(1, delta.num_value_heads, delta.key_dim, delta.value_dim))
        outputs = list[Tensor]()
        for t in range(num):
            now = slice(t, t + 1)
            output, state = step(q[now], k[now], v[now], decay[now], strength[now], state)
            outputs.append(output)
        self._states[place] = state
        return torch.cat(outputs)


def test_with_keep_states_stay_those_of_the_weights_that_fed_them() -> None:
    models = [hybrid(DENSE, seed) for seed in range(2)]
    generator = loaded(models[0], "float32")
    backend = Engine(
        generator, EngineSettings(max_running=15, prefill_tokens=128, kv_bytes=1 << 24, kv_on_update="keep")
    )
    requests = requests_of(SAMPLED)
    backend.submit(requests)
    rollouts = [one for _ in range(9) for one in backend.step()]
    generator.use(generator.hold(slot(generator, models[1])))
    backend.set_version(1)
    rollouts += drain(backend)
    prompts = {request.group_id: request.prompt_token_ids_T for request in requests}
    for rollout in rollouts:
        prompt, versions = prompts[rollout.group_id], rollout.policy_versions_T
        assert set(versions.tolist()) == {0, 1}
        fed, border = np.concatenate((prompt, rollout.token_ids_T[:-1])), len(prompt) - 1 + int((versions == 0).sum())
        past, parts = Continued(), list[Tensor]()
        for model, (start, stop) in zip(models, ((0, border), (border, len(fed))), strict=True):
            with torch.no_grad():
                hidden = model(torch.from_numpy(fed[start:stop]).long(), torch.arange(start, stop), past)
                parts.append(model.logits(hidden))
        expected = gathered(torch.cat(parts)[len(prompt) - 1 :] / 0.9, rollout.token_ids_T)
        np.testing.assert_allclose(rollout.behavior_logprobs_T, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_ranks_equal_one(name: str, precision: str) -> None:
    model, meeting, found = hybrid(name), Meeting(2), dict[int, Tensor]()
    ranks = [loaded(model, precision, tensor_parallel=Rank(meeting, rank)) for rank in range(2)]
    assert ranks[1].shape.delta.num_key_heads == 1
    assert ranks[1].shape.state_bytes * 2 == model.shape.state_bytes
    threads = [threading.Thread(target=lambda r=r: found.update({r: logits(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    wanted = logits(loaded(model, precision))
    assert torch.equal(found[0], found[1])
    near = (found[0] - wanted).norm(dim=1) <= (1e-5 if precision == "float32" else 2e-2) * wanted.norm(dim=1)
    assert near.float().mean() > 0.95  # in bfloat16 another expert may be chosen


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    shape = HYBRIDS[DENSE]
    assert shape.delta is not None
    odd = replace(shape, delta=replace(shape.delta, num_key_heads=1))
    with pytest.raises(ValueError, match="2 tensor-parallel ranks cannot share 1 key heads evenly"):
        GeneratorModel(odd, "float32", "cpu", tensor_parallel=Alone(2, 0))


def test_steps_are_no_graphs_because_of_the_states() -> None:
    generator = loaded(hybrid(DENSE), "float32")
    assert "slots" in generator.no_graphs_because
    backend = make_engine(generator)
    assert "without CUDA graphs" in backend.describe()
    assert f"delta nets by {delta.backend_name(torch.device('cpu'))}" in backend.describe()


def test_an_engine_that_sleeps_gives_its_states_up() -> None:
    model = hybrid(DENSE)
    generator = loaded(model, "float32")
    backend = make_engine(generator)
    first = run(backend, requests_of(GREEDY))
    backend.sleep()
    assert backend._states is None
    generator.load(model)
    backend.wake()
    assert backend._states is not None and not backend._states.states_L_S_H_K_V[:, EMPTY].any()
    assert_same(run(backend, requests_of(GREEDY)), first)


def with_a_common_beginning(num_shared: int, count: int, seed: int = 0) -> list[GenerationRequest]:
    """Prompts that differ behind their first tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 130, num_shared)
    return [
        GenerationRequest(
            group_id=10 + number, group_size=2, sampling=SAMPLED,
            prompt_token_ids_T=np.concatenate((common, rng.integers(0, 130, 3 + 5 * number))).astype(np.int32),
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("num_shared", "prefill_tokens"), crossed([16, 37, 48], [7, 16, 64, 1000]))
def test_the_third_prompt_begins_behind_the_state_of_what_all_share(num_shared: int, prefill_tokens: int) -> None:
    """The second one shows that it is shared. All rollouts have the bits of prompts that are computed alone."""
    model = loaded(hybrid("qwen3_next_dense"), "float32")
    requests = with_a_common_beginning(num_shared, 5)
    backend = make_engine(model, max_running=16, prefill_tokens=prefill_tokens)
    chunks, states = list[tuple[int, int]](), backend._scheduler._states
    schedule = backend._scheduler.schedule

    def noted() -> Schedule:
        plan = schedule()
        chunks.extend((one.group.request.group_id, one.start) for one in plan.chunks if one.sequence is None)
        return plan

    backend._scheduler.schedule = noted  # type: ignore[method-assign]
    found = run(backend, requests)
    firsts = dict(reversed(chunks))
    assert firsts[10] == firsts[11] == 0
    assert [firsts[group_id] for group_id in (12, 13, 14)] == [num_shared // 16 * 16] * 3
    for request in requests:
        alone = run(make_engine(model, max_running=16, prefill_tokens=prefill_tokens), [request])
        for key, rollout in alone.items():
            assert found[key].token_ids_T.tobytes() == rollout.token_ids_T.tobytes()
            assert found[key].behavior_logprobs_T.tobytes() == rollout.behavior_logprobs_T.tobytes()
    assert states is not None and not states._slots and states._pool.num_free == SHARED_STATES


@pytest.mark.parametrize("num_own", [1, 2])
def test_a_prompt_that_ends_where_the_beginning_does_has_a_state(monkeypatch: pytest.MonkeyPatch, num_own: int) -> None:
    """Its whole prefix may be shared, and its state is written all the same. Slots hold no numbers at first."""

    class Unwritten(StateCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for slots in (self.states_L_S_H_K_V, self.inputs_L_S_D_C):
                slots[:, EMPTY + 1 :] = math.nan

    monkeypatch.setattr("llamarl.generation.engine.StateCache", Unwritten)
    model = loaded(hybrid("qwen3_next_dense"), "float32")
    requests = with_a_common_beginning(48, 3)
    last = replace(requests[0], group_id=20, prompt_token_ids_T=requests[0].prompt_token_ids_T[: 48 + num_own])
    found = run(make_engine(model, max_running=16), [*requests, last])
    alone = run(make_engine(model, max_running=16), [last])
    for key, rollout in alone.items():
        assert found[key].token_ids_T.tobytes() == rollout.token_ids_T.tobytes()
        assert found[key].behavior_logprobs_T.tobytes() == rollout.behavior_logprobs_T.tobytes()


def test_more_beginnings_than_slots_are_computed() -> None:
    """Those that were used least recently are computed again."""
    model = loaded(hybrid(DENSE), "float32")
    beginnings = [with_a_common_beginning(20, 3, seed) for seed in range(SHARED_STATES + 3)]
    requests = [
        replace(one, group_id=100 * number + one.group_id)
        for place in range(3)
        for number, some in enumerate(beginnings)
        for one in some[place : place + 1]
    ]
    found = run(make_engine(model, max_running=70, blocks=1000), requests)
    for request in requests[-3:]:
        alone = run(make_engine(model), [request])
        assert all(found[key].token_ids_T.tobytes() == one.token_ids_T.tobytes() for key, one in alone.items())


def test_new_weights_drop_shared_states() -> None:
    models = [hybrid(DENSE, seed) for seed in range(2)]
    generator = loaded(models[0], "float32")
    backend = make_engine(generator, max_running=16)
    requests = with_a_common_beginning(40, 5)
    backend.submit(requests[:3])
    for _ in range(6):
        backend.step()
    states = backend._scheduler._states
    assert states is not None and len(states._slots) == 1
    generator.use(generator.hold(slot(generator, models[1])))
    backend.set_version(1)
    assert not states._slots
    backend.submit(requests[3:])
    rollouts = {(one.group_id, one.index): one for one in drain(backend)}
    alone = run(make_engine(loaded(models[1], "float32"), max_running=16), requests[3:])
    assert_same({key: rollouts[key] for key in alone}, alone)
