"""Confines a process to computing: no capabilities, rlimits, and an irrevocable allow-list of system calls.

Other calls (open, socket, clone, execve, kill, ptrace, ...) fail with EPERM. The list contains numbers, which depend on
the processor. `missing` reports whether processor and kernel are supported. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_MODE_FILTER = 2
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: number on x86_64 and on aarch64 (-1 means that the call does not exist).
_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214), "mprotect": (10, 226),
    "mremap": (25, 216), "madvise": (28, 233), "futex": (202, 98), "readv": (19, 65), "writev": (20, 66),
    "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "times": (100, 153), "getrusage": (98, 165), "getpid": (39, 172), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278),
    "rseq": (334, 293), "set_robust_list": (273, 99), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
# Name: position and allowed values of the argument that selects the operation. Excluded operations of madvise take
# memory from the machine. Excluded operations of futex wait, which a single-threaded process does not need.
_ARGUMENTS = {"madvise": (2, (0, 1, 2, 3, 4, 8, 14, 15)), "futex": (1, (1, 129))}
_NOBODY = 65534
_CAPABILITIES_3 = 0x20080522
"""Version of the kernel's capability record: 64 capabilities in three sets."""
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def missing() -> str:
    """Returns why this machine cannot confine programs, in a few words. Empty means that it can."""
    processor, bits = platform.machine(), 8 * struct.calcsize("P")
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if processor not in AUDIT_ARCHITECTURES or bits != 64 or sys.byteorder != "little":
        return f"it knows the system calls of {' and '.join(AUDIT_ARCHITECTURES)}, and this is {processor}, {bits} bits"
    # A filter at address 0: the kernel rejects the address if it supports filters, otherwise the mode.
    if _libc().prctl(_PR_SET_SECCOMP, _MODE_FILTER, None) and (ctypes.get_errno() != errno.EFAULT):
        return "this kernel (or the container) refuses seccomp filters"
    return ""


def only_compute(*, parent: int, cpu_s: int, memory_bytes: int) -> None:
    """Confines this process to computing with its open descriptors. It dies with `parent`.

    Raises:
        OSError: the kernel refused, so nothing may run.
    """
    libc = _libc()
    _drop_rights(libc)
    _control(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)  # a later change of user would clear it
    if os.getppid() != parent:
        raise ProcessLookupError(parent)
    _control(libc, _PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # the soft limit can be ignored, the hard limit cannot
    limits = {"AS": memory_bytes, "FSIZE": 0, "CORE": 0, "NOFILE": 0, "NPROC": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    code = program()
    _control(libc, _PR_SET_NO_NEW_PRIVS, 1)
    _control(libc, _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_FilterProgram(len(code) // 8, code)))


def _drop_rights(libc: ctypes.CDLL) -> None:
    """Drops all capabilities, and changes from root to an unprivileged user if possible. The root user of a container
    may be unable to change or know no other user, and is not root on the machine."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


def _control(libc: ctypes.CDLL, *arguments: object) -> None:
    if libc.prctl(*arguments, *[0] * (5 - len(arguments))):
        raise OSError(ctypes.get_errno(), f"prctl({arguments[0]})")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def program() -> bytes:
    """Returns the filter program for the kernel: calls of another architecture kill, unlisted calls fail.

    The parent calls it once before it forks.
    """
    processor = platform.machine()
    column = list(AUDIT_ARCHITECTURES).index(processor)
    steps = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCHITECTURES[processor]), (RETURN, 0, 0, KILL)]
    steps.append((LOAD, 0, 0, 0))
    for name, numbers in _ALLOWED.items():
        allow = [(RETURN, 0, 0, ALLOW)]
        if name in _ARGUMENTS:
            place, values = _ARGUMENTS[name]
            tests = [step for value in values for step in ((JUMP_IF_EQUAL, 0, 1, value), *allow)]
            allow = [(LOAD, 0, 0, 16 + 8 * place), *tests, (RETURN, 0, 0, REFUSE)]
        steps += [(JUMP_IF_EQUAL, 0, len(allow), numbers[column]), *allow]
    steps.append((RETURN, 0, 0, REFUSE))
    return assembled(steps)


def assembled(steps: Iterable[tuple[int, int, int, int]]) -> bytes:
    """Returns the instructions of a filter as the kernel reads them."""
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
