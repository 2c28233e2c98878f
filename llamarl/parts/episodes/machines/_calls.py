"""System calls that no process of a machine may make: a seccomp filter in the form that `bwrap --seccomp` reads.

Programs of a machine need most of the other calls, so this is a deny-list on top of namespaces without capabilities.
It refuses calls that reach rarely used parts of the kernel, other namespaces, or memory that no limit bounds.
"""

from __future__ import annotations

import errno
import functools
import platform

from llamarl.parts.episodes.sandbox.seccomp import (
    ALLOW,
    AUDIT_ARCHITECTURES,
    JUMP_IF_EQUAL,
    KILL,
    LOAD,
    REFUSE,
    RETURN,
    assembled,
)

# Name: number on x86_64 and on aarch64 (-1 means that the call does not exist).
_REFUSED = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "personality": (135, 92),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "vhangup": (153, 58),
}  # fmt: skip
_CLONE, _CLONE3, _IOCTL, _SOCKET, _PRLIMIT = (56, 220), (435, 435), (16, 29), (41, 198), (302, 261)
_NEW_NAMESPACES = 0x7E020000
_PUSHES_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which write to a terminal as if its user typed."""
_FAMILIES = (1, 2, 10, 16)
"""Families of sockets within the machine's network: Unix, IPv4, IPv6, netlink. Others, such as VSOCK, reach beyond."""
_JUMP_IF_ANY_BIT, _X32 = 0x45, 0x40000000
_ABSENT = 0x00050000 | errno.ENOSYS


@functools.cache
def program() -> bytes:
    """Returns the filter program for this processor. Refused calls fail with EPERM, and `clone3` with ENOSYS, whereupon
    the C library uses `clone`, whose flags a filter can read."""
    processor = platform.machine()
    column = list(AUDIT_ARCHITECTURES).index(processor)
    refuse, allow = (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)
    steps = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCHITECTURES[processor]), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, 0), (_JUMP_IF_ANY_BIT, 0, 1, _X32), refuse]
    for numbers in _REFUSED.values():
        if numbers[column] >= 0:
            steps += [(JUMP_IF_EQUAL, 0, 1, numbers[column]), refuse]
    steps += [(JUMP_IF_EQUAL, 0, 1, _CLONE3[column]), (RETURN, 0, 0, _ABSENT)]
    by_argument = (
        (_CLONE, 0, [(_JUMP_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse, allow]),
        (_IOCTL, 1, [step for value in _PUSHES_INPUT for step in ((JUMP_IF_EQUAL, 0, 1, value), refuse)] + [allow]),
        (_SOCKET, 0, [step for value in _FAMILIES for step in ((JUMP_IF_EQUAL, 0, 1, value), allow)] + [refuse]),
        (_PRLIMIT, 0, [(JUMP_IF_EQUAL, 0, 1, 0), allow, refuse]),
    )
    for numbers, place, tests in by_argument:
        steps += [(JUMP_IF_EQUAL, 0, len(tests) + 1, numbers[column]), (LOAD, 0, 0, 16 + 8 * place), *tests]
    return assembled([*steps, allow])
