"""What a run has recorded happens again, bit for bit; what was changed is found and named."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import signal
import threading
from collections.abc import Callable, Container
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from llamarl.cluster.inline import InlineCluster
from llamarl.executors.trainer import TrainerExecutor
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import Drawn
from llamarl.generation.scheduler import Sequence
from llamarl.journal.reader import JournalReader
from llamarl.journal.records import encode, records
from llamarl.kernels import products
from llamarl.parts.replay.executor import ReplayingExecutor
from llamarl.parts.replay.recorded import Diverged
from llamarl.parts.replay.replayer import Replayer
from llamarl.training.trainer import Trainer
from llamarl.types import Outcome, RewardResult, Rollout, RolloutGroup
from tests.end_to_end.tiny import Command, llamarl, llamarl_here, rows
from tests.executors.rewards import EvenLength
from tests.nightly import NIGHTLY, nightly

OPTIONS = (
    "--steps", 6, "--eval.every_steps", 0, "--trainer.learning_rate", 3e-3, "--rollout.max_new_tokens", 40,
    "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]",
)  # fmt: skip
INLINE = (*OPTIONS, "--cluster.kind", "inline")
KINDS = {
    "several_generators_segments_and_little_memory": (
        "--generator.replicas", 2, "--rollout.segment_tokens", 7, "--rollout.max_staleness", 3,
        "--generator.kv_cache_bytes", 50_000, "--generator.prefill_tokens", 11, "--steps", 20 if NIGHTLY else 8,
    ),
    "synchronous_with_critic_and_reference": ("--recipe", "ppo", "--rollout.max_staleness", 0, "--rollout.window", 1),
    "8_bit_adapters_recomputed": (
        "--generator.dtype", "int8", "--trainer.lora.rank", 4, "--generator.kv_on_update", "recompute",
        "--rollout.max_staleness", 2, "--rollout.max_new_tokens", 120,  # longer than a step: versions change in them
    ),
}  # fmt: skip


def trained(folder: Path, toml: Path, *options: object) -> Path:
    done = llamarl_here("train", toml, "--output", folder, *INLINE, *options)
    assert done.returncode == 0, done.stderr
    return folder / "tiny"


def recorded(run: Path) -> list[Rollout]:
    """That were trained on."""
    settings = next(records(run / "journal/00000001.groups")).header["settings"]
    journal = JournalReader(run, cast("Any", range(1000)), settings)
    journal.resume(None)
    return [one for _, groups in journal.steps_after(0) for group in groups for one in group.rollouts]


@pytest.mark.parametrize("kind", [*KINDS] if NIGHTLY else [*KINDS][:1])
def test_a_run_happens_again(tmp_path: Path, toml: Path, kind: str) -> None:
    run = trained(tmp_path, toml, *KINDS[kind])
    rollouts = recorded(run)
    if "synchronous" not in kind:  # else the replay has nothing to get wrong
        assert sum(len(set(one.policy_versions_T.tolist())) > 1 for one in rollouts) > 2
        assert sum(start == 0 for one in rollouts for _, start, *_ in one.prefills) > len(rollouts)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = llamarl_here("replay", run)
    assert done.returncode == 0, done.stdout + done.stderr
    num_tokens = sum(one.num_tokens for one in rollouts)
    steps = KINDS[kind][-1] if "--steps" in KINDS[kind] else 6
    size = 6 * int(steps)
    assert (
        done.stdout.splitlines()[-1]
        == f"replayed {steps} steps, {size} rollouts, {num_tokens:,} tokens, {size} rewards: all equal"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "it only reads"


@nightly("a run each; by day a run happens again, and what differs is named")
def test_turns_and_a_run_that_went_on(tmp_path: Path, toml: Path) -> None:
    """What waited for its environment goes on over its cache, or a new one; a resumed run is one run."""
    options = (
        "--rollout.environment", "tests.parts.episodes.environments.worlds:Chatty", "--reward.parts", "['gsm8k']",
        "--rollout.stop_strings", "['e', 'a', '1', '2', 'o']",
        "--rollout.max_staleness", 3, "--generator.replicas", 2, "--checkpoint.every_steps", 3,
    )  # fmt: skip
    run = trained(tmp_path, toml, *options, "--steps", 3)
    trained(tmp_path, toml, *options, "--steps", 6, "--resume")
    rollouts = recorded(run)
    assert max(one.num_turns for one in rollouts) > 2
    done = llamarl_here("replay", run)
    assert done.returncode == 0, done.stdout + done.stderr
    num_tokens = sum(int(one.is_sampled_T.sum()) for one in rollouts)
    assert done.stdout.splitlines()[-1] == f"replayed 6 steps, 36 rollouts, {num_tokens:,} tokens: all equal"
    assert "rewards are not judged again" in done.stderr


@nightly("processes")
@pytest.mark.parametrize("layout", [("fsdp", 2), ("tp", 2)])
def test_layouts_of_several_ranks(tmp_path: Path, toml: Path, layout: tuple[str, int]) -> None:
    """In processes like those of the run: bit for bit."""
    options = (*OPTIONS, f"--trainer.parallelism.{layout[0]}", layout[1])
    assert llamarl("train", toml, "--output", tmp_path, *options).returncode == 0
    done = llamarl("replay", tmp_path / "tiny")
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"replayed 6 steps, 36 rollouts, [\d,]+ tokens, 36 rewards: all equal", done.stdout.splitlines()[-1]
    )


@nightly("processes")
def test_a_generator_that_was_killed(tmp_path: Path, toml: Path) -> None:
    """What it had begun goes on elsewhere, and another one takes its place."""
    options = ("--steps", 120, *OPTIONS[2:], "--generator.replicas", 2, "--rollout.segment_tokens", 9)
    command = Command.start(tmp_path, "train", toml, "--output", tmp_path, *options)
    run = tmp_path / "tiny"
    command.until(lambda: (run / "journal.jsonl").exists() and len(rows(run / "journal.jsonl")) > 12)
    os.kill(command.children()["generator-1"], signal.SIGKILL)
    code, said = command.wait()
    assert code == 0, said
    done = llamarl("replay", run)
    assert done.returncode == 0, done.stderr
    assert re.match(r"replayed 120 steps, 720 rollouts, .*: all equal", done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    from tests.end_to_end.tiny import write_toml

    folder = tmp_path_factory.mktemp("replay")
    return trained(folder, write_toml(folder, model), "--checkpoint.every_steps", 2, "--checkpoint.keep", 9)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


@nightly("a run each; by day a run happens again, and what differs is named")
@pytest.mark.skipif(products.onednn() is None, reason="this torch has no oneDNN")
def test_it_multiplies_as_the_run_did(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on, and its replay, whatever is quicker by then."""
    quickest, multiplied = [products.ONEDNN], products.onednn()
    assert multiplied is not None

    def other_bits(*factors: torch.Tensor) -> torch.Tensor:
        """MKL's and oneDNN's are the same on some processors."""
        return multiplied(*factors) * (1 + 2e-7)

    def times_us(paths: list[str], *_: object) -> dict[str, list[float]]:
        return {path: [1.0 if path == quickest[0] else 9.0] * 3 for path in paths}

    monkeypatch.setattr(products, "_times_us", times_us)
    monkeypatch.setattr(products, "onednn", lambda: other_bits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    products._chosen.cache_clear()
    try:
        options = ("--checkpoint.every_steps", 2, "--checkpoint.keep", 9)
        run = trained(tmp_path, toml, *options, "--steps", 4)
        kept = list((run / "kernels").glob("products-*.json"))
        assert kept
        quickest[0] = products.TORCH
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "later"))
        products._chosen.cache_clear()
        trained(tmp_path, toml, *options, "--resume")
        products._chosen.cache_clear()
        done = llamarl_here("replay", run, "--only", "train")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "replayed 6 steps" in done.stdout
        for file in kept:
            file.unlink()
        products._chosen.cache_clear()
        assert llamarl_here("replay", run, "--only", "train").returncode == 1, "other sums have other bits"
    finally:
        products._chosen.cache_clear()


@nightly("a run each; by day a run happens again, and what differs is named")
@pytest.mark.parametrize("only", ["train", "generate", "reward"])
def test_a_part_from_the_nearest_checkpoint(run: Path, only: str) -> None:
    done = llamarl_here("replay", run, "--steps", "5:6", "--only", only)
    assert done.returncode == 0, done.stderr
    assert re.match(r"replayed 2 steps, 12 rollouts.*: all equal$", done.stdout.splitlines()[-1])
    assert ("tokens" in done.stdout) == (only == "generate") and ("rewards" in done.stdout) == (only == "reward")


@nightly("a long run; by day a run happens again")
def test_the_record_is_small(run: Path) -> None:
    rollouts, lines = recorded(run), (run / "journal.jsonl").stat().st_size
    assert len(rollouts) == 36
    assert sum(len(json.dumps(one.prefills)) for one in rollouts) < 60 * len(rollouts)
    assert lines < 200 * len(rollouts), "digests of tensors, order of groups"
    assert all(path.suffix == ".gz" for path in (run / "journal").iterdir())
    num_bytes = sum(path.stat().st_size for path in (run / "journal").iterdir())
    assert num_bytes < 16 * sum(one.num_tokens for one in rollouts) + 100 * len(rollouts), "each token once"
    assert not (run / "rollouts.jsonl").exists()


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    found = rows(path)
    change(found)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def differs(run: Path, *options: object) -> str:
    done = llamarl_here("replay", run, *options)
    assert done.returncode == 1 and "all equal" not in done.stdout
    return done.stderr.splitlines()[-1]


def test_a_changed_token_is_named(copy: Path) -> None:
    def change(found: list[dict[str, Any]]) -> None:
        found[20]["token_ids"][3] += 1

    rewrite(copy / "rollouts.jsonl", change)
    row = rows(copy / "rollouts.jsonl")[20]
    token = row["token_ids"][3]
    assert differs(copy).startswith(
        f"llamarl replay: step {row['step']}, rollout {row['index']} of group {row['group_id']}, token_ids[3]: "
        f"recorded {token}, replayed {token - 1}. Likely cause: rollouts.jsonl or the journal was changed"
    )


def test_a_changed_reward_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a grader that says something else now."""
    score, seen = EvenLength.score, []

    def other(self: EvenLength, items: Several[Any]) -> list[RewardResult]:
        results = score(self, items)
        if not seen:
            seen.append(results[0])
            results[0] = RewardResult(outcome=Outcome.SCORE, value=0.75)
        return results

    monkeypatch.setattr(EvenLength, "score", other)
    done = llamarl_here("replay", copy, "--only", "reward")
    assert done.returncode == 1 and done.stdout.splitlines()[-1].endswith("1 reward differs, all else is equal")
    assert re.search(r"step 1, rollout 0 of group \d+: recorded \w+ [\d.]+, judged score 0.75 now", done.stderr)


def test_a_truncated_record_is_named(copy: Path) -> None:
    last = max(path for path in (copy / "journal").glob("*.gz") if path.stat().st_size > 2_000)
    plain, whole = last.with_suffix(""), last.read_bytes()
    last.write_bytes(whole[:-700])
    assert re.search(
        rf"steps to 6, replayed steps to \d. .*: {plain} is missing, or damaged after byte \d+", differs(copy)
    )
    last.unlink()
    plain.write_bytes(gzip.decompress(whole)[:-700])
    said = differs(copy)
    assert "the journal: recorded steps to 6, replayed steps to 5" in said and "damaged after byte" in said
    rewrite(copy / "rollouts.jsonl", lambda found: found.__delitem__(slice(9, None)))
    assert "step 2, rollouts.jsonl, its rows: recorded 3, replayed 6" in differs(copy, "--steps", "1:3")


@nightly("a replay each; by day faults of test_replay_faults.py are named")
def test_a_flipped_weight_is_named(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps 3 and 4 of the run."""
    step = Trainer.step

    def flipping(self: Trainer, groups: Several[RolloutGroup]) -> Any:
        if self.policy_version == 3:
            weight = dict(self.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
            with torch.no_grad():
                weight.view(torch.int32)[5, 7] ^= 1 << 20
        return step(self, groups)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", flipping)
        run = trained(tmp_path, toml)
    said = differs(run)
    assert re.search(
        r"step 4, rollout 0 of group \d+, trainer_logprobs\[0\]: .*cause: the step took other weights", said
    )
    assert llamarl_here("replay", run, "--steps", "1:3").returncode == 0
    said = differs(run, "--only", "generate")
    assert re.search(r"step 4, weights of version 4, tensor [\w.]+: recorded [0-9a-f]{16}, replayed [0-9a-f]{16}", said)


@nightly("a replay each; by day faults of test_replay_faults.py are named")
def test_a_token_that_came_otherwise_is_named(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One log-probability of the run is one bit off."""
    append, changed = Rows.append, list[tuple[int, int, int]]()

    def off(self: Rows, drawn: Drawn, version: int, *routes: Any) -> np.ndarray:
        if version == 3 and not changed:
            sequence = self.sequences[0]
            changed.append((sequence.group.request.group_id, sequence.index, int(self.length_R[0])))
            drawn.logprobs_B[0] = np.nextafter(drawn.logprobs_B[0], np.float32(-1e9))
        return append(self, drawn, version, *routes)

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "append", off)
        run = trained(tmp_path, toml)
    ((group_id, index, token),) = changed
    what = f"step 3, rollout {index} of group {group_id}, token {token} (version 3): recorded token "
    assert what in differs(run, "--only", "generate")
    assert llamarl_here("replay", run, "--only", "train").returncode == 0


@nightly("a replay each; by day faults of test_replay_faults.py are named")
def test_keys_and_values_of_another_version_are_seen(
    tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout was parked and resumed, and the record does not say so."""
    note, left_out = Sequence.note_prefills, list[int]()

    def silent(self: Sequence, version: int) -> None:
        before = self.prefills
        note(self, version)
        if before and before[-1][3] < version:
            self.prefills = before
            left_out.append(version)

    with monkeypatch.context() as patched:
        patched.setattr(Sequence, "note_prefills", silent)
        for seed in range(8):  # whether weights come between two pieces of a rollout is a matter of time
            folder = tmp_path / str(seed)
            folder.mkdir()
            run = trained(folder, toml, "--rollout.segment_tokens", 7, "--rollout.max_staleness", 3, "--seed", seed)
            if left_out:
                break
    assert left_out
    assert re.search(r"step \d, rollout \d of group \d+, token \d+ \(version \d\): recorded token", differs(run))


def test_tokens_that_nobody_sampled_again_are_missed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is equal is all of it."""
    add = Replayer.add
    monkeypatch.setattr(Replayer, "add", lambda self, items: add(self, list(items)[:-1]))
    assert re.search(r"step 6, tokens in all: recorded \d+, replayed \d+", differs(run, "--only", "generate"))


@nightly("a replay each; by day faults of test_replay_faults.py are named")
def test_a_reordered_step_is_named(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer took its groups in another order than is on record."""
    take = TrainerExecutor._take

    def reordered(self: TrainerExecutor, group_ids: Several[int]) -> list[RolloutGroup]:
        return take(self, group_ids if self._trainer.policy_version != 2 else group_ids[::-1])

    with monkeypatch.context() as patched:
        patched.setattr(TrainerExecutor, "_take", reordered)
        run = trained(tmp_path, toml, "--rollout.max_staleness", 0, "--rollout.prompts_per_step", 7, "--steps", 3)
    assert "step 3, " in differs(run)


@nightly("a run each; by day a run happens again, and what differs is named")
def test_on_another_processor_it_compares_closely_and_says_so(copy: Path) -> None:
    def elsewhere(found: list[dict[str, Any]]) -> None:
        (start,) = (row for row in found if "machine" in row)
        start["machine"]["instructions"] = "those of another processor"

    rewrite(copy / "events.jsonl", elsewhere)
    done = llamarl_here("replay", copy)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"instructions was those of another processor and is .+: numbers are compared within 0.001, fingerprints",
        done.stderr,
    )

    def change(found: list[dict[str, Any]]) -> None:
        learnt = [row for row in found if "trainer_logprobs" in row]  # a group with equal rewards has none
        learnt[-1]["trainer_logprobs"][3] += 0.01

    rewrite(copy / "rollouts.jsonl", change)
    assert ", trainer_logprobs[3]: recorded " in differs(copy)


@nightly("in one process by day; processes themselves: `cluster/test_processes.py`")
def test_parts_of_the_steps_in_processes_of_their_own(run: Path) -> None:
    done = llamarl("replay", run, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"replayed 6 steps, 36 rollouts, [\d,]+ tokens, 36 rewards: all equal", done.stdout.splitlines()[-1]
    )


def test_the_death_of_one_ends_it_while_another_works(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody asks it for anything meanwhile."""
    steps, stops, ended_by_death = threading.Event(), threading.Event(), list[bool]()
    step, shutdown, works = TrainerExecutor.step, InlineCluster.shutdown, ReplayingExecutor.work

    def work(self: ReplayingExecutor) -> bool:
        if steps.wait(0.01):
            raise RuntimeError("the generator is broken")
        works(self)  # it adopts the weights
        return True

    def stepping(self: TrainerExecutor, *arguments: Any) -> Any:
        steps.set()
        ended_by_death.append(stops.wait(15.0))
        return step(self, *arguments)

    async def stopping(self: InlineCluster, timeout_s: float) -> None:
        stops.set()
        await shutdown(self, timeout_s)

    monkeypatch.setattr(ReplayingExecutor, "work", work)
    monkeypatch.setattr(TrainerExecutor, "step", stepping)
    monkeypatch.setattr(InlineCluster, "shutdown", stopping)
    done = llamarl_here("replay", run, "--steps", "1:1", "--only", "train")
    assert done.returncode == 1 and "the generator is broken" in done.stderr
    assert ended_by_death == [True]


@nightly("a run each; by day a run happens again, and what differs is named")
def test_others_learn_from_what_is_on_record(copy: Path) -> None:
    """From the base model, or a checkpoint; the page shows both, and the folder says what it is."""
    what = ("--trainer.loss", "grpo", "--shaping.length_penalty", 0.5)
    done = llamarl_here("replay", copy, *what)
    assert done.returncode == 0, done.stderr
    assert re.search(r"trained on 6 recorded steps with .*loss.name = 'grpo' \(was 'aipo'\).*ratios up to", done.stdout)
    other = copy.with_name("copy-replay")
    assert 'name = "grpo"' in (other / "config.toml").read_text()
    of_both = [[row for row in rows(one / "metrics.jsonl") if row["kind"] == "step"] for one in (copy, other)]
    assert [row["step"] for row in of_both[1]] == [1, 2, 3, 4, 5, 6]
    for name, is_same in (("reward_mean", True), ("loss", False), ("learning_rate", True), ("staleness_max", True)):
        assert ([row[name] for row in of_both[0]] == [row[name] for row in of_both[1]]) is is_same, name
    for name, is_same in (("token_ids", True), ("advantage", False)):
        columns = [[row[name] for row in rows(one / "rollouts.jsonl")] for one in (copy, other)]
        assert (columns[0] == columns[1]) is is_same
    done = llamarl_here("report", copy, other)
    assert done.returncode == 0 and "off-policy replay of" in (copy / "report.html").read_text()
    done = llamarl_here("replay", copy, *what)
    assert done.returncode == 2 and "replace it (--overwrite) or choose another --name" in done.stderr
    done = llamarl_here("replay", copy, *what, "--overwrite", "--steps", "5:6")
    assert done.returncode == 0 and [row["step"] for row in rows(other / "metrics.jsonl")] == [5, 6]
    for more, said in (
        (("--rollout.top_k", 3), "--rollout.top_k: rollouts are as they were recorded"),
        (("--trainer.advantage", "gae"), "needs a critic, of which the run has nothing on record"),
        (("--trainer.loss", "grpo", "--only", "train"), "--against, --only or --jobs"),
        (("--trainer.loss", "grpo", "--steps", "4:6"), "where there is a checkpoint: 1, 3, 5, 7"),
        (("--trainer.loss", "grpo", "--name", copy.name), f"--name {copy.name} is the run that is replayed"),
    ):
        done = llamarl_here("replay", copy, *more, "--overwrite")
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_same_settings_learn_the_same(run: Path) -> None:
    """What others learn differs by their settings alone."""
    done = llamarl_here("replay", run, "--trainer.on_nonfinite", "skip", "--name", "same")
    assert done.returncode == 0, done.stderr
    names = ("step", "loss", "grad_norm", "kl_to_behavior", "importance_ratio_max")
    found = [
        [[row[name] for name in names] for row in rows(one / "metrics.jsonl") if row["kind"] == "step"]
        for one in (run, run.with_name("same"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("token_ids", lambda row: row["token_ids"].__setitem__(3, 1), "token 3, token_ids: .* Why: noise, or keys"),
        (
            "policy_versions",
            lambda row: row.update(policy_versions=[[9, len(row["token_ids"])]]),
            "Why: order: another",
        ),
        ("reward", lambda row: row.update(reward=0.125), "reward: .* and 0.125. Why: reward"),
        ("index", lambda row: row.update(index=7), "rollout .* of the step: .* Why: order: other groups"),
    ],
)
def test_where_two_runs_part(run: Path, copy: Path, name: str, change: Callable[[Any], None], why: str) -> None:
    rewrite(copy / "rollouts.jsonl", lambda found: change(found[14]))
    done = llamarl_here("replay", run, "--against", copy)
    assert done.stdout == "6 steps are equal\n", "what was exported is no record"
    untrained(copy, range(1, 7))
    done = llamarl_here("replay", run, "--against", copy)
    assert done.returncode == 1 and re.search(rf"2 steps are equal; the first difference: step 3, .*{why}", done.stdout)


def untrained(run: Path, steps: Container[int]) -> None:
    """The journal has of these steps what `record.kind = "resume"` keeps, or runs of before did."""
    for path in (run / "journal").iterdir():
        data = b""
        for record in records(path.with_suffix("")):
            if record.header.get("step") in steps and "trained" in record.header:
                record.header["nothing"] = record.header.pop("trained")
            data += encode(record.header, [(part.start, part.rollout) for part in record.parts], [record.rest])
        path.unlink()
        path.with_suffix("").write_bytes(data)


@nightly("a run each; by day a run happens again, and what differs is named")
def test_a_run_that_kept_all_later(run: Path, copy: Path) -> None:
    """Of its first steps there is what it takes to go on: others are compared by their number, and nobody edited it."""
    untrained(copy, (1, 2, 3))
    for pair in ((run, copy), (copy, run)):
        done = llamarl_here("replay", pair[0], "--against", pair[1])
        assert done.returncode == 0 and done.stdout == "3 steps, from step 4 on, are equal\n"
    done = llamarl_here("replay", copy, "--only", "train")
    assert done.returncode == 2
    assert "step 1 has nothing to compare training with, as record.kind was 'resume'; give --steps 4:" in done.stderr
    for more in (("--steps", "4:"), ("--only", "generate")):
        assert llamarl_here("replay", copy, *more).returncode == 0


def test_a_run_of_sft_is_refused(copy: Path) -> None:
    """It has settings, metrics and checkpoints, and nothing that could differ: not as one that lost its journal."""
    (copy / "trace.json").unlink()
    assert llamarl_here("replay", copy, "--only", "reward").returncode != 2, "a journal alone is enough to begin"
    shutil.rmtree(copy / "journal")
    (copy / "journal.jsonl").unlink()
    done = llamarl_here("replay", copy)
    assert done.returncode == 2 and "has no journal, as runs of `llamarl sft`" in done.stderr, done.stderr


@nightly("a replay each; by day a run happens again")
def test_what_was_exported_is_compared_too(copy: Path) -> None:
    """Beside the journal, as far as it goes."""
    rewrite(copy / "rollouts.jsonl", lambda found: found.__delitem__(slice(12, None)))
    assert llamarl_here("replay", copy, "--only", "train").returncode == 0
    rewrite(copy / "rollouts.jsonl", lambda found: found[7].update(advantage=9.0))
    assert ", advantage: recorded 9.0, replayed" in differs(copy, "--only", "train")


def test_two_runs_that_are_one(run: Path, copy: Path) -> None:
    done = llamarl_here("replay", run, "--against", copy)
    assert done.returncode == 0 and done.stdout == "6 steps are equal\n"

    def change(found: list[dict[str, Any]]) -> None:
        next(row for row in found if row["step"] == 4 and "fingerprint" in row)["fingerprint"] = "0" * 16

    rewrite(copy / "journal.jsonl", change)
    done = llamarl_here("replay", run, "--against", copy)
    assert done.returncode == 1 and "first difference: step 4, weights of version 4" in done.stdout


def test_a_difference_that_another_process_finds_keeps_its_sentence() -> None:
    """With `--jobs` it comes from a worker of a pool, which pickles it."""
    one = Diverged(3, "loss", 1.5, np.float32(2.5), "another machine")
    other = pickle.loads(pickle.dumps(one))
    assert isinstance(other, Diverged)
    assert str(other) == str(one) == "step 3, loss: recorded 1.5, replayed 2.5. Likely cause: another machine"
