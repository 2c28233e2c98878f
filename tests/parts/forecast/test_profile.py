"""A profile finds the constants of a run that has known ones, and both readers take it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._predict import Prediction, predict_step
from llamarl.config import ConfigError, RunConfig
from llamarl.observability.spans import Span
from llamarl.parts.forecast.cli.profile import main
from llamarl.parts.forecast.constants import Constants, load_profile
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.hardware import Pool, find_gpu
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.profile import make_profile, measure, planner_constants, robust_line, run_request
from llamarl.parts.forecast.recorded import read_run
from llamarl.parts.forecast.simulator.cores import SharedCores, in_turn
from llamarl.parts.forecast.simulator.draws import ResponseLengths
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.result import Simulation
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import choose_split
from tests.nightly import nightly
from tests.parts.forecast.run_folder import COSTS, GROUP, PROMPT_TOKENS, PROMPTS, write_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("profile"))


@pytest.mark.parametrize("name", COSTS)
def test_known_costs_are_recovered(run_folder: Path, name: str) -> None:
    # One step in seven takes six times as long; the base is a small part of a train step, and shows least.
    tolerance = 0.35 if name == "train_base_s" else 0.06
    assert getattr(measure(read_run(run_folder)), name) == pytest.approx(COSTS[name], rel=tolerance)


def test_exact_run_is_recovered_exactly(tmp_path: Path) -> None:
    found = measure(read_run(write_run(tmp_path, noise=0.0, outliers=0)))
    for name, value in COSTS.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    assert found.prompt_tokens == PROMPT_TOKENS


def test_robust_line_stands_outliers_and_never_goes_negative() -> None:
    x = np.arange(1.0, 21.0)
    y = 3 + 2 * x
    y[[2, 9, 15]] *= 10
    assert robust_line(x, y) == pytest.approx((3, 2))
    assert robust_line(x, 2 * x - 5)[0] > 0
    assert robust_line(x, 50 - x)[1] > 0
    assert robust_line(np.full(5, 7.0), np.full(5, 14.0))[0] == pytest.approx(14)


def test_file_goes_through_both_readers(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    assert main([str(run_folder), "--output", str(path), "--cores", "2"]) == 0
    assert "per computed token" in capsys.readouterr().out
    run, costs, profile = read_run(run_folder), Costs.load(path), load_profile(path)
    assert costs.cores == 2 and costs.skips_equal_rewards and costs.trainer_gpus == 1
    assert costs.measured_groups[3] == tuple(run.groups[3])
    assert len(costs.measured_groups) == 30 * PROMPTS
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    # The planner's formulas give back what was measured, for the work that was measured.
    found = _predicted(run_folder, path, staleness=8)  # large enough for no wait for the longest response
    inputs = float(run.counters["num_input_tokens"].mean())
    train_s = costs.train_base_s + costs.train_token_gpu_s * inputs
    assert found.train_s == pytest.approx(train_s, rel=0.05)
    tokens = sum(tokens for group in run.groups for tokens, _ in group) / 30
    rows = 64  # as many as may run
    decode_s = tokens / rows * (costs.decode_base_s + costs.decode_per_rollout_s * rows)
    prefill_s = PROMPTS * PROMPT_TOKENS * costs.prefill_token_s
    assert found.generate_s == pytest.approx(decode_s + prefill_s + costs.publish_s, rel=0.05)
    assert profile.gpu["node_gpus"] == 2


def _predicted(
    run_folder: Path, profile: Path, *, staleness: int, limit: int = 144, replicas: int = 1, group_size: int = GROUP
) -> Prediction:
    measured = load_profile(profile)
    pool = Pool(gpu=measured.device(find_gpu("cpu-core")), count=1)
    request = run_request(read_run(run_folder), measured.constants, (pool,))
    tokens = [tokens for group in read_run(run_folder).groups for tokens, _ in group]
    lengths = Lengths.measured(np.minimum(np.array(tokens, dtype=np.float64), limit))
    request = replace(request, lengths=lengths, group_size=group_size)
    return predict_step(
        request, pool, staleness=staleness, replicas=replicas, max_running=64, microbatch_tokens=1 << 20
    )


@nightly("many points; by day costs are recovered and read")
def test_roofline_grows_with_the_work(run_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    main([str(run_folder), "--output", str(path)])
    base = _predicted(run_folder, path, staleness=1)
    assert _predicted(run_folder, path, staleness=0).step_s > base.step_s
    assert _predicted(run_folder, path, staleness=1, limit=30).step_s < base.step_s
    assert _predicted(run_folder, path, staleness=1, group_size=4).step_s < base.step_s
    assert _predicted(run_folder, path, staleness=1, replicas=2).generate_s < base.generate_s
    assert 0 <= base.trainer_idle_share < 1 and 0 <= base.generator_idle_share < 1


def _simulated(run_folder: Path, tmp_path: Path, *, generator_device: str = "cpu", **changes: Any) -> Simulation:
    run = read_run(run_folder)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(make_profile(run, cores=2, gpu=None)))
    costs = replace(Costs.load(path), **{key: value for key, value in changes.items() if key not in ROLLOUT})
    data = run.config.model_dump(exclude_none=True)
    data["rollout"] |= {key: changes[key] for key in ROLLOUT if key in changes}
    data["generator"] |= {"device": generator_device}
    config = RunConfig.model_validate(data | {"steps": 12, "checkpoint": {"every_steps": 0}})
    metrics = tmp_path / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    simulation = simulate(config, costs, Faults(), choose_split(config, costs, None, None), metrics)
    steps = [json.loads(line)["step_s"] for line in metrics.read_text().splitlines()]
    assert steps == pytest.approx([step.step_s for step in simulation.steps])
    assert sum(steps) == pytest.approx(simulation.virtual_s, rel=0.05)
    return simulation


ROLLOUT = ("max_staleness", "group_size", "max_new_tokens")


@nightly("long simulations; by day profiles are read and priced")
def test_simulation_from_a_profile_grows_with_costs_and_shrinks_with_cores(run_folder: Path, tmp_path: Path) -> None:
    def step_s(**changes: Any) -> float:
        return float(_simulated(run_folder, tmp_path, **changes).step_s.mean())

    alone, base, one_core = step_s(cores=0), step_s(), step_s(cores=1)
    assert alone < base < one_core
    assert step_s(controller_rollout_s=4e-3) > base
    assert step_s(call_s=0.05) > base
    assert step_s(decode_base_s=0.01) > base
    assert step_s(skips_equal_rewards=False) > base
    assert step_s(max_new_tokens=20) < base
    assert step_s(group_size=4) < base
    assert step_s(cores=1, max_staleness=0) > step_s(max_staleness=0)


@nightly("long simulations; by day profiles are read and priced")
def test_devices_other_than_the_cpu_share_no_cores(run_folder: Path, tmp_path: Path) -> None:
    shared = _simulated(run_folder, tmp_path, cores=1, controller_rollout_s=0.0)
    apart = _simulated(run_folder, tmp_path, cores=1, controller_rollout_s=0.0, generator_device="cuda")
    assert apart.step_s.mean() < shared.step_s.mean()


def test_shared_cores_stretch_the_clock() -> None:
    spans = {"trainer": [Span("train", 1.0, 3.0)], "generator-0": [Span("generate", 2.0, 4.0)]}
    threads = {"trainer": 1, "generator-0": 1}
    one = SharedCores(spans, threads, cores=1)
    assert [one(at_s) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)] == pytest.approx([0, 1, 2, 4, 5, 7])
    two = SharedCores(spans, threads, cores=2)
    assert [two(at_s) for at_s in (1.0, 3.0, 5.0)] == pytest.approx([1, 3, 5])
    # The controller, while it works, is a third thread: two on two cores become three.
    controller = {"trainer": [Span("train", 0.0, 4.0)], "controller": in_turn([(1.0, 1.0), (1.5, 1.0)])}
    busy = SharedCores(controller, {"trainer": 2, "controller": 1}, cores=2)
    assert [busy(at_s) for at_s in (1.0, 3.0, 4.0)] == pytest.approx([1, 4, 5])


@nightly("long simulations; by day profiles are read and priced")
def test_what_a_profile_cannot_explain_is_contention(run_folder: Path, tmp_path: Path) -> None:
    """With it the simulation takes as long as the run; it slows those down who work beside others."""
    run = read_run(run_folder)
    found = make_profile(run, cores=2, gpu=None)["costs"]["contention"]
    longer = make_profile(replace(run, step_s=1.2 * run.step_s), cores=2, gpu=None)["costs"]["contention"]
    assert longer > found > 1
    assert make_profile(replace(run, step_s=0.1 * run.step_s), cores=2, gpu=None)["costs"]["contention"] == 1
    steps_s = [_simulated(run_folder, tmp_path, contention=one).step_s.mean() for one in (found, longer)]
    assert steps_s[1] == pytest.approx(1.2 * steps_s[0], rel=0.1)
    spans = {"trainer": [Span("train", 0.0, 2.0)], "generator-0": [Span("generate", 1.0, 2.0)]}
    assert SharedCores(spans, {"trainer": 1, "generator-0": 1}, cores=2, contention=1.5)(2.0) == pytest.approx(2.5)
    # One that waits for a core disturbs nobody: of four threads on two cores two run at once.
    assert SharedCores(spans, {"trainer": 2, "generator-0": 2}, cores=2, contention=1.5)(2.0) == pytest.approx(1.5 + 3)


def test_a_larger_group_is_as_mixed_as_the_measured_ones() -> None:
    """Groups of one kind stay so; where rewards come at random, a group that happens to be equal does not."""
    random = np.random.default_rng(0)
    alike = tuple(((9, float(number % 2)),) * 4 for number in range(200))
    mixed = tuple(tuple((9, float(reward)) for reward in random.integers(0, 2, 4)) for _ in range(200))

    def equal_share(groups: tuple[Any, ...]) -> float:
        lengths = ResponseLengths(Costs(measured_groups=groups), 20, seed=0)
        return float(np.mean([len(set(lengths.rewards(number, 16) or ())) == 1 for number in range(200)]))

    assert equal_share(alike) == 1.0
    assert equal_share(mixed) < 0.02 < np.mean([len({reward for _, reward in group}) == 1 for group in mixed])


def _break(run: Path, file: str, text: str | None) -> None:
    (run / file).unlink() if text is None else (run / file).write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", None, "config.toml"),
        ("metrics.jsonl", None, "cannot read .*metrics.jsonl"),
        ("metrics.jsonl", '{"kind": "step", "step": 1}\n', "1 steps, too few to measure; a profile needs 9"),
        ("metrics.jsonl", "".join(f'{{"kind": "step", "step": {n}}}\n' for n in range(12)), "run it again"),
        ("rollouts.jsonl", None, "no rollout is on record"),
        ("rollouts.jsonl", "", "rollouts.jsonl:1: the file is empty"),
        ("rollouts.jsonl", '{"group_id": 0}\n', "is not a rollout"),
        ("trace.json", None, "cannot read .*trace.json"),
        ("trace.json", '{"traceEvents": []}', "has no `trainer`"),
    ],
)
def test_bad_run_folders(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    run = write_run(tmp_path, steps=10)
    _break(run, file, text)
    with pytest.raises(ConfigError, match=message):
        main([str(run)])


def test_a_run_of_sft_has_nothing_to_measure(tmp_path: Path) -> None:
    """It has settings, metrics and checkpoints, and running it again would not mend that."""
    run = write_run(tmp_path, steps=10)
    for file in ("rollouts.jsonl", "trace.json"):
        (run / file).unlink()
    with pytest.raises(ConfigError, match="has neither rollouts nor generators to measure, as runs of `llamarl sft`"):
        main([str(run)])


def test_a_run_whose_forwards_were_not_seen(run_folder: Path) -> None:
    run = read_run(run_folder)
    generator = run.config.generator.model_copy(update={"backend": "vllm"})
    with pytest.raises(ConfigError, match=r"profile a run with generator.backend = 'native'"):
        measure(replace(run, config=run.config.model_copy(update={"generator": generator})))


def test_bad_options(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cores 0`"):
        main([str(run_folder), "--cores", "0"])
    with pytest.raises(ConfigError, match="cannot write"):
        main([str(run_folder), "--output", str(tmp_path / "none" / "profile.json")])
    with pytest.raises(ConfigError, match="--gpu h9"):
        main([str(run_folder), "--gpu", "h9"])


def test_runs_on_gpus_need_the_kind(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with (run / "config.toml").open("a") as file:
        file.write('[trainer]\ndevice = "cuda"\n[generator]\ndevice = "cuda"\n')
    with pytest.raises(ConfigError, match="--gpu h100-80g"):
        main([str(run)])
    assert main([str(run), "--gpu", "h100-80g"]) == 0
    profile = load_profile(run / "profile.json")
    assert profile.gpu == {} and Costs.load(run / "profile.json").cores == 0
    assert profile.constants.decode_overhead_s == pytest.approx(COSTS["decode_base_s"], rel=0.1)


def test_what_a_step_on_a_gpu_takes_beyond_reading_its_weights_is_overhead(run_folder: Path) -> None:
    """Embedding of 8B are looked up, not read: 7.5e9 weights of 2 bytes."""
    run = read_run(run_folder)
    model = run.config.model.model_copy(update={"path": "llama3-8b"})
    run, gpu = replace(run, config=run.config.model_copy(update={"model": model})), find_gpu("h100-80g")
    found, _ = planner_constants(run, Costs(decode_base_s=0.01), gpu, 1)
    read_s = 2 * 7.504e9 / (gpu.memory_bandwidth * Constants().bandwidth_efficiency)
    assert found["decode_overhead_s"] == pytest.approx(0.01 - read_s, rel=1e-3)
