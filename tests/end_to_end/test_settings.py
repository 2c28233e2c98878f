"""No setting without effect: each changes something that can be observed of a tiny run, of one under a virtual clock,
of a part of a run, or of what `llamarl explain` says; or is refused. Of three that take a GPU or a start that hangs,
the table names only the code that reads them."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig
from tests.architecture.repository import PACKAGE
from tests.architecture.test_settings import _settings
from tests.end_to_end.effects import EFFECTS, FAST, nested
from tests.end_to_end.tiny import llamarl_here, rows
from tests.nightly import nightly, some

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
PAID = ("--rollout.environment", "tests.parts.episodes.environments.worlds:Paid", "--rollout.max_new_tokens", 40)
DECAY = ("--trainer.decay", "linear", "--trainer.decay_steps", 3)
REFUSED = {
    "model.warm_start": ("nowhere.toml", "cannot read"),
    "model.adapter": ("nowhere", "model.adapter"),
    "data.overlong_prompts": ("refuse", "max_prompt_tokens", "--data.max_prompt_tokens", 30),
    "rollout.tools": ("['tests.nowhere:tool']", "tests.nowhere"),
    "rollout.agent": ("tests.nowhere:run", "tests.nowhere"),
    "generator.backend": ("vllm", "needs generator.vllm.python"),
    "generator.vllm.python": ("python", "generator.vllm is set but not used"),
    "generator.vllm.arguments": ("['--x']", "generator.vllm is set but not used"),
    "generator.tensor_parallel": (2, "needs a process for each rank"),
    "generator.router_replay": ("false", "is not a mixture of experts"),
    "generator.kv_cache_bytes": (100, "does not hold one prompt and response"),
    "generator.device": ("cuda", "no GPU"),
    "weight_sync.delta": ("true", "saves nothing"),
    "weight_sync.max_mismatch": (1e-30, "WeightsWrong"),
    "trainer.microbatch_tokens": (20, "can have together"),
    "trainer.moments_on": ("host", "has no effect"),
    "trainer.train_router": ("false", "is not a mixture of experts"),
    "trainer.device": ("cuda", "no GPU"),
    **{
        f"{who}.parallelism.{one}": (2, "asks for 2 processes")
        for who in ("trainer", "critic")
        for one in ("fsdp", "tp")
    },
    **{
        f"{who}.parallelism.{one}": (2, "asks for 2 processes") for who in ("trainer", "critic") for one in ("pp", "cp")
    },
    "trainer.parallelism.ep": (2, "ep = 2 does not divide the 1 ranks of fsdp and cp"),
    "critic.parallelism.ep": (2, "ep = 2 does not divide the 1 ranks of fsdp and cp"),
    **{
        f"reference.{one}": (value, "reference is set but not used")
        for one, value in (("path", "x"), ("dtype", "int8"), ("threads", 2), ("device", "cuda"))
    },
    **{
        f"critic.{one}": (value, "critic is set but not used")
        for one, value in (("path", "x"), ("threads", 2), ("device", "cuda"))
    },
    "data.filter": ("{path = 'nowhere'}", "cannot read nowhere"),
    "reward.weights": ("[1.0, 2.0]", "reward.weights has 2 numbers for 1 parts"),
    "reward.model": ("{path = 'nowhere'}", "nowhere"),
    "reward.max_invalid_share": (
        0.5,
        "TooManyInvalid",
        "--reward.parts",
        "[{name = 'tests.end_to_end.parts:Undecided'}]",
    ),
    "checkpoint.mirror": ("true", "a copy in memory dies"),
    "checkpoint.copy_to": ("file:///nowhere/at/all", "checkpoint.copy_to"),
    "cluster.placement": ("colocated", "needs rollout.max_staleness = 0", "--rollout.max_staleness", 1),
    "cluster.kind": ("hosts", "cluster."),
    **{
        f"cluster.{one}": (value, f"cluster.{one} is for several hosts")
        for one, value in (("listen", "localhost:6700"), ("pki", "elsewhere"), ("min_hosts", 1))
    },
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
    "rollout.max_active": (2, "staleness_mean", "--rollout.max_staleness", 2),
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
    "trainer.weights": ("bfloat16", "weights", "--trainer.dtype", "bfloat16"),
    "trainer.moments": ("8bit", "weights"),
    "trainer.lora": ("{rank = 2}", "weights"),
    "reference.kl_coefficient": (0.1, "weights"),
    "reference.kl_in": ("reward", "weights", *KL),
    "reference.kl_estimator": ("k2", "weights", *KL),
    "critic.learning_rate_scale": (9.0, "extra.value_loss", *PPO),
    "critic.clip": (1e-4, "extra.value_loss", *PPO, "--trainer.passes", 3),
    "reward.parts": ("[{name = 'exact'}]", "rewards"),
    "shaping.length_penalty": (0.5, "advantages"),
    "shaping.overlong_penalty": (0.5, "advantages"),
    "shaping.mask_truncated": ("true", "advantages"),
    "shaping.credit": ("turn", "advantages", *PAID),
    "shaping.turn_discount": (0.5, "advantages", *PAID, "--shaping.credit", "discounted"),
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
    "screen.kind": ("none", "lines"),
    "screen.completions": (0, "completions", "--screen.kind", "lines"),
}
"""Value, what changes, and other settings that both runs have."""
HOSTS = ("--cluster.kind", "hosts", "--cluster.listen", "0.0.0.0:6700", "--cluster.num_hosts", 2)
ROLES = {
    "trainer": (), "critic": PPO, "generator": (), "reward": (), "reference": KL,
    "environment": ("--rollout.environment", "calculator"), "reward_model": ("--reward.model", "{path = 'MODEL'}"),
}  # fmt: skip
PLANNED = {
    "trainer.threads": (2,),
    "generator.threads": (2,),
    "cluster.num_hosts": (3, *HOSTS, "--generator.replicas", 3),
    **{
        f"cluster.place.{role}": ("['host-1']" if role == "generator" else "['host-2']", *HOSTS, *given)
        for role, given in ROLES.items()
    },
}
"""Value, and other settings: `llamarl explain` says something else follows. Hosts are called so either way."""
READ = {
    "generator.cuda_graphs": "executors/generator.py",
    "cluster.shutdown_timeout_s": "run/executors.py",
}
"""Where what takes a GPU or another machine to show is read, as an attribute."""


def test_every_setting_has_one_row() -> None:
    names = [name for name, _ in _settings(RunConfig)]
    assert sorted([*REFUSED, *CHANGES, *EFFECTS, *PLANNED, *READ]) == sorted(names)


@pytest.mark.parametrize("name", READ)
def test_it_is_read(name: str) -> None:
    text = (PACKAGE / READ[name]).read_text(encoding="utf-8")
    reads = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert name.rpartition(".")[2] in reads


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if one in FAST else nightly("40 runs")) for name, (_, one) in EFFECTS.items()]
)
def test_it_has_an_effect(tmp_path: Path, model: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    value, effect = EFFECTS[name]
    before, after = effect(tmp_path, nested(name.rpartition(".")[0], {})), effect(tmp_path, nested(name, value))
    assert before != after


@pytest.mark.parametrize("name", some(PLANNED, 4))
def test_something_else_follows(runs: Runs, name: str) -> None:
    value, *given = (str(one).replace("MODEL", str(runs.folder / "MODEL")) for one in PLANNED[name])

    assert runs.planned(*given) != runs.planned(*given, f"--{name}", value)


@dataclass
class Seen:
    """What can be observed of a run."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    def __getitem__(self, what: str) -> Any:
        if what == "place":
            return self.folder
        if what in ("lines", "completions"):  # of steps, and of what the last one learnt from
            return len(re.findall(r"(?m)^step +\d" if what == "lines" else r"(?m)^reward \S+ +> ", self.stdout))
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
            "weights": lambda: sorted(
                (row["step"], row["fingerprint"])
                for row in rows(self.folder / "journal.jsonl") if "fingerprint" in row
            ),
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
        self.seen, self.plans = dict[tuple[object, ...], Seen](), dict[tuple[str, ...], str]()

    def __call__(self, *options: object) -> Seen:
        if options not in self.seen:
            output = Path(tempfile.mkdtemp(dir=self.folder))
            done = llamarl_here("train", self.toml, "--output", output, *BASE, *options)
            text = done.stdout.replace(str(output), "")
            folders = sorted(self.folder.glob("OTHER/*") if "OTHER" in options else output.glob("*"))
            self.seen[options] = Seen(done.returncode, text, done.stderr, folders[0] if folders else output)
        return self.seen[options]

    def planned(self, *options: str) -> str:
        """What follows from settings, as `llamarl explain` says it."""
        if options not in self.plans:
            done = llamarl_here("explain", self.toml, "--json", *options)
            assert done.returncode == 0, done.stderr
            self.plans[options] = json.dumps(json.loads(done.stdout)["consequences"])
        return self.plans[options]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Runs:
    from tests.end_to_end.tiny import make_model, write_toml

    folder = tmp_path_factory.mktemp("settings")
    shutil.copytree(model, folder / "model")
    make_model(folder / "MODEL", std=0.2)
    return Runs(folder, write_toml(folder, folder / "model"))


NOT_REPEATED = {"place", "extra.peak_tflops", "extra.decode_steps"}
"""What differs by itself: where a run lies, what is measured at its start, and what a generator had done when a step
ended, which may be one forward more or less."""


@nightly("a hundred runs")
def test_what_is_observed_repeats_itself(runs: Runs) -> None:
    """Else a difference would show nothing."""
    first = runs()
    runs.seen.clear()
    second = runs()
    for what in {what for _, what, *_ in CHANGES.values()} - NOT_REPEATED:
        assert first[what] == second[what], what


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
