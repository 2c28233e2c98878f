"""Rows of rollouts that are made from the journal: what they say, of which run, and what cannot be said."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cli.export import main
from llamarl.config import ConfigError
from llamarl.journal import reader as journal_reader
from llamarl.journal.reader import segments
from llamarl.observability.metrics import UpdateMetrics
from llamarl.parts.page.document import sample
from llamarl.parts.page.rollouts import Rollouts
from llamarl.rewards._base import right, wrong
from llamarl.rewards._weighted import weighted_sum
from llamarl.run.rollouts import TrainedSteps, rollout_lines, rollout_rows
from llamarl.training.result import PolicyStepResult
from llamarl.types import Outcome, RewardResult, RolloutGroup
from tests.controller.oracle import lines_of
from tests.journals import journal_of

NAN = float("nan")


class Writer:
    """A run of steps of one group of two rollouts each."""

    def __init__(self, folder: Path, make_group: Any, **options: Any) -> None:
        self.folder, self._make_group, self._options = folder, make_group, {"keeps": "all"} | options
        self.expected = dict[int, list[str]]()
        self.journal = journal_of(folder, print, **self._options)
        self.journal.begin(0)
        (folder / "config.toml").write_text(
            f'model = {{path = "x"}}\ndata = {{train = "jsonl"}}\nrecord = {{kind = "{self._options["keeps"]}"}}\n'
        )

    def resume(self, version: int) -> None:
        """Another process goes on from an earlier step; nothing of this one is closed."""
        self.journal = journal_of(self.folder, print, **self._options)
        self.journal.resume(None)
        self.journal.begin(version)

    def step(self, step: int, salt: float = 0.0) -> None:
        one = step - 1
        group: RolloutGroup = self._make_group(
            one, responses=[(4, 5, 6), (7,)], outcomes=[Outcome.SCORE, Outcome.INVALID]
        )
        self.journal.rollouts([(one, rollout) for rollout in group.rollouts])
        self.journal.groups([group], lambda _: 0)
        result = PolicyStepResult(
            policy_version=step, skipped=False, update=UpdateMetrics(num_loss_tokens=4),
            advantages={one: np.array([0.1 + salt, -1 / 3])},
            logprobs={one: {0: np.array([-0.1, NAN, -2.5], np.float32)}},
            token_advantages={one: {1: np.array([0.7], np.float32)}},
        )  # fmt: skip
        self.journal.step([one], {"step": step, "sampler": {}, "next_group_id": step, "unconsumed": []}, result)
        self.expected = {number: lines for number, lines in self.expected.items() if number < step} | {
            step: [*lines_of(step, [group], result)]
        }

    @property
    def lines(self) -> list[str]:
        return [line for step in sorted(self.expected) for line in self.expected[step]]


@pytest.fixture
def run(tmp_path: Path, make_group: Any) -> Iterator[Writer]:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = Writer(folder, make_group)
    yield writer
    writer.journal.close()


def derived(folder: Path) -> list[str]:
    return list(rollout_lines(folder))


def test_a_row_holds_what_the_step_saw(run: Writer) -> None:
    """Numbers as they were; what is not finite is said, as JSON has no word for it; a column of those that have it."""
    for step in range(1, 7):
        run.step(step)
    assert derived(run.folder) == run.lines
    first, second = map(json.loads, derived(run.folder)[-2:])
    assert (first["step"], first["group_id"], first["index"]) == (6, 5, 0)
    assert first["token_ids"] == [4, 5, 6] and first["policy_versions"] == [[5, 2], [6, 1]]
    assert first["staleness"] == 0, "step 6 begins at version 5, and so does the rollout"
    assert (first["outcome"], first["advantage"], second["advantage"]) == ("score", 0.1, -1 / 3)
    assert first["trainer_logprobs"] == [pytest.approx(-0.1), None, -2.5] and "trainer_logprobs" not in second
    assert second["advantages"] == [pytest.approx(0.7)] and "advantages" not in first
    assert second["outcome"] == "invalid"
    assert (first["right"], second["right"]) == (False, None), "a score of 0 is wrong, and nobody judged the second"


def test_a_weighted_sum_says_what_is_right_and_each_part(run: Writer, make_group: Any) -> None:
    """Brevity alone earns something, so the outcome of each is a score: the first part decides what is right."""
    results = [
        weighted_sum(["exact", "brief"], [1.0, 0.5], [first, RewardResult(outcome=Outcome.SCORE, value=0.4)])
        for first in (right(1.0), wrong(0.0, "no"))
    ]
    group = replace(make_group(0), results=tuple(results))
    run.journal.rollouts([(0, rollout) for rollout in group.rollouts])
    run.journal.groups([group], lambda _: 0)
    result = PolicyStepResult(
        policy_version=1, skipped=False, update=UpdateMetrics(num_loss_tokens=4), advantages={0: np.array([1.0, -1.0])}
    )
    run.journal.step([0], {"step": 1, "sampler": {}, "next_group_id": 1, "unconsumed": []}, result)
    rows = [*map(json.loads, derived(run.folder))]
    assert [(row["outcome"], row["right"]) for row in rows] == [("score", True), ("score", False)]
    assert [row["reward_parts"] for row in rows] == [{"exact": 1.0, "brief": 0.4}, {"exact": 0.0, "brief": 0.4}]
    page = Rollouts(run.folder)
    page.refresh()
    assert [row["index"] for row in page.find({"right": "wrong"}, None)["rows"]] == [1]
    assert [row["index"] for row in page.find({"right": "right"}, None)["rows"]] == [0]


def test_over_files_that_are_compressed_beside_one_that_is_written(run: Writer) -> None:
    for step in range(1, 10):
        run.step(step)
        if step % 3 == 0:
            run.journal.next_segment()
            run.journal.committed(step)
            run.journal._compressing.join()
    assert len(list((run.folder / "journal").glob("*.gz"))) >= 2
    run.step(10)
    assert derived(run.folder) == run.lines


def test_steps_that_were_taken_back_are_left_out(run: Writer) -> None:
    for step in range(1, 6):
        run.step(step)
    run.resume(3)
    for step in (4, 5, 6):
        run.step(step, salt=1.0)
    assert derived(run.folder) == run.lines
    assert len(run.lines) == 12


def test_each_step_is_read_once_as_it_comes_and_again_on_demand(run: Writer) -> None:
    steps, places, found = TrainedSteps(run.folder), dict[int, Any](), list[str]()
    for step in range(1, 9):
        run.step(step)
        if step % 4 == 0:
            run.journal.next_segment()
        for one in steps.new():
            places[one.step] = one.place
            found += one.lines()
        assert found == run.lines
        assert not [*steps.new()] and not steps.was_replaced()
    again = {one.step: [*one.lines()] for one in steps.again({step: places[step] for step in (7, 2, 3)})}
    assert again == {step: run.expected[step] for step in (2, 3, 7)}
    run.resume(5)
    assert steps.was_replaced()
    assert not TrainedSteps(run.folder).was_replaced()


def test_a_torn_end_is_read_when_it_is_whole(run: Writer) -> None:
    run.step(1)
    run.step(2)
    path = run.folder / "journal/00000001.groups"
    whole = path.read_bytes()
    for size in range(len(whole) - 600, len(whole), 37):
        path.write_bytes(whole[:size])
        steps = TrainedSteps(run.folder)
        assert [one.step for one in steps.new()] == [1]
        path.write_bytes(whole)
        assert [one.step for one in steps.new()] == [2]


def test_what_is_lost_is_named(run: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 7):
        run.step(step)
        if step % 2 == 0:
            run.journal.next_segment()
    (run.folder / "journal/00000002.groups").unlink()
    lacks = list[str]()
    lines = [*rollout_lines(run.folder, lacks.append)]
    assert lines == run.expected[1] + run.expected[2] + run.expected[5] + run.expected[6]
    assert lacks == [f"{run.folder}: rollouts of steps 3-4 cannot be derived: the journal does not have them"]
    assert main([str(run.folder), "--rollouts"]) == 0
    assert lacks[0] in capsys.readouterr().err
    assert (run.folder / "rollouts.jsonl").read_text().splitlines() == lines


def test_what_is_kept_for_resuming_says_so(tmp_path: Path, make_group: Any) -> None:
    writer = Writer(tmp_path, make_group, keeps="resume")
    for step in (1, 2):
        writer.step(step)
    writer.journal.close()
    said = f"{tmp_path}: rollouts of steps 1-2 cannot be derived: record.kind = 'resume' keeps only what --resume needs"
    for command in (lambda: derived(tmp_path), lambda: main([str(tmp_path), "--rollouts"])):
        with pytest.raises(ConfigError) as refused:
            command()
        assert str(refused.value).startswith(said)
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert sample(tmp_path, None, 1 << 20)["said"].startswith(said)
    live = Rollouts(tmp_path)
    assert not live.refresh() and live.find({}, None)["said"].startswith(said)


def old(folder: Path, *lines: str, pieces: Sequence[Sequence[str]] = ()) -> Path:
    """A run of before, whose rows are in `rollouts.jsonl`, perhaps in pieces, and nowhere else."""
    for number, of_piece in enumerate(pieces, start=1):
        with gzip.open(folder / f"rollouts-{number:05d}.jsonl.gz", "wt") as file:
            file.writelines(f"{line}\n" for line in of_piece)
    (folder / "rollouts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder / "rollouts.jsonl"


def shown(folder: Path) -> list[tuple[int, int, str]]:
    """Step, index and reason of each rollout that a page finds."""
    page = Rollouts(folder)
    while page.refresh():
        pass
    return [(row["step"], row["index"], row["reason"]) for row in page.find({}, None)["rows"]]


def by_hand(line: str) -> str:
    return line.replace('"reason": ""', '"reason": "by hand"')


def test_the_journal_comes_first(run: Writer) -> None:
    """Whatever was exported, and changed, since; a file by itself is what it says."""
    run.step(1)
    run.step(2)
    assert main([str(run.folder), "--rollouts"]) == 0
    file = run.folder / "rollouts.jsonl"
    assert file.read_text().splitlines() == run.lines
    file.write_text(by_hand(file.read_text()))
    run.step(3)
    assert derived(run.folder) == run.lines
    assert [row["reason"] for row in rollout_rows(file)] == ["by hand"] * 4
    assert shown(run.folder) == [(step, index, "") for step in (1, 2, 3) for index in (0, 1)]
    assert main([str(run.folder), "--rollouts"]) == 0
    assert file.read_text().splitlines() == run.lines
    file.write_text("damaged")
    assert derived(run.folder) == run.lines, "who has all in the journal reads no file"


def test_a_file_is_read_for_steps_that_the_journal_lacks(run: Writer) -> None:
    """Also between those that it has, and not for those that were taken back."""
    for step in range(1, 7):
        run.step(step)
        if step % 2 == 0:
            run.journal.next_segment()
    old(run.folder, *(by_hand(line) for line in [*run.lines, run.lines[-1].replace('"step": 6', '"step": 7')]))
    (run.folder / "journal/00000002.groups").unlink()
    reasons = [(row["step"], row["index"], row["reason"]) for row in map(json.loads, derived(run.folder))]
    assert reasons == [(n, index, "by hand" if n in (3, 4) else "") for n in range(1, 7) for index in (0, 1)]
    page = shown(run.folder)
    assert page[:12] == reasons and {step for step, *_ in page[12:]} <= {7}
    assert {row["step"] for row in sample(run.folder, None, 1 << 20)["rows"]} >= set(range(1, 7))


def test_steps_that_were_exported_and_taken_back_are_left_out(run: Writer) -> None:
    for step in range(1, 6):
        run.step(step)
    assert main([str(run.folder), "--rollouts"]) == 0
    run.resume(2)
    for step in (3, 4):
        run.step(step, salt=1.0)
    assert derived(run.folder) == run.lines and len(run.lines) == 8


def test_an_open_page_shows_no_rollout_twice(run: Writer) -> None:
    """After an export, and when a step comes to the journal that a file had."""
    page, all_of = Rollouts(run.folder), lambda: [row["step"] for row in page.find({}, None)["rows"]]
    for step in (1, 2, 3):
        run.step(step)
        page.refresh()
    assert main([str(run.folder), "--rollouts"]) == 0
    while page.refresh():
        pass
    assert all_of() == [1, 1, 2, 2, 3, 3]
    (run.folder / "journal/00000001.groups").rename(run.folder / "away")
    page = Rollouts(run.folder)
    page.refresh()
    assert all_of() == [1, 1, 2, 2, 3, 3]
    (run.folder / "away").rename(run.folder / "journal/00000001.groups")
    while page.refresh():
        pass
    assert all_of() == [1, 1, 2, 2, 3, 3]


def test_the_only_record_is_not_replaced(run: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        run.step(step)
    lines = run.lines
    for path in (run.folder / "journal").iterdir():
        path.unlink()
    file = old(run.folder, *lines[3:], pieces=[lines[:3]])
    before = {path.name: path.read_bytes() for path in run.folder.glob("rollouts*")}
    for output in ((), ("--output", str(file)), ("--output", str(run.folder / "rollouts-00001.jsonl.gz"))):
        with pytest.raises(
            ConfigError, match=r"rollouts\S* is the only record of the rollouts of step 1; name another"
        ):
            main([str(run.folder), "--rollouts", *output])
    assert {path.name: path.read_bytes() for path in run.folder.glob("rollouts*")} == before
    assert main([str(run.folder), "--rollouts", "--output", str(tmp_path / "all.jsonl")]) == 0
    assert [*map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())] == [*map(json.loads, lines)]
    file.write_text(file.read_text() + '{"step"')
    with pytest.raises(ConfigError) as refused:
        derived(run.folder)
    assert str(refused.value).startswith(f"{file}:4: malformed JSON")
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="it may be the only record of its rollouts"):
        derived(run.folder)


def test_a_step_of_which_a_file_has_a_part_is_named(run: Writer) -> None:
    """The process that wrote it died."""
    config = run.folder / "config.toml"
    config.write_text(config.read_text() + "rollout = {prompts_per_step = 1, group_size = 2}\n")
    for step in (1, 2, 3):
        run.step(step)
    for cut, said in (
        (5, "rollouts of steps 3 cannot be derived: {}/rollouts.jsonl has only 1 rows of step 3"),
        (6, ""),
    ):
        old(run.folder, *run.lines[:cut])
        for path in (run.folder / "journal").iterdir():
            path.unlink()
        lacks = list[str]()
        assert len([*rollout_lines(run.folder, lacks.append)]) == cut
        assert lacks == ([f"{run.folder}: {said.format(run.folder)}"] if said else [])


def test_an_advantage_that_is_no_number(run: Writer) -> None:
    """Of a run that went wrong: the row says null, as of other numbers that are none."""
    run.step(1, salt=NAN)
    first, second = map(json.loads, derived(run.folder))
    assert (first["advantage"], second["advantage"]) == (None, -1 / 3)


def test_files_of_another_version_are_told_once(run: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often somebody looks."""
    run.step(1)
    monkeypatch.setattr(journal_reader, "FORMAT", 99)
    steps = TrainedSteps(run.folder)
    for _ in range(5):
        assert not [*steps.new()]
    assert [*steps.faults] == [f"{run.folder}/journal/00000001.groups was written by another version of llamarl"]


def test_the_page_finds_them(run: Writer) -> None:
    page = Rollouts(run.folder)
    for step in range(1, 6):
        run.step(step)
        page.refresh()
    found = page.find({"step": "2..3", "right": "wrong"}, None)
    assert [(row["step"], row["index"]) for row in found["rows"]] == [(2, 0), (3, 0)]
    run.resume(2)
    run.step(3, salt=2.0)
    page.refresh()
    assert [(row["step"], row["advantage"]) for row in page.find({"step": "3.."}, None)["rows"]] == [
        (3, 2.1),
        (3, -0.333),
    ]


@pytest.mark.parametrize("options", [("folder",), ("--merge",), ("--step", "3")])
def test_options_of_models_do_not_go_with_rollouts(run: Writer, options: Sequence[str]) -> None:
    run.step(1)
    with pytest.raises(ConfigError, match="--rollouts writes rows"):
        main([str(run.folder), *options, "--rollouts"])
    with pytest.raises(ConfigError, match="--output is for --rollouts"):
        main([str(run.folder), "--output", "x"])


def test_a_run_without_a_step(run: Writer) -> None:
    with pytest.raises(ConfigError, match="no rollout is on record"):
        derived(run.folder)
    assert segments(run.folder) == [1]
