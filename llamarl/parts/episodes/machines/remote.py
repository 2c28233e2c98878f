"""Machines of a service, over HTTP. Each request is a POST with the token of the service.

    /start   {"limits": {...}, "idle_s": ...}                     -> {"machine": id}
    /run     {"machine": id, "command": ..., "s": ..., "cap": ...}  -> {"code", "is_late", "total", "output": base64}
    /ask     {"machine": id, "program": ..., "text": ..., "s": ..., "cap": ...} -> the same
    /put     a tar archive, with the header `Machine: id`         -> {}
    /get     {"machine": id, "paths": [...], "cap": ...}          -> a tar archive
    /close   {"machine": id}                                      -> {}

Status 410 says that the machine ended, hung or exceeded a limit, and 413 that files do not fit. 400 to 404 say that the
settings are wrong, and any other status that the service has failed. The body is then the reason.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError

from pydantic import Field

from llamarl.config import ConfigError
from llamarl.parts.episodes.machines._base import (
    CommandResult,
    Machine,
    MachineBackend,
    MachineLimits,
    MachineLost,
    pack_folder,
)
from llamarl.parts.episodes.machines._connection import FILES_S, GRACE_S

START_S = 60.0
"""Maximum seconds until a machine is ready."""
_LOST, _MISCONFIGURED = 410, (400, 401, 403, 404)
_HEAD_BYTES = 1 << 12
_TAR_BYTES_PER_FILE = 2048


@dataclass
class Remote(MachineBackend):
    """Asks a service for machines, whose protocol is in `llamarl/parts/episodes/machines/remote.py`. The service
    enforces the limits."""

    url: str
    """Address of the service, for example `https://machines.example.com/v1`."""
    token: str = "LLAMARL_MACHINES_TOKEN"
    """Name of the environment variable that has the token of the service."""
    idle_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds without a request after which the service ends a machine, for example that of a killed run."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} must begin with http:// or https://")

    def problem(self) -> str:
        try:
            self.start(None, MachineLimits()).close()
        except (OSError, ConfigError, MachineLost) as error:
            return str(error)
        return ""

    def start(self, folder: str | None, limits: MachineLimits) -> Machine:
        if folder and not os.path.isdir(folder):
            raise ConfigError(f"{folder} is not a folder that a machine can be given")
        answer = self.ask("start", {"limits": asdict(limits), "idle_s": self.idle_s}, START_S)
        with _protocol():
            machine = _RemoteMachine(self, str(json.loads(answer)["machine"]))
        if folder:
            try:
                machine.put(pack_folder(folder))
            except BaseException:
                machine.close()
                raise
        return machine

    def ask(
        self, path: str, body: dict[str, Any] | bytes, s: float, most: int = _HEAD_BYTES, machine: str = ""
    ) -> bytes:
        """Returns the answer of the service, at most `most` bytes. Raises ConfigError, MachineLost or OSError."""
        if not (token := os.environ.get(self.token)):
            raise ConfigError(f"the environment variable {self.token} has no token of the service {self.url}")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream", "Machine": machine}
        if isinstance(body, dict):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", body, headers, method="POST")
        try:
            with _OPENER.open(request, timeout=s) as reply:
                answer = reply.read(most + 1)
        except HTTPError as error:
            reason = f"the service of machines: {error.read(200).decode(errors='replace') or error}"
            if error.code == _LOST:
                raise MachineLost(reason) from None
            raise (ConfigError if error.code in _MISCONFIGURED else OSError)(reason) from None
        except HTTPException as error:
            raise OSError(f"the service of machines: {type(error).__name__}: {error}") from None
        if len(answer) > most:
            raise OSError(f"the service of machines answered with over {most} bytes")
        return answer


class _RemoteMachine(Machine):
    def __init__(self, service: Remote, name: str) -> None:
        self._service, self._name = service, name

    def run(self, command: str, s: float, cap: int) -> CommandResult:
        return self._result("run", {"command": command}, s, cap)

    def ask(self, program: str, text: str, s: float, cap: int) -> CommandResult:
        return self._result("ask", {"program": program, "text": text}, s, cap)

    def put(self, tar: bytes) -> None:
        self._service.ask("put", tar, FILES_S, machine=self._name)

    def get(self, paths: Sequence[str], cap: int) -> bytes:
        most = cap + (len(paths) + 10) * _TAR_BYTES_PER_FILE
        return self._service.ask("get", {"machine": self._name, "paths": [*paths], "cap": cap}, FILES_S, most)

    def close(self) -> None:
        with suppress(OSError, ConfigError, MachineLost):  # the service ends it after `idle_s`
            self._service.ask("close", {"machine": self._name}, GRACE_S)

    def _result(self, path: str, body: dict[str, Any], s: float, cap: int) -> CommandResult:
        body |= {"machine": self._name, "s": s, "cap": cap}
        answer = self._service.ask(path, body, s + 2 * GRACE_S, _HEAD_BYTES + 2 * cap)
        with _protocol():
            said = json.loads(answer)
            code, is_late, total = int(said["code"]), bool(said["is_late"]), int(said["total"])
            return CommandResult(code=code, is_late=is_late, output=base64.b64decode(said["output"]), total=total)


@contextmanager
def _protocol() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        reason = f"the service of machines answered otherwise than the protocol says: {type(error).__name__}: {error}"
        raise OSError(reason) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects are errors, so that no other server gets the token."""

    def redirect_request(self, *_: Any) -> None:  # type: ignore[override]
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
