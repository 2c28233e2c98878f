"""How long others wait at `llamarl serve` while long calls are read, and which callbacks of its event loop are slow.

    python benchmarks/gateway_latency.py [--rounds 5] [--context 65536]

A tiny model of random weights with a long context is served. For each kind of call, one client sends it round after
round, and another one asks for `/health` meanwhile, every few milliseconds on a connection that is kept. In the server
each callback of the event loop is timed, waits for the interpreter's lock included. What is too long for the context is
refused after it was encoded, so nothing but reading is measured there; `stream` is answered to its end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from _record import write_result

from llamarl.data.sources.running_total import RunningTotal
from tests.end_to_end.tiny import make_model

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
HEALTH_S, SLOW_S, CALL_S = 0.005, 0.05, 300.0
SERVE = f"""
import asyncio, sys, time
run = asyncio.Handle._run
def timed(handle):
    start_s = time.perf_counter()
    run(handle)
    if (took_s := time.perf_counter() - start_s) > {SLOW_S}:
        print(f"slow {{took_s:.4f}} {{handle!r:.300}}", file=sys.stderr, flush=True)
asyncio.Handle._run = timed
from llamarl.parts.episodes.cli.serve import main
sys.exit(main(sys.argv[1:]))
"""


def calls() -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each kind."""
    text = " ".join(row.question for row in RunningTotal(count=1000))
    text *= (1 << 20) // len(text) + 1

    def chat(*contents: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": one} for one in contents]}

    return {
        "nothing": ("chat/completions", chat("Roy has 3 apples") | {"max_tokens": 8}),
        "chat of 1 MiB": ("chat/completions", chat(text[: 1 << 20])),
        "chat of 20,000 messages": ("chat/completions", chat(*["Roy has 3 apples"] * 20_000)),
        "chat of 2,048 messages": ("chat/completions", chat(*[text[:400]] * 2048)),
        "prompt of 1 MiB": ("completions", {"prompt": text[: 1 << 20]}),
        "prompt of 1 MiB without a space": ("completions", {"prompt": text[: 1 << 20].replace(" ", "")}),
        "prompt of 100,000 tokens": ("completions", {"prompt": [5] * 100_000}),
        "stream": ("completions", {"prompt": text[:2000], "max_tokens": 512, "stream": True, "logprobs": 0, "n": 4}),
    }


def ask(connection: http.client.HTTPConnection, path: str, data: bytes) -> int:
    connection.request("POST", f"/v1/{path}", data, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    return reply.status


def health(address: str, is_over: threading.Event, took_s: list[float]) -> None:
    connection = http.client.HTTPConnection(address, timeout=CALL_S)
    while not is_over.wait(HEALTH_S):
        start_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took_s.append(time.perf_counter() - start_s)


def measure(address: str, path: str, body: dict[str, Any], rounds: int, errors: Path) -> dict[str, Any]:
    connection, data = http.client.HTTPConnection(address, timeout=CALL_S), json.dumps(body).encode()
    is_over, took_s, calls_s, statuses = threading.Event(), list[float](), list[float](), set[int]()
    before = errors.stat().st_size
    asking = threading.Thread(target=health, args=(address, is_over, took_s))
    asking.start()
    for _ in range(rounds):
        start_s = time.perf_counter()
        statuses.add(ask(connection, path, data))
        calls_s.append(time.perf_counter() - start_s)
    time.sleep(20 * HEALTH_S)
    is_over.set()
    asking.join()
    slow = re.findall(r"^slow (\S+) (.*)$", errors.read_text(encoding="utf-8")[before:], re.MULTILINE)
    ordered = sorted(1000 * one for one in took_s)
    return {
        "statuses": sorted(statuses),
        "body_bytes": len(data),
        "call_s": round(statistics.median(calls_s), 4),
        "health_ms": {
            "median": round(statistics.median(ordered), 2),
            "p99": round(ordered[int(0.99 * len(ordered))], 2),
            "max": round(ordered[-1], 2),
            "count": len(ordered),
        },
        "slow_callbacks": [{"s": float(seconds), "what": what} for seconds, what in slow],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of call")
    parser.add_argument("--context", type=int, default=65536, help="tokens; a text has at most 32 characters for each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, errors = make_model(Path(folder) / "model", context=options.context), Path(folder) / "errors"
        (model / "chat_template.jinja").write_text(TEMPLATE)
        command = [sys.executable, "-c", SERVE, str(model), "--port", "0", "--generator.max_running", "8"]
        with (
            errors.open("w") as log,
            subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log,
                text=True,
            ) as server,
        ):  # fmt: skip
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                assert line, f"the server does not begin: {errors.read_text(encoding='utf-8')}"
                address = urlsplit(line.split()[-1]).netloc
                figures = {
                    kind: measure(address, path, body, options.rounds, errors) for kind, (path, body) in calls().items()
                }
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(60)
    worst = {
        "health_max_ms": max(one["health_ms"]["max"] for one in figures.values()),
        "slow_callbacks": sum(len(one["slow_callbacks"]) for one in figures.values()),
    }
    notes = [
        f"`slow_callbacks`: of the server's event loop, over {1000 * SLOW_S:.0f} ms.",
        "`health_ms`: of GET /health by another client, while the calls of a kind were sent one after the other.",
        "Bars, on idle cores: no slow callback, and no answer of /health after more than 100 ms.",
    ]
    print(json.dumps(figures | {"worst": worst}, indent=2))
    settings = {"rounds": options.rounds, "context": options.context}
    print(write_result("gateway-latency", settings, {"calls": figures, "worst": worst}, notes))


if __name__ == "__main__":
    main()
