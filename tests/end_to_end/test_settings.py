"""No setting without effect: each changes something that can be observed of a tiny run, or is refused, or is read by
the code that the table names (what takes deaths, hosts or a GPU to show; tests of its own show it there)."""

from __future__ import annotations

import ast
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig
from tests.architecture.repository import PACKAGE
from tests.architecture.test_settings import _settings
from tests.end_to_end.tiny import llamarl_here, rows
from tests.nightly import nightly

BASE = (
    "--cluster.kind",
    "inline",
    "--steps",
    3,
    "--rollout.max_staleness",
    0,
    "--rollout.window",
    1,
    "--eval.every_steps",
    0,
    "--trainer.learning_rate",
    3e-3,
    "--reward.parts",
    "[{name = 'tests.executors.rewards:EvenLength'}]",
    "--rollout.max_new_tokens",
    16,
    "--trainer.weight_decay",
    0.1,
    "--checkpoint.every_steps",
    0,
)
DATA = "{name = 'running_total', count = 200, first = 7}"
KL, PPO, LATE = ("--reference.kl_coefficient", 0.1), ("--recipe", "ppo"), ("--rollout.max_staleness", 3)
DECAY = ("--trainer.decay", "linear", "--trainer.decay_steps", 3)
REFUSED = {
    "model.warm_start": ("nowhere.toml", "cannot read"),
    "data.overlong_prompts": ("refuse", "max_prompt_tokens", "--data.max_prompt_tokens", 30),
    "rollout.tools": ("['tests.nowhere:tool']", "tests.nowhere"),
    "rollout.agent": ("tests.nowhere:run", "tests.nowhere"),
    "generator.backend": ("vllm", "needs generator.vllm.python"),
    "generator.vllm.python": ("python", "generator.vllm is set and not used"),
    "generator.vllm.arguments": ("['--x']", "generator.vllm is set and not used"),
    "generator.tensor_parallel": (2, "needs a process for each rank"),
    "generator.kv_cache_bytes": (100, "does not hold one prompt and response"),
    "generator.device": ("cuda", "no GPU"),
    "weight_sync.delta": ("true", "saves nothing"),
    "weight_sync.power_of_two_scales": ("true", "is for what changes of 8-bit weights"),
    "weight_sync.max_mismatch": (1e-30, "WeightsWrong"),
    "trainer.microbatch_tokens": (20, "can have together"),
    "trainer.device": ("cuda", "no GPU"),
    **{
        f"{who}.parallelism.{one}": (2, "asks for 2 processes")
        for who in ("trainer", "critic")
        for one in ("fsdp", "tp")
    },
    **{
        f"{who}.parallelism.{one}": (2, "asks for 2 processes") for who in ("trainer", "critic") for one in ("pp", "cp")
    },
    **{
        f"reference.{one}": (value, "reference is set and not used")
        for one, value in (("path", "x"), ("dtype", "int8"), ("threads", 2), ("device", "cuda"))
    },
    **{
        f"critic.{one}": (value, "critic is set and not used")
        for one, value in (("path", "x"), ("threads", 2), ("device", "cuda"))
    },
    "reward.weights": ("[1.0, 2.0]", "reward.weights has 2 numbers for 1 parts"),
    "reward.model": ("{path = 'nowhere'}", "nowhere"),
    "reward.max_invalid_share": (
        0.5,
        "TooManyInvalid",
        "--reward.parts",
        "[{name = 'tests.end_to_end.parts:Undecided'}]",
    ),
    "checkpoint.mirror": ("true", "no copy in memory helps"),
    "checkpoint.copy_to": ("file:///nowhere/at/all", "checkpoint.copy_to"),
    "cluster.placement": ("colocated", "needs rollout.max_staleness = 0", "--rollout.max_staleness", 1),
    "cluster.kind": ("hosts", "cluster."),
}
"""Value, what the refusal says, and other settings."""
CHANGES = {
    "name": ("other", "place"),
    "output": ("OTHER", "place"),
    "seed": (5, "rollouts"),
    "steps": (2, "loss"),
    "recipe": ("dapo", "weights"),
    "model.path": ("MODEL", "rollouts"),
    "data.train": (DATA, "prompts"),
    "data.eval": (DATA, "evals"),
    "data.template": ("Q: {question}\n", "prompts"),
    "data.max_prompt_tokens": (35, "prompts"),
    "rollout.prompts_per_step": (3, "rollouts"),
    "rollout.group_size": (4, "rollouts"),
    "rollout.max_staleness": (2, "staleness_limit"),
    "rollout.window": (4, "staleness_limit", "--rollout.max_staleness", 2),
    "rollout.max_attempts": (4, "extra.dropped_groups", "--rollout.group_size", 2),
    "rollout.max_new_tokens": (9, "rollouts"),
    "rollout.segment_tokens": (4, "extra.resumed_segments"),
    "rollout.stop_strings": ("['e', 'a']", "rollouts"),
    "rollout.environment": ("calculator", "settled"),
    "rollout.temperature": (0.5, "rollouts"),
    "rollout.top_p": (0.5, "rollouts"),
    "rollout.top_k": (3, "rollouts"),
    "rollout.min_p": (0.5, "rollouts"),
    "generator.replicas": (2, "executors"),
    "generator.max_running": (1, "extra.decode_steps"),
    "generator.prefill_tokens": (3, "extra.prefill_steps"),
    "generator.dtype": ("bfloat16", "rollouts"),
    "generator.kv_dtype": ("bfloat16", "rollouts"),
    "weight_sync.transport": ("file", "files"),
    "weight_sync.probe_every_steps": (0, "extra.mismatch_max"),
    "trainer.loss": ("reinforce", "loss"),
    "trainer.advantage": ("group_normalized", "weights"),
    "trainer.learning_rate": (1e-4, "weights"),
    "trainer.warmup_steps": (2, "learning_rate"),
    "trainer.decay": ("cosine", "learning_rate", *DECAY),
    "trainer.decay_steps": (5, "learning_rate", *DECAY),
    "trainer.decay_floor": (0.5, "learning_rate", *DECAY),
    "trainer.weight_decay": (0.5, "weights"),
    "trainer.beta1": (0.5, "weights"),
    "trainer.beta2": (0.5, "weights"),
    "trainer.max_grad_norm": (1e-3, "weights"),
    "trainer.passes": (2, "weights"),
    "trainer.dtype": ("bfloat16", "weights"),
    "trainer.peak_tflops": (7.0, "extra.peak_tflops"),
    "trainer.lora": ("{rank = 2}", "weights"),
    "reference.kl_coefficient": (0.1, "weights"),
    "reference.kl_in": ("reward", "weights", *KL),
    "reference.kl_estimator": ("k2", "weights", *KL),
    "critic.learning_rate_scale": (9.0, "extra.value_loss", *PPO),
    "critic.clip": (1e-4, "extra.value_loss", *PPO, "--trainer.passes", 3),
    "reward.parts": ("[{name = 'exact'}]", "rewards"),
    "shaping.length_penalty": (0.5, "advantages"),
    "shaping.overlong_penalty": (0.5, "advantages"),
    "shaping.overlong_share": (0.9, "advantages", "--shaping.overlong_penalty", 0.5),
    "shaping.mask_truncated": ("true", "advantages"),
    "eval.every_steps": (1, "evals"),
    "eval.max_prompts": (5, "evals"),
    "eval.samples": (2, "evals", "--eval.temperature", 1.0),
    "eval.temperature": (1.0, "evals"),
    "checkpoint.every_steps": (1, "files"),
    "checkpoint.keep": (1, "files", "--checkpoint.every_steps", 1),
    "checkpoint.keep_every": (1, "files", "--checkpoint.every_steps", 1),
    "record.max_bytes": (1 << 16, "files", "--steps", 60),
    "record.kind": ("resume", "files", "--checkpoint.every_steps", 1, "--checkpoint.keep", 1),
    "metrics.sinks": ("['jsonl', 'tensorboard']", "files"),
    "screen.kind": ("none", "stdout"),
}
"""Value, what changes, and other settings that both runs have."""
READ = {
    "data.solution": "run/sft.py",
    "generator.threads": "run/executors.py",
    "trainer.threads": "run/executors.py",
    "generator.kv_on_update": "executors/backends.py",
    "generator.cuda_graphs": "executors/backends.py",
    "weight_sync.patience_s": "controller/controller.py",
    "weight_sync.on_mismatch": "controller/controller.py",
    "trainer.activation_checkpointing": "training/compute.py",
    "trainer.compile": "training/compute.py",
    "trainer.on_nonfinite": "training/health.py",
    "trainer.max_skipped_steps": "training/health.py",
    "metrics.port": "run/train.py",
    "cluster.listen": "run/hosts.py",
    "cluster.pki": "cluster/open.py",
    "cluster.num_hosts": "run/hosts.py",
    "cluster.host_timeout_s": "run/hosts.py",
    "cluster.max_restarts": "controller/lives.py",
    "cluster.restart_window_s": "controller/lives.py",
    "cluster.start_timeout_s": "run/train.py",
    "cluster.call_timeout_s": "controller/controller.py",
    "cluster.stall_timeout_s": "controller/controller.py",
    "cluster.shutdown_timeout_s": "run/assembly.py",
    "screen.completions": "controller/telemetry.py",
    "launch.slurm": "launch/script.py",
    **{
        f"launch.kubernetes.{one}": "launch/script.py"
        for one in ("image", "claim", "mount", "namespace", "gpus", "cpu", "memory")
    },
    **{
        f"cluster.place.{one}": "run/hosting.py"
        for one in ("trainer", "critic", "generator", "reward", "reward_model", "environment", "reference")
    },
    **{
        f"cluster.on_failure.{one}": "controller/lives.py"
        for one in ("generator", "reward", "reward_model", "reference", "environment", "critic", "trainer")
    },
}
"""Where it is read; as an attribute, or, of a section, by its name."""


def test_every_setting_has_one_row() -> None:
    names = [name for name, _ in _settings(RunConfig)]
    assert sorted([*REFUSED, *CHANGES, *READ]) == sorted(names)


@pytest.mark.parametrize("name", READ)
def test_it_is_read(name: str) -> None:
    path = PACKAGE / READ[name]
    section, last = name.split(".")[-2:]
    text = path.read_text(encoding="utf-8")
    reads = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert last in reads or (section in reads and "getattr" in text) or f"{section}.model_dump" in text


@dataclass
class Seen:
    """What can be observed of a run."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    def __getitem__(self, what: str) -> Any:
        if what in ("stdout", "place"):
            return self.stdout if what == "stdout" else self.folder
        if what == "files":
            names = {
                str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if "kernels" not in str(path)
            }
            return {name for name in names if "tfevents" not in name} | {"tfevents"} & {
                "tfevents" for name in names if "tfevents" in name
            }
        recorded = rows(self.folder / "rollouts.jsonl")
        metrics = rows(self.folder / "metrics.jsonl")
        steps = [row for row in metrics if row["kind"] == "step"]
        found = {
            "rollouts": lambda: [(row["token_ids"], row["behavior_logprobs"]) for row in recorded],
            "prompts": lambda: [row["prompt"] for row in recorded],
            "rewards": lambda: [row["reward"] for row in recorded],
            "advantages": lambda: [row["advantage"] for row in recorded],
            "weights": lambda: [row.get("fingerprint") for row in rows(self.folder / "journal.jsonl")],
            "evals": lambda: [[row[one] for one in ("accuracy", "k", "num_prompts", "mean_response_tokens")]
                              for row in metrics if row["kind"] == "eval"],
            "executors": lambda: {
                name for row in rows(self.folder / "events.jsonl") for name in row.get("spans", {})
            },
            "settled": lambda: {name for row in steps for name in row if "turns" in name},
        }  # fmt: skip
        return found[what]() if what in found else [row.get(what) for row in steps]


class Runs:
    """Of one model; those of equal settings run once."""

    def __init__(self, folder: Path, toml: Path) -> None:
        self.folder, self.toml = folder, toml
        self.seen = dict[tuple[object, ...], Seen]()

    def __call__(self, *options: object) -> Seen:
        if options not in self.seen:
            output = self.folder / str(len(self.seen))
            done = llamarl_here("train", self.toml, "--output", output, *BASE, *options)
            text = done.stdout.replace(str(output), "")
            folders = sorted(self.folder.glob("OTHER/*") if "OTHER" in options else output.glob("*"))
            self.seen[options] = Seen(done.returncode, text, done.stderr, folders[0] if folders else output)
        return self.seen[options]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Runs:
    from tests.end_to_end.tiny import make_model, write_toml

    folder = tmp_path_factory.mktemp("settings")
    shutil.copytree(model, folder / "model")
    make_model(folder / "MODEL", std=0.2)
    return Runs(folder, write_toml(folder, folder / "model"))


@nightly("a hundred runs")
@pytest.mark.parametrize("name", CHANGES)
def test_it_changes_something(runs: Runs, name: str) -> None:
    value, what, *given = CHANGES[name]
    value = runs.folder / str(value) if value in ("OTHER", "MODEL") else value
    before, after = runs(*given), runs(*given, f"--{name}", value)
    assert before.code == after.code == 0, before.stderr + after.stderr
    assert before[what] != after[what]


@nightly("a hundred runs")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(runs: Runs, name: str) -> None:
    value, said, *given = REFUSED[name]
    seen = runs(*given, f"--{name}", value)
    assert seen.code != 0 and str(said) in seen.stderr, seen.stderr
