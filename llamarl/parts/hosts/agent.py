"""`HostAgent`: one host of a run, which calls home, runs Monarch's worker loop as its child and answers the registry.

When the controller is silent, or the connection ends, all that the host has started for it ends, and the agent calls
again under a fresh identity and port of the engine: Monarch takes no other back.
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
from llamarl.parts.hosts.home import BLAST_S, BROKEN, HUNG_UP, MAX_LINE_BYTES, SILENT_S, Line, on_loop, own_inventory
from llamarl.run.placement import count_devices

CONTROLLER_SILENT_S = 4.0
"""A little more patience than the registry has: it should be the one who says what is lost."""
ENGINE_S = 30.0
"""Longest wait in seconds for the engine to start."""
BACK_OFF_S = 0.3, 2.0
"""Seconds between calls to the registry, at first and at most."""
SAY_S = 60.0
"""Seconds after which the agent says once more why it calls again."""
NAME_S = 10.0
"""Longest wait in seconds for a name to be looked up."""
DRAIN = signal.SIGUSR1
"""Lets an agent leave in order, as `--drain` does."""
LEAVE_S = 100.0
"""Longest wait for the controller to let a host go that asked to leave; spot machines get two minutes' notice."""
LOG_BYTES = 64 << 10
"""Bytes of one log that go with one beat, and the last ones of a log that is behind by more than `LOG_BEHIND_BYTES`."""
LOG_BEHIND_BYTES = 4 << 20
LOG_TOTAL_BYTES = MAX_LINE_BYTES // 8
"""Bytes of all logs with one beat; JSON takes up to six characters for a byte."""
REAPED_S, REAPED_LOOK_S = 0.5, 0.02
"""Longest wait for the engine to reap a process that has ended, as then the system says how, and between two looks."""
END_S = 3.0
"""Longest wait in seconds for killed processes to be gone."""
PR_SET_CHILD_SUBREAPER = 36


class HostRefused(ConfigError):
    """The controller does not want this host; the message says why."""


class WorkerLoop:
    """The worker loop, and every process that has come from it."""

    def __init__(self, address: str, env: dict[str, str], log: Path) -> None:
        self._reader, self._lifeline = os.pipe()
        code = "from llamarl.cluster.fork_server import begin; begin()\n"  # before what takes long to import
        code += "import sys; from llamarl.cluster.monarch import serve_host; serve_host(sys.argv[1])"
        with open_own(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, address],
                stdout=subprocess.PIPE, stderr=output, stdin=subprocess.DEVNULL,
                env={**os.environ, **env, **log_env(log.parent), LIFELINE: str(self._reader)}, pass_fds=(self._reader,),
            )  # fmt: skip

    def url(self) -> str:
        """Address where the engine can be attached, once it says so. Raises EOFError: it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the engine ended with exit code {self._process.wait()}; its log says why")
        return json.loads(line)["url"]

    def check(self) -> None:
        """Raises EOFError: it has ended."""
        if self._process.poll() is not None:
            raise EOFError("the engine has ended")
        _reap()

    def end(self) -> None:
        """Kills everything; waits until it is gone, for seconds at most."""
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


class HostAgent:
    """`run` is all that it does."""

    def __init__(
        self,
        controllers: Sequence[str],
        pki: Path,
        name: str,
        address: str,
        once: bool,
        tell: Callable[[str], None],
        weights_address: str = "",
    ) -> None:
        """
        Args:
            controllers: `host:port` of each registry that may answer.
            address: of this host, on its certificate.
            once: it ends with the first run that it took part in.
            tell: gets a sentence for people.
            weights_address: of this host, for weights; empty: `address`.

        Raises:
            ConfigError: there is no certificate for it.
        """
        self._controllers = deque(controllers)
        self._context, self._env = client_context(pki, name), monarch_env(pki, name)
        self._address, self._once, self._tell = address, once, tell
        self._logs = Path(tempfile.mkdtemp(prefix="llamarl-host-"))
        gpus = count_devices() if Path("/dev/nvidiactl").exists() else 0
        self._inventory = own_inventory(name, address, str(self._logs), gpus, weights_address)
        self._run = ""
        self._sent = dict[str, int]()
        """Bytes of each log."""
        self._line: Line | None = None
        self._has_served = False
        self._task: asyncio.Task[Any] | None = None
        self._is_leaving = self._is_done = False

    async def run(self) -> int:
        """Until it is let go, or asked to end a second time. The exit code; raises Refused."""
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(DRAIN, self._drain)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the engine leaves behind comes here
        try:
            await self._stay()
        except asyncio.CancelledError:
            self._tell(f"{self._inventory.name} ends")
        finally:
            shutil.rmtree(self._logs, ignore_errors=True)
        return 0

    @property
    def _place(self) -> str:
        """`host:port` of the registry that is called, or answers."""
        return self._controllers[0]

    async def _stay(self) -> None:
        """Calls one registry after the other until it is let go for good."""
        pause_s, said_s = BACK_OFF_S[0], dict[str, float]()
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
            # A slow refusal, such as a name server's, is no stay.
            if self._has_served and time.monotonic() - started_s > 2 * BACK_OFF_S[1]:
                pause_s, said_s = BACK_OFF_S[0], {}
            if not self._is_done:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_S[1])

    def _leave(self) -> None:
        """Asks to be let go; the second time, and with nobody to ask, it ends."""
        if self._is_leaving or self._line is None:
            assert self._task is not None
            self._task.cancel()
            return
        self._is_leaving = True
        self._line.tell(leaving=True)
        asyncio.get_running_loop().call_later(LEAVE_S, self._leave)

    def _drain(self) -> None:
        """Asks to be let go; however often it is told to."""
        if not self._is_leaving:
            self._leave()

    async def _take_part(self) -> None:
        """One stay: from the call to the end of the connection. Raises HostRefused, and what is in `BROKEN`."""
        line = await call(self._place, self._context, self._address)
        try:
            run = await self._run_of(line)
            inventory = self._inventory.model_copy(update={"code": code_fingerprint()})  # the engine runs what is there
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
        """Id of the run that answers. Raises what is in `BROKEN`."""
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
        """Answers until it is let go. Raises what is in `BROKEN`."""
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
        """Pieces that have been added to the logs, one of each log, as far as a message holds them."""
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
        """Opens a port, where weights take theirs, for one who measures the wire from here."""

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
    """Bytes per second from another host, or why none come; it connects as a generator does to a trainer."""
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
    """Ends processes of executors and all that they have started, those alone that have come from this agent."""
    own = descendants(os.getpid())
    for pid in own.intersection(pids):
        kill_group(pid)
    return {}


def _forget_states() -> None:
    """The run is over whose trainer or critic had them in this host's memory."""
    if MEMORY in os.environ:
        shutil.rmtree(mirror_folder(""), ignore_errors=True)


async def _watch(line: Line, pid: int) -> dict[str, Any]:
    """Tells the registry how a process has ended, as soon as it has, and ends what it has left behind."""
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
    """Cause of death of a process that nobody has waited for yet; None: it has been reaped."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    code = os.waitstatus_to_exitcode(int(fields[-1])) if state == "Z" else None
    return code if code is None else killed_by(-code) if code < 0 else f"ended with exit code {code}"


async def _fetch(names: list[str]) -> dict[str, Any]:
    """Fetches models of the Hub, in a thread; the process that does it is one of those that end with a stay."""

    def fetch() -> str:
        for name in filter(None, map(hub_name, names)):
            try:
                open_hub().fetched(name)
            except ConfigError as error:
                return f"{name}: {error}"
        return ""

    return {"failed": await asyncio.to_thread(fetch)}


async def _look(**asked: Any) -> dict[str, Any]:
    """Looks for files in a thread: a network file system may take its time."""
    return await asyncio.to_thread(_seen, **asked)


def _seen(paths: list[str], folder: str, token: str) -> dict[str, Any]:
    """Which paths are not here, and whether `folder` is the controller's and can be written to."""
    missing = [path for path in paths if not Path(path).exists()]
    try:
        is_shared = not folder or (Path(folder) / token).read_text() == token
        if folder and is_shared:  # not what other hosts read now
            own = Path(folder) / f"{token}-{os.getpid()}"
            own.touch()
            own.unlink(missing_ok=True)
    except OSError as error:
        return {"missing": missing, "folder": error.strerror or str(error)}
    return {"missing": missing, "folder": "" if is_shared else "another folder is there"}


def descendants(pid: int) -> set[int]:
    """Processes that have come from this one, whose parents live or have left them to it."""
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
    """The registry at a place, `host:port`, from this host's `address`. Raises HostRefused, and what is in `BROKEN`."""
    host, _, port = place.rpartition(":")
    loop = asyncio.get_running_loop()
    looking = loop.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(looking, NAME_S)
    except TimeoutError:
        raise TimeoutError(f"no name server says within {NAME_S:g} s who {host} is") from None
    try:
        source = (str(ipaddress.ip_address(address)), 0)
    except ValueError:  # a name: the system chooses
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
