"""Recorded experts beside the journal: they come back bit for bit, and where they are lost, only they are."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.journal import records
from llamarl.journal.reader import segment_path
from llamarl.journal.records import named
from llamarl.types import FinishReason, Rollout, RolloutGroup, observed, unknown_routes
from tests.controller.test_journal import PROMPTS, SETTINGS, SIZE, Author, read, same_group
from tests.journals import journal_of


class MixtureAuthor(Author):
    """Its rollouts tell which experts computed them, `width` of each token."""

    def __init__(self, folder: Path, seed: int, dtype: Any = np.uint8, **options: Any) -> None:
        self.dtype, self.prompts = dtype, dict[int, np.ndarray]()
        super().__init__(folder, seed, **options)

    def drawn(self, num: int) -> np.ndarray:
        most = np.iinfo(self.dtype).max
        return np.array([self.random.randrange(most) for _ in range(6 * num)], self.dtype).reshape(num, 6)

    def grown(self, group_id: int, index: int, before: Rollout | None, is_final: bool) -> Rollout:
        one = super().grown(group_id, index, before, is_final)
        known = before.columns["routes"] if before else self.drawn(0)
        routes = np.concatenate((known, self.drawn(one.num_tokens - len(known))))
        prompt = self.prompts.setdefault(group_id, self.drawn(4))
        return replace(one, columns=one.columns | {"routes": routes}, prompt_routes=prompt)


@pytest.fixture(params=[np.uint8, np.uint16])
def author(request: pytest.FixtureRequest, tmp_path: Path) -> MixtureAuthor:
    (tmp_path / "run").mkdir()
    author = MixtureAuthor(tmp_path / "run", 3, request.param, keeps="all")
    while author.version < 4:
        author.act()
        if author.version == 2:
            author.checkpoint()
            author.journal._compressing.join()
    author.journal.close()
    return author


def steps(author: Author) -> dict[int, list[RolloutGroup]]:
    journal, _, said = read(author.folder)
    assert said == ""
    found = dict(journal.steps_after(0))
    assert sorted(found) == [1, 2, 3, 4]
    return found


def unrouted(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(
        replace(one, columns={name: v for name, v in one.columns.items() if name != "routes"}, prompt_routes=None)
        for one in group.rollouts
    ))  # fmt: skip


def test_they_come_back_as_they_were(author: MixtureAuthor) -> None:
    """From compressed files too."""
    assert segment_path(author.folder, 1).with_suffix(".routes.gz").exists()
    for groups in steps(author).values():
        for group in groups:
            was = author.whole[group.group_id]
            assert same_group(unrouted(group), unrouted(was))
            for one, before in zip(group.rollouts, was.rollouts, strict=True):
                for array, expected in (
                    (one.columns["routes"], before.columns["routes"]), (one.prompt_routes, before.prompt_routes),
                ):  # fmt: skip
                    assert array.dtype == author.dtype
                    assert array.flags.writeable
                    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("how", ["gone", "torn", "flipped"])
def test_without_them_no_rollout_is_lost(author: MixtureAuthor, how: str) -> None:
    for path in (author.folder / "journal").glob("*.routes*"):
        data = bytearray(gzip.decompress(path.read_bytes()))
        if how == "gone":
            path.unlink()
        elif how == "torn":
            path.with_suffix("").write_bytes(data[: len(data) // 2])
        else:
            data[len(data) // 2] ^= 4
            path.with_suffix("").write_bytes(data)
    lost, known = 0, 0
    for groups in steps(author).values():
        for group in groups:
            was = author.whole[group.group_id]
            assert same_group(unrouted(group), unrouted(was))
            for one, before in zip(group.rollouts, was.rollouts, strict=True):
                routes = one.columns.get("routes", unknown_routes(one.num_tokens, 6, author.dtype))
                is_lost = (routes == np.iinfo(author.dtype).max).all(1)
                np.testing.assert_array_equal(routes[~is_lost], before.columns["routes"][~is_lost])
                lost, known = lost + is_lost.sum(), known + (~is_lost).sum()
    assert lost
    assert bool(known) == (how != "gone")


def test_files_go_with_those_of_the_journal(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    author = MixtureAuthor(tmp_path / "run", 5, keep=1)
    for _ in range(4):
        for _ in range(30):
            author.act()
        author.checkpoint()
    names = {path.name[:8] for path in (author.folder / "journal").glob("*.routes*")}
    assert names <= {path.name[:8] for path in (author.folder / "journal").glob("*.groups*")}
    assert "00000001" not in names
    author.journal.close()


def test_what_an_environment_wrote_gets_its_experts_when_it_is_prefilled(tmp_path: Path) -> None:
    """They come after the tokens, with those that the policy goes on with."""
    journal = journal_of(tmp_path, prompts=PROMPTS, settings=SETTINGS)
    journal.begin(0)
    sampled = {
        "token_ids": np.arange(3, dtype=np.int32), "behavior_logprobs": np.zeros(3, np.float32),
        "policy_versions": np.zeros(3, np.int32), "routes": np.arange(18, dtype=np.uint8).reshape(3, 6),
    }  # fmt: skip
    columns = observed(sampled, np.arange(2))
    parked = Rollout(group_id=0, index=0, columns=columns, finish_reason=FinishReason.PARKED)
    journal.rollouts([(0, parked)])
    more = {name: np.concatenate((values, values[:1])) for name, values in columns.items()}
    more["routes"] = np.arange(36, dtype=np.uint8).reshape(6, 6)
    journal.rollouts([(0, replace(parked, columns=more, finish_reason=FinishReason.STOP))])
    journal.close()
    found, _, _ = read(tmp_path, {"step": 0, "sampler": {}, "next_group_id": 1, "unconsumed": [(0, 0)]})
    _, held = found.pop_generated(0)
    assert SIZE
    np.testing.assert_array_equal(held[0, 0].columns["routes"], more["routes"])


def test_a_prompt_is_named_once(author: MixtureAuthor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings share it, and later parts of a rollout do not tell it again."""
    (group, *_) = steps(author)[1]
    prompt = np.arange(24, dtype=author.dtype).reshape(4, 6)
    rollouts = [replace(one, prompt_routes=prompt) for one in group.rollouts]
    arrays, calls = dict[int, Any](), list[np.ndarray]()

    def counting(array: np.ndarray, into: dict[int, Any]) -> Any:
        calls.append(array)
        return named(array, into)

    monkeypatch.setattr(records, "named", counting)
    records.encode({}, [(0, one) for one in rollouts], routes=arrays)
    assert sum(one is prompt for one in calls) == 1 and len(calls) == 1 + len(rollouts)
    records.encode({}, [(1, one) for one in rollouts], routes=arrays)
    assert sum(one is prompt for one in calls) == 1 and len(calls) == 1 + 2 * len(rollouts)
