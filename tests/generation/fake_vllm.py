"""The routes of vLLM that the adapter uses, without a model: the next token is the sum of all before, modulo 96.

    python fake_vllm.py [die] --uds SOCKET

Each token takes 2 ms, and none is sampled while paused. Log-probability of a token: minus its hundredth; token 95 is
sampled with a log-probability that is not finite. Prompts that begin with token 90 are refused. `die` ends at once.
"""

from __future__ import annotations

import base64
import json
import pickle
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlparse

STATE: dict[str, Any] = {"version": "default", "paused": False, "tokens": 0, "fetched": None}
ABORTED = set[str]()
NOT_FINITE = 95
SUPERSEDED = 66
"""A version that cannot be fetched."""


def generate(body: dict[str, Any]) -> dict[str, Any]:
    sampling, fed, versions = body["sampling_params"], list(body["token_ids"]), []
    start, reason = len(fed), "length"
    while len(fed) - start < sampling["max_tokens"]:
        if f"generate-tokens-{body.get('request_id')}" in ABORTED:
            reason = "abort"
            break
        time.sleep(0.002)
        if STATE["paused"]:
            continue
        fed.append(sum(fed) % 96)
        versions.append(STATE["version"])
        STATE["tokens"] += 1
        if fed[-1] in sampling.get("stop_token_ids", []):
            reason = "stop"
            break
    new = fed[start:]
    borders = [i for i in range(len(new)) if i == 0 or versions[i] != versions[i - 1]]
    spans = [
        {"version": versions[a], "start": a, "end": b}
        for a, b in zip(borders, [*borders[1:], len(new)], strict=True)
    ]  # fmt: skip
    content = [{"token_id": t, "logprob": -9999.0 if t == NOT_FINITE else -t / 100} for t in new]
    prompt = [None, *({str(t): {"logprob": -t / 100}} for t in body["token_ids"][1:])]
    choice = {"token_ids": new, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
    return {"choices": [choice], "prompt_logprobs": prompt}


def answer(path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/inference/v1/generate":
        if body["token_ids"][0] == 90:
            return 400, {"error": {"message": "no such prompt"}}
        return 200, generate(body)
    if path == "/collective_rpc":
        late = STATE["fetched"] == SUPERSEDED
        error = base64.b64encode(pickle.dumps(RuntimeError("superseded"))).decode() if late else ""
        return 200, {"results": [{"fetching": False, "version": STATE["fetched"], "error": error}]}
    if path == "/abort_requests":
        assert body["request_ids"], "an empty list would abort everything"
        ABORTED.update(body["request_ids"])
    elif path == "/update_weights":
        assert STATE["paused"]
        assert body["update_info"]["version"] == STATE["fetched"]
    else:
        STATE.update(
            {
                "/pause": lambda: {"paused": query["mode"] == ["keep"]},
                "/resume": lambda: {"paused": False},
                "/start_weight_update": dict,
                "/finish_weight_update": lambda: {"version": body["weight_version"]},
                "/update_weight_version": lambda: {"version": body["new_version"]},
                "/init_weight_transfer_engine": lambda: {"fetched": body["init_info"]["version"]},
            }[path]()
        )
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        metrics = f'# HELP x\nvllm:generation_tokens_total{{engine="0"}} {float(STATE["tokens"])}\n'
        self._send(200, metrics.encode() if self.path == "/metrics" else b"")

    def do_POST(self) -> None:
        url = urlparse(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, result = answer(url.path, parse_qs(url.query), body)
        self._send(status, json.dumps(result).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "adapter"

    def log_message(self, *args: object) -> None:
        """Quiet."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    if "die" in sys.argv:
        sys.exit("cannot find a device")
    with Server(sys.argv[-1], Handler) as server:
        server.serve_forever()
