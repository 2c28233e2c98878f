"""The program inside a machine: runs commands, and unpacks and packs files. Standard library of Python 3.9 or later.

    host -> agent   a line of JSON with the number of bytes that follow
    agent -> host   the same; the first message is {"hello": ...}, with a descriptor of /proc over a Unix socket

It is process 1 of its machine: no process of the machine can signal or trace it, and orphans become its children. All
limits are set in its children. Arguments: the descriptor to read, the descriptor to write, limits as JSON.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import tarfile
import time
from contextlib import suppress

WORK, STATE = "/work", "/run/shell"
SCRIPT = """
shopt -s expand_aliases
trap '{ declare -p; declare -f; alias -p; shopt -p; printf "cd -- %q\\n# whole\\n" "$PWD"
} >/run/shell/new 2>/dev/null' EXIT
. /run/shell/state >/dev/null 2>&1
eval "$(</run/shell/command)"
"""
CHUNK = 1 << 16
INTERRUPT_S = 1.0
"""Seconds that a living program has to end an interrupted request."""
LOOK_S = 0.2
"""Seconds between two looks at the CPU time of all processes, and at the host."""
PR_SET_DUMPABLE = 4


class Streams:
    """Messages from and to the host."""

    def __init__(self, read: int, write: int) -> None:
        self._reader, self._write = os.fdopen(read, "rb"), write

    def receive(self) -> tuple[dict, bytes] | None:
        """Returns the next message and its bytes. None means that the host is gone."""
        line = self._reader.readline()
        if not line:
            return None
        message = json.loads(line)
        return message, self._reader.read(message.get("bytes", 0))

    def send(self, message: dict, content: bytes = b"") -> None:
        data = json.dumps({**message, "bytes": len(content)}).encode() + b"\n" + content
        while data:
            data = data[os.write(self._write, data) :]


class Output:
    """The first and the last half of `cap` bytes."""

    def __init__(self, cap: int) -> None:
        self._half, self._head, self._tail, self.total = cap - cap // 2, b"", bytearray(), 0
        self._rest = cap // 2

    def add(self, data: bytes) -> None:
        self.total += len(data)
        missing = self._half - len(self._head)
        self._head += data[:missing]
        self._tail += data[missing:]
        del self._tail[: max(len(self._tail) - self._rest, 0)]

    def kept(self) -> bytes:
        return self._head + bytes(self._tail)


def limit(limits: dict) -> None:
    """Sets the limits of a child."""
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))


def spawn(arguments: list, descriptors: list, limits: dict) -> int:
    """Starts a child with these descriptors as 0, 1, 2, ... Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for place, descriptor in enumerate([fcntl.fcntl(one, fcntl.F_DUPFD, 64) for one in descriptors]):
            os.dup2(descriptor, place)
        os.closerange(len(descriptors), 256)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        limit(limits)
        os.execv(arguments[0], arguments)
    except (OSError, ValueError) as error:
        os.write(1, f"the command cannot be started: {error}".encode())
    finally:
        os._exit(127)
    return 0


def reap() -> None:
    """Reaps ended children, which are also orphans of the machine."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_all() -> None:
    """Kills all other processes of the machine. A process that forks meanwhile is killed by a further round."""
    for _ in range(1000):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            break
        reap()
        time.sleep(0.001)


def collect(ends: list, source: int, seconds: float, output: Output) -> bool:
    """Collects output until one of `ends` can be read. Returns whether that took longer than `seconds`."""
    until, poll = time.monotonic() + seconds, select.poll()
    for descriptor in (*ends, source):
        poll.register(descriptor, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        ready = dict(poll.poll(left * 1000))
        if source in ready and not drain(source, output):
            poll.unregister(source)
        if any(end in ready for end in ends):
            while drain(source, output):
                pass
            return False
    return True


def drain(source: int, output: Output) -> bool:
    """Reads what has arrived. Returns False if there is nothing, and at the end."""
    try:
        data = os.read(source, CHUNK)
    except BlockingIOError:
        return False
    output.add(data)
    return bool(data)


def remove(path: str) -> None:
    """Removes a file or link."""
    if os.path.lexists(path):
        os.unlink(path)


def write_new(path: str, content: bytes) -> None:
    """Writes a file, never through a link of the machine's."""
    remove(path)
    with open(path, "xb") as file:
        file.write(content)


class LivingProgram:
    """A Python program that stays alive between requests."""

    def __init__(self, program: str, limits: dict) -> None:
        self.source, output = os.pipe2(os.O_CLOEXEC)
        asked, self._ask = os.pipe2(os.O_CLOEXEC)
        self.done, done = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)
        empty = os.open(os.devnull, os.O_RDONLY)
        arguments = [sys.executable, "-P", "-c", program]
        self.pid = spawn(arguments, [empty, output, output, asked, done], limits)
        self.handle = os.pidfd_open(self.pid)
        for descriptor in (empty, output, asked, done):
            os.close(descriptor)

    def has_ended(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])

    def ask(self) -> None:
        """Asks for a text to be read. A program that closed its descriptors is found not to be done later."""
        with suppress(BrokenPipeError):
            os.write(self._ask, b".")

    def is_done(self) -> bool:
        """Returns whether the program has said so, and lives."""
        said = select.select([self.done], [], [], 0)[0] and os.read(self.done, 1)
        return bool(said) and not self.has_ended()

    def close(self) -> int:
        """Kills the program. Returns its exit code."""
        code = 128 + signal.SIGKILL
        try:
            os.kill(self.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except (ProcessLookupError, ChildProcessError):  # ended and reaped
            pass
        for descriptor in (self.source, self._ask, self.done, self.handle):
            os.close(descriptor)
        return code if code >= 0 else 128 - code


class Agent:
    """Answers the requests of the host, one after the other."""

    def __init__(self, limits: dict) -> None:
        self._limits = limits
        self._living: LivingProgram | None = None

    def run(self, request: dict, content: bytes) -> tuple:
        """Runs a command in a new shell that begins with the state of the previous one."""
        remove(f"{STATE}/new")
        write_new(f"{STATE}/command", content)
        source, sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(source, False)
        output, empty = Output(request["cap"]), os.open(os.devnull, os.O_RDONLY)
        shell = ["/bin/bash", "--noprofile", "--norc", "-c", SCRIPT, "bash"]
        pid = spawn(shell, [empty, sink, sink], self._limits)
        os.close(sink)
        os.close(empty)
        handle = os.pidfd_open(pid)
        is_late = collect([handle], source, request["s"], output)
        os.close(handle)
        if is_late:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if is_late:
            kill_all()
        os.close(source)
        self._keep_state()
        reap()
        code = code if code >= 0 else 128 - code
        return {"code": code, "is_late": is_late, "total": output.total}, output.kept()

    def ask(self, request: dict, content: bytes) -> tuple:
        """Passes a text to the living program."""
        if self._living is not None and self._living.has_ended():
            self._living.close()
            self._living = None
        living = self._living = self._living or LivingProgram(request["program"], self._limits)
        write_new(f"{STATE}/text", content)
        output, ends = Output(request["cap"]), [living.done, living.handle]
        living.ask()
        is_late = collect(ends, living.source, request["s"], output)
        code, is_stuck = 0, False
        if is_late:
            os.kill(living.pid, signal.SIGINT)
            is_stuck = collect(ends, living.source, INTERRUPT_S, output)
        if is_stuck or not living.is_done():
            code, self._living = living.close() or 1, None
            kill_all()
        reap()
        return {"code": code, "is_late": is_late, "total": output.total}, output.kept()

    @staticmethod
    def _keep_state() -> None:
        """Keeps the state that the shell saved, if it is whole."""
        try:
            if not stat.S_ISREG(os.lstat(f"{STATE}/new").st_mode):  # a pipe would hold up the agent
                return
            with open(f"{STATE}/new", "rb") as file:
                file.seek(-8, os.SEEK_END)
                is_whole = file.read() == b"# whole\n"
            if is_whole:
                os.replace(f"{STATE}/new", f"{STATE}/state")
        except OSError:  # the shell was killed or replaced itself
            pass

    @staticmethod
    def put(request: dict, content: bytes) -> tuple:
        """Unpacks folders, files and links."""
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for entry in archive:
                path = os.path.join(WORK, entry.name)
                os.makedirs(path if entry.isdir() else os.path.dirname(path), exist_ok=True)
                if entry.issym():
                    os.symlink(entry.linkname, path)
                elif not entry.isdir() and (source := archive.extractfile(entry)):
                    with open(path, "wb") as file:
                        file.write(source.read())
                    os.chmod(path, entry.mode & 0o755 | 0o600)
        return {}, b""

    @staticmethod
    def get(request: dict, content: bytes) -> tuple:
        """Packs the named regular files, as long as they fit."""
        kill_all()
        packed, left = io.BytesIO(), request["cap"]
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in request["paths"]:
                path = os.path.join(WORK, name)
                try:
                    found = os.lstat(path)
                    is_plain = stat.S_ISREG(found.st_mode) and os.path.realpath(path) == path
                    if not is_plain or found.st_size > left:
                        continue
                    with open(path, "rb") as file:
                        data = file.read(found.st_size)
                except OSError:
                    continue
                left -= len(data)
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return {}, packed.getvalue()


def hello(write: int) -> None:
    """Says that the machine is ready. Over a Unix socket the host also gets the machine's /proc, to measure it."""
    line, proc = b'{"hello": 1, "bytes": 0}\n', os.open("/proc", os.O_RDONLY)
    if stat.S_ISSOCK(os.fstat(write).st_mode):
        with socket.socket(fileno=os.dup(write)) as stream:
            stream.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [proc]))])
    else:
        os.write(write, line)
    os.close(proc)


def cpu_s() -> float:
    """Returns the CPU seconds of all processes of the machine, and of ended ones."""
    ticks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:  # it has ended
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def watch(read: int, most_cpu_s: float) -> None:
    """Ends the machine when its processes have used more CPU time, or the host is gone. Any process of the machine may
    cause a further look."""
    host = select.poll()
    host.register(read, select.POLLRDHUP)  # POLLHUP is always reported

    def look(*_: object) -> None:
        if host.poll(0) or cpu_s() > most_cpu_s:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)


def main() -> None:
    read, write, limits = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    if most_cpu_s := limits.pop("MACHINE_CPU_S", None):  # where the host does not watch the machine's /proc
        watch(read, most_cpu_s)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel lets no process of the machine send such a signal here
    for descriptor in {read, write}:
        os.set_inheritable(descriptor, False)
    agent, streams = Agent(limits), Streams(read, write)
    hello(write)
    while (received := streams.receive()) is not None:
        request, content = received
        try:
            streams.send(*getattr(agent, request["op"])(request, content))
        except OSError as error:
            streams.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
