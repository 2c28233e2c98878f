"""Folders of runs that older versions of llamarl wrote (four steps, a checkpoint, a model) are shown, exported, resumed
and replayed.

`fixtures/run_COMMIT.tar.gz` is the folder of the run that `llamarl train` of this commit wrote. The settings of 934d847
include `weight_sync.power_of_two_scales`, which llamarl no longer has. To make another: a worktree of a commit, a model
with 16 numbers a token, `llamarl train` in processes, with a reward that differs within groups and
`checkpoint.keep = 1`. Pack `old/` and `model/` without the lock.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llamarl.algorithms.losses.aipo import Aipo
from llamarl.parts.page.cli import report
from llamarl.parts.page.live import Watched, build_app
from llamarl.parts.replay import recorded
from llamarl.run.folder import RunFolder
from tests.end_to_end.tiny import llamarl_here, rows
from tests.nightly import nightly

FIXTURES = Path(__file__).parent / "fixtures"
COMMITS = ("934d847", "23758f0a")
STEPS = 4
RENAMED = (("extra.mismatch_kl", "extra.probe_kl"), ("extra.kl_mismatch", "extra.kl_same_version"))
"""Names of two metrics: that of the older runs, and that of today."""


@pytest.fixture(params=COMMITS)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run. Its settings name a model next to it."""
    with tarfile.open(FIXTURES / f"run_{request.param}.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "old"


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run / "metrics.jsonl") if row["kind"] == "step"]


def drawn() -> set[str]:
    """Metrics by the names that charts have for them."""
    return set(re.findall(r'"((?:extra\.)?[a-z_]+)["|]', (Path(report.__file__).parents[1] / "curves.js").read_text()))


def check_series(series: dict[str, list[float | None]], run: Path) -> None:
    """Of a page: curves of both names are among the charts, with the numbers that the run has written."""
    assert series["step"] == [1, 2, 3, 4] and series["reward_mean"] == [row["reward_mean"] for row in steps(run)]
    for names in RENAMED:
        (name,) = drawn() & set(names) & series.keys()
        told = [row.get(names[0], row.get(names[1])) for row in steps(run)]
        assert series[name] == [one and pytest.approx(one, rel=1e-4) for one in told] and any(told)


def test_its_report_has_curves_groups_and_rollouts(run: Path) -> None:
    done = llamarl_here("report", "old", "--output", "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(r'id="data">(.*?)</script>', Path("page.html").read_text(), re.DOTALL)
    assert found
    (shown,) = json.loads(found[1])["runs"]
    assert shown["state"] == "finished"
    check_series(shown["series"], run)
    assert len(shown["flows"]) == STEPS and len(shown["evals"]) == 3


def test_it_is_watched(run: Path) -> None:
    client = TestClient(build_app([Watched(run, str)], "secret"))
    check_series(client.get("/secret/news?run=0&change=-1&after=0").json()["series"], run)


def test_its_checkpoint_is_exported(run: Path) -> None:
    done = llamarl_here("export", "old", "exported")
    assert done.returncode == 0 and done.stdout.startswith("step 4: exported\n"), done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path("exported").iterdir()}


@nightly("runs that go on; by day what an older version wrote is read")
def test_it_goes_on(run: Path) -> None:
    """With its own settings; the first step is the one after its last."""
    before = rows(run / "metrics.jsonl")
    goes_on = ("--output", ".", "--cluster.kind", "inline", "--steps", STEPS + 1, "--resume")
    done = llamarl_here("train", "old/config.toml", *goes_on)
    assert done.returncode == 0, done.stderr
    assert "old: finished steps 5 to 5 in" in done.stdout
    assert rows(run / "metrics.jsonl")[: len(before)] == before and steps(run)[-1]["step"] == STEPS + 1
    assert steps(run)[-1]["grad_norm"] > 0
    assert (run / "checkpoints/step-00000005").is_dir()


@nightly("runs that go on; by day what an older version wrote is read")
def test_its_replay_is_equal_or_says_in_a_sentence_why_not(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with what this code computes; where that is something else, the code is named."""
    done = llamarl_here("replay", "old")
    equal = done.stdout.endswith("replayed 4 steps, 32 rollouts, 256 tokens, 32 rewards: all equal\n")
    assert (done.returncode == 0) == equal
    assert "setting" not in done.stderr, "what older code did not know had its default"
    assert not equal or recorded.other_machine(RunFolder(run)) in done.stderr, "what is less exact elsewhere"
    assert equal or re.fullmatch(r"llamarl replay: step 1, .*: recorded .*\. Likely cause: .*\n", done.stderr)
    losses, machine = Aipo.token_losses, next(row["machine"] for row in rows(run / "events.jsonl") if "machine" in row)

    def other(self: Aipo, positions: Any) -> Any:
        found = losses(self, positions)
        return type(found)(loss_N=found.loss_N * 1.01, capped_N=found.capped_N)

    monkeypatch.setattr(Aipo, "token_losses", other)
    monkeypatch.setattr(recorded, "machine", lambda: machine)
    done = llamarl_here("replay", "old", "--only", "train")  # elsewhere a generator differs in the last digits
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    cause = recorded.other_code(RunFolder(run))
    assert cause
    assert re.fullmatch(
        rf"llamarl replay: step 1, .*: recorded .*, replayed .*\. Likely cause: {re.escape(cause)}", said
    )
