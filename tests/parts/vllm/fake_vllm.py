"""The routes of vLLM that the adapter uses, in front of one of two models.

    python fake_vllm.py [die] [--model FOLDER --seed N ...] --uds SOCKET

With `--model`, as in the adapter's own command, it is the package's `Transformer`, which takes over weights by the
plugin's `Receiver` and samples: runs can be tested. Without, the next token is the sum of all before, modulo 96, and
takes 2 ms; its log-probability is minus its hundredth; token 95 is sampled with one that is not finite; prompts that
begin with token 90 are refused. `die` ends at once. No token is sampled while paused.
"""

from __future__ import annotations

import base64
import json
import pickle
import socketserver
import sys
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

STATE: dict[str, Any] = {"version": "default", "paused": False, "tokens": 0}
ABORTED = set[str]()
NOT_FINITE = 95
SUPERSEDED = 66
"""A version that cannot be fetched."""
LOCK = threading.Lock()
"""Sampling, pausing and loading, one at a time."""


class Sums:
    """No model."""

    token_s = 0.002
    fetched: int | None = None

    def next(self, fed: list[int], temperature: float) -> tuple[int, float]:
        token = sum(fed) % 96
        return token, -9999.0 if token == NOT_FINITE else -token / 100

    def score(self, ids: list[int]) -> list[float]:
        return [-token / 100 for token in ids[1:]]

    def fetch(self, info: dict[str, Any]) -> None:
        self.fetched = info["version"]

    def state(self) -> dict[str, Any]:
        late = self.fetched == SUPERSEDED
        error = base64.b64encode(pickle.dumps(RuntimeError("superseded"))).decode() if late else ""
        return {"fetching": False, "version": self.fetched, "error": error, "fingerprint": "", "num_bytes": 0}

    def load(self, version: int) -> None:
        assert version == self.fetched

    def remove_ids(self, spans: str) -> None:
        pass


class Model:
    """The model in a folder."""

    token_s = 0.0

    def __init__(self, folder: str, seed: int) -> None:
        import torch

        from llamarl.models.hf import load_model
        from llamarl.models.masking import UnusedIds
        from llamarl.parts.vllm.plugin import Receiver

        torch.set_num_threads(1)
        self._model = load_model(folder, torch.float32, "cpu")
        self._model.unused_ids = UnusedIds(())  # vLLM knows of none
        self.removed: list[list[int]] = []
        self._noise = torch.Generator().manual_seed(seed)
        self._receiver = Receiver()
        self._receiver.parallel_config = SimpleNamespace(rank=0)
        self._receiver.model = SimpleNamespace(load_weights=self._copy)

    def next(self, fed: list[int], temperature: float) -> tuple[int, float]:
        import torch

        logits_V = self._logits(fed)[-1]
        logprobs_V = torch.log_softmax(logits_V / temperature if temperature else logits_V, -1)
        if temperature:
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=self._noise))
        else:
            token = int(logits_V.argmax())
        return token, float(logprobs_V[token])

    def score(self, ids: list[int]) -> list[float]:
        import torch

        logprobs_T_V = torch.log_softmax(self._logits(ids[:-1]), -1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_T_V, ids[1:], strict=True)]

    def _logits(self, ids: list[int]) -> Any:
        import torch

        from llamarl.models.attention import causal_attend

        with torch.inference_mode():
            hidden = self._model(torch.tensor(ids), torch.arange(len(ids)), causal_attend([len(ids)]))
            logits = self._model.logits(hidden)
            for first, stop in self.removed:
                logits[:, first:stop] = -float("inf")
            return logits

    def fetch(self, info: dict[str, Any]) -> None:
        from llamarl.parts.vllm.plugin import InitInfo

        self._receiver.init_transfer_engine(InitInfo(**info))

    def state(self) -> dict[str, Any]:
        return self._receiver.state()

    def remove_ids(self, spans: str) -> None:
        self.removed = json.loads(spans)

    def load(self, version: int) -> None:
        from llamarl.parts.vllm.plugin import UpdateInfo

        self._receiver.receive_weights(UpdateInfo(version))

    def _copy(self, weights: Iterable[tuple[str, Any]]) -> None:
        import torch

        with torch.no_grad():
            for name, weight in weights:
                self._model.get_parameter(name).copy_(weight)


def generate(model: Sums | Model, body: dict[str, Any]) -> dict[str, Any]:
    sampling, fed, versions, logprobs = body["sampling_params"], list(body["token_ids"]), [], []
    start, reason = len(fed), "length"
    while len(fed) - start < sampling["max_tokens"]:
        if f"generate-tokens-{body.get('request_id')}" in ABORTED:
            reason = "abort"
            break
        time.sleep(0.002 if STATE["paused"] else model.token_s)
        with LOCK:
            if STATE["paused"]:
                continue
            token, logprob = model.next(fed, sampling["temperature"])
            versions.append(STATE["version"])
            STATE["tokens"] += 1
        fed.append(token)
        logprobs.append(logprob)
        if token in sampling.get("stop_token_ids", []):
            reason = "stop"
            break
    new = fed[start:]
    borders = [i for i in range(len(new)) if i == 0 or versions[i] != versions[i - 1]]
    spans = [
        {"version": versions[a], "start": a, "end": b}
        for a, b in zip(borders, [*borders[1:], len(new)], strict=True)
    ]  # fmt: skip
    content = [{"token_id": t, "logprob": logprob} for t, logprob in zip(new, logprobs, strict=True)]
    choice = {"token_ids": new, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
    result: dict[str, Any] = {"choices": [choice]}
    if "prompt_logprobs" in sampling:
        ids = body["token_ids"]
        with LOCK:
            scores = model.score(ids)
        scored = [{str(t): {"logprob": s}} for t, s in zip(ids[1:], scores, strict=True)]
        result["prompt_logprobs"] = [None, *scored]
    return result


def answer(model: Sums | Model, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/inference/v1/generate":
        if body["token_ids"][0] == 90 and isinstance(model, Sums):
            return 400, {"error": {"message": "no such prompt"}}
        return 200, generate(model, body)
    if path == "/collective_rpc" and body["method"] == "remove_ids":
        model.remove_ids(*body["args"])
        return 200, {"results": [None]}
    if path == "/collective_rpc":
        return 200, {"results": [model.state()]}
    if path == "/init_weight_transfer_engine":
        model.fetch(body["init_info"])
        return 200, {}
    if path == "/abort_requests":
        assert body["request_ids"], "an empty list would abort everything"
        ABORTED.update(body["request_ids"])
        return 200, {}
    with LOCK:
        if path == "/update_weights":
            assert STATE["paused"]
            model.load(body["update_info"]["version"])
        else:
            STATE.update(
                {
                    "/pause": lambda: {"paused": query["mode"] == ["keep"]},
                    "/resume": lambda: {"paused": False},
                    "/start_weight_update": dict,
                    "/finish_weight_update": lambda: {"version": body["weight_version"]},
                    "/update_weight_version": lambda: {"version": body["new_version"]},
                }[path]()
            )
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        metrics = f'# HELP x\nvllm:generation_tokens_total{{engine="0"}} {float(STATE["tokens"])}\n'
        self._send(200, metrics.encode() if self.path == "/metrics" else b"")

    def do_POST(self) -> None:
        url = urlparse(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, result = answer(self.server.model, url.path, parse_qs(url.query), body)
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
    model: Sums | Model


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    if "die" in sys.argv:
        sys.exit("cannot find a device")
    model = Model(option("--model"), int(option("--seed"))) if "--model" in sys.argv else Sums()
    with Server(option("--uds"), Handler) as server:
        server.model = model
        server.serve_forever()
