"""`VllmServer`: a vLLM server in a separate process and interpreter, behind a Unix socket. No torch."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import llamarl
from llamarl.child import Child
from llamarl.config import ConfigError, open_own
from llamarl.config.ref import may_run
from llamarl.config.section import PLACED, named_devices
from llamarl.models.folder import load_shape
from llamarl.observability.spans import stage
from llamarl.parts.vllm import plugin as vllm_plugin

CONTROL_TIMEOUT_S = 120.0
"""Maximum seconds for an answer that is not a rollout."""
LOG_LINES = 15
TOKENIZER_FILE = "tokenizer.json"
NEEDED = ("vllm", "numpy", "xxhash")
"""Packages of vLLM's environment."""


class VllmFailed(RuntimeError):
    """The server did not start, died, or refused a request. The message ends with the end of its log."""


class VllmRefused(VllmFailed):
    """The server refused a request and continues to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """Options of one vLLM server."""

    python: str
    """Interpreter of the environment that has vLLM."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cpu"
    """`cpu`; `cuda` for all visible GPUs, `cuda:1` for one of them."""
    max_running: int = 64
    """Rollouts that are decoded in parallel."""
    prefill_tokens: int = 512
    """Tokens of one step, including prompts, in addition to one token per running rollout."""
    kv_bytes: int | None = None
    """Bytes of the KV cache. None means 1 GiB on a CPU, and vLLM's default on a GPU."""
    kv_dtype: str = "auto"
    """vLLM's name for the data type of the KV cache."""
    threads: int = 1
    """OpenMP threads on a CPU."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """Whether a weight update keeps or recomputes the KV cache of running rollouts."""
    seed: int = 0
    """Seed of the server's noise. Replicas need different seeds."""
    start_timeout_s: float = 300.0
    log_path: str | None = None
    """File for the server's output. None means a folder that is removed with the server."""
    arguments: tuple[str, ...] = ()
    """Further arguments for `vllm serve`, such as `--tensor-parallel-size 2`."""


class VllmServer:
    """One `vllm serve` process and its socket. Answers from any thread. Ends when this process ends, also when it
    crashes."""

    def __init__(self, model_path: str | Path, settings: VllmSettings, command: Sequence[str] = ()) -> None:
        """
        Args:
            command: runs this instead of `vllm serve MODEL ...`, with `--uds PATH` appended.

        Raises:
            ConfigError: the interpreter or the device does not exist.
            VllmFailed: the server did not answer within `start_timeout_s`.
        """
        require_python(settings.python)
        visible = visible_devices(settings.device)
        self.name = f"vLLM server of {model_path}"
        self._scratch = Path(tempfile.mkdtemp(prefix="llamarl-vllm-"))
        self._socket = str(self._scratch / "socket")
        self.log_path = Path(settings.log_path or self._scratch / "log")
        command = list(command) or _command(Path(model_path), settings)
        with open_own(self.log_path, "wb") as log:
            self._keeper = Child(
                *("-I", vllm_plugin.__file__, str(self._scratch), *command, "--uds", self._socket),
                stdout=log, stderr=log, env=_environment(self._scratch, settings) | visible,
            )  # fmt: skip
        try:
            self._wait_until_healthy(settings.start_timeout_s)
        except BaseException:
            self.close()
            raise

    @stage("starts vLLM")
    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.require_alive()
            if time.monotonic() > deadline_s:
                self.fail(f"did not answer within {timeout_s:.0f} s; raise cluster.timeout_s")
            try:
                self._send("GET", "/health", None, CONTROL_TIMEOUT_S)
                return
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)

    def require_alive(self) -> None:
        """
        Raises:
            VllmFailed: the server has ended.
        """
        if self._keeper.has_ended():
            self.fail("has ended")

    def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        return self._answer("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """Sends a request. Returns the decoded answer.

        Raises:
            VllmFailed: an error status, no answer in time, or no server.
        """
        answer = self._answer("POST", path, json.dumps(body or {}).encode(), timeout_s)
        return json.loads(answer) if answer else None

    def _answer(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        try:
            status, answer = self._send(method, path, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            what = f"no answer within {timeout_s:.0f} s" if isinstance(error, TimeoutError) else repr(error)
            self.fail(f"did not do {path}: {what}", error)
        if status != 200:
            said = f"answered {path} with {status}: {answer[:500].decode(errors='replace')}"
            if status in (400, 422):
                raise VllmRefused(f"{self.name} {said}")
            self.fail(said)
        return answer

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(self._socket)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """
        Raises:
            VllmFailed: always.
        """
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        except FileNotFoundError:
            lines = []
        raise VllmFailed("\n".join((f"{self.name} {what}; the end of {self.log_path}:", *lines))) from cause

    def close(self) -> None:
        """Stops the server and everything it started."""
        self._keeper.end(vllm_plugin.GRACE_S + 5)
        shutil.rmtree(self._scratch, ignore_errors=True)


def check_python(python: str) -> None:
    """Raises ConfigError if this interpreter cannot be run or lacks a package that the adapter needs. Imports none of
    them."""
    may_run("generator.vllm.python", python)
    require_python(python)
    code = f"import importlib.util as u; print(*[n for n in {NEEDED} if u.find_spec(n) is None])"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"generator.vllm.python = {python!r} is not a Python interpreter that works: {error}"
        ) from None
    if missing := done.stdout.split():
        raise ConfigError(
            f"generator.vllm.python = {python!r} has no {' and no '.join(missing)}; name the interpreter of an "
            "environment that has, such as `make vllm` builds"
        )


def require_python(python: str) -> None:
    """Raises ConfigError if the interpreter cannot be run."""
    if shutil.which(python) is None:
        raise ConfigError(
            f"generator.vllm.python = {python!r} cannot be run; name the interpreter of an environment that has vLLM, "
            "such as `make vllm` builds"
        )


def visible_devices(device: str) -> dict[str, str]:
    """Returns the environment variables that make `device` the only visible GPU. Raises ConfigError."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    named = named_devices(device)
    if not named or PLACED in os.environ:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(max(named) + 1)]
    if len(names) <= max(named):
        raise ConfigError(f"generator.device = {device!r}, but CUDA_VISIBLE_DEVICES = {seen!r} has {len(names)} GPUs")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in named)}


def _command(model_path: Path, settings: VllmSettings) -> list[str]:
    kv_bytes = ["--kv-cache-memory-bytes", str(settings.kv_bytes)] if settings.kv_bytes else []
    tokenizer = [] if (model_path / TOKENIZER_FILE).is_file() else ["--skip-tokenizer-init"]
    return [
        settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path.absolute()),
        "--dtype", settings.dtype, "--max-num-seqs", str(settings.max_running),
        "--max-num-batched-tokens", str(settings.prefill_tokens + settings.max_running),
        "--max-model-len", str(load_shape(model_path).max_position_embeddings + 1),
        "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--kv-cache-dtype", settings.kv_dtype, "--generation-config", "vllm", "--seed", str(settings.seed),
        "--weight-transfer-config", '{"backend": "llamarl"}',
        "--worker-extension-cls", f"{vllm_plugin.__name__}.WorkerExtension",
        "--disable-uvicorn-access-log", *kv_bytes, *tokenizer, *settings.arguments,
    ]  # fmt: skip


def _environment(scratch: Path, settings: VllmSettings) -> dict[str, str]:
    """Returns variables that put this package and the plugin's entry point, and nothing else, on vLLM's PYTHONPATH."""
    found = scratch / "found"
    metadata = found / "llamarl_vllm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llamarl-vllm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(vllm_plugin.ENTRY_POINT)
    (found / "llamarl").symlink_to(Path(llamarl.__file__).parent, target_is_directory=True)
    wanted = {
        "PYTHONPATH": str(found),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for reinforcement learning
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one beyond the context, to score a sequence that fills it
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if plugins := os.environ.get("VLLM_PLUGINS"):
        wanted["VLLM_PLUGINS"] = f"{plugins},llamarl"
    if settings.kv_bytes is None:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
    own = {"PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in own} | wanted
