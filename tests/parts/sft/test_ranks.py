"""Supervised training in two processes, one of which does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from safetensors.torch import load_file, save_file

from llamarl.config import RunConfig
from llamarl.distributed.links import open_rendezvous
from llamarl.run.executors import executor_spec
from tests.end_to_end.tiny import make_model
from tests.executors.test_ranks import END_S, fails_to_start
from tests.nightly import nightly


@nightly("two processes that import torch; training/test_layouts.py has ranks of the trainer")
def test_ranks_that_do_not_all_start(tmp_path: Path) -> None:
    """The start fails at once, with the error of the rank that failed, for which the others would wait."""
    model = make_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1] += 1  # the last rank's part of a tied embedding
    save_file(tensors, model / "model.safetensors")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": "running_total"},
            "trainer": {"parallelism": {"fsdp": 2}},
        }
    )
    spec = executor_spec(
        "trainer", "llamarl.parts.sft.executor:SftExecutor", 1, 2, config=config, resume=True,
        checkpoint_folder=str(tmp_path / "checkpoints"), rendezvous=open_rendezvous(2, 240.0),
    )  # fmt: skip
    error, after_s = asyncio.run(fails_to_start(spec, tmp_path / "logs"))
    assert "`lm_head.weight` differs from" in error and after_s < END_S
    assert "weight` differs from" in (tmp_path / "logs/trainer.1.log").read_text(), "as it has told the others"
