"""Moments of AdamW as codes, and in memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llamarl.config.roles import TrainerConfig
from llamarl.distributed.mesh import ALONE
from llamarl.executors.trainer import OptimizingExecutor
from llamarl.sharding.box import Box
from llamarl.training import optimizer as optimizers
from llamarl.training.optimizer import (
    BLOCK,
    MOMENTS,
    SCALE,
    Dice,
    LightAdamW,
    build_optimizer,
    decoded,
    encoded,
    in_place,
    read_state,
    state_spec,
    stochastically_rounded,
    table,
)
from llamarl.weight_sync.layout import TensorSpec
from tests.training.layouts import QWEN3, new_trainer

ROWS, COLUMNS = 7, 600
CPU = torch.device("cpu")


def trained(steps: int = 12, rows: slice = slice(None), start: Tensor | None = None, **settings: Any) -> Any:
    """Matrix, vector and optimizer after some steps, of these rows of the matrix."""
    noise = torch.Generator().manual_seed(3)
    matrix = torch.randn(ROWS, COLUMNS, generator=noise) if start is None else start
    matrix, vector = matrix[rows].clone().requires_grad_(), torch.randn(5, generator=noise).requires_grad_()
    optimizer = build_optimizer([matrix, vector], TrainerConfig(learning_rate=1e-2, weight_decay=0.1, **settings))
    for _ in range(steps):
        gradient = torch.randn(ROWS, COLUMNS, generator=noise) * torch.logspace(-3, 1, COLUMNS)
        matrix.grad, vector.grad = gradient[rows].clone(), torch.randn(5, generator=noise)
        optimizer.step()
    return matrix.detach(), vector.detach(), optimizer


def test_values_of_the_codes() -> None:
    """Seven decades, each with twice as many values as the one below it, and zero and one."""
    first, bounds = table("exp_avg", CPU)
    second, _ = table("exp_avg_sq", CPU)
    assert len(first.unique()) == len(second.unique()) == 256 and len(bounds) == 255
    assert torch.equal(first[:127], -first[128:255].flip(0)) and first[127] == 0 and first[-1] == 1
    assert second[0] == 0
    for values, smallest in ((first[128:-1], 1), (second[1:-1], 2)):
        counts = [int(((values > 10.0**power) & (values < 10.0 ** (power + 1))).sum()) for power in range(-7, 0)]
        assert counts == [smallest * 2**decade for decade in range(7)]
    # Midpoints of equal parts of a decade.
    assert first[-2] == pytest.approx(1 - 0.9 / 64 / 2, rel=1e-6) and first[128] == pytest.approx(0.55e-6, rel=1e-6)


@given(st.lists(st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0), min_size=1, max_size=700),
       st.sampled_from(MOMENTS))  # fmt: skip
def test_a_code_is_the_nearest_one(values: list[float], name: str) -> None:
    matrix = torch.tensor([values, values[::-1]])
    matrix = matrix if name == "exp_avg" else matrix.abs()
    codes, scales = encoded(name, matrix)
    assert codes.dtype == torch.int8 and codes.shape == matrix.shape and scales.shape == (2, -(-len(values) // BLOCK))
    again = decoded(name, codes, scales)
    known, _ = table(name, CPU)
    of_element = scales.repeat_interleave(BLOCK, 1)[:, : len(values)]
    best = (known * of_element[..., None] - matrix[..., None]).abs().amin(-1)
    kept = (matrix > 0) & (again == known[1] * of_element) if name == "exp_avg_sq" else torch.zeros_like(again).bool()
    assert (((again - matrix).abs() <= best * 1.001 + of_element * 1e-7) | kept).all()


def test_exact_moments_of_the_host_are_the_same_bits() -> None:
    """As those of the optimizer that keeps them beside the weights."""
    usual, moved = trained(), trained(moments_on="host")
    assert type(usual[2]) is not type(moved[2]) and isinstance(moved[2], LightAdamW)
    assert torch.equal(usual[0], moved[0]) and torch.equal(usual[1], moved[1])
    for one, other in zip(usual[2].state.values(), moved[2].state.values(), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_moments_in_memory_of_their_own_are_put_back(monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    """As those of a GPU's host are, of which the device has copies."""
    beside, moment = trained(moments=moments), LightAdamW._moment
    monkeypatch.setattr(LightAdamW, "_moment", lambda *arguments: moment(*arguments).clone())
    monkeypatch.setattr(optimizers, "TILE", 2 * COLUMNS)
    away = trained(moments=moments, moments_on="host")
    assert torch.equal(beside[0], away[0]) and torch.equal(beside[1], away[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_and_types_are_those_of_the_weights(dtype: torch.dtype) -> None:
    """A rate of zero moves nothing; float64 weights are updated in float64, their codes are what they are."""
    weight, config = torch.ones(2, 300, dtype=dtype, requires_grad=True), TrainerConfig(moments="8bit", warmup_steps=3)
    optimizer = build_optimizer([weight], config)
    for step, rate in enumerate((0.0, 1e-9)):
        weight.grad = torch.ones_like(weight)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        moved = (1 - weight.detach()).abs().max()
        assert (moved == 0) == (step == 0 or dtype == torch.float32) and moved < 2e-9
    assert optimizer.state[weight]["exp_avg"].dtype == torch.int8


def test_codes_learn_what_exact_moments_do_and_vectors_are_exact() -> None:
    noise = torch.Generator().manual_seed(3)
    start = torch.randn(ROWS, COLUMNS, generator=noise)
    exact, coded = trained(), trained(moments="8bit")
    moved = (exact[0] - start).norm()
    assert 0 < (coded[0] - exact[0]).norm() < 0.03 * moved
    assert torch.equal(exact[1], coded[1])
    of_matrix, of_vector = coded[2].state.values()
    kinds = {name: value.dtype for name, value in of_matrix.items() if name != "step"}
    assert kinds == {
        f"{name}{end}": kind for name in MOMENTS for end, kind in (("", torch.int8), (SCALE, torch.float32))
    }
    assert {name: value.dtype for name, value in of_vector.items()} == dict.fromkeys(("step", *MOMENTS), torch.float32)
    held = sum(value.numel() * value.element_size() for name, value in of_matrix.items() if name != "step")
    assert held == 2 * (ROWS * COLUMNS + 4 * ROWS * 3)


def test_bits_do_not_depend_on_tiles_or_on_who_holds_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = trained(moments="8bit")
    upper, _, _ = trained(moments="8bit", rows=slice(0, 3))
    lower, _, _ = trained(moments="8bit", rows=slice(3, None))
    assert torch.equal(torch.cat([upper, lower]), whole)
    monkeypatch.setattr(optimizers, "TILE", 2 * COLUMNS + 1)
    assert torch.equal(trained(moments="8bit")[0], whole)


def test_a_gradient_that_comes_once_does_not_throw_its_weight() -> None:
    """What it leaves of the second moment is less than the smallest code; taken for zero, the first moment would be
    divided by `eps`."""
    weight = torch.zeros(1, BLOCK, requires_grad=True)
    optimizer = build_optimizer([weight], TrainerConfig(learning_rate=1e-2, moments="8bit"))
    for step in range(12):
        weight.grad = torch.zeros(1, BLOCK)
        weight.grad[0, 0] = 1.0
        weight.grad[0, 1] = 1e-4 if step == 0 else 0.0
        optimizer.step()
    assert abs(float(weight.detach()[0, 1])) < 0.1


@pytest.mark.parametrize("shape", [(4, 600), (3, 256), (5, 8), (3, 5, 300)], ids=str)
@pytest.mark.parametrize("now", ["float32", "8bit"])
@pytest.mark.parametrize("before", ["float32", "8bit"])
def test_state_of_one_setting_is_read_by_the_other(before: str, now: str, shape: tuple[int, ...]) -> None:
    """The same setting finds the same bits, by whatever part of the rows; codes that become float32 are what they stood
    for, in parts of the columns, too."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    matrix = start.clone().requires_grad_()
    old = build_optimizer([matrix], TrainerConfig(learning_rate=1e-2, moments=before))
    for seed in range(3):
        matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        old.step()
    state = old.state[matrix]
    whole = Box.whole(shape)
    parts = [whole.cut(0, 1, shape[0]), whole.cut(-2, 1, shape[-2])]
    parts += [whole.cut(-1, 3, shape[-1])] if now == "float32" else []
    for part in parts:
        spec = TensorSpec(name="w", global_shape=shape, box=part, dtype="float32")

        def read(name: str, box: Box) -> Tensor:
            return state[name][box.within(Box.whole(state[name].shape))].clone()

        own = torch.zeros(part.shape, requires_grad=True)
        new = build_optimizer([own], TrainerConfig(learning_rate=1e-2, moments=now))
        found = read_state([*state], spec, read, new)
        new.state[own] = {name: in_place(value, own, name, new) for name, value in found.items()}
        exact = {
            name: decoded(name, state[name], state[name + SCALE]) if before == "8bit" else state[name]
            for name in MOMENTS
        }
        index = part.within(whole)
        for name in MOMENTS:
            if now == "float32":
                assert torch.equal(found[name], exact[name][index])
            elif before == "8bit":
                assert torch.equal(found[name], state[name][index])
            else:
                codes, scales = encoded(name, exact[name][index])
                assert torch.equal(found[name], codes) and torch.equal(found[name + SCALE], scales)
        assert found["step"] == 3
        own.grad = torch.ones(part.shape)
        new.step()
        assert own.isfinite().all()


def test_scales_lie_where_their_columns_do() -> None:
    spec = TensorSpec(name="w", global_shape=(8, 1000), box=Box((2, 512), (5, 1000)), dtype="float32")
    scales = state_spec(spec, "exp_avg_scale")
    assert (scales.global_shape, scales.box) == ((8, 4), Box((2, 2), (5, 4)))
    assert state_spec(spec, "exp_avg") is spec
    stack = TensorSpec(name="w", global_shape=(4, 8, 1000), box=Box((1, 2, 512), (3, 5, 1000)), dtype="float32")
    scales = state_spec(stack, "exp_avg_scale")
    assert (scales.global_shape, scales.box) == ((4, 8, 4), Box((1, 2, 2), (3, 5, 4)))


def place_of(shape: tuple[int, ...], first_row: int = 0, whole: tuple[int, ...] | None = None) -> TensorSpec:
    box = Box((first_row, *[0] * (len(shape) - 1)), (first_row + shape[0], *shape[1:]))
    return TensorSpec(name="w", global_shape=whole or shape, box=box, dtype="bfloat16")


def rounding(rate: float, steps: int, rows: slice = slice(0, ROWS), **settings: Any) -> tuple[Tensor, Tensor]:
    """Rows of a matrix before and after steps up the same slope, in bfloat16."""
    torch.manual_seed(5)
    before = torch.randn(ROWS, COLUMNS).bfloat16()
    weight = before[rows].clone().requires_grad_()
    config = TrainerConfig(learning_rate=rate, dtype="bfloat16", weights="bfloat16", **settings)
    place = place_of((rows.stop - rows.start, COLUMNS), rows.start, (ROWS, COLUMNS))
    optimizer = build_optimizer([weight], config, [place])
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return before[rows].float(), weight.detach().float()


def test_small_updates_count_on_average() -> None:
    """Each is 1e-5 where neighbors are 0.0078 apart: to the nearest, none would be seen."""
    before, after = rounding(1e-5, 50)
    assert (after - before).mean() == pytest.approx(-50e-5, rel=0.2)
    ones = before.abs() > 0.5
    assert 0 < float((after != before)[ones].float().mean()) < 0.3


def test_rounding_is_by_chance_in_proportion_and_exact_where_nothing_is_between() -> None:
    dice = Dice("1:w", place_of((64, 512)))
    noise = dice.throw(slice(0, 64), torch.tensor(7.0))
    assert float(noise.float().mean()) == pytest.approx(0xFFFF / 2, rel=0.01)
    assert int(noise.min()) >= 0 and int(noise.max()) <= 0xFFFF and len(noise.unique()) > 20_000
    for share in (0.0, 0.1, 0.75):
        for sign in (1.0, -1.0):
            exact = torch.full((64, 512), sign * (1.0 + share / 128))
            up = (stochastically_rounded(exact, noise).float().abs() > 1.0).float().mean()
            assert float(up) == pytest.approx(share, abs=0.01) and (share or up == 0)
    another = Dice("2:w", place_of((64, 512)))
    for which, step in ((another, 7.0), (dice, 8.0)):
        other = which.throw(slice(0, 64), torch.tensor(step))
        together = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]).float())
        assert abs(float(together[0, 1])) < 0.03


def test_what_is_no_number_stays_none() -> None:
    """In each of its forms; a GPU's is all ones."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    found = stochastically_rounded(bits.view(torch.float32), torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert found[:3].isnan().all() and found[3:].tolist() == [float("inf"), float("-inf")]


def test_seeds_and_places_beyond_31_bits_have_noise_of_their_own() -> None:
    torch.manual_seed(5)
    first, again = (LightAdamW([{"params": [weight := torch.zeros(1)]}], lr=1.0, betas=(0.9, 0.9), eps=1.0, coded=False,
                               on_host=False, places={weight: place_of((64, 512))}) for _ in range(2))  # fmt: skip
    torch.manual_seed(6)
    other = LightAdamW([{"params": [weight := torch.zeros(1)]}], lr=1.0, betas=(0.9, 0.9), eps=1.0, coded=False,
                       on_host=False, places={weight: place_of((64, 512))})  # fmt: skip
    rows, step = slice(0, 64), torch.tensor(1.0)
    noises = [next(iter(one._dice.values())).throw(rows, step) for one in (first, again, other)]
    assert torch.equal(noises[0], noises[1]) and not torch.equal(noises[0], noises[2])
    high = [
        Dice("1:w", place_of((8, 16_384), row, (1 << 18, 16_384))).throw(slice(0, 8), step)
        for row in (0, 1 << 17, (1 << 18) - 8)  # elements from 0, from 2^31 and up to 2^32
    ]
    for one in high:
        assert len(one.unique()) > 50_000
    together = torch.corrcoef(torch.stack([one.flatten() for one in high]).float())
    assert float((together - torch.eye(3)).abs().max()) < 0.02


def test_bits_of_roundings_do_not_depend_on_tiles_or_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rounding(1e-3, 5)[1]
    parts = [rounding(1e-3, 5, rows)[1] for rows in (slice(0, 3), slice(3, ROWS))]
    assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(optimizers, "TILE", 2 * COLUMNS + 1)
    assert torch.equal(rounding(1e-3, 5)[1], whole)
    assert torch.equal(rounding(1e-3, 5, moments_on="host")[1], whole)
    cut = TensorSpec(name="w", global_shape=(64, 600), box=Box((8, 256), (20, 600)), dtype="bfloat16")
    noise = Dice("0:w", place_of((64, 600))).throw(slice(0, 64), torch.tensor(3.0))
    assert torch.equal(Dice("0:w", cut).throw(slice(0, 12), torch.tensor(3.0)), noise[8:20, 256:])
    stack = TensorSpec(name="w", global_shape=(8, 8, 600), box=Box((2, 3, 256), (6, 8, 600)), dtype="bfloat16")
    part = noise.view(8, 8, 600)[3:5, 3:8, 256:]
    assert torch.equal(Dice("0:w", stack).throw(slice(1, 3), torch.tensor(3.0)), part)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "bfloat16"}, "trainer.weights = 'bfloat16' with trainer.dtype = 'float32'"),
        ({"weights": "bfloat16", "dtype": "bfloat16", "lora": {"rank": 2}}, "adapters are small; leave one out"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**settings)


@pytest.mark.parametrize("config", [{}, {"moments": "8bit"}, {"weights": "bfloat16", "dtype": "bfloat16"}], ids=str)
def test_a_mirror_s_room_is_asked_for_as_each_setting_takes_it(make_groups, config: dict[str, Any]) -> None:
    """Before the first step there are no moments yet."""
    asked = list[int]()

    class Asked:
        check_space = staticmethod(asked.append)

    executor = OptimizingExecutor.__new__(OptimizingExecutor)
    executor._mirror = Asked()  # type: ignore[assignment]
    shape = QWEN3 | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    trainer = new_trainer(ALONE, shape, config)
    executor._built(trainer)
    trainer.step(make_groups())
    assert asked == [pytest.approx(sum(part.nbytes for _, part in trainer.shards().values()), rel=0.01)]
