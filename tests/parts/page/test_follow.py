"""Each row once, whatever happens to the file meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.observability.sinks import RowLog
from llamarl.parts.page.follow import RowReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


def steps(follower: RowReader) -> list[int]:
    return [row["step"] for _, row in follower.rows()]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_rows_come_once_and_a_torn_one_when_it_is_whole(path: Path) -> None:
    follower = RowReader(path)
    assert steps(follower) == [], "there is no file yet"
    append(path, '{"step": 1}\n{"step": 2}\n{"st')
    assert steps(follower) == [1, 2]
    assert follower.is_torn
    assert steps(follower) == []
    append(path, 'ep": 3}\n')
    assert steps(follower) == [3]
    assert not follower.is_torn


def test_damaged_rows_are_counted(path: Path) -> None:
    append(path, '{"step": 1}\nno row\n[1]\n{"step": 2}\n')
    follower = RowReader(path)
    assert steps(follower) == [1, 2]
    assert follower.num_damaged == 2


def test_pieces_are_followed_while_they_are_made(path: Path) -> None:
    """Every row goes into a file of its own, which is compressed behind the reader's back."""
    log, follower, found = RowLog(path, lambda failure: pytest.fail(str(failure)), max_bytes=70), RowReader(path), []
    for step in range(1, 30):
        log.write({"step": step, "text": "a" * 40})
        if step % 3 == 0:
            found += steps(follower)
            assert not follower.was_replaced()
    log.close()
    assert len(list(path.parent.glob("rollouts-*"))) > 5
    assert found + steps(follower) == list(range(1, 30))
    places = [place for place, _ in RowReader(path).rows()]
    assert [row["step"] for row in follower.read(places[3:20:4])] == [4, 8, 12, 16, 20]


def test_a_piece_that_a_crash_has_cut_short(path: Path) -> None:
    append(path.with_name("rollouts-00001.jsonl"), '{"step": 1}\n{"st')
    append(path, '{"step": 2}\n')
    follower = RowReader(path)
    assert steps(follower) == [1, 2]
    assert follower.num_damaged == 1


def test_a_file_in_the_place_of_another_comes_whole(path: Path) -> None:
    """Also a longer one, and one that was cut in its place."""
    follower = RowReader(path)
    append(path, '{"step": 1}\n')
    assert steps(follower) == [1]
    append(other := path.with_name("other"), '{"step": 7}\n{"step": 8}\n')
    other.replace(path)
    assert follower.was_replaced()
    assert steps(follower) == [7, 8]
    path.write_text('{"step": 9}\n')
    assert follower.was_replaced()
    assert steps(follower) == [9]
    assert not follower.was_replaced()
    path.unlink()
    assert not follower.was_replaced()
    assert steps(follower) == [], "what comes in its place is not there yet"


def test_rows_that_are_taken_back_come_again(path: Path) -> None:
    log, follower = RowLog(path, lambda failure: pytest.fail(str(failure))), RowReader(path)
    for step in range(1, 6):
        log.write({"step": step})
    assert steps(follower) == [1, 2, 3, 4, 5]
    log.drop_after(3)
    log.write({"step": 4})
    assert follower.was_replaced()
    assert steps(follower) == [1, 2, 3, 4]
    assert not follower.was_replaced()
    log.close()
