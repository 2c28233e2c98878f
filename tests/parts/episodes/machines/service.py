"""A service of machines that `remote` asks, made of bubblewrap: `python -m tests.parts.episodes.machines.service`."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import compare_digest, token_hex
from typing import Any

from llamarl.config import ConfigError
from llamarl.parts.episodes.machines import CommandResult, Machine, MachineBackend, MachineLimits, MachineLost
from llamarl.parts.episodes.machines.bubblewrap import Bubblewrap

MAX_BODY_BYTES = 1 << 28


class Service(ThreadingHTTPServer):
    """Answers on the loopback. Each request has a thread."""

    daemon_threads = True

    def __init__(self, backend: MachineBackend, token: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.backend, self.token = backend, token
        self.machines = dict[str, Machine]()
        self._until_s = dict[str, tuple[float, float]]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def machine(self, name: str) -> Machine:
        """Returns a machine, which then has `idle_s` more. Raises MachineLost."""
        if name not in self.machines:
            raise MachineLost("there is no such machine")
        idle_s, _ = self._until_s[name]
        self._until_s[name] = idle_s, time.monotonic() + idle_s
        return self.machines[name]

    def start(self, body: dict[str, Any]) -> dict[str, Any]:
        self.end_idle()
        name, idle_s = token_hex(16), float(body["idle_s"])
        self.machines[name] = self.backend.start(None, MachineLimits(**body["limits"]))
        self._until_s[name] = idle_s, time.monotonic() + idle_s
        return {"machine": name}

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        return _as_json(self.machine(body["machine"]).run(body["command"], body["s"], body["cap"]))

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return _as_json(self.machine(body["machine"]).ask(body["program"], body["text"], body["s"], body["cap"]))

    def get(self, body: dict[str, Any]) -> bytes:
        return self.machine(body["machine"]).get(body["paths"], body["cap"])

    def close(self, body: dict[str, Any]) -> dict[str, Any]:
        if (machine := self.machines.pop(body["machine"], None)) is not None:
            machine.close()
        return {}

    def end_idle(self) -> None:
        """Ends the machines for which nobody has asked in time."""
        for name in [name for name in list(self.machines) if self._until_s[name][1] < time.monotonic()]:
            self.close({"machine": name})


def _as_json(result: CommandResult) -> dict[str, Any]:
    output = base64.b64encode(result.output).decode()
    return {"code": result.code, "is_late": result.is_late, "total": result.total, "output": output}


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        if not compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {self.server.token}".encode()):
            return self._answer(401, b"the token is wrong")
        if size > MAX_BODY_BYTES:
            return self._answer(413, b"the request is too large")
        body, path = self.rfile.read(size), self.path.strip("/")
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            name: getattr(self.server, name) for name in ("start", "run", "ask", "get", "close")
        }
        try:
            if path == "put":
                self.server.machine(self.headers["Machine"]).put(body)
                return self._answer(200, b"{}")
            if path not in calls:
                return self._answer(404, b"there is no such path")
            answer = calls[path](json.loads(body))
            return self._answer(200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        except MachineLost as lost:
            return self._answer(410, str(lost).encode())
        except (ConfigError, ValueError, LookupError, TypeError) as error:
            return self._answer(400, str(error).encode())
        except OSError as error:
            return self._answer(413 if path == "put" else 503, str(error).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with Service(Bubblewrap(), os.environ["LLAMARL_MACHINES_TOKEN"], port=8090) as service:
        service.serve_forever()
