"""`Registry`: the connected hosts. Their agents connect over mutual TLS and send a status twice a second.

A host is lost if it is silent for `SILENT_S` or its connection ends. Its agent then stops everything that it started
and reconnects as a new host with the old name.

A separate thread answers agents, because they give up a silent controller: a busy event loop of the controller must not
cost a run its hosts.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from llamarl.checkpoint.keeper import Place
from llamarl.config import ConfigError, open_own
from llamarl.net.entrance import Entrance, Proved, listen
from llamarl.net.reasons import plain
from llamarl.parts.hosts.certificates import CONTROLLER, controller_names, mismatch, server_context
from llamarl.parts.hosts.home import BEAT_S, BROKEN, SILENT_S, BadMessage, Inventory, Line, on_loop, own_inventory

START_S = 40.0
"""Maximum seconds for an accepted agent to start the engine on its host."""

DRIFT = 1e-4
"""Maximum drift between two clocks in seconds per second. A measured offset becomes less accurate with time."""
SAY_S = 5.0
"""Seconds between two lines about connected and missing hosts."""
MAX_NAMES = 24
"""Maximum number of host names in such a line."""
BYE_S = 1.0
"""Maximum seconds for hosts to receive the end of the run."""


T = TypeVar("T")


class HostLost(ConnectionError):
    """A host is lost. The message is a sentence."""


class Host:
    """One connected machine."""

    def __init__(self, inventory: Inventory, url: str, keeper: Place, line: Line) -> None:
        """`keeper`: place for copies of checkpoints in this host's memory."""
        self.inventory, self.name, self.url, self.keeper = inventory, inventory.name, url, keeper
        self.offset_s = self.error_s = float("inf")
        """Seconds that the host's clock is ahead of ours, and the error bound: half of the shortest round trip."""
        self._known_s, self.heard_s = time.time(), time.monotonic()
        self.is_known = False
        """Whether the host has answered, so that its clock is known."""
        self.is_leaving = False
        self._loop = asyncio.get_running_loop()
        """Event loop of the registry."""
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._line = line
        self._numbers = itertools.count(1)
        self._asked = dict[int, tuple[float, asyncio.Future[dict[str, Any]]]]()
        self._watched = dict[int, Callable[[str], None]]()
        """Callbacks for the end of a process on the host."""

    @property
    def lost(self) -> str:
        """Returns why the host was lost, as a sentence. Empty means connected."""
        return self._lost.result() if self._lost.done() else ""

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Calls `call` with the reason when the host is lost, on the event loop of the caller."""
        back = partial(_call_in, asyncio.get_running_loop(), call)
        self._loop.call_soon_threadsafe(self._lost.add_done_callback, lambda lost: back(lost.result()))

    def lose(self, reason: str) -> None:
        """Marks the host as lost, once. Called in the registry's thread."""
        self._lost.set_result(reason)

    def when_ended(self, pid: int, call: Callable[[str], None]) -> None:
        """Calls `call` with the cause when a process ends, on the event loop of the caller. An empty cause means
        unknown."""
        self._watched[pid] = partial(_call_in, asyncio.get_running_loop(), call)
        self.tell("watch", pid=pid)

    def process_ended(self, pid: int, cause: str) -> None:
        """Handles the agent's report of an ended process. Called in the registry's thread."""
        if call := self._watched.pop(pid, None):
            call(cause)

    async def ask(self, what: str, timeout_s: float = SILENT_S, **arguments: Any) -> dict[str, Any]:
        """Returns the answer of the host's agent. Raises HostLost, TimeoutError, or ConfigError with the agent's
        reason."""
        return await _in(self._loop, self._ask(what, timeout_s, arguments))

    async def _ask(self, what: str, timeout_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        answer = self._send(what, arguments)
        await asyncio.wait((answer, self._lost), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.lost:
            raise HostLost(self.lost)
        if not answer.done():
            raise TimeoutError(f"host {self.name} had no answer to `{what}` after {timeout_s:g} s")
        if reason := answer.result().get("error"):
            raise ConfigError(f"host {self.name}: {reason}")
        return answer.result()

    def tell(self, what: str, **arguments: Any) -> None:
        """Sends a message that needs no answer."""
        self._loop.call_soon_threadsafe(self._send, what, arguments)

    def _send(self, what: str, arguments: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._asked = {old: one for old, one in self._asked.items() if not one[1].done()}
        self._asked[number] = time.time(), answer
        if not self.lost:
            self._line.tell(ask=number, what=what, **arguments)
        return answer

    async def beat(self) -> None:
        """Sends a status request periodically. Runs in the registry's thread."""
        while not self.lost:
            self._send("beat", {})
            await asyncio.sleep(BEAT_S)

    def answered(self, message: Mapping[str, Any]) -> None:
        """Handles an answer. The fastest answer gives the best estimate of the clock offset."""
        asked_s, answer = self._asked.get(int(message["answer"]), (0.0, None))
        if answer is None:
            return
        heard_s = time.time()
        error_s, drift_s = (heard_s - asked_s) / 2, DRIFT * (heard_s - self._known_s)
        if error_s < self.error_s + drift_s:
            self.error_s, self._known_s = error_s, heard_s
            self.offset_s = float(message["time"]) - (asked_s + heard_s) / 2
        if not answer.done():
            answer.set_result(dict(message))

    def describe(self) -> str:
        """Returns a line for people."""
        clock = f"clock {self.offset_s * 1e3:+.1f} ms (± {self.error_s * 1e3:.1f})"
        return f"host {self.name}: {self.inventory.room}, {clock}"


class Registry:
    """The controller's end. `hosts` are the connected hosts by name."""

    def __init__(self, pki: Path, logs: Path | None, tell: Callable[[str], None]) -> None:
        """
        Args:
            pki: folder of the certificates.
            logs: folder that collects the logs of all hosts. None means not collected.
            tell: called with sentences about hosts that joined, were refused, or left.

        Raises:
            ConfigError: this process has no certificate.
        """
        self._pki, self._context = pki, server_context(pki, CONTROLLER)
        self._own = own_inventory(CONTROLLER, "", "", 0)
        self._run = secrets.token_hex(8)
        self._logs, self.tell = logs, tell
        self._received = dict[tuple[str, str], int]()
        """Received bytes of each host's log files."""
        self._said = defaultdict[str, Counter[str]](Counter)
        """Number of refusals by address and reason."""
        self._loop = asyncio.new_event_loop()
        """Event loop of the thread that answers agents."""
        self._caller: asyncio.AbstractEventLoop | None = None
        self._entrance: Entrance | None = None
        self._serving = set[asyncio.Task[Any]]()
        self._changed = asyncio.Event()
        self._starting = set[str]()
        """Names of accepted hosts whose engine is starting."""
        self.hosts = dict[str, Host]()
        self.joined: Callable[[Host], None] = lambda host: None
        self.leaves: Callable[[Host], None] = lambda host: self.dismiss(host, "nothing runs there")
        """Called when a host asks to leave. `dismiss` releases it."""

    async def open(self, place: str) -> str:
        """Starts to listen. Returns address and port. Callbacks run on the caller's loop. Raises ConfigError."""
        self._caller = asyncio.get_running_loop()
        threading.Thread(target=self._loop.run_forever, name="registry", daemon=True).start()
        address, _, port = place.rpartition(":")
        try:
            return f"{address}:{await _in(self._loop, self._open(address, int(port)))}"
        except OSError as error:
            raise ConfigError(f"cluster.listen = {place!r}: {plain(error)}; name a free port here") from None

    async def until(
        self, num_hosts: int, timeout_s: float, fewest: int | None = None, patience_s: float = math.inf
    ) -> None:
        """Waits for hosts.

        Args:
            fewest: number of hosts that suffices at the deadline, or when no host has joined for `patience_s`. None
                means all.

        Raises:
            ConfigError: too few hosts joined.
        """
        fewest = num_hosts if fewest is None else fewest
        come = asyncio.create_task(_in(self._loop, self._come(num_hosts, fewest, timeout_s, patience_s)))
        try:
            while not (await asyncio.wait({come}, timeout=SAY_S))[0]:
                refused = f"; refused: {_some(self._said)}" if self._said else ""
                missing = f"{self._missing(num_hosts)}{refused}"
                self.tell(f"{len(self.hosts)} of {num_hosts} hosts have called: {self._here()}; {missing}")
            await come
        except TimeoutError:
            refused = "".join(
                f"\n  {peer} was refused {_times(number)}: {reason}"
                for peer, reasons in list(self._said.items())
                for reason, number in list(reasons.items())
            )
            option, number = ("num_hosts", num_hosts) if fewest == num_hosts else ("min_hosts", fewest)
            who = f"only {self._here()}" if self.hosts else "no host"
            raise ConfigError(
                f"cluster.{option} = {number}, but {who} called within {timeout_s:g} s (cluster.timeout_s), "
                f"{self._missing(number)}; start `llamarl host` on the others, or lower cluster.{option}{refused}"
            ) from None
        finally:
            come.cancel()

    def _here(self) -> str:
        return _some(self.hosts) or "none"

    def _missing(self, num_hosts: int) -> str:
        """Returns the names of hosts that have a certificate here and have not connected."""
        names = {path.stem for path in self._pki.glob("*.crt")} - {"ca", CONTROLLER, *self.hosts}
        number = num_hosts - len(self.hosts)
        if len(others := names.difference(controller_names(self._pki))) >= number:
            names = others  # the controller's machine may have no host
        which = f": {_some(names)}" if len(names) == number else f", of {_some(names)}"
        return f"{number} missing{which if names else ''}"

    def dismiss(self, host: Host, reason: str) -> None:
        """Releases a host in order, which ends its agent if it asked to leave."""
        host.tell("bye", reason=reason, is_final=host.is_leaving)
        self._loop.call_soon_threadsafe(self._lose, host, reason)

    async def close(self) -> None:
        """Releases all hosts. May be called twice."""
        if self._loop.is_running():
            for host in list(self.hosts.values()):
                self.dismiss(host, "the run has ended")
            await _in(self._loop, self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self, address: str, port: int) -> int:
        listener = listen(address, port)
        self._entrance = Entrance(listener, on_loop(self._serve))
        return listener.getsockname()[1]

    async def _come(self, num_hosts: int, fewest: int, timeout_s: float, patience_s: float) -> None:
        """Waits for hosts. Raises TimeoutError if fewer than `fewest` join."""
        clock = asyncio.get_running_loop()
        deadline_s = clock.time() + timeout_s
        while (number := sum(host.is_known for host in self.hosts.values())) < num_hosts:
            self._changed.clear()
            rest_s = max(0.0, deadline_s - clock.time())
            try:
                await asyncio.wait_for(self._changed.wait(), rest_s if number < fewest else min(rest_s, patience_s))
            except TimeoutError:
                if number < fewest:
                    raise
                return

    async def _close(self) -> None:
        if self._entrance is not None:
            self._entrance.close()
        if self._serving:  # agents close the connection when they receive it
            await asyncio.wait(self._serving, timeout=BYE_S)
        for task in (left := list(self._serving)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _say(self, text: str) -> None:
        self._call(self.tell, text)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Calls a callback on the caller's loop."""
        if self._caller is not None:
            _call_in(self._caller, callback, *arguments)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proved: Proved) -> None:
        peer = (writer.get_extra_info("peername") or ("one who is gone",))[0]
        line = Line(reader, writer, self._context)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            certificate = await line.secure()
            proved()
            line.tell(run=self._run)  # before the checks: an earlier write by the agent would hide the refusal
            host = await self._admitted(line, peer, certificate)
            if host is not None:
                await self._attend(host, line)
        except (BadMessage, ConfigError, KeyError, ssl.SSLError) as error:
            self._refuse(line, peer, plain(error), "refused")
        except BROKEN as error:  # the next attempt may succeed
            self._refuse(line, peer, plain(error), "busy")
        except asyncio.CancelledError:  # the run ends; asyncio's streams would log an error
            pass
        finally:
            self._serving.remove(task)
            line.close()

    def _refuse(self, line: Line, peer: str, reason: str, how: str) -> None:
        with suppress(*BROKEN):  # the handshake may have failed
            line.tell(**{how: reason})
        self._said[peer][reason] += 1
        if self._said[peer][reason] == 1:  # agents retry
            self._say(f"{peer} was refused as a host: {reason}")

    async def _admitted(self, line: Line, peer: str, certificate: Mapping[str, Any]) -> Host | None:
        """Returns a new host. None means that a host of this name is connected. Raises ConfigError and errors in
        `BROKEN`."""
        hello = await line.hear()
        try:
            inventory = Inventory.model_validate(hello)
        except ValidationError:
            raise ConfigError("it speaks otherwise; install the same version of llamarl on all hosts") from None
        try:
            addresses = await _addresses(inventory.address)
        except OSError as error:
            raise ConnectionRefusedError(f"its address {inventory.address}: {plain(error)}") from None
        if objection := self._objection(inventory, peer, certificate, addresses):
            raise ConfigError(objection)
        if (name := inventory.name) in self.hosts or name in self._starting:
            pid = f" (pid {self.hosts[name].inventory.pid})" if name in self.hosts else ""
            line.tell(busy=f"a host {name} is here already{pid}")
            return None
        self._starting.add(name)
        try:
            line.tell(logs={file: size for (host, file), size in self._received.items() if host == name})
            served = await line.hear(START_S)
            address, secret = served["keeper"]
            host = Host(inventory, str(served["url"]), (str(address), str(secret)), line)
            self.hosts[name] = host
        finally:
            self._starting.remove(name)
        return host

    def _objection(self, one: Inventory, peer: str, certificate: Mapping[str, Any], addresses: set[str]) -> str:
        """Returns why a host is rejected. Empty means accepted. Raises ConnectionRefusedError if it must retry
        later."""
        if reason := mismatch(certificate, one.name, one.address):
            return f"{reason}; name the host as in `llamarl certs`"
        if peer not in addresses:
            objection = f"it calls from {peer}, not from its address {one.address}"
            if one.address in addresses:
                return objection
            raise ConnectionRefusedError(f"{objection}, by DNS {', '.join(sorted(addresses))}, which may be behind")
        own = self._own
        for what, theirs, ours in (
            ("code", one.code, own.code),
            ("Python", one.python, own.python),
            *((package, one.packages.get(package), own.packages[package]) for package in own.packages),
        ):
            if theirs != ours:
                return f"its {what} is {theirs}, the controller's {ours}; install the same at the same path"
        return ""

    def _asks_to_leave(self, host: Host) -> None:
        if not host.is_leaving:
            host.is_leaving = True
            self._say(f"host {host.name} is about to leave")
            self._call(lambda: self.leaves(host))

    async def _attend(self, host: Host, line: Line) -> None:
        """Handles messages until the host is lost."""
        beats, reason = asyncio.create_task(host.beat()), ""
        self._said.pop(host.inventory.address, None)
        try:
            while not host.lost:
                message = await line.hear()
                host.heard_s = time.monotonic()
                if host.lost:  # released
                    break
                if "answer" in message:
                    host.answered(message)
                    if not host.is_known and host.error_s < float("inf"):
                        host.is_known = True
                        self._changed.set()
                        self._call(lambda: self.joined(host))
                self._heard(host, message)
        except TimeoutError:
            reason = f"it has been silent for {SILENT_S:g} s"
            self._look_for_all()
        except (*BROKEN, KeyError, ValueError, TypeError) as error:
            reason = plain(error)
        finally:
            beats.cancel()
            if not host.lost:
                self._lose(host, f"host {host.name} ({host.inventory.address}) is lost: {reason}")
                self._say(host.lost)

    def _heard(self, host: Host, message: Mapping[str, Any]) -> None:
        """Handles a message of a host."""
        for piece in message.get("logs", ()):
            self._keep(host, str(piece["file"]), int(piece["upto"]), str(piece["data"]).encode("latin-1"))
        if "ended" in message:
            host.process_ended(int(message["ended"]), str(message["cause"]))
        if message.get("leaving"):
            self._asks_to_leave(host)

    def _look_for_all(self) -> None:
        """Checks at a silent host whether all hosts are silent. In that case this machine is disconnected, and says
        so."""
        silent_s = time.monotonic() - max((host.heard_s for host in self.hosts.values()), default=0.0)
        if len(self.hosts) > 1 and silent_s > SILENT_S - BEAT_S:  # every host is about to be lost
            reason = f"this machine is cut off: all {len(self.hosts)} hosts have been silent for over {silent_s:.1f} s"
            self._say(reason)
            for host in list(self.hosts.values()):
                self._lose(host, f"host {host.name} ({host.inventory.address}) is lost: {reason}")

    def _lose(self, host: Host, reason: str) -> None:
        if not host.lost:
            host.lose(reason)
            del self.hosts[host.name]
            self._changed.set()

    def _keep(self, host: Host, file: str, upto: int, data: bytes) -> None:
        """Appends to the copy of a log, which is then complete up to `upto`."""
        if self._logs is None or Path(file).name != file:
            return
        self._received[host.name, file] = upto
        with suppress(OSError), open_own(self._logs / file, "ab") as log:  # a full disk loses logs, not the host
            log.write(data)


async def _in(loop: asyncio.AbstractEventLoop, there: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine on another thread's loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there, loop))


def _some(names: Iterable[str]) -> str:
    """Returns names for a line, only the first of many."""
    first, rest = sorted(names)[:MAX_NAMES], sorted(names)[MAX_NAMES:]
    return ", ".join([*first, *([f"{len(rest)} more"] if rest else [])])


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """Calls a callback on another thread's loop, unless that loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


async def _addresses(host: str) -> set[str]:
    """Returns the addresses of a name. Raises OSError if it cannot be resolved."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}
