"""What was changed after a run is named by its replay: where, and as what."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from llamarl.algorithms.losses.aipo import Aipo
from llamarl.journal.records import encode, records
from llamarl.parts.replay import recorded
from tests.end_to_end.tiny import llamarl_here, rows, write_toml
from tests.nightly import some
from tests.parts.replay.test_replay import differs, rewrite, trained, untrained

TOKEN = 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A run with a model of its own."""
    folder = tmp_path_factory.mktemp("faults")
    own = Path(shutil.copytree(model, folder / "model"))
    return trained(folder, write_toml(folder, own), "--checkpoint.every_steps", 2, "--checkpoint.keep", 9)


@pytest.fixture
def run(whole: Path) -> Any:
    """It is put back after the test."""
    folders = (whole, whole.parent / "model")
    for folder in folders:
        shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"))
    yield whole
    for folder in folders:
        shutil.rmtree(folder)
        folder.with_name(f"{folder.name}-kept").rename(folder)


def in_journal(run: Path, change: Callable[[dict[str, Any], dict[tuple[int, int], Any], bytearray], None]) -> None:
    """`change` gets header, rollouts by group and index, and what follows them, of each record; digests are those of
    what it leaves."""
    for path in sorted((run / "journal").iterdir()):
        data = b""
        for record in records(path.with_suffix("")):
            assert not any(part.start for part in record.parts)
            parts = {(part.rollout.group_id, part.rollout.index): part.rollout for part in record.parts}
            rest = bytearray(record.rest)
            change(record.header, parts, rest)
            data += encode(record.header, [(0, one) for one in parts.values()], [rest])
        path.unlink()
        path.with_suffix("").write_bytes(data)


def place(run: Path) -> tuple[int, int]:
    """Group and index of a rollout with enough tokens."""
    row = suitable(rows(run / "rollouts.jsonl"))
    return row["group_id"], row["index"]


def suitable(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a rollout with enough tokens that was learnt from; a group with equal rewards is not."""
    return next(row for row in found[15:] if "trainer_logprobs" in row and len(row["token_ids"]) > TOKEN)


def reward_in_journal(run: Path) -> None:
    group_id, index = place(run)

    def change(header: dict[str, Any], *_: Any) -> None:
        if header["kind"] == "group" and header["group_id"] == group_id:
            header["results"][index][1] = 0.375

    in_journal(run, change)


def column_in_journal(name: str, new: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
    def fault(run: Path) -> None:
        key = place(run)

        def change(_: Any, rollouts: dict[tuple[int, int], Any], rest: bytearray) -> None:
            if key in rollouts:
                rollouts[key].columns[name][TOKEN] = new(rollouts[key].columns[name][TOKEN])

        in_journal(run, change)

    return fault


def trainers_logprob_in_journal(run: Path) -> None:
    key = place(run)

    def change(header: dict[str, Any], _: Any, rest: bytearray) -> None:
        offset = 0
        for name, dtype, places in header.get("trained", ()):
            for group_id, index, size in places:
                if name == "trainer_logprobs" and (group_id, index) == key:
                    np.frombuffer(rest, dtype, size, offset)[TOKEN] = -0.5
                offset += size * np.dtype(dtype).itemsize

    in_journal(run, change)


def beside_a_file(fault: Callable[[Path], None]) -> Callable[[Path], None]:
    """As of a run that has a `rollouts.jsonl`, too."""

    def both(run: Path) -> None:
        rewrite(run / "rollouts.jsonl", lambda found: None)
        fault(run)

    return both


def value_in(file: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda run: rewrite(
        run / file, lambda found: change(suitable(found) if file == "rollouts.jsonl" else found[2])
    )


def setting(section: str, name: str, value: str) -> Callable[[Path], None]:
    def fault(run: Path) -> None:
        before = (run / "config.toml").read_text()
        after = re.sub(rf"(?ms)(^\[{section}\]\n[^\[]*?^{name} = )\S+", rf"\g<1>{value}", before)
        assert after != before
        (run / "config.toml").write_text(after)

    return fault


def damaged_file(run: Path) -> None:
    path = max((run / "journal").iterdir(), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[:600] + bytes([data[600] ^ 8]) + data[601:])


def missing_file(run: Path) -> None:
    sorted((run / "journal").iterdir())[1].unlink()


def cut_file(run: Path) -> None:
    path = sorted(path for path in (run / "journal").iterdir() if path.stat().st_size > 1000)[-1]
    path.write_bytes(path.read_bytes()[:-400])


def weight(run: Path) -> None:
    path = run.parent / "model/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, path)


def fingerprint(run: Path) -> None:
    def change(header: dict[str, Any], *_: Any) -> None:
        if header["kind"] == "published" and header["step"] == 3:
            header["fingerprint"] = "0" * 16

    in_journal(run, change)


ROLLOUT = r"step \d, rollout INDEX of group GROUP, "
TOKENS = ROLLOUT + r"token 9 \(version \d\): recorded token "
EITHER = r".*Likely cause: rollouts.jsonl or the journal was changed"
JOURNAL = r"step \d, the journal: recorded steps to 6, replayed steps to \d. Likely cause: "
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "token": (column_in_journal("token_ids", lambda t: t + 1), TOKENS),
    "log-probability": (column_in_journal("behavior_logprobs", lambda p: np.nextafter(p, np.float32(-9))), TOKENS),
    "trainer's log-probability": (
        trainers_logprob_in_journal,
        ROLLOUT + r"trainer_logprobs\[9\]: recorded -0.5, .* cause: the journal was changed",
    ),
    "reward": (reward_in_journal, r"step \d, rollout \d of group GROUP, advantage: recorded .* cause: a reward, or"),
    "reward in the journal": (
        beside_a_file(reward_in_journal),
        ROLLOUT + r"reward: recorded \S+, replayed 0.375" + EITHER,
    ),
    "token in the journal": (
        beside_a_file(column_in_journal("token_ids", lambda t: t + 1)),
        ROLLOUT + r"token_ids\[9\]: " + EITHER,
    ),
    "log-probability in the journal": (
        beside_a_file(column_in_journal("behavior_logprobs", lambda p: np.nextafter(p, np.float32(-9)))),
        ROLLOUT + r"behavior_logprobs\[9\]: " + EITHER,
    ),
    "version in the journal": (
        beside_a_file(column_in_journal("policy_versions", lambda v: v + 1)),
        ROLLOUT + r"policy_versions\[9\]: " + EITHER,
    ),
    "reward in the file": (
        value_in("rollouts.jsonl", lambda row: row.update(reward=0.375)),
        ROLLOUT + r"reward: recorded 0.375, replayed" + EITHER,
    ),
    "version": (
        value_in("rollouts.jsonl", lambda row: row["policy_versions"].insert(0, [0, 1])),
        ROLLOUT + r"policy_versions.*" + EITHER,
    ),
    "trainer's log-probability in the file": (
        value_in("rollouts.jsonl", lambda row: row["trainer_logprobs"].__setitem__(9, -0.5)),
        ROLLOUT + r"trainer_logprobs\[9\]: recorded -0.5, .* cause: rollouts.jsonl was changed",
    ),
    "metrics": (
        value_in("metrics.jsonl", lambda row: row.update(loss=7.0)),
        r"step \d, loss: recorded 7.0, replayed .* cause: metrics.jsonl was changed",
    ),
    "setting": (
        setting("trainer", "learning_rate", "0.004"),
        r"step 1, setting trainer.learning_rate: recorded 0.003, replayed 0.004. Likely cause: config.toml",
    ),
    "setting of generators": (
        setting("generator", "dtype", '"bfloat16"'),
        r"step 0, weights of version 0.* Likely cause: generator\.\* in config.toml, or a checkpoint, was changed",
    ),
    "weights": (weight, r"step 0, weights of version 0, tensor model.norm.weight: .*/model.safetensors was changed"),
    "fingerprint": (fingerprint, r"step 3, weights of version 3.*: recorded 0{16}, replayed .*other weights"),
    "journal, damaged": (damaged_file, JOURNAL + r"\S+/journal/\d{8}.groups (is missing|was cut), or .*after byte"),
    "journal, missing": (missing_file, JOURNAL + r"\S+/journal/00000002.groups is missing"),
    "journal, cut": (cut_file, JOURNAL + r"\S+/journal/\d{8}.groups (is missing|was cut), or"),
}  # fmt: skip


@pytest.mark.parametrize("name", some(FAULTS, 4))
def test_it_is_named(run: Path, name: str) -> None:
    fault, said = FAULTS[name]
    group_id, index = place(run)
    fault(run)
    assert re.match(
        "llamarl replay: " + said.replace("GROUP", str(group_id)).replace("INDEX", str(index)), differs(run)
    )


def test_code_that_computes_something_else_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that computes the same is not."""
    starts = [row for row in rows(run / "events.jsonl") if row["kind"] == "start"]
    assert [row["code"] for row in starts] == [recorded.code_fingerprint()]
    monkeypatch.setattr(recorded, "code_fingerprint", lambda: "0" * 16)
    done = llamarl_here("replay", run)
    assert done.returncode == 0 and "all equal" in done.stdout
    losses = Aipo.token_losses

    def other(self: Aipo, positions: Any) -> Any:
        found = losses(self, positions)
        return type(found)(loss_N=found.loss_N * 1.01, capped_N=found.capped_N)

    monkeypatch.setattr(Aipo, "token_losses", other)
    assert re.search(rf"Likely cause: the code of llamarl differs, 0{{16}} and not {starts[0]['code']}", differs(run))


def test_a_setting_as_it_was_and_one_step(run: Path) -> None:
    """Nothing differs, and one is one."""
    done = llamarl_here("replay", run, "--trainer.learning_rate", 3e-3, "--steps", "1:1")
    assert done.returncode == 0, done.stderr
    assert "trained on 1 recorded step with nothing that differs: importance" in done.stdout
    done = llamarl_here("replay", run, "--steps", "1:1", "--only", "train")
    assert done.stdout.splitlines()[-1] == "replayed 1 step, 6 rollouts: all equal"
    other = Path(shutil.copytree(run, run.with_name("other")))
    rewrite(other / "rollouts.jsonl", lambda found: found[7].update(reward=0.125))
    untrained(other, range(1, 7))
    assert llamarl_here("replay", run, "--against", other).stdout.startswith(
        "1 step is equal; the first difference: step 2"
    )
    shutil.rmtree(other)
    shutil.rmtree(run.with_name("tiny-replay"))
