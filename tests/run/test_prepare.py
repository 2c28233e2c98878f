"""What can be refused before a process starts."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.config.schema import RunConfig
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.observability.spans import MIN_FILES
from llamarl.run import checks
from llamarl.run.checks import check_cache, check_tensor_parallel
from llamarl.run.prepare import check_parts, prepare
from llamarl.sharding.tensor_parallel import tensor_parallel_box
from tests.end_to_end.tiny import make_model


def shape(num_heads: int = 8, num_kv_heads: int = 2, intermediate_size: int = 96, vocab_size: int = 320) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden_size=64,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=128,
    )


@pytest.mark.parametrize(
    ("model", "num_ranks", "message"),
    [
        (shape(), 3, "= 3 cannot share the 8 attention heads of m evenly; use one of 1, 2, 4, 8"),
        (shape(intermediate_size=90), 4, "= 4 cannot share the 90 feed-forward columns of m evenly; use one of 1, 2"),
        (shape(vocab_size=321), 2, "= 2 cannot share the 321 tokens in the vocabulary of m evenly; use one of 1"),
        (shape(12, 4), 6, "= 6 cannot share the 320 tokens in the vocabulary of m evenly; use one of 1, 2, 4"),
        (shape(12, 4, vocab_size=360), 6, "= 6 cannot share the 4 key/value heads of m evenly; use one of 1, 2, 4, 12"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused(model: ModelShape, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(model, num_ranks, "m")
    assert str(error.value) == f"generator.tensor_parallel {message}"


MOE = MoeShape(num_experts=6, experts_per_token=2, expert_size=522, sparse_layers=(0,), shared_size=12)


@pytest.mark.parametrize(
    ("moe", "num_ranks", "message"),
    [
        (MOE, 2, None),
        (MOE, 4, "= 4 cannot share the 522 columns of each expert of m evenly; use one of 1, 2"),
        (replace(MOE, num_experts=8), 4, None),
        (replace(MOE, shared_size=18), 4, "= 4 cannot share the 18 columns of the shared expert of m evenly"),
    ],
)
def test_experts_are_cut_by_columns_or_by_their_numbers(moe: MoeShape, num_ranks: int, message: str | None) -> None:
    """522 columns leave 261 to each of 2 ranks; to each of 4 about 130, so experts go by number where that divides."""
    model = replace(shape(), family="qwen3_moe", moe=moe)
    if message is None:
        check_tensor_parallel(model, num_ranks, "m")
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_tensor_parallel(model, num_ranks, "m")


def test_vllm_does_not_serve_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "load_shape", lambda path: replace(shape(), family="qwen3_moe", moe=MOE))
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "running_total"},
            "generator": {"backend": "vllm", "vllm": {"python": "python"}},
            "cluster": {"kind": "monarch"},
        }
    )
    with pytest.raises(ConfigError, match="backend = 'vllm' does not record the experts of each token in m"):
        checks.check_layout(config)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_what_is_let_through_can_be_cut(num_ranks: int) -> None:
    model = shape()
    try:
        check_tensor_parallel(model, num_ranks, "m")
    except ConfigError:
        return
    rows = {"q_proj": 64, "k_proj": 16, "gate_proj": 96, "embed_tokens": 320}
    for name, size in rows.items():
        box = tensor_parallel_box(f"model.{name}.weight", (size, 64), num_ranks, num_ranks - 1, model.num_kv_heads)
        assert box.stops[0] == size


@pytest.mark.parametrize(("dtype", "ranks", "needed"), [("float32", 1, 96 * 128), ("bfloat16", 2, 96 * 32)])
def test_a_cache_that_does_not_hold_one_sequence_is_refused(dtype: str, ranks: int, needed: int) -> None:
    """Of 70 + 20 tokens, in blocks of 16; per token keys and values of 2 heads of 8."""
    for size in (1, needed - 1, needed, None):
        config = RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "running_total"},
                "rollout": {"max_new_tokens": 20},
                "generator": {"kv_cache_bytes": size, "dtype": dtype, "tensor_parallel": ranks},
            }
        )
        if size is None or size >= needed:
            check_cache(config, shape(), 70)
            continue
        said = rf"kv_cache_bytes = {size} does not hold one prompt and response of 90 tokens; give at least {needed}"
        with pytest.raises(ConfigError, match=said):
            check_cache(config, shape(), 70)


@pytest.mark.parametrize(("first", "is_said"), [(0, True), (30, True), (31, False)])
def test_evaluation_on_the_training_data_is_said(tmp_path: Path, first: int, is_said: bool) -> None:
    problems = {"train": {"name": "running_total", "count": 40}}
    problems["eval"] = {"name": "running_total", "count": 10, "first": first}
    model = make_model(tmp_path / "model")
    prepared = prepare(RunConfig.model_validate({"model": {"path": str(model)}, "data": problems}))
    assert is_said == any("data.eval: all of its prompts are in data.train too" in one for one in prepared.warnings)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"temperature": 0.5}, None),
        (
            {"top_p": 0.9},
            "rollout.top_p = 0.9 with generator.backend = 'vllm': rollouts come from a truncated distribution",
        ),
        ({"top_k": 20, "min_p": 0.1}, "rollout.top_k = 20, rollout.min_p = 0.1 with generator.backend"),
    ],
)
def test_sampling_that_the_trainer_does_not_know_of_is_said(
    tmp_path: Path, rollout: dict[str, float], said: str | None
) -> None:
    problems, model = {"train": {"name": "running_total", "count": 9}}, make_model(tmp_path / "model")
    settings = {"model": {"path": str(model)}, "data": problems, "rollout": rollout}
    native = prepare(RunConfig.model_validate(settings)).warnings
    assert not any("truncated distribution" in one for one in native), "its generators say what they left out"
    settings |= {"generator": {"backend": "vllm", "vllm": {"python": sys.executable}}}
    _, warnings = checks.check_layout(RunConfig.model_validate(settings))
    cut = [one for one in warnings if "truncated distribution" in one]
    assert [one.startswith(said or "-") for one in cut] == [True] * (said is not None)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, None),
        ({"generator": {"replicas": 4096}}, MIN_FILES + 8 + 3 * 4096),
        ({"trainer": {"parallelism": {"fsdp": 512}}}, MIN_FILES + 8 * 512 + 3),
        ({"cluster": {"kind": "hosts", "listen": "a:1", "num_hosts": 2048}}, MIN_FILES + 2048),
    ],
)
def test_connections_that_a_process_could_not_open(
    settings: dict[str, dict[str, object]], needed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (1024, 1024))
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}} | settings)
    if needed is None:
        checks.check_files(config)
        return
    with pytest.raises(ConfigError, match=f"may have {needed} open files, and this shell allows 1024: run ulimit"):
        checks.check_files(config)


def test_files_are_counted_before_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems, model = {"train": {"name": "running_total", "count": 9}}, make_model(tmp_path / "model")
    config = RunConfig.model_validate({"model": {"path": str(model)}, "data": problems})
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (MIN_FILES, MIN_FILES))
    with pytest.raises(ConfigError, match=f"this shell allows {MIN_FILES}: run ulimit"):
        prepare(config)


def test_a_part_whose_import_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_part.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"reward": {"parts": ["slow_part:Slow"]}, "cluster": {"timeout_s": 0.2}}
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}} | settings)
    outer = signal.setitimer(signal.ITIMER_REAL, 200.0)
    with pytest.raises(ConfigError, match=r"not imported and built after cluster.timeout_s = 0.2 s"):
        check_parts(config)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, *outer)
    assert 100.0 < left_s < 200.0  # a limit of whoever is around this still holds


def test_moments_that_cannot_lie_so() -> None:
    """In blocks that ranks would cut, or where they are already."""
    shape = ModelShape(
        family="llama", hidden_size=512, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=768,
        vocab_size=10, max_position_embeddings=9, tie_embeddings=True,
    )  # fmt: skip
    problems = {"model": {"path": "m"}, "data": {"train": "d"}}

    def check(**trainer: Any) -> None:
        checks.check_moments(RunConfig.model_validate(problems | {"trainer": trainer}), shape)

    check(moments="8bit", parallelism={"fsdp": 4})
    check(moments="float32", parallelism={"tp": 2})
    check(moments_on="host", device="cuda")
    with pytest.raises(ConfigError, match=r"tp = 2: a rank has 384 columns of the feed-forward output, and each 256"):
        check(moments="8bit", parallelism={"tp": 2})
    with pytest.raises(ConfigError, match=r"moments_on = 'host' with trainer.device = 'cpu' has no effect"):
        check(moments_on="host")
    # A critic's moments are the trainer's in kind, and its layout is its own.
    values = {"trainer": {"moments": "8bit", "advantage": "gae"}, "critic": {"parallelism": {"tp": 2}}}
    with pytest.raises(ConfigError, match=r"8bit' with critic.parallelism.tp = 2: a rank has 384 .* use critic.para"):
        checks.check_models(RunConfig.model_validate(problems | values), shape)
