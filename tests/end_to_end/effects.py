"""What settings do that no run of some steps shows: to deaths and waits under a virtual clock, to what a scheduler is
given, and to parts of a run by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from llamarl.cluster.api import CallTimeout, MeshFailed
from llamarl.config import RunConfig
from llamarl.config.schema import DataConfig, GeneratorConfig
from llamarl.controller.restart import TooManyRestarts
from llamarl.controller.supervision import Stalled
from llamarl.controller.weights import WeightsWrong
from llamarl.data.prompts import load_prompts, open_tokenizer
from llamarl.distributed.mesh import ALONE
from llamarl.executors.generator import GeneratorExecutor
from llamarl.models.attention import causal_attend
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.observability.sinks import Subject
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.run import simulate
from llamarl.parts.forecast.simulator.split import Split
from llamarl.parts.hosts.launch import script
from llamarl.parts.page.trackers.prometheus import Prometheus
from llamarl.training.optimization import Health
from llamarl.training.policy import set_compute
from llamarl.training.result import NonFiniteStep
from llamarl.types import GenerationRequest, SamplingParams
from tests.controller.fakes import Run, config, kills
from tests.end_to_end.tiny import llamarl_here, write_toml
from tests.executors.ledger import RIGHT, Generator, Model, Trainer, logprobs, values
from tests.parts.episodes.test_episodes import TURN, World
from tests.parts.forecast.simulator.conftest import run_config

Effect = Callable[[Path, dict[str, Any]], object]
"""What is observed, given a folder and sections with some settings."""
LEAST = {"model": {"path": "nowhere"}, "data": {"train": "jsonl"}}
ENDS = (CallTimeout, MeshFailed, NonFiniteStep, Stalled, TooManyRestarts, WeightsWrong)


def nested(name: str, value: object) -> dict[str, Any]:
    """Sections of one setting, by its dotted name."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _ended(run: Callable[[], object]) -> str:
    """How, in a word."""
    try:
        run()
    except ENDS as error:
        return type(error).__name__
    return "finished"


def _faked(folder: Path, given: dict[str, Any], generators: list[Generator], **roles: Any) -> Run:
    for file in folder.glob("*.jsonl"):
        file.unlink()
    run = Run(config(folder, **given), folder, generators, **roles)
    run.start_s = 1.0
    return run


def death_of(role: str, *at_s: float) -> Effect:
    """How a run ends in which it dies, at these times."""

    def effect(folder: Path, given: dict[str, Any]) -> str:
        models = {"reward_model": Model(lambda _: RIGHT), "environment": World(), "critic": Model(values)}
        models = {name: models.get(name, Model(logprobs)) for name in {role} - {"reward", "trainer"}}
        rollout = {"environment": {"name": "calculator"}} if role == "environment" else {}
        generator = Generator(turn_tokens=TURN if rollout else 0)
        run = _faked(folder, given | {"rollout": rollout}, [generator], models=models)
        return _ended(lambda: run.train(strike=kills(*((role, one_s) for one_s in at_s))))

    return effect


def death_of_a_generator(folder: Path, given: dict[str, Any]) -> str:
    """In a simulated run, where others can come."""
    split = Split(trainer_gpus=1, replicas=2, generator_gpus=1)
    costs = Costs(response_lengths=(300, 500), train_token_gpu_s=1e-4, generator_start_s=20.0)
    wanted = run_config(steps=12, max_staleness=1, window=4, **given)
    found = simulate(wanted, costs, Faults(deaths=((12.0, 1),)), split, folder / "simulated.jsonl")
    return f"{found.end.split(':')[0]} {sorted(found.spans)}"


def late_generators(folder: Path, given: dict[str, Any]) -> float:
    """Of two, of which one takes 2 s for new weights."""
    run = _faked(folder, given, [Generator(), Generator(adopt_s=2.0)]).train()
    return sum(row["extra.late_generators"] for row in run.steps)


def weights_that_differ(folder: Path, given: dict[str, Any]) -> str:
    run = _faked(folder, given | {"rollout": {"max_staleness": 0}}, [Generator(outcomes=["adopted", "mismatch"])])
    return _ended(run.train)


def slow_step(folder: Path, given: dict[str, Any]) -> str:
    given["cluster"]["on_failure"] = "stop"
    return _ended(_faked(folder, given, [Generator()], trainer=Trainer(step_s=40.0)).train)


def not_finite(folder: Path, given: dict[str, Any]) -> list[str]:
    """What a trainer does about three such steps."""
    given = {"trainer": {"on_nonfinite": "skip"} | given["trainer"]}
    health = Health(RunConfig.model_validate(LEAST | given).trainer, ALONE)
    return [_ended(lambda: health.ended("the loss is NaN", is_finite=False)) for _ in range(3)]


def _layer(given: dict[str, Any]) -> Any:
    shape = ModelShape(
        family="llama", hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16,
        vocab_size=20, max_position_embeddings=32,
    )  # fmt: skip
    model = new_model(shape, seed=0, std=0.1)
    set_compute(model, RunConfig.model_validate(LEAST | given).trainer, torch.device("cpu"))
    return model


def kept_for_backward(folder: Path, given: dict[str, Any]) -> int:
    """Bytes."""
    model, sizes = _layer(given), dict[int, int]()
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in weights:
            sizes[at] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.arange(20), torch.arange(20), causal_attend([20]))
    return sum(sizes.values())


def what_computes(folder: Path, given: dict[str, Any]) -> str:
    """Of a feed-forward layer; torch compiles it at its first call."""
    return type(next(iter(_layer(given).model.layers.children())).mlp.forward).__name__


def recomputed_tokens(folder: Path, given: dict[str, Any]) -> int:
    """Of a rollout under way when weights change."""
    generator = GeneratorExecutor(str(folder / "model"), GeneratorConfig(max_running=2, **given["generator"]))
    sampling = SamplingParams(max_new_tokens=12)
    prompt_T = np.arange(5, 15, dtype=np.int32)
    generator.submit([GenerationRequest(group_id=1, prompt_token_ids_T=prompt_T, group_size=1, sampling=sampling)])
    for _ in range(4):
        generator.work()
    generator._engine.set_version(1)
    while generator.work():
        pass
    found = generator._engine.stats().recomputed_tokens
    generator.close()
    return found


def served_port(folder: Path, given: dict[str, Any]) -> int:
    """Where Prometheus is answered."""
    port = RunConfig.model_validate(LEAST | given).metrics.port
    home = "llamarl.parts.page.trackers.prometheus"
    with patch(f"{home}.listen") as listen, patch(f"{home}.Entrance"):
        Prometheus(Subject(name="x", folder=folder, settings={}, port=port, step=0))
    return int(listen.call_args.args[1])


def what_sft_learns(folder: Path, given: dict[str, Any]) -> str:
    """The refusal of a source that does not have it."""
    (folder / "rows.jsonl").write_text('{"id": "r7", "question": "1?", "answer": "1"}\n')
    options = ("--data.train", f"{{name = 'jsonl', path = '{folder}/rows.jsonl'}}", "--output", folder)
    options += tuple(one for name, value in given["data"].items() for one in (f"--data.{name}", value))
    return llamarl_here("sft", write_toml(folder, folder / "model"), *options, "--cluster.kind", "inline").stderr


def what_a_chat_says(folder: Path, given: dict[str, Any]) -> str:
    """The prompt of a template that tells a date, and knows an argument."""
    (folder / "model" / "chat_template.jinja").write_text(
        "{{ strftime_now('%F') }}{{ tone }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    data = DataConfig.model_validate({"train": {"name": "running_total", "count": 1}} | given["data"])
    return load_prompts(data, open_tokenizer(str(folder / "model"), data), 4096).prompts[0].text


def for_slurm(folder: Path, given: dict[str, Any]) -> str:
    return script.slurm_script(_several(folder, given), "run.toml", ())


def for_kubernetes(folder: Path, given: dict[str, Any]) -> str:
    return script.kubernetes_manifest(_several(folder, given))


def _several(folder: Path, given: dict[str, Any]) -> RunConfig:
    pods = {"image": "x", "claim": "c"} | given["launch"].pop("kubernetes", {})
    wanted = {
        "name": "run", "model": {"path": str(folder / "model")}, "data": {"train": "jsonl"},
        "cluster": {"kind": "hosts", "listen": "0.0.0.0:6700", "num_hosts": 2},
        "launch": given["launch"] | {"kubernetes": pods},
    }  # fmt: skip
    return RunConfig.model_validate(wanted)


EFFECTS: dict[str, tuple[object, Effect]] = {
    **{f"cluster.on_failure.{role}": ("stop", death_of(role, 2.0))
       for role in ("reward", "reward_model", "reference", "environment", "critic", "trainer")},
    "cluster.on_failure.generator": ("drop", death_of_a_generator),
    "cluster.max_restarts": (0, death_of("reward", 2.0)),
    "cluster.timeout_s": (30.0, slow_step),
    "data.solution": ("way", what_sft_learns),
    "data.system": ("Be brief.", what_a_chat_says),
    "data.examples": ([{"question": "1+1?", "answer": "2"}], what_a_chat_says),
    "data.template_arguments": ({"tone": "kind"}, what_a_chat_says),
    "data.date": ("2024-07-06", what_a_chat_says),
    "weight_sync.patience_s": (0.5, late_generators),
    "weight_sync.on_mismatch": ("resync", weights_that_differ),
    "trainer.on_nonfinite": ("stop", not_finite),
    "trainer.activation_checkpointing": (True, kept_for_backward),
    "trainer.compile": (True, what_computes),
    "generator.kv_on_update": ("recompute", recomputed_tokens),
    "metrics.port": (19464, served_port),
    "launch.slurm": ({"partition": "fast"}, for_slurm),
    **{f"launch.kubernetes.{name}": (value, for_kubernetes) for name, value in (
        ("image", "other"), ("claim", "other"), ("mount", "/other"), ("namespace", "other"), ("gpus", 3), ("cpu", 7),
        ("memory", "9Gi"),
    )},
}  # fmt: skip
"""A value other than the default, and where it shows."""
FAST = (not_finite, recomputed_tokens, served_port, what_sft_learns, what_a_chat_says, for_slurm, for_kubernetes)
"""Those that take milliseconds."""
