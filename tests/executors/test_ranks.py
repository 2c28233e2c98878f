"""A trainer of two processes, through Monarch, when one of them fails: the other does not wait for it.

Not covered: a rank that hangs, as the time limit of a trainer's collectives is a minute; see tests/training.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from llamarl.algorithms.advantages.gae import Gae
from llamarl.cluster import handle
from llamarl.cluster.api import ExecutorError, ExecutorHandle, ExecutorSpec, RemoteError
from llamarl.cluster.open import open_cluster
from llamarl.config import ConfigError, RunConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.distributed.links import open_rendezvous
from llamarl.generation.model import GeneratorModel
from llamarl.models.folder import load_shape
from llamarl.run.executors import executor_spec, spawn_all
from llamarl.training.result import PolicyStepResult
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from llamarl.weight_sync.transports.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.end_to_end.tiny import ROOT
from tests.nightly import nightly

END_S = 60.0
"""Much less than the 240 s of the call, at which the other rank would wait."""


def group(number: int) -> RolloutGroup:
    ids_T = np.arange(4, dtype=np.int32) + number
    rollouts = tuple(
        Rollout(
            group_id=number,
            index=index,
            columns={
                "token_ids": ids_T,
                "behavior_logprobs": np.full(4, -1.0, np.float32),
                "policy_versions": np.zeros(4, np.int32),
            },
            finish_reason=FinishReason.STOP,
        )
        for index in range(2)
    )
    return RolloutGroup(
        group_id=number,
        prompt=Prompt(prompt_id=f"p-{number}", text="", token_ids_T=ids_T, answer=""),
        rollouts=rollouts,
        results=tuple(RewardResult(outcome=Outcome.SCORE, value=float(index)) for index in range(2)),
        responses=("", ""),
    )


class UnevenPublisher(SharedMemoryPublisher):
    """One rank cannot have it."""

    able_rank: ClassVar[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if os.environ["RANK"] != self.able_rank:
            raise PermissionError("no luck")
        super().__init__(*arguments, **options)


class OnFirstPublisher(UnevenPublisher):
    able_rank = "0"


class OnLastPublisher(UnevenPublisher):
    able_rank = "1"


OnFirstSubscriber = OnLastSubscriber = SharedMemorySubscriber


async def tries_transports(trainer: ExecutorHandle, model: Path) -> None:
    """What fails on one rank fails on all at once, and what is tried next works: their messages are in step."""
    specs, own, start_s = GeneratorModel(load_shape(model), "float32", "cpu").specs(), __name__, time.monotonic()
    await trainer.call("set_layout", 0, specs, timeout_s=240.0)
    for transport in (f"{own}:OnFirst", f"{own}:OnLast", "p2p", f"{own}:OnLast", "shared_memory", f"{own}:OnFirst"):
        tried = trainer.call("publish_sample", 1, transport, timeout_s=240.0)
        if ":" in transport:
            with pytest.raises(RemoteError, match="PermissionError: no luck"):
                await tried
        else:
            assert (await tried).transport == transport
    assert time.monotonic() - start_s < END_S


@nightly(
    "a trainer of ranks through Monarch; by day ranks fail in training/test_layouts.py and cluster/test_processes.py"
)
def test_the_failure_of_one_rank_and_of_its_part_of_the_checkpoint(model: Path, tmp_path: Path) -> None:
    """A step fails at once with the error of the rank that failed; so does the start, where others would wait for it to
    look for checkpoints."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1] += 1  # the last rank's part of a tied embedding
    save_file(tensors, broken / "model.safetensors")

    def config(path: Path) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"path": str(path)},
                "data": {"train": "running_total"},
                "trainer": {"parallelism": {"fsdp": 2}, "loss": "tests.training.layouts:Fragile"},
            }
        )

    async def ends() -> tuple[RemoteError, float]:
        async with open_cluster(ClusterConfig(kind="monarch"), tmp_path / "logs") as cluster:

            async def spawn(path: Path) -> ExecutorHandle:
                spec = executor_spec(
                    "trainer", "trainer:TrainerExecutor", 1, 2, config=config(path), resume=True,
                    checkpoint_folder=str(tmp_path / "checkpoints"), rendezvous=open_rendezvous(2, 240.0),
                )  # fmt: skip
                (handle,) = await spawn_all(cluster, [replace(spec, code_paths=(str(ROOT),))], 240.0)
                return handle

            with pytest.raises(ConfigError, match=r"broken: `lm_head\.weight` differs from"):
                await spawn(broken)
            assert "weight` differs from" in (tmp_path / "logs/trainer.1.log").read_text(), "as it has told the others"
            trainer = await spawn(model)
            await tries_transports(trainer, model)
            await trainer.call("add_groups", [group(0), group(1)], timeout_s=240.0)
            start_s = time.monotonic()
            with pytest.raises(RemoteError) as failed:
                await trainer.call("step", [0, 1], [], timeout_s=240.0)
            await trainer.stop(timeout_s=8.0)
            return failed.value, time.monotonic() - start_s

    error, after_s = asyncio.run(ends())
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (error.executor, error.rank) == ("trainer", 1)
    assert str(error).startswith("trainer.step failed in rank 1\nTraceback")
    assert "in token_losses\n" in str(error) and str(error).endswith("ZeroDivisionError: no luck")
    assert after_s < END_S
    assert "ZeroDivisionError: no luck" in (tmp_path / "logs/trainer.1.log").read_text()


@dataclass(frozen=True)
class UnevenGae(Gae):
    """The last rank cannot have it."""

    def __post_init__(self) -> None:
        if os.environ.get("RANK") == "1":
            raise ZeroDivisionError("no luck")


@nightly("ranks that never come are in distributed/test_mesh.py")
def test_a_critic_whose_ranks_do_not_all_start(model: Path, tmp_path: Path) -> None:
    """The start fails at once, with the error of the rank that failed, for which the others would wait."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": "running_total"},
            "critic": {"parallelism": {"fsdp": 2}},
            "trainer": {"advantage": "tests.executors.test_ranks:UnevenGae"},
        }
    )
    spec = executor_spec(
        "critic", "models:CriticExecutor", 1, 2, config=config, checkpoint_folder=str(tmp_path / "checkpoints"),
        rendezvous=open_rendezvous(2, 240.0),
    )  # fmt: skip
    error, after_s = asyncio.run(fails_to_start(spec, tmp_path / "logs"))
    assert "ZeroDivisionError: no luck" in error and after_s < END_S
    assert "ZeroDivisionError: no luck" in (tmp_path / "logs/critic.1.log").read_text(), "as it has told the others"


async def fails_to_start(spec: ExecutorSpec, logs: Path) -> tuple[str, float]:
    """What an executor of several ranks says that does not start, and when."""
    start_s = time.monotonic()
    async with open_cluster(ClusterConfig(kind="monarch"), logs) as cluster:
        with pytest.raises((ConfigError, ExecutorError)) as failed:
            await spawn_all(cluster, [replace(spec, code_paths=(str(ROOT),))], 240.0)
    return str(failed.value), time.monotonic() - start_s


@nightly("training/test_layouts.py computes in ranks")
def test_a_step_is_the_same_whether_its_groups_came_in_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": "running_total"},
            "trainer": {"parallelism": {"fsdp": 2}},
        }
    )

    def spec(name: str) -> ExecutorSpec:
        return executor_spec(
            name, "trainer:TrainerExecutor", 1, 2, config=config, resume=False, rendezvous=open_rendezvous(2, 240.0),
            checkpoint_folder=str(tmp_path / name),
        )  # fmt: skip

    async def learn(trainer: ExecutorHandle, dealt_bytes: int) -> tuple[PolicyStepResult, int]:
        """The result of a second step, and how often parts were sent to one rank alone."""
        monkeypatch.setattr(handle, "DEALT_BYTES", dealt_bytes)
        alone, send = list[int | None](), trainer._send

        def count(method: str, payload: bytes, timeout_s: float, rank: int | None = None) -> Any:
            alone.append(rank)
            return send(method, payload, timeout_s, rank)

        trainer._send = count
        await trainer.call("add_groups", [group(0)], timeout_s=240.0)
        await trainer.call("step", [0, 1], [group(1), group(2)], timeout_s=240.0)
        result = await trainer.call("step", [2, 3], [group(3)], timeout_s=240.0)
        return result, len(alone) - alone.count(None)

    async def both() -> list[tuple[PolicyStepResult, int]]:
        async with open_cluster(ClusterConfig(kind="monarch"), tmp_path / "logs") as cluster:
            trainers = await spawn_all(cluster, [spec("whole"), spec("dealt")], 240.0)
            found = [await learn(*one) for one in zip(trainers, (1 << 30, 0), strict=True)]
            await trainers[0]._send("add_groups", pickle.dumps((([group(4)],), {}, False)), 240.0, 0)
            with pytest.raises(RemoteError, match="KeyError: 4") as failed:
                await trainers[0].call("step", [4], [], timeout_s=240.0)
            assert failed.value.rank == 1
            assert "KeyError: 4" in (tmp_path / "logs/whole.1.log").read_text(), "as it has told the others"
            return found

    (whole, none), (dealt, parts) = asyncio.run(both())
    assert (none, parts) == (0, 3), "each call has one part here"
    assert whole.policy_version == dealt.policy_version == 2
    assert whole.update == dealt.update
    assert whole.logprobs.keys() == dealt.logprobs.keys() == {2, 3}
    for number, found in whole.logprobs.items():
        for index, logprobs_T in found.items():
            np.testing.assert_array_equal(logprobs_T, dealt.logprobs[number][index])
