"""`Registry`: which hosts are here. Their agents call home over mutual TLS, and are asked twice a second how they are.

A host that is silent for `SILENT_S`, or whose connection ends, is lost; its agent ends what it has started there and
calls again, as a new host under the old name.

Agents give up a controller that is silent, so they are answered in a thread of their own: whatever keeps the
controller's event loop busy must not cost a run its hosts.
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
"""Longest wait in seconds for an agent that was let in to start the engine on its host."""

DRIFT = 1e-4
"""Seconds per second by which clocks part at most: what is known of them gets worse with time."""
SAY_S = 5.0
"""Seconds between two lines about who has come and who is missing, while others are waited for."""
MAX_NAMES = 24
"""Most names of hosts in such a line."""
BYE_S = 1.0
"""Longest wait in seconds for hosts to hear that the run has ended."""


T = TypeVar("T")


class HostLost(ConnectionError):
    """A host is gone; the message is a sentence."""


class Host:
    """One machine that is here, and what it was asked."""

    def __init__(self, inventory: Inventory, url: str, keeper: Place, line: Line) -> None:
        """`keeper`: of states, in this host's memory, for others."""
        self.inventory, self.name, self.url, self.keeper = inventory, inventory.name, url, keeper
        self.offset_s = self.error_s = float("inf")
        """Seconds that the host's clock is ahead of ours, and how wrong that can be: half of the shortest way there and
        back."""
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
        """Who hears of the end of a process there."""

    @property
    def lost(self) -> str:
        """Reason why the host is gone, a sentence; empty: it is here."""
        return self._lost.result() if self._lost.done() else ""

    def when_lost(self, call: Callable[[str], None]) -> None:
        """`call` hears why the host is gone, on the event loop that asks for it."""
        back = partial(_call_in, asyncio.get_running_loop(), call)
        self._loop.call_soon_threadsafe(self._lost.add_done_callback, lambda lost: back(lost.result()))

    def lose(self, reason: str) -> None:
        """Marks the host as gone, once; called in the registry's thread."""
        self._lost.set_result(reason)

    def when_ended(self, pid: int, call: Callable[[str], None]) -> None:
        """`call` hears how a process of the host ended, on the event loop that asks for it; empty: nobody knows."""
        self._watched[pid] = partial(_call_in, asyncio.get_running_loop(), call)
        self.tell("watch", pid=pid)

    def process_ended(self, pid: int, cause: str) -> None:
        """The host's agent says so; called in the registry's thread."""
        if call := self._watched.pop(pid, None):
            call(cause)

    async def ask(self, what: str, timeout_s: float = SILENT_S, **arguments: Any) -> dict[str, Any]:
        """Answer of the host's agent. Raises HostLost, TimeoutError, or ConfigError with the agent's own reason."""
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
        """Asks for what needs no answer."""
        self._loop.call_soon_threadsafe(self._send, what, arguments)

    def _send(self, what: str, arguments: Mapping[str, Any]) -> asyncio.Future[dict[str, Any]]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._asked = {old: one for old, one in self._asked.items() if not one[1].done()}
        self._asked[number] = time.time(), answer
        if not self.lost:
            self._line.tell(ask=number, what=what, **arguments)
        return answer

    async def beat(self) -> None:
        """Asks the host again and again whether it is there; runs in the registry's thread."""
        while not self.lost:
            self._send("beat", {})
            await asyncio.sleep(BEAT_S)

    def answered(self, message: Mapping[str, Any]) -> None:
        """An answer has come; how the clocks differ is known best from the quickest."""
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
        """A line for people."""
        clock = f"clock {self.offset_s * 1e3:+.1f} ms (± {self.error_s * 1e3:.1f})"
        return f"host {self.name}: {self.inventory.room}, {clock}"


class Registry:
    """The controller's end. `hosts` are those that are here, by name."""

    def __init__(self, pki: Path, logs: Path | None, tell: Callable[[str], None]) -> None:
        """
        Args:
            pki: folder of the certificates.
            logs: where the logs of all hosts are brought together; None: nowhere.
            tell: gets a sentence for people: who came, was refused, left.

        Raises:
            ConfigError: this process has no certificate.
        """
        self._pki, self._context = pki, server_context(pki, CONTROLLER)
        self._own = own_inventory(CONTROLLER, "", "", 0)
        self._run = secrets.token_hex(8)
        self._logs, self.tell = logs, tell
        self._received = dict[tuple[str, str], int]()
        """Bytes of each host's log files."""
        self._said = defaultdict[str, Counter[str]](Counter)
        """Refusals by address, and of these the number by reason."""
        self._loop = asyncio.new_event_loop()
        """Event loop of the thread that answers agents."""
        self._caller: asyncio.AbstractEventLoop | None = None
        self._entrance: Entrance | None = None
        self._serving = set[asyncio.Task[Any]]()
        self._changed = asyncio.Event()
        self._starting = set[str]()
        """Names of hosts that were let in, whose engine starts."""
        self.hosts = dict[str, Host]()
        self.joined: Callable[[Host], None] = lambda host: None
        self.leaves: Callable[[Host], None] = lambda host: self.dismiss(host, "nothing runs there")
        """A host asks to leave; `dismiss` lets it go."""

    async def open(self, place: str) -> str:
        """Address and port where it listens from now on. Callbacks come on the caller's loop. Raises ConfigError."""
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
        """Waits until so many hosts are here.

        Args:
            fewest: so many do when the time is over, or nobody has come for `patience_s`; None: all have to.

        Raises:
            ConfigError: they are not.
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
        """Who has not called of those whose certificates are here, too."""
        names = {path.stem for path in self._pki.glob("*.crt")} - {"ca", CONTROLLER, *self.hosts}
        number = num_hosts - len(self.hosts)
        if len(others := names.difference(controller_names(self._pki))) >= number:
            names = others  # the controller's own machine need not compute
        which = f": {_some(names)}" if len(names) == number else f", of {_some(names)}"
        return f"{number} missing{which if names else ''}"

    def dismiss(self, host: Host, reason: str) -> None:
        """Lets a host go in order, which ends its agent when it was to leave."""
        host.tell("bye", reason=reason, is_final=host.is_leaving)
        self._loop.call_soon_threadsafe(self._lose, host, reason)

    async def close(self) -> None:
        """Lets all hosts go; may be called again."""
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
        """Raises TimeoutError: not even the fewest are here."""
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
        if self._serving:  # agents hang up when they hear it
            await asyncio.wait(self._serving, timeout=BYE_S)
        for task in (left := list(self._serving)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _say(self, text: str) -> None:
        self._call(self.tell, text)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Calls back on the caller's loop."""
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
            line.tell(run=self._run)  # first: what was written before would hide why the caller is refused
            host = await self._admitted(line, peer, certificate)
            if host is not None:
                await self._attend(host, line)
        except (BadMessage, ConfigError, KeyError, ssl.SSLError) as error:
            self._refuse(line, peer, plain(error), "refused")
        except BROKEN as error:  # the next call may do better
            self._refuse(line, peer, plain(error), "busy")
        except asyncio.CancelledError:  # the run ends; asyncio's streams would report it as an error
            pass
        finally:
            self._serving.remove(task)
            line.close()

    def _refuse(self, line: Line, peer: str, reason: str, how: str) -> None:
        with suppress(*BROKEN):  # the handshake may have failed
            line.tell(**{how: reason})
        self._said[peer][reason] += 1
        if self._said[peer][reason] == 1:  # it may try again and again
            self._say(f"{peer} was refused as a host: {reason}")

    async def _admitted(self, line: Line, peer: str, certificate: Mapping[str, Any]) -> Host | None:
        """A new host; None: one of its name is here. Raises ConfigError, and what is in `BROKEN`."""
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
        """Why a host may not take part; empty when it may. Raises ConnectionRefusedError: not yet."""
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
        """Until the host is gone."""
        beats, reason = asyncio.create_task(host.beat()), ""
        self._said.pop(host.inventory.address, None)
        try:
            while not host.lost:
                message = await line.hear()
                host.heard_s = time.monotonic()
                if host.lost:  # let go
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
        """A host has said something, asked or unasked."""
        for piece in message.get("logs", ()):
            self._keep(host, str(piece["file"]), int(piece["upto"]), str(piece["data"]).encode("latin-1"))
        if "ended" in message:
            host.process_ended(int(message["ended"]), str(message["cause"]))
        if message.get("leaving"):
            self._asks_to_leave(host)

    def _look_for_all(self) -> None:
        """A host is silent: if nobody else is heard either, it is this machine that is lost, and so it says."""
        silent_s = time.monotonic() - max((host.heard_s for host in self.hosts.values()), default=0.0)
        if len(self.hosts) > 1 and silent_s > SILENT_S - BEAT_S:  # each of them is about to be lost by itself
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
        """Adds to the copy of a log, which then is as far as `upto`."""
        if self._logs is None or Path(file).name != file:
            return
        self._received[host.name, file] = upto
        with suppress(OSError), open_own(self._logs / file, "ab") as log:  # a full disk costs logs, not the host
            log.write(data)


async def _in(loop: asyncio.AbstractEventLoop, there: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that runs on another thread's loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there, loop))


def _some(names: Iterable[str]) -> str:
    """Names for a line, the first of many."""
    first, rest = sorted(names)[:MAX_NAMES], sorted(names)[MAX_NAMES:]
    return ", ".join([*first, *([f"{len(rest)} more"] if rest else [])])


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """Calls back on another thread's loop, unless that has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


async def _addresses(host: str) -> set[str]:
    """Raises OSError: nobody knows it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}
