"""`HostAgent`: represents one host of a run. It connects to the registry, answers it, and runs Monarch's worker loop.

If the controller is silent or the connection ends, the agent stops everything that the host started for it. It then
reconnects under a new identity and engine port, because Monarch never accepts an old one again.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import json
import math
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.checkpoint.keeper import MirrorKeeper
from llamarl.child import kill_group
from llamarl.cluster.engine_files import MEMORY, log_env, mirror_folder
from llamarl.cluster.handle import cause_of_reaped, killed_by
from llamarl.cluster.start_up import LIFELINE
from llamarl.config import ConfigError, open_own
from llamarl.config.hub import hub_name, open_hub
from llamarl.distributed.links import LOST_S
from llamarl.net.entrance import Entrance, listen
from llamarl.net.reasons import plain
from llamarl.observability.files import code_fingerprint
from llamarl.parts.hosts.certificates import client_context, monarch_env
from llamarl.parts.hosts.heartbeat import beat
from llamarl.parts.hosts.home import BLAST_S, BROKEN, HUNG_UP, MAX_LINE_BYTES, SILENT_S, Line, on_loop, own_inventory
from llamarl.run.placement import count_devices

CONTROLLER_SILENT_S = 4.0
"""Seconds without a message after which the agent gives up. Longer than the registry's limit, so that the registry
reports the loss first."""
ENGINE_S = 30.0
"""Maximum seconds for the engine to start."""
BACK_OFF_S = 0.3, 2.0
"""Initial and maximum seconds between attempts to connect."""
SAY_S = 60.0
"""Seconds after which the agent repeats why it reconnects."""
NAME_S = 10.0
"""Maximum seconds of a DNS lookup."""
DRAIN = signal.SIGUSR1
"""Signal that makes an agent leave in order, as `--drain` does."""
LEAVE_S = 100.0
"""Maximum seconds for the controller to release a host that asked to leave. Spot machines get two minutes' notice."""
LOG_BYTES = 64 << 10
"""Maximum bytes of one log per beat. A log that is behind by more than `LOG_BEHIND_BYTES` skips to its last bytes."""
LOG_BEHIND_BYTES = 4 << 20
LOG_TOTAL_BYTES = MAX_LINE_BYTES // 8
"""Maximum bytes of all logs per beat. JSON needs up to six characters per byte."""
REAPED_S, REAPED_LOOK_S = 0.5, 0.02
"""Maximum seconds for the engine to reap an ended process, so that the exit status is known, and polling interval."""
END_S = 3.0
"""Maximum seconds for killed processes to disappear."""
PR_SET_CHILD_SUBREAPER = 36


class HostRefused(ConfigError):
    """The controller rejected this host. The message has the reason."""


class WorkerLoop:
    """The worker loop and all processes that it started."""

    def __init__(self, address: str, env: dict[str, str], log: Path) -> None:
        self._reader, self._lifeline = os.pipe()
        code = "from llamarl.cluster.fork_server import begin; begin()\n"  # before slow imports
        code += "import sys; from llamarl.cluster.monarch import serve_host; serve_host(sys.argv[1])"
        with open_own(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, address],
                stdout=subprocess.PIPE, stderr=output, stdin=subprocess.DEVNULL,
                env={**os.environ, **env, **log_env(log.parent), LIFELINE: str(self._reader)}, pass_fds=(self._reader,),
            )  # fmt: skip

    def url(self) -> str:
        """Returns the address where the engine can be attached, once it is printed. Raises EOFError if the loop has
        ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the engine ended with exit code {self._process.wait()}; its log says why")
        return json.loads(line)["url"]

    def check(self) -> None:
        """Raises EOFError if the loop has ended."""
        if self._process.poll() is not None:
            raise EOFError("the engine has ended")
        _reap()

    def end(self) -> None:
        """Kills everything and waits a few seconds for it to end."""
        for descriptor in (self._lifeline, self._reader):
            os.close(descriptor)
        deadline_s = time.monotonic() + END_S
        while (found := descendants(os.getpid())) and time.monotonic() < deadline_s:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap()
            time.sleep(0.01)
        self._process.poll()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostIdentity:
    """Who a host is to the others."""

    name: str
    """Name, as on its certificate."""
    address: str
    """Address, as on its certificate."""
    weights_address: str = ""
    """Address for weights. Empty means `address`."""
    pki: Path
    """Folder with its certificate and key."""


class HostAgent:
    """Agent of a host. `run` does all of the work."""

    def __init__(
        self,
        controllers: Sequence[str],
        identity: HostIdentity,
        tell: Callable[[str], None],
        *,
        once: bool,
        give_up_s: float = math.inf,
    ) -> None:
        """
        Args:
            controllers: `host:port` of each registry to try.
            tell: called with sentences for people.
            once: exits after the first run.
            give_up_s: seconds without a controller after which the agent ends.

        Raises:
            ConfigError: there is no certificate for this host.
        """
        self._controllers = deque(controllers)
        name, self._address = identity.name, identity.address
        self._context, self._env = client_context(identity.pki, name), monarch_env(identity.pki, name)
        self._once, self._tell = once, tell
        self._logs = Path(tempfile.mkdtemp(prefix="llamarl-host-"))
        gpus = count_devices() if Path("/dev/nvidiactl").exists() else 0
        self._inventory = own_inventory(name, self._address, str(self._logs), gpus, identity.weights_address)
        self._run = ""
        self._sent = dict[str, int]()
        """Sent bytes of each log."""
        self._line: Line | None = None
        self._has_served = False
        self._task: asyncio.Task[Any] | None = None
        self._is_leaving = self._is_done = False
        self._give_up_s = give_up_s

    async def run(self) -> int:
        """Runs until the controller releases the host, or a second request to stop. Returns the exit code. Raises
        HostRefused."""
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(DRAIN, self._drain)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans of the engine
        beating = asyncio.create_task(beat())
        try:
            await self._stay()
        except asyncio.CancelledError:
            self._tell(f"{self._inventory.name} ends")
        finally:
            beating.cancel()
            shutil.rmtree(self._logs, ignore_errors=True)
        return 0

    @property
    def _place(self) -> str:
        """Returns `host:port` of the current registry."""
        return self._controllers[0]

    async def _stay(self) -> None:
        """Connects to one registry after the other until the host is released permanently, or none has answered for
        `give_up_s`."""
        pause_s, said_s = BACK_OFF_S[0], dict[str, float]()
        last_s = time.monotonic()
        while not self._is_done:
            started_s, self._has_served = time.monotonic(), False
            try:
                await self._take_part()
            except BROKEN as error:
                text = f"{self._place}: {plain(error)}; calls again"
                if started_s - said_s.get(text, -math.inf) >= SAY_S:
                    self._tell(text)
                    said_s[text] = started_s
                self._controllers.rotate(-1)
            if self._is_leaving:
                return
            last_s = time.monotonic() if self._has_served else last_s
            if time.monotonic() - last_s >= self._give_up_s:
                self._tell(f"no controller has answered for {self._give_up_s:g} s; {self._inventory.name} ends")
                return
            # A slow refusal, for example by a DNS server, does not count as a session.
            if self._has_served and time.monotonic() - started_s > 2 * BACK_OFF_S[1]:
                pause_s, said_s = BACK_OFF_S[0], {}
            if not self._is_done:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_S[1])

    def _leave(self) -> None:
        """Asks to leave. Exits at the second request, or if no registry is connected."""
        if self._is_leaving or self._line is None:
            assert self._task is not None
            self._task.cancel()
            return
        self._is_leaving = True
        self._line.tell(leaving=True)
        asyncio.get_running_loop().call_later(LEAVE_S, self._leave)

    def _drain(self) -> None:
        """Asks to leave. Repeated requests have no further effect."""
        if not self._is_leaving:
            self._leave()

    async def _take_part(self) -> None:
        """Runs one session, from connecting to the end of the connection. Raises HostRefused and errors in `BROKEN`."""
        line = await call(self._place, self._context, self._address)
        try:
            run = await self._run_of(line)
            inventory = self._inventory.model_copy(update={"code": code_fingerprint()})  # current code for the engine
            line.tell(**inventory.model_dump())
            self._welcomed(run, await line.hear(CONTROLLER_SILENT_S))
            keeper = MirrorKeeper(mirror_folder(""), self._address)
            engine = WorkerLoop(self._address, self._env, self._logs / f"host-{self._inventory.name}.log")
            try:
                url = await asyncio.wait_for(asyncio.to_thread(engine.url), ENGINE_S)
                line.tell(url=url, keeper=keeper.place)
                self._line, self._has_served = line, True
                self._tell(f"{self._inventory.name} at {self._inventory.addresses} serves {self._place}")
                await self._serve(line, engine)
            finally:
                self._line = None
                keeper.close()
                engine.end()
        finally:
            line.close()

    async def _run_of(self, line: Line) -> str:
        """Returns the id of the run that answers. Raises errors in `BROKEN`."""
        try:
            return str((await line.hear(CONTROLLER_SILENT_S))["run"])
        except ssl.SSLError as error:
            name = self._inventory.name
            raise HostRefused(f"{self._place} does not accept {name}.crt: {plain(error)}; it says more") from None

    def _welcomed(self, run: str, message: dict[str, Any]) -> None:
        if reason := message.get("refused"):
            raise HostRefused(f"{self._place} refuses this host: {reason}")
        if reason := message.get("busy"):
            raise ConnectionRefusedError(reason)
        if self._run != run:
            self._run, self._sent = run, {}
            _forget_states()
            for old in self._logs.iterdir():
                old.unlink()
        else:
            self._sent |= {str(file): int(size) for file, size in message["logs"].items()}

    async def _serve(self, line: Line, engine: WorkerLoop) -> None:
        """Answers the registry until the host is released. Raises errors in `BROKEN`."""
        tasks = set[asyncio.Task[None]]()
        try:
            while True:
                engine.check()
                message = await line.hear(CONTROLLER_SILENT_S)
                what, number = message.pop("what"), int(message.pop("ask"))
                if what == "bye":
                    self._tell(f"let go by {self._place}: {message['reason']}")
                    self._is_done |= self._once or bool(message["is_final"])
                    _forget_states()
                    return
                if what == "beat":
                    line.tell(answer=number, time=time.time(), logs=list(self._new_logs()))
                    continue
                tasks.add(task := asyncio.create_task(self._answer(line, number, what, message)))
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, line: Line, number: int, what: str, arguments: dict[str, Any]) -> None:
        orders = {"fetch": _fetch, "kill": _kill, "look": _look, "offer": self._offer, "pull": _pull}
        orders["watch"] = partial(_watch, line)
        try:
            found = await orders[what](**arguments)
        except (*BROKEN, KeyError, TypeError, ValueError) as error:
            found = {"error": f"{what}: {plain(error)}"}
        if number:
            line.tell(answer=number, time=time.time(), **found)

    def _new_logs(self) -> Iterator[dict[str, Any]]:
        """Yields new pieces of the logs, one per log, up to the size of a message."""
        room = LOG_TOTAL_BYTES
        for path in sorted(self._logs.iterdir()):
            at, size = self._sent.get(path.name, 0), path.stat().st_size
            note = ""
            if size - at > LOG_BEHIND_BYTES:
                note = f"\n[{size - LOG_BYTES - at} bytes are left out here]\n"
                at = size - LOG_BYTES
            if size > at and room > 0:
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read(LOG_BYTES)
                self._sent[path.name] = at + len(data)
                room -= len(data)
                yield {"file": path.name, "upto": at + len(data), "data": note + data.decode("latin-1")}

    async def _offer(self, num_bytes: int, secret: str) -> dict[str, Any]:
        """Opens a port in the range for weights, to measure bandwidth from here."""

        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proved: Callable[[], None]) -> None:
            with suppress(*BROKEN):
                async with asyncio.timeout(BLAST_S):
                    if secrets.compare_digest(await reader.readexactly(len(secret)), secret.encode()):
                        proved()
                        entrance.close()
                        left, block = num_bytes, bytes(1 << 20)
                        while left:
                            writer.write(block[: min(left, len(block))])
                            left -= min(left, len(block))
                            await writer.drain()
            writer.close()

        listener = listen(self._inventory.weights_address)
        entrance = Entrance(listener, on_loop(give))
        asyncio.get_running_loop().call_later(BLAST_S, entrance.close)
        return {"port": listener.getsockname()[1]}


async def _pull(address: str, port: int, num_bytes: int, secret: str) -> dict[str, Any]:
    """Returns bytes per second from another host, or an error. Connects as a generator connects to a trainer."""
    writer = None
    try:
        async with asyncio.timeout(LOST_S):
            reader, writer = await asyncio.open_connection(address, port, limit=4 << 20)
        async with asyncio.timeout(BLAST_S):
            writer.write(secret.encode())
            started_s, left = time.monotonic(), num_bytes
            while left and (data := await reader.read(1 << 20)):
                left -= len(data)
        return {"failed": HUNG_UP} if left else {"bytes_per_s": num_bytes / (time.monotonic() - started_s)}
    except BROKEN as error:
        return {"failed": plain(error)}
    finally:
        if writer is not None:
            writer.close()


async def _kill(pids: list[int]) -> dict[str, Any]:
    """Kills processes of executors and their descendants, but only descendants of this agent."""
    own = descendants(os.getpid())
    for pid in own.intersection(pids):
        kill_group(pid)
    return {}


def _forget_states() -> None:
    """Forgets the copies of trainer and critic state in this host's memory, because the run has ended."""
    if MEMORY in os.environ:
        shutil.rmtree(mirror_folder(""), ignore_errors=True)


async def _watch(line: Line, pid: int) -> dict[str, Any]:
    """Reports at once how a process has ended, and kills what it left behind."""
    cause = ""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        line.tell(ended=pid, cause=cause)
        return {}
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
        loop.remove_reader(descriptor)
        deadline_s = loop.time() + REAPED_S
        while not (cause := _cause_of(pid) or cause_of_reaped(descriptor) or "") and loop.time() < deadline_s:
            await asyncio.sleep(REAPED_LOOK_S)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    kill_group(pid)
    line.tell(ended=pid, cause=cause)
    return {}


def _cause_of(pid: int) -> str | None:
    """Returns the cause of death of a process that has not been reaped. None means that it was reaped."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    code = os.waitstatus_to_exitcode(int(fields[-1])) if state == "Z" else None
    return code if code is None else killed_by(-code) if code < 0 else f"ended with exit code {code}"


async def _fetch(names: list[str]) -> dict[str, Any]:
    """Fetches models of the Hub in a thread. Its process ends with the session."""

    def fetch() -> str:
        for name in filter(None, map(hub_name, names)):
            try:
                open_hub().fetched(name)
            except ConfigError as error:
                return f"{name}: {error}"
        return ""

    return {"failed": await asyncio.to_thread(fetch)}


async def _look(**asked: Any) -> dict[str, Any]:
    """Checks for files in a thread, because a network file system may be slow."""
    return await asyncio.to_thread(_seen, **asked)


def _seen(paths: list[str], folder: str, token: str) -> dict[str, Any]:
    """Returns the missing paths, and whether `folder` is the controller's folder and writable."""
    missing = [path for path in paths if not Path(path).exists()]
    try:
        is_shared = not folder or (Path(folder) / token).read_text() == token
        if folder and is_shared:  # not in a file that other hosts read now
            own = Path(folder) / f"{token}-{os.getpid()}"
            own.touch()
            own.unlink(missing_ok=True)
    except OSError as error:
        return {"missing": missing, "folder": error.strerror or str(error)}
    return {"missing": missing, "folder": "" if is_shared else "another folder is there"}


def descendants(pid: int) -> set[int]:
    """Returns the descendants of this process, including adopted orphans."""
    children = dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, ahead = set[int](), [pid]
    while ahead:
        new = children.get(ahead.pop(), [])
        found.update(new)
        ahead += new
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def call(place: str, context: ssl.SSLContext, address: str) -> Line:
    """Connects to the registry at `host:port` from this host's `address`. Raises HostRefused and errors in `BROKEN`."""
    host, _, port = place.rpartition(":")
    loop = asyncio.get_running_loop()
    looking = loop.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(looking, NAME_S)
    except TimeoutError:
        raise TimeoutError(f"no name server says within {NAME_S:g} s who {host} is") from None
    try:
        source = (str(ipaddress.ip_address(address)), 0)
    except ValueError:  # a name: the system chooses the address
        source = None
    calling = asyncio.open_connection(str(found[0][-1][0]), int(port), local_addr=source)
    line = Line(*await asyncio.wait_for(calling, SILENT_S), context, host)
    try:
        await line.secure()
    except ssl.SSLCertVerificationError as error:
        line.close()
        raise HostRefused(f"who answers at {place} is not taken for the controller: {plain(error)}") from None
    except BaseException:
        line.close()
        raise
    return line
