"""The simulator at 16,384 GPUs, and what one controller sustains.

    python benchmarks/simulator.py            # writes benchmarks/results/simulator-DATE.json, about ten minutes

1. 16,384 GPUs, over 1,024 generators, 200 steps, once without faults and once with deaths, slow nodes and time-outs.
2. What the simulator leaves out of the controller's work: the bytes of rollouts that a real cluster packs and unpacks.
"""

from __future__ import annotations

import argparse
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
from llamarl.config import RunConfig
from llamarl.executors.replies import Collected, Scored
from llamarl.simulator.costs import SimulatorCosts
from llamarl.simulator.faults import Faults
from llamarl.simulator.layout import make_layout
from llamarl.simulator.report import render, summary
from llamarl.simulator.run import simulate
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
    "cluster": {"on_generator_failure": "respawn"},
}
FAULTS = "slow=0.01x2,deaths=4,die=7@300,join=8@600,reward_timeouts=0.00001"
"""Llama 3 405B lost 419 of 54 days' hours to hardware on 16,384 GPUs, one in three hours; this is twelve times that."""


def simulated(faults_text: str, steps: int) -> dict[str, Any]:
    """One large run; its summary."""
    config = RunConfig.model_validate(SETTINGS | {"steps": steps})
    costs = SimulatorCosts()
    layout = make_layout(config, costs, GPUS)
    faults = Faults.parse(faults_text, layout.replicas)
    with tempfile.TemporaryDirectory() as folder:
        simulation = simulate(config, costs, faults, layout, Path(folder) / "metrics.jsonl")
    print(render(simulation), flush=True)
    assert sorted(simulation.group_ids) == list(range(steps * config.rollout.prompts_per_step)), "a group was lost"
    return summary(simulation) | {"faults": faults_text}


def transport_s_per_group(response_tokens: int, group_size: int, repeats: int = 50) -> float:
    """Processor seconds to pack and unpack one group on all its ways: request, rollouts, to and from reward, trainer.

    Each array is packed twice where `chunks` measures it first. Messages of the engine come on top.
    """
    prompt_T = np.zeros(512, np.int32)
    prompt = Prompt(prompt_id="p", text="x" * 2000, token_ids_T=prompt_T, answer="1")
    rollouts = tuple(
        Rollout(
            group_id=0,
            index=index,
            token_ids_T=np.zeros(response_tokens, np.int32),
            behavior_logprobs_T=np.zeros(response_tokens, np.float32),
            policy_versions_T=np.zeros(response_tokens, np.int32),
            finish_reason=FinishReason.STOP,
        )
        for index in range(group_size)
    )
    text = "x" * 4 * response_tokens
    results = tuple(RewardResult(outcome=Outcome.SCORE, value=1.0) for _ in rollouts)
    scored = [[Scored(response=text, result=result) for result in results]]
    group = RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts, results=results, responses=(text,) * group_size)
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=prompt_T, group_size=group_size, sampling=SamplingParams()
    )
    replies = [
        pickle.dumps(Collected(rollouts=[rollout], num_running=1, num_waiting=1, generated_tokens=1), protocol=5)
        for rollout in rollouts
    ]
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


def main() -> None:
    """Runs everything and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    output = options.output or Path(__file__).parent / "results" / f"simulator-{date}.json"
    clean, faulty = simulated("", options.steps), simulated(FAULTS, options.steps)
    control_s = clean["controller_ms_per_group"] / 1e3
    transport_s = transport_s_per_group(1200, 16)
    needed = clean["groups"] / clean["virtual_s"]
    result = {
        "date": date,
        "command": f"python benchmarks/simulator.py --steps {options.steps}",
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"llamarl": _version(), "python": platform.python_version(), "numpy": np.__version__},
        "settings": SETTINGS | {"gpus": GPUS, "faults": FAULTS, "costs": "SimulatorCosts()"},
        "gpus": clean["gpus"],
        "generator_replicas": clean["generator_replicas"],
        "wall_s": clean["wall_s"],
        "cpu_s": clean["cpu_s"],
        "staleness_max": max(clean["staleness_max"], faulty["staleness_max"]),
        "staleness_bound": clean["staleness_bound"],
        "controller_ms_per_group": clean["controller_ms_per_group"],
        "transport_ms_per_group": transport_s * 1e3,
        "groups_per_s": 1 / control_s,
        "groups_per_s_with_transport": 1 / (control_s + transport_s),
        "groups_per_s_needed": needed,
        "controller_core_share": needed * control_s,
        "controller_core_share_with_transport": needed * (control_s + transport_s),
        "memory_max_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "clean": clean,
        "faulty": faulty,
        "notes": [
            "wall_s is one process on one core of a machine that others used at the same time; cpu_s is its share.",
            "groups_per_s is the controller alone: its loops, buffer, records and event loop, without transport.",
            "transport is packing and unpacking of 16 responses of 1,200 tokens; the messages of Monarch come on top.",
            "groups_per_s_needed is what the simulated cluster consumes at the pace that it reaches.",
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
