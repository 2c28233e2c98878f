"""What executors are started with, and who is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from llamarl.config import RunConfig
from llamarl.run.executors import PROCESS, GeneratorSpecs, spawn_all

MINIMAL = {"model": {"path": "m"}, "data": {"train": "running_total"}, "cluster": {"timeout_s": 50.0}}


def test_each_replica_has_its_own_vllm_seed_and_log(tmp_path: Path) -> None:
    generator = {"backend": "vllm", "vllm": {"python": "p", "arguments": ["--x"]}, "device": "cuda:1", "threads": 3}
    seeds = set[int]()
    for seed in (0, 1):
        config = RunConfig.model_validate(MINIMAL | {"generator": generator, "seed": seed})
        specs = GeneratorSpecs(config=config, logs=tmp_path)
        settings = [specs(number).options["backend"] for number in range(3)]
        seeds |= {one.seed for one in settings}
        assert [one.log_path for one in settings] == [f"{tmp_path}/generator-{i}.vllm.log" for i in range(3)]
        for one in settings:
            assert (one.python, one.arguments, one.device, one.threads) == ("p", ("--x",), "cuda:1", 3)
            assert one.start_timeout_s == 40.0, "before the cluster gives up, so that the reason is heard"
    assert len(seeds) == 6 and all(0 <= seed < 2**32 for seed in seeds)


def test_a_native_generator_has_no_vllm(tmp_path: Path) -> None:
    config = RunConfig.model_validate(MINIMAL)
    specs = GeneratorSpecs(config=config, logs=tmp_path)
    assert specs(0).options["backend"] is None


def test_who_is_not_there_yet_is_told() -> None:
    """Whichever comes first; the handles are in the order of the specifications."""

    class Slow:
        async def spawn(self, spec: SimpleNamespace, timeout_s: float, tell: Callable[[str], None]) -> str:
            tell(f"stage of {spec.name}")
            await asyncio.sleep(spec.start_s)
            return f"{spec.name} in {timeout_s:g} s"

    specs = [SimpleNamespace(name="trainer", start_s=0.02), SimpleNamespace(name="reward", start_s=0.0)]
    heard = list[dict[str, str]]()
    handles = asyncio.run(
        spawn_all(cast(Any, Slow()), cast(Any, specs), 9.0, lambda missing: heard.append({**missing}))
    )
    assert handles == ["trainer in 9 s", "reward in 9 s"]
    both = {"trainer": "stage of trainer", "reward": "stage of reward"}
    assert heard == [
        {"trainer": PROCESS, "reward": PROCESS}, {**both, "reward": PROCESS}, both, {"trainer": "stage of trainer"}, {},
    ]  # fmt: skip
