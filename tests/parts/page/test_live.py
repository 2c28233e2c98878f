"""The page while a run goes on: what is new, and nothing else; nobody without the token."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llamarl.parts.page import follow, live
from llamarl.parts.page.cli import watch
from llamarl.parts.page.cli.watch import watching
from llamarl.parts.page.live import Watched, build_app
from tests.nightly import nightly
from tests.parts.page.runs import add_step, flow_row, make_run, rollout_row, span_rows, step_row, write_rows

START_S, END_S = 240.0, 240.0
MAX_MIB, ANSWER_S = 256, 0.2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "made", end=None)


@pytest.fixture
def run(folder: Path) -> Watched:
    return Watched(folder, str)


@pytest.fixture
def client(run: Watched) -> TestClient:
    return TestClient(build_app([run], "secret"))


def test_news_are_what_is_new(client: TestClient, folder: Path) -> None:
    first = client.get("/secret/news?run=0&change=-1&after=0").json()
    assert first["whole"]
    assert first["series"]["step"] == [float(step) for step in range(1, 21)]
    assert list(first["flows"]) == [str(step) for step in range(1, 21)], "each has its mark"
    assert any(name == "rollout.temperature" for name, _, _ in first["settings"])
    assert client.get(f"/secret/news?run=0&change={first['change']}&after=20").json() == {"change": first["change"]}
    add_step(folder, 21, reward_mean=float("nan"))
    news = client.get(f"/secret/news?run=0&change={first['change']}&after=20").json()
    assert not news["whole"]
    assert news["series"]["step"] == [21.0]
    assert news["series"]["reward_mean"] == [None]
    assert list(news["flows"]) == ["17", "18", "19", "20", "21"], "they may come later than metrics"
    assert "settings" not in news


def test_nothing_is_read_before_somebody_asks(run: Watched) -> None:
    assert (run.data.num_steps, len(run._rollouts)) == (0, 0)
    run.news({})
    assert (run.data.num_steps, len(run._rollouts)) == (20, 0)


def test_nothing_new_costs_a_look_at_sizes(client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = client.get("/secret/news?run=0&change=-1").json()["change"]
    monkeypatch.setattr(follow, "pieces", lambda path: pytest.fail("a folder is listed"))
    for name in ("findings", "window", "described"):
        monkeypatch.setattr(live, name, lambda *_, **__: pytest.fail("all is looked at again"))
    assert client.get(f"/secret/news?run=0&change={change}").json() == {"change": change}
    monkeypatch.undo()
    monkeypatch.setattr(follow, "pieces", lambda path: pytest.fail("a folder is listed"))
    add_step(folder, 21)
    assert client.get(f"/secret/news?run=0&change={change}&after=20").json()["series"]["step"] == [21.0]


def test_what_looks_at_all_spans_is_rare_until_the_end(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RARE_S", 1e6)
    first = client.get("/secret/news?run=0&change=-1").json()
    assert first["work"]["rows"]
    add_step(folder, 21)
    news = client.get(f"/secret/news?run=0&change={first['change']}&after=20").json()
    assert news["series"]["step"] == [21.0]
    assert "work" not in news, "the page has it"
    assert client.get("/secret/news?run=0&change=-1").json()["work"] == first["work"], "another page has not"
    write_rows(folder / "events.jsonl", [{"kind": "end", "at_s": 1.7e9 + 50, "end": "interrupted", "reason": "Ctrl-C"}])
    last = client.get(f"/secret/news?run=0&change={news['change']}&after=21").json()
    assert last["claims"][0]["text"] == "the run was interrupted: Ctrl-C"
    assert last["work"]["to"] > first["work"]["to"]


def test_claims_are_those_of_the_steps_they_stand_above(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rarely all spans are looked at."""
    monkeypatch.setattr(live, "RARE_S", 1e6)
    change = client.get("/secret/news?run=0&change=-1").json()["change"]
    for step in range(21, 41):
        add_step(folder, step, reward_mean=0.9, verdict=f"balanced over steps 11 to {step}, 9s: equal")
    news = client.get(f"/secret/news?run=0&change={change}&after=20").json()
    texts = [claim["text"] for claim in news["claims"]]
    assert any(text.startswith("reward rose") and "to 0.9 " in text for text in texts), texts
    assert "balanced over steps 11 to 40, 9s: equal" in texts


def test_a_run_that_falls_silent_says_so(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    change = client.get("/secret/news?run=0&change=-1").json()["change"]
    monkeypatch.setattr("llamarl.parts.page.run_data.time.time", lambda: 2e12)
    news = client.get(f"/secret/news?run=0&change={change}&after=20").json()
    assert "dead" in news["claims"][0]["text"]


def test_a_long_run_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as can be read while a page waits; what is said of the whole comes when all is known."""
    monkeypatch.setattr(live, "LOOK_S", 0.0)
    folder = make_run(tmp_path / "long", steps=0, end=None)
    write_rows(folder / "metrics.jsonl", [step_row(step) for step in range(1, 1201)])
    write_rows(folder / "rollouts.jsonl", [rollout_row(step, step, 0) for step in range(1, 1201)])
    run, change, steps, num_told = Watched(folder, None), "-1", list[float](), list[bool]()
    while not num_told or num_told[-1]:
        news = run.news({"change": change, "after": str(len(steps))})
        change, steps = news["change"], steps + news["series"]["step"]
        num_told.append(news["more"])
        assert ("claims" in news) != news["more"]
    assert steps == list(range(1, 1201))
    assert len(num_told) >= 3
    found = [run.rollouts({}) for _ in range(3)]
    assert [one["more"] for one in found] == [True, True, False]
    assert [one["rows"][-1]["step"] for one in found] == [500, 1000, 1200]


def test_a_run_that_begins_anew_comes_whole(client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "RARE_S", 1e6)
    first = client.get("/secret/news?run=0&change=-1").json()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    make_run(folder, steps=2, end=None)
    news = client.get(f"/secret/news?run=0&change={first['change']}&after=20").json()
    assert news["whole"]
    assert news["series"]["step"] == [1.0, 2.0]
    assert news["claims"] != first["claims"]


def test_windows_flows_and_rollouts(client: TestClient) -> None:
    client.get("/secret/news?run=0&change=-1")
    work = client.get("/secret/work?run=0&from=10000&to=14000").json()
    assert (work["from"], work["to"]) == (10_000, 14_000)
    assert work["waits"]["trainer"] == {"rollouts": pytest.approx(2000, abs=1)}
    assert list(client.get("/secret/flow?run=0&step=7").json()) == ["7"]
    found = client.get("/secret/rollouts", params={"run": 0, "step": "7", "reward": "1"}).json()
    assert [row["index"] for row in found["rows"]] == [1, 1]
    assert found["words"]["5"] == "5"


@pytest.mark.parametrize(
    "path",
    ["/", "/wrong/", "/news?run=0", "/secret/passwd?run=0", "/secret/news?run=3", "/secret/rollouts?run=-1",
     "/secret/news", "/secret/work?run=0",
     "/secret/flow?run=0&step=x", "/secret/../config.toml"],
)  # fmt: skip
def test_nothing_else_is_there(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_may_ask_its_server_alone(client: TestClient) -> None:
    page = client.get("/secret/").text
    assert "connect-src 'self'" in page
    assert '"live":"/secret/"' in page


@nightly("ten thousand steps, a run to follow; by day the same page follows a short one")
def test_ten_thousand_steps_stay_responsive(tmp_path: Path) -> None:
    """Bounded waits, compared with what all of it takes on the same machine."""
    folder = make_run(tmp_path / "long", steps=0, end=None)
    steps = range(1, 10_001)
    write_rows(folder / "metrics.jsonl", [step_row(step) for step in steps])
    write_rows(folder / "events.jsonl", [row for step in steps for row in (span_rows(step), flow_row(step))])
    write_rows(folder / "rollouts.jsonl", [rollout_row(step, step, 0) for step in steps])
    client, change, is_more = TestClient(build_app([Watched(folder, None)], "secret")), "-1", True
    start_s = time.monotonic()
    while is_more:
        news = client.get(f"/secret/news?run=0&change={change}").json()
        change, is_more = news["change"], news.get("more", False)
    all_s = time.monotonic() - start_s
    add_step(folder, 10_001)
    start_s = time.monotonic()
    news = client.get(f"/secret/news?run=0&change={change}&after=10000").json()
    assert news["series"]["step"] == [10_001.0]
    assert time.monotonic() - start_s < all_s / 4, "it is not all read again"
    assert len(client.get(f"/secret/news?run=0&change={change}&after=10000").content) < 300_000


def test_the_command_only_reads_and_ends_with_ctrl_c(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    command = [sys.executable, "-m", "llamarl", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_PROXY": "*"}) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/([\w-]{20,})/", process.stdout.readline())
            assert found
            own, others = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, process.pid))
            assert others == 19 > own, "a run goes first"
            with urllib.request.urlopen(found[0], timeout=START_S) as answer:
                assert b"llamarl" in answer.read()
            with pytest.raises(OSError, match="404"):
                urllib.request.urlopen(found[0].replace(found[1], "x" * 24), timeout=START_S)
            process.send_signal(signal.SIGINT)
            process.wait(END_S)
        finally:
            process.kill()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@nightly("ten thousand steps, a run to follow; by day the same page follows a short one")
def test_a_page_lives_as_long_as_its_run(folder: Path) -> None:
    """Also of one that is killed, and can say nothing any more."""
    with watching(folder) as said:
        address = said.split()[-1]
        with urllib.request.urlopen(address, timeout=START_S) as answer:
            assert b"llamarl" in answer.read()
    assert not is_answered(address)
    program = f"""if True:
        import signal, sys
        from pathlib import Path
        from llamarl.parts.page.cli.watch import watching
        with watching(Path({str(folder)!r})) as said:
            print(said, flush=True)
            signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        address = run.stdout.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=START_S) as answer:
            assert answer.status == 200
        run.kill()
    until_s = time.monotonic() + END_S
    while is_answered(address):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def is_answered(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=START_S).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import time; time.sleep(600)"])
def test_a_page_that_does_not_begin_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(watch, "dependent", lambda _: [sys.executable, "-c", program])
    monkeypatch.setattr(watch, "START_S", 0.5)
    start_s = time.monotonic()
    with watching(folder) as said:
        assert f"does not answer; the run continues without it, try llamarl watch {folder}" in said
    assert time.monotonic() - start_s < END_S


def processor_s(pid: int) -> float:
    """Processor time of a process, in seconds: other than waits, it does not depend on what else runs."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@nightly("160,000 rollouts are written and read")
def test_a_long_run_takes_little_memory(tmp_path: Path) -> None:
    """10,000 steps of 16 rollouts and a run that goes on, in a process of its own that two pages ask."""
    folder, many = (
        make_run(tmp_path / "long", steps=0, end=None),
        {f"extra.metric_{one}": 0.1 * one for one in range(50)},
    )
    write_rows(folder / "metrics.jsonl", [step_row(step, **many) for step in range(1, 10_001)])
    for step in range(1, 10_001):
        write_rows(folder / "events.jsonl", [span_rows(step), flow_row(step)])
        write_rows(folder / "rollouts.jsonl", [rollout_row(step, step, index) for index in range(16)])
    command = [sys.executable, "-m", "llamarl", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_PROXY": "*"}) as process:
        try:
            assert process.stdout is not None
            address, changes = process.stdout.readline().split()[-1], ["-1", "-1"]
            until_s = time.monotonic() + 400
            while "of 160,000 searched" not in ask(address, "rollouts?run=0&step=1")["said"]:
                assert time.monotonic() < until_s, "it does not catch up"
                time.sleep(0.5)
            start_s = processor_s(process.pid)
            for step in range(10_001, 10_021):
                write_rows(folder / "metrics.jsonl", [step_row(step, **many)])
                for page, change in enumerate(changes):
                    changes[page] = ask(address, f"news?run=0&change={change}&after={step - 1}")["change"]
                time.sleep(0.2)
            taken_s = processor_s(process.pid) - start_s
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert int(peak_kib) < MAX_MIB << 10
    assert taken_s < 40 * ANSWER_S, f"{taken_s:.1f} s"


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=240) as answer:
        return json.load(answer)


def test_two_pages_see_the_same(run: Watched, folder: Path) -> None:
    """Also a page that has asked before."""
    clients = [TestClient(build_app([run], "secret")) for _ in range(2)]
    change = clients[0].get("/secret/news?run=0&change=-1").json()["change"]
    write_rows(folder / "events.jsonl", [{"kind": "warning", "at_s": 1.7e9 + 50, "text": "slow"}])
    for client, known in zip(clients, (change, "-1"), strict=True):
        assert ["warning", 50.0, "slow"] in client.get(f"/secret/news?run=0&change={known}").json()["texts"]
