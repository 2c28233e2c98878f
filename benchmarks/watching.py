"""What a run loses while `llamarl watch` shows it: the demo, watched and unwatched in turns.

    python benchmarks/watching.py [--pairs 24] [--turn-s 10] [--pages 2]

One run with a learning rate of nearly 0, so that its steps stay alike, and beside it one `watch` process, which so many
pages ask as a browser does, on a connection that is kept, every 1.2 s. Watching is stopped (SIGSTOP) and goes on
(SIGCONT) in turns, ABBA: each pair is of turns beside each other, so that whatever else the machine does meets both. Of
a turn count the steps that lie in it as a whole, by the tokens that they trained per second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from _record import write_result

ROOT = Path(__file__).parents[1]
SKIPPED_S = 1.0
"""Of each turn, at its beginning: what was written meanwhile is read at once."""
ASK_S, START_S, STEPS = 1.2, 240.0, 100_000
Turn = tuple[bool, float, float]
"""Whether it was watched, and from when to when, seconds since the epoch."""


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that grows."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] if path.exists() else []


def page(address: str, is_over: threading.Event) -> None:
    """Asks as a page does."""
    parts, change, after = urlsplit(address), "-1", 0.0
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)

    def ask(path: str) -> Any:
        connection.request("GET", parts.path + path)
        return json.load(connection.getresponse())

    while ask("rollouts?run=0")["more"]:
        pass
    while not is_over.wait(ASK_S):
        news = ask(f"news?run=0&change={change}&after={after}")
        change, after = news["change"], ([after, *news.get("series", {}).get("step", ())])[-1]


def take_turns(run: Path, pairs: int, turn_s: float, num_pages: int) -> tuple[list[Turn], float]:
    """Watched and not, beside each other; and the share of one core that watching takes."""
    command, turns, is_over = [sys.executable, "-m", "llamarl", "watch", str(run)], list[Turn](), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert watch.stdout is not None
            address = watch.stdout.readline().split()[-1]
            pages = [threading.Thread(target=page, args=(address, is_over)) for _ in range(num_pages)]
            for one in pages:
                one.start()
            time.sleep(turn_s)
            before_s = cpu_s(watch.pid)
            for number in range(2 * pairs):
                is_watched = number % 4 in (0, 3)
                watch.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
                start_s = time.time()
                time.sleep(turn_s)
                turns.append((is_watched, start_s + SKIPPED_S, time.time()))
            watch.send_signal(signal.SIGCONT)
            share = (cpu_s(watch.pid) - before_s) / (pairs * turn_s)
            is_over.set()
            for one in pages:
                one.join()
        finally:
            is_over.set()
            watch.kill()
    return turns, share


def cpu_s(pid: int) -> float:
    """That a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_per_s(steps: Sequence[tuple[float, float, float]], turn: Turn) -> float:
    """Of steps (begin, end, tokens) that lie in a turn."""
    _, start_s, end_s = turn
    inside = [step for step in steps if start_s <= step[0] and step[1] <= end_s]
    return sum(tokens for *_, tokens in inside) / sum(end - begin for begin, end, _ in inside)


def measured(run: Path, turns: Sequence[Turn]) -> dict[str, Any]:
    """Ratios of speeds, watched over unwatched, a pair each."""
    ends = {row["step"]: row["trained_s"] for row in rows(run / "events.jsonl") if row["kind"] == "flow"}
    trained = {row["step"]: row for row in rows(run / "metrics.jsonl") if row["kind"] == "step"}
    steps = [
        (ends[step - 1], ends[step], trained[step]["num_loss_tokens"])
        for step in sorted(trained)
        if step in ends and step - 1 in ends
    ]
    ratios = list[float]()
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        watched, unwatched = (first, second) if first[0] else (second, first)
        ratios.append(tokens_per_s(steps, watched) / tokens_per_s(steps, unwatched))
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "standard_error": round(1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "steps": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--turn-s", type=float, default=10.0, help="of each half of a pair")
    parser.add_argument("--pages", type=int, default=2, help="that ask, as browsers do")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--output", folder, "--steps", str(STEPS), "--trainer.learning_rate", "1e-9",
                    "--eval.every_steps", "0", "--checkpoint.every_steps", "0", "--screen.kind", "none"]  # fmt: skip
        command = [sys.executable, "-m", "llamarl", "train", "configs/demo.toml", *settings]
        run, until_s = Path(folder, "demo"), time.monotonic() + START_S
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}) as training:
            try:
                while len(rows(run / "metrics.jsonl")) < 5:
                    assert training.poll() is None, "the run has ended"
                    assert time.monotonic() < until_s, "the run does not begin"
                    time.sleep(1)
                turns, share = take_turns(run, options.pairs, options.turn_s, options.pages)
            finally:
                training.send_signal(signal.SIGINT)
                training.wait(60)
        figures = measured(run, turns) | {"core_share": round(share, 4)}
    settings_of = {"pairs": options.pairs, "turn_s": options.turn_s, "pages": options.pages}
    notes = [
        "`core_share`: of one core, that the watching process takes while it is not stopped.",
        "`ratio`: trained tokens per second, watched over unwatched, the median of the pairs; below 1 watching costs.",
    ]
    print(json.dumps(figures, indent=2))
    print(write_result("watching", settings_of, figures, notes))


if __name__ == "__main__":
    main()
