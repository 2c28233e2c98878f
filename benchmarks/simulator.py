"""The simulator at 16,384 GPUs, and what one controller sustains.

    python benchmarks/simulator.py            # writes benchmarks/results/simulator-DATE.json, about ten minutes

1. 16,384 GPUs, over 1,024 generators, 200 steps, once without faults and once with deaths, slow nodes and time-outs.
2. What the simulator leaves out of the controller's work: the bytes of rollouts that a real cluster packs and unpacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import platform
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import llamarl
from llamarl.cluster.api import ExecutorSpec
from llamarl.cluster.open import open_cluster
from llamarl.config import RunConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.executors.replies import Collected, ScoredResponse
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.report import render_simulation, summary
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import best_split
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

GPUS = 16_384
SETTINGS: dict[str, Any] = {
    "steps": 200,
    "model": {"path": "simulated"},
    "data": {"train": {"name": "simulated"}},
    "rollout": {
        "prompts_per_step": 1024,
        "group_size": 16,
        "max_staleness": 3,
        "window": 1024,
        "max_new_tokens": 4096,
    },
    "generator": {"max_running": 256},
    "cluster": {"on_failure": {"generator": "respawn"}},
}
FAULTS = "slow=0.01x2,deaths=4,die=7@300,join=8@600,reward_timeouts=0.00001"
"""Llama 3 405B lost 419 of 54 days' hours to hardware on 16,384 GPUs, one in three hours; this is twelve times that."""


def simulated(faults_text: str, steps: int) -> dict[str, Any]:
    """One large run; its summary."""
    config = RunConfig.model_validate(SETTINGS | {"steps": steps})
    costs = Costs()
    split = best_split(config, costs, GPUS)
    faults = Faults.parse(faults_text, split.replicas)
    with tempfile.TemporaryDirectory() as folder:
        simulation = simulate(config, costs, faults, split, Path(folder) / "metrics.jsonl")
    print(render_simulation(simulation), flush=True)
    assert sorted(simulation.group_ids) == list(range(steps * config.rollout.prompts_per_step)), "a group was lost"
    return summary(simulation) | {"faults": faults_text}


def transport_s_per_group(response_tokens: int, group_size: int, repeats: int = 50) -> float:
    """Processor seconds to pack and unpack one group on all its ways: request, rollouts, to and from reward, trainer.

    Messages of the engine come on top.
    """
    prompt_T = np.zeros(512, np.int32)
    prompt = Prompt(prompt_id="p", text="x" * 2000, token_ids_T=prompt_T, answer="1")
    rollouts = tuple(
        Rollout(
            group_id=0,
            index=index,
            columns={
                "token_ids": np.zeros(response_tokens, np.int32),
                "behavior_logprobs": np.zeros(response_tokens, np.float32),
                "policy_versions": np.zeros(response_tokens, np.int32),
            },
            finish_reason=FinishReason.STOP,
        )
        for index in range(group_size)
    )
    text = "x" * 4 * response_tokens
    results = tuple(RewardResult(outcome=Outcome.SCORE, value=1.0) for _ in rollouts)
    scored = [[ScoredResponse(response=text, result=result) for result in results]]
    group = RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts, results=results, responses=(text,) * group_size)
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=prompt_T, group_size=group_size, sampling=SamplingParams()
    )
    replies = [pickle.dumps(Collected(rollouts=[rollout]), protocol=5) for rollout in rollouts]
    answer = pickle.dumps(scored, protocol=5)
    start_s = time.process_time()
    for _ in range(repeats):
        for item in (request, (prompt, list(rollouts)), group):
            pickle.dumps(item, protocol=5)
            pickle.dumps(((item,), {}), protocol=5)
        for reply in replies:
            pickle.loads(reply)
        pickle.loads(answer)
    return (time.process_time() - start_s) / repeats


async def message_s(calls: int = 2000, at_once: int = 16) -> float:
    """Processor seconds of this process per call to an executor on Monarch, `at_once` under way at a time."""
    async with open_cluster(ClusterConfig(kind="monarch")) as cluster:
        folder = str(Path(__file__).parents[1] / "tests" / "cluster")
        spec = ExecutorSpec(name="reward", target="executors:Echo", code_paths=(folder,))
        handle = await cluster.spawn(spec, timeout_s=60)

        async def call(count: int) -> None:
            for _ in range(count):
                await handle.call("echo", [], timeout_s=30)

        start_s = time.process_time()
        await asyncio.gather(*(call(calls // at_once) for _ in range(at_once)))
        return (time.process_time() - start_s) / calls


LARGE = (
    *("gpus", "generator_replicas", "wall_s", "cpu_s", "staleness_bound"),
    *("staleness_max", "memory_max_bytes", "clean", "faulty"),
)
"""What `large` finds; the first five are those of the run without faults."""


def large(steps: int) -> dict[str, Any]:
    """Both large runs."""
    clean = simulated("", steps)
    faulty = simulated(FAULTS, steps)
    return {
        **{name: clean[name] for name in LARGE[:5]},
        "staleness_max": max(clean["staleness_max"], faulty["staleness_max"]),
        "memory_max_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "clean": clean,
        "faulty": faulty,
    }


def kept(path: Path) -> dict[str, Any]:
    """The large runs of an older file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: found[name] for name in LARGE}


def controller_costs(clean: dict[str, Any]) -> dict[str, Any]:
    """What one core of the controller has to do for a group, and how many groups per second it could do."""
    size = SETTINGS["rollout"]["group_size"]
    control_s = clean["controller_ms_per_group"] / 1e3
    packing_s = transport_s_per_group(1200, size)
    call_s = asyncio.run(message_s())
    # One reply per rollout; request, scoring and the trainer's copy are about one more call each.
    total_s = control_s + packing_s + (size + 3) * call_s
    needed = clean["groups"] / clean["virtual_s"]
    return {
        "controller_ms_per_group": control_s * 1e3,
        "packing_ms_per_group": packing_s * 1e3,
        "message_ms_per_call": call_s * 1e3,
        "messages_per_group": size + 3,
        "groups_per_s": 1 / control_s,
        "groups_per_s_with_transport": 1 / total_s,
        "groups_per_s_needed": needed,
        "controller_core_share": needed * control_s,
        "controller_core_share_with_transport": needed * total_s,
    }


def main() -> None:
    """Runs what is asked for and writes, or updates, the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--part", choices=("all", "costs"), default="all", help="costs: keep the large runs")
    options = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    output = options.output or Path(__file__).parent / "results" / f"simulator-{date}.json"
    found = kept(output) if options.part == "costs" else large(options.steps)
    result = found | {
        "date": date,
        "command": f"python benchmarks/simulator.py --steps {options.steps}",
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"llamarl": _version(), "python": platform.python_version(), "numpy": np.__version__},
        "settings": SETTINGS | {"gpus": GPUS, "faults": FAULTS, "costs": "Costs()"},
        **controller_costs(found["clean"]),
        "notes": [
            "wall_s is one process on a two-core machine that others used at the same time; cpu_s is its own share.",
            "groups_per_s is the controller alone: loops, buffer, records, telemetry and event loop.",
            "Transport is packing and unpacking 16 responses of 1,200 tokens, and Monarch's cost per call.",
            "There is one call per rollout, because generators hand each one over as it ends.",
            "groups_per_s_needed is what the simulated cluster consumes; slower models or longer responses need less.",
        ],
    }
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {output}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llamarl")
    except PackageNotFoundError:
        return f"source at {Path(llamarl.__file__).parent}"


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main()
