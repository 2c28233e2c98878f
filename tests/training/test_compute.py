"""Settings that trade arithmetic, memory and precision: what they leave alone, and what they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config import RunConfig
from llamarl.config.roles import LoraConfig
from llamarl.config.schema import TrainerConfig
from llamarl.distributed.mesh import RankMesh
from llamarl.kernels import half, ops, products
from llamarl.models.lora import add_adapters
from llamarl.models.memory import TrainerLoad, activation_bytes
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Projection
from llamarl.training import policy
from llamarl.training.cost import step_cost
from llamarl.training.optimizer import learning_rate_at
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.policy import RankModel
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import RolloutGroup
from tests.kernels.test_products import PATHS, serving
from tests.nightly import nightly
from tests.training.conftest import SHAPE


def stepped(trainer: Trainer, groups: list[RolloutGroup]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics, and the gradient that the optimizer saw."""
    seen = dict[str, Tensor]()
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update((name, weight.grad.clone()) for name, weight in trainer.model.named_parameters())
    )
    return trainer.step(groups).metrics, seen


def computing_in(trainer: Trainer, dtype: str) -> Trainer:
    trainer.config = trainer.config.model_copy(update={"dtype": dtype})
    return trainer


def by_torch(trainer: Trainer) -> Trainer:
    """With torch's operations, as on GPUs."""
    trainer.policy.fused = False
    for module in trainer.model.modules():
        for name in ("normalize", "rotate", "activate"):
            module.__dict__.pop(name, None)
    return trainer


def kept_bytes(trainer: Trainer, groups: list[RolloutGroup]) -> int:
    """Of different memory between forward and backward of all groups in one microbatch, weights left out."""
    (batch,) = pack(trainer._samples(groups)[0], 1 << 30)
    kept = dict[int, int]()
    weights = {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}

    def pack_hook(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights and not isinstance(x, nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        logprobs_R = trainer.logprobs(batch)
    assert logprobs_R.requires_grad
    return sum(kept.values())


class TestActivationCheckpointing:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_step_is_the_same_bits(self, make_trainer, make_groups, dtype: str) -> None:
        results = [
            stepped(computing_in(make_trainer(activation_checkpointing=on, microbatch_tokens=30), dtype), make_groups())
            for on in (False, True)
        ]
        assert results[0][0] == results[1][0]
        assert all(torch.equal(grad, results[1][1][name]) for name, grad in results[0][1].items())

    def test_it_keeps_little(self, make_trainer, make_groups) -> None:
        groups = make_groups(((30, 30),) * 4)
        plain, thrifty = (
            kept_bytes(make_trainer(activation_checkpointing=on, shape={"num_layers": 6}), groups)
            for on in (False, True)
        )
        assert thrifty < 0.15 * plain


def test_who_steps_knows_what_keeps_copies(
    make_model, make_trainer, make_groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing does. Not covered: that a copy which is forgotten is made anew; see tests/kernels."""
    assert not make_trainer().copying
    monkeypatch.setattr(policy, "uses_halves", lambda config, device: True)
    monkeypatch.setattr(half, "prepare", lambda *_: None)
    settings = TrainerConfig(dtype="bfloat16", learning_rate=1e-3)
    trainer = Trainer(make_model(), settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7))
    products = [one.multiply for one in trainer.model.modules() if isinstance(one, Projection)]
    assert trainer.copying == products and len(products) == 2 * 7
    for product in products:
        product._half_O_I = torch.zeros(1)
    trainer.step(make_groups())
    assert all(product._half_O_I is None for product in products)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [{}, {"family": "llama", "intermediate_size": 200}], ids=["qwen3", "wide llama"])
def test_estimate_of_activations(make_trainer, make_groups, shape: dict, recompute: bool) -> None:
    """Within a quarter of what autograd holds with torch's own operations, and under it by no more than a tenth; fused
    ones hold less."""
    shape = {"hidden_size": 64, "num_layers": 4, "head_dim": 16} | shape
    groups = make_groups(((20, 40, 30), (25, 40, 40)))
    trainer, fused_trainer = by_torch(make_trainer(shape=shape)), make_trainer(shape=shape)
    assert kept_bytes(fused_trainer, groups) < kept_bytes(trainer, groups) or ops.kernels().library is None
    model_shape = ModelShape(**SHAPE | shape)
    num_tokens = sum(len(g.prompt.token_ids_T) + sum(r.num_tokens - 1 for r in g.rollouts) for g in groups)
    num_keys = sum(len(g.prompt.token_ids_T) + 3 * (len(g.prompt.token_ids_T) + 39) for g in groups)
    load = TrainerLoad(
        tokens=num_tokens,
        targets=0,
        keys=num_keys,
        half=False,
        checkpointing=False,
        flash=False,
        on_gpu=False,
        fused=False,
    )
    layer, ends = activation_bytes(model_shape, load), 4 * 4 * 64 * num_tokens
    if recompute:
        # Of the layers only the inputs are kept, and one of them is computed again at a time.
        estimate = 4 * 4 * 64 * num_tokens + layer + ends
        one_layer = (kept_bytes(trainer, groups) - ends) / 4
        thrifty = by_torch(make_trainer(shape=shape, activation_checkpointing=True))
        found = kept_bytes(thrifty, groups) + one_layer
        assert estimate < (4 * layer + ends) / 2
    else:
        estimate, found = 4 * layer + ends, kept_bytes(trainer, groups)
    assert 0.9 < estimate / found < 1.25


@nightly("torch's compiler works for a minute")
def test_compiled_is_equal(make_trainer, make_groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, with ragged microbatches and all layers through one graph; and it is compiled indeed."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # starts no processes
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (metrics, gradient), (compiled_metrics, compiled) = (
        stepped(make_trainer(compile=on, microbatch_tokens=30, shape={"family": "llama"}), make_groups())
        for on in (False, True)
    )
    for name, grad in gradient.items():
        assert (compiled[name] - grad).norm() <= 1e-5 * grad.norm(), name
    assert compiled_metrics == pytest.approx(metrics, rel=1e-4)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2, "queries and keys; feed-forward"
    assert not counters["graph_break"]


def test_flops(make_trainer, make_groups) -> None:
    """Matrix products as torch counts them; attention by counting pairs; three times the forward."""
    groups = make_groups()
    trainer = by_torch(make_trainer(shape={"tie_embeddings": False}))
    samples = trainer._samples(groups)[0]
    (batch,) = pack(samples, 1000)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), serving("torch"):  # it knows no others
        trainer.logprobs(batch)
    products = next(flops for op, flops in counter.get_flop_counts()["Global"].items() if str(op) == "aten.mm")
    shape = ModelShape(**SHAPE)
    pairs = 0
    for prompt, lengths in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        pairs += sum(range(1, prompt + 1)) + sum(prompt + t for length in lengths for t in range(1, length + 1))
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    assert step_cost(shape, samples).flops == 3 * (products + attention)


def test_padding_share(make_groups) -> None:
    """Inputs of responses: one less than tokens. (4, 0, 8) of 3 x 8 and (2, 2) of 2 x 2."""
    groups = [to_sample_group(group, np.ones(3)[: len(group.rollouts)]) for group in make_groups(((5, 1, 9), (3, 3)))]
    assert step_cost(ModelShape(**SHAPE), groups).padding_share == pytest.approx(12 / 28)
    assert step_cost(ModelShape(**SHAPE), []).padding_share == 0


class TestBfloat16:
    def test_masters_and_moments_are_float32(self, make_trainer, make_groups) -> None:
        trainer = computing_in(make_trainer(), "bfloat16")
        trainer.step(make_groups())
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
        assert {value.dtype for state in trainer.optimizer.state.values() for value in state.values()} == {
            torch.float32
        }

    def test_steps_far_below_its_resolution_add_up(self, make_trainer, make_groups) -> None:
        """A norm's weights are 1, where bfloat16 is 2^-8 coarse."""
        trainer = computing_in(make_trainer(learning_rate=1e-6), "bfloat16")
        weight = trainer.model.model.norm.weight
        before = weight.detach().clone()
        for _ in range(20):
            trainer.step(make_groups())
        moved = (weight - before).abs()
        assert 1e-5 < moved.median() < 3e-5
        assert torch.equal(weight.bfloat16(), before.bfloat16())

    def test_gradients_are_near(self, make_trainer, make_groups) -> None:
        types = ("float32", "bfloat16")
        exact, rounded = (stepped(computing_in(make_trainer(), dtype), make_groups())[1] for dtype in types)
        for name, grad in exact.items():
            assert 0 < (rounded[name] - grad).norm() < 0.1 * grad.norm(), name


class TestDecay:
    def rates(self, **config) -> list[float]:
        return [learning_rate_at(step, TrainerConfig(learning_rate=2.0, **config)) for step in range(8)]

    def test_linear(self) -> None:
        assert self.rates(decay="linear", decay_steps=4) == pytest.approx([2, 1.5, 1, 0.5, 0, 0, 0, 0])
        warm = self.rates(decay="linear", decay_steps=5, warmup_steps=1, decay_floor=0.2)
        assert warm == pytest.approx([1, 2, 1.6, 1.2, 0.8, 0.4, 0.4, 0.4])

    def test_cosine(self) -> None:
        half = 2**-0.5
        expected = [2, 1 + half, 1, 1 - half, 0, 0, 0, 0]
        assert self.rates(decay="cosine", decay_steps=4) == pytest.approx(expected, abs=1e-15)

    @pytest.mark.parametrize("decay", ["linear", "cosine"])
    def test_it_never_rises_after_the_warm_up_and_ends_at_the_floor(self, decay: str) -> None:
        rates = self.rates(decay=decay, decay_steps=7, warmup_steps=2, decay_floor=0.1)
        assert rates[:3] == sorted(rates[:3])
        assert rates[2:] == sorted(rates[2:], reverse=True)
        assert rates[7] == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("trainer", "said"),
        [
            ({"decay_steps": 5}, "trainer.decay_steps = 5 and trainer.decay_floor = 0 do nothing"),
            ({"decay": "linear"}, "trainer.decay = 'linear' with trainer.decay_steps = 0 ends before it begins"),
            ({"decay": "cosine", "decay_steps": 3, "warmup_steps": 3}, "ends before it begins, after trainer.warmup_"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, trainer: dict, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            RunConfig.model_validate({"model": {"path": "x"}, "data": {"train": {"name": "x"}}, "trainer": trainer})


KINDS = {
    "plain": {},
    "microbatches_recomputed": {"microbatch_tokens": 30, "activation_checkpointing": True},
    "adapters": {},
}


class TestProducts:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("path", PATHS[1:])
    def test_a_step_is_nearly_the_same_by_every_path(
        self, make_model, make_trainer, make_groups, kind: str, path: str
    ) -> None:
        found = dict[str, dict[str, Tensor]]()
        for name in (products.TORCH, path):
            with serving(name):
                trainer = make_trainer(shape={"family": "qwen2"}, **KINDS[kind])  # with biases
                if kind == "adapters":
                    add_adapters(model := make_model(), lora := LoraConfig(rank=4), seed=2)
                    trainer = Trainer(
                        model, TrainerConfig(lora=lora), Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7)
                    )
                assert trainer.step(make_groups()).update.grad_norm > 0
                found[name] = {key: weight.detach() for key, weight in trainer.sharding.weights.items()}
        assert all("lora" in key for key in found[path]) == (kind == "adapters")
        for key, weight in found[path].items():
            torch.testing.assert_close(weight, found[products.TORCH][key], atol=1e-5, rtol=1e-4, msg=key)

    @pytest.mark.skipif(len(PATHS) == 1, reason="this torch has no oneDNN")
    def test_linear_layers_and_the_head_are_served(self, make_trainer, make_groups, monkeypatch) -> None:
        served, real = list[str](), products._multiply

        def multiply(path: str, product: str, *rest) -> Tensor:
            served.append(product)
            assert path == products.ONEDNN
            return real(path, product, *rest)

        monkeypatch.setattr(products, "_multiply", multiply)
        with serving(products.ONEDNN):
            make_trainer().step(make_groups())
        # Seven matrices in each of two layers; the head's outputs are computed again in backward.
        linear = 7 * SHAPE["num_layers"]
        counts = {product: served.count(product) for product in products.PRODUCTS}
        assert counts == {products.OUTPUT: linear + 2, products.INPUT: linear + 1, products.WEIGHT: linear + 1}


def test_ranks_agree_on_what_is_even(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another's processor chose other products: they share microbatches."""
    monkeypatch.setattr(RankMesh, "exchange", lambda self, value: [value, 128, 1])
    assert make_trainer().policy.even == 128


@pytest.mark.parametrize(("length", "num_inputs"), [(100, 101), (1019, 1020), (1030, 1152)])
def test_large_microbatches_are_even(make_trainer, make_groups, length: int, num_inputs: int) -> None:
    """Where products want it, so that they meet few sizes; small ones stay as they are."""
    trainer = make_trainer(shape={"max_position_embeddings": 2048})
    trainer.policy.even = 128
    (batch,) = pack(trainer._samples(make_groups(((length,),)))[0], 1 << 30)
    inputs = trainer.policy.place(batch, torch.device("cpu"))
    num_prompt = len(batch.token_ids_N) - length + 1
    assert len(inputs.token_ids_N) == (num_inputs if num_inputs % 128 == 0 else num_prompt + length - 1)
    assert inputs.num_tokens == len(batch.token_ids_N)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_beginning_is_computed_once_and_changes_nothing(make_trainer, make_groups, monkeypatch, dtype) -> None:
    beginning_T = np.arange(30, dtype=np.int32)
    groups = [
        replace(one, prompt=replace(one.prompt, token_ids_T=np.concatenate((beginning_T, one.prompt.token_ids_T))))
        for one in make_groups()
    ]
    shared, gradients = stepped(computing_in(make_trainer(), dtype), groups)
    monkeypatch.setattr(RankModel, "shares_beginnings", False)
    apart, expected = stepped(computing_in(make_trainer(), dtype), groups)
    assert shared["num_input_tokens"] == apart["num_input_tokens"] - 2 * len(beginning_T)
    assert shared["num_flops"] < apart["num_flops"]
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm() + 1e-9, name


@pytest.mark.parametrize("shape", [{}, {"family": "qwen2", "tie_embeddings": False}], ids=["qwen3", "qwen2"])
def test_bfloat16_trains_the_weights_that_are_served(make_model, make_groups, shape: dict) -> None:
    """Masters that are ahead of their rounding change neither what is scored nor a gradient."""
    settings = TrainerConfig(dtype="bfloat16", learning_rate=1e-3, max_grad_norm=1e9)
    ahead, served = make_model(**shape), make_model(**shape)
    for weight in (one for one in served.parameters() if one.ndim > 1):
        weight.data = weight.data.bfloat16().float()
    trainers = [
        Trainer(model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7))
        for model in (ahead, served)
    ]
    sequences = [np.arange(1, 30, dtype=np.int32), np.arange(5, 20, dtype=np.int32)]
    said, expected = (np.concatenate(one.score(sequences, half=True)) for one in trainers)
    np.testing.assert_array_equal(said, expected)
    rounded, exact = (np.concatenate(one.score(sequences, rounded=True)) for one in trainers)
    np.testing.assert_array_equal(rounded, exact)
    np.testing.assert_array_equal(np.concatenate(trainers[1].score(sequences)), exact)
    masters = np.concatenate(trainers[0].score(sequences))
    assert np.abs(masters - exact).max() > 1e-3, "the masters are another policy, and are back"
    (_, found), (_, gradients) = (stepped(one, make_groups()) for one in trainers)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)
    _, in_float32 = stepped(
        Trainer(
            make_model(**shape),
            TrainerConfig(max_grad_norm=1e9),
            Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7),
        ),
        make_groups(),
    )
    for name, gradient in in_float32.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


def test_gradients_of_products_in_bfloat16_add_up() -> None:
    weight_O_I, x_M_I = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4)
    product = half.Product()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y_M_O = product(x_M_I, weight_O_I)
        y_M_O.sum().backward()
    assert weight_O_I.grad is not None
    torch.testing.assert_close(weight_O_I.grad, torch.full((3, 4), 4.0))


@pytest.mark.parametrize("half", [False, True])
def test_contexts_are_not_scored_and_what_they_share_is_computed_once(
    make_model, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    trainer = Trainer(
        make_model(), TrainerConfig(dtype="bfloat16"), Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7)
    )
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 40, 32).astype(np.int32)
    sequences = [np.concatenate((beginning, rng.integers(0, 40, num).astype(np.int32))) for num in (3, 9, 4)]
    contexts, sizes, whole = [33, 32, 36], list[int](), trainer.score(sequences, 0.7, half)
    shape_of = trainer.policy.hidden_shape
    monkeypatch.setattr(trainer.policy, "hidden_shape", lambda one: sizes.append(len(one.token_ids_N)) or shape_of(one))
    found = trainer.score(sequences, 0.7, half, contexts=contexts)
    for found_T, whole_T, num in zip(found, whole, contexts, strict=True):
        assert np.isnan(found_T[: num - 1]).all() and len(found_T) == len(whole_T)
        np.testing.assert_allclose(found_T[num - 1 :], whole_T[num - 1 :], atol=3e-2 if half else 1e-5)
    if trainer.policy.shares_beginnings:
        assert sizes == [31 + (34 - 31) + (40 - 31)], "the third sequence has no token that is needed"
    cutoffs_N = np.full(sum(len(ids_T) - 1 for ids_T in sequences), -np.inf, np.float32)
    cutoffs_N[34] = -0.01
    among = trainer.score(sequences, 0.7, half, cutoffs_N, contexts=[1, 1, 1])[1]
    assert among[0] > whole[1][0], "cutoffs belong to their tokens"
    np.testing.assert_array_equal(trainer.score(sequences, 0.7, half, cutoffs_N, contexts=[2, 1, 9])[1][1:], among[1:])
