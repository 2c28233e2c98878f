"""Commands that try to leave a machine, to gain rights in it, to exceed its limits, or to hurt its agent.

Each prints GOT only where it has worked. Nothing is written to a place of the host: `test -w` and `os.access` ask.
SECRET is a file of the host in FOLDER that everybody there can read. PORT, NAME and SOCKET are a TCP port, an abstract
Unix socket and a Unix socket of the host, PROGRAM a process of the host.
"""

from __future__ import annotations

import platform

from llamarl.parts.episodes.machines._calls import _REFUSED

COLUMN = 0 if platform.machine() == "x86_64" else 1
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def got(*_): print("TOG"[::-1], flush=True)  # bash shows the text of a program that is killed
def call(*arguments):
    # A 64-bit -1 is an address that no call can use.
    result = libc.syscall(*[ctypes.c_long(one) for one in (*arguments, *[-1] * (7 - len(arguments)))])
    return result, ctypes.get_errno()
def does(work, *arguments):
    try: work(*arguments)
    except (OSError, ValueError): return
    got()
"""

WRITES = {
    f"writes {path}": f"test -w {path} && echo GOT"
    for path in (
        "/", "/usr", "/usr/bin", "/usr/bin/env", "/usr/lib", "/bin/bash", "/etc", "/etc/passwd", "/etc/group", "/dev",
        "/dev/null/x", "/run", "/run/agent.py", "/opt", "/opt/python", "/opt/python/bin", "/opt/packages", "/proc/sys",
        "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/panic", "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/printk", "/proc/sys/kernel/randomize_va_space", "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/drop_caches", "/proc/sys/vm/panic_on_oom", "/proc/sys/fs/file-max", "/proc/sys/fs/suid_dumpable",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/kcore",
        "/proc/1/mem", "/proc/1/oom_score_adj", "/proc/1/uid_map", "/proc/1/setgroups", "/proc/acpi", "/proc/irq",
        "/sys", "/sys/fs/cgroup", "/sys/kernel", "/boot", "/home", "/root", "/var", "/mnt", "/srv",
    )
}  # fmt: skip
READS = {
    "a secret file": "cat $SECRET && echo GOT",
    "the folder of a secret file": "ls $FOLDER && echo GOT",
    "a secret by another root": "cat /proc/*/root/$SECRET && echo GOT",
    "a secret by another folder": "cat /proc/*/cwd/../../../../../../../../$SECRET && echo GOT",
    "a secret by relative path": "cat ../../../../../../$SECRET && echo GOT",
    "a secret by a link": "ln -s $SECRET link; cat link && echo GOT",
    "a secret by a mount": "mkdir m; mount --bind / m && cat m/$SECRET && echo GOT",
    "variables of processes": "cat /proc/*/environ | tr '\\0' '\\n' | grep LLAMARL && echo GOT",
    "variables of the agent": "cat /proc/1/environ && echo GOT",
    "processes of the host": 'ps axww | grep "[${PROGRAM:0:1}]${PROGRAM:1}" && echo GOT',
    "command lines of the host": "grep -x sleep /proc/[0-9]*/comm && echo GOT",
    "passwords": "cat /etc/shadow /etc/gshadow && echo GOT",
    "users of the host": "grep -q root /etc/passwd && echo GOT",
    "the root's folder": "ls /root && echo GOT",
    "folders of users": "ls /home && echo GOT",
    "logs": "ls /var/log && echo GOT",
    "messages of the kernel": "dmesg && echo GOT",
    "the kernel's log": "head -c 1 /dev/kmsg && echo GOT",
    "the kernel's log in proc": "timeout 1 head -c 1 /proc/kmsg && echo GOT",
    "memory": "head -c 1 /dev/mem && echo GOT",
    "memory of the kernel": "head -c 1 /proc/kcore && echo GOT",
    "addresses of the kernel": "grep -qv '^0000000000000000' /proc/kallsyms && echo GOT",
    "pages": "head -c 1 /proc/kpagecount && echo GOT",
    "a disk": "for disk in /dev/vd* /dev/sd* /dev/nvme* /dev/loop*; do head -c 1 $disk && echo GOT; done",
    "graphics cards": "ls /dev/nvidia* /dev/dri && echo GOT",
    "virtual machines": "ls /dev/kvm /dev/vsock /dev/vhost* && echo GOT",
    "files of users in memory": "ls /dev/fuse /dev/shm/* && echo GOT",
    "temporary files": "[ $(ls -A /tmp | wc -l) -gt 0 ] && echo GOT",
    "sockets of services": "ls /run/*.sock /run/docker* /var/run/* /run/systemd && echo GOT",
    "descriptors of the agent": "ls /proc/1/fd && echo GOT",
    "files of the agent": "ls /proc/1/root/ /proc/1/cwd/ && echo GOT",
    "maps of the agent": "cat /proc/1/maps && echo GOT",
    "system calls of the agent": "cat /proc/1/syscall /proc/1/stack && echo GOT",
    "inherited descriptors": "[ $(ls /proc/self/fd | wc -l) -gt 4 ] && echo GOT",
    "devices": "[ $(ls /dev | wc -l) -gt 14 ] && echo GOT",
    "hardware": "ls /sys/class && echo GOT",
    "control groups": "ls /sys/fs/cgroup && echo GOT",
    "tokens of a cloud": "ls /var/run/secrets && echo GOT",
    "keys of users": "cat ~/.ssh/* ~/.aws/* ~/.netrc && echo GOT",
    "the host's name": "[ $(hostname) = machine ] || echo GOT",
}
NETWORK = {
    "a port of the host": "does(socket.create_connection, ('127.0.0.1', int(os.environ['PORT'])), 3)",
    "a port by IPv6": "does(socket.create_connection, ('::1', int(os.environ['PORT'])), 3)",
    "a port by another address": "does(socket.create_connection, ('0.0.0.0', int(os.environ['PORT'])), 3)",
    "an abstract socket": "does(socket.socket(socket.AF_UNIX).connect, '\\0' + os.environ['NAME'])",
    "a socket in a folder": "does(socket.socket(socket.AF_UNIX).connect, os.environ['SOCKET'])",
    "the internet": "does(socket.create_connection, ('1.1.1.1', 53), 3)",
    "the internet by UDP": "does(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('1.1.1.1', 53))",
    "a name": "does(socket.getaddrinfo, 'example.com', 80)",
    "metadata of a cloud": "does(socket.create_connection, ('169.254.169.254', 80), 3)",
    "a multicast": "does(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('224.0.0.1', 5353))",
    "interfaces": "[got() for _, name in socket.if_nameindex() if name != 'lo']",
    "a raw socket": "does(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
    "a raw socket of IPv6": "does(socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58)",
    "packets": "does(socket.socket, 17, socket.SOCK_RAW, 0x300)",
    "the virtual machine's host": "does(socket.socket, 40, socket.SOCK_STREAM)",
    "ciphers of the kernel": "does(socket.socket, 38, socket.SOCK_SEQPACKET)",
    "bluetooth": "does(socket.socket, 31, socket.SOCK_RAW, 1)",
    "a bus of cars": "does(socket.socket, 29, socket.SOCK_RAW, 1)",
    "express data paths": "does(socket.socket, 44, socket.SOCK_RAW)",
    "SCTP's family of nodes": "does(socket.socket, 30, socket.SOCK_RDM)",
    "radio": "does(socket.socket, 36, socket.SOCK_DGRAM)",
    "reliable datagrams": "does(socket.socket, 21, socket.SOCK_SEQPACKET)",
    "a tunnel": "does(os.open, '/dev/net/tun', os.O_RDWR)",
    "a low port": "does(socket.socket().bind, ('127.0.0.1', 80))",
    "the audit": "s = socket.socket(16, socket.SOCK_RAW, 9)\ns.send(struct.pack('IHHII', 16, 1000, 5, 1, 0))\n"
    "if struct.unpack('i', s.recv(64)[16:20])[0] == 0: got()",
    "an address for an interface": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ndoes(fcntl.ioctl, s, 0x8914, "
    "struct.pack('16sH', b'lo', 0))",
}
CALLS = {
    **{
        f"calls {name}": f"result, error = call({numbers[COLUMN]})\nif error not in (errno.EPERM, errno.ENOSYS): got()"
        for name, numbers in _REFUSED.items()
        if numbers[COLUMN] >= 0
    },
    **{
        f"clones into a new {name} namespace": f"pid, _ = call({(56, 220)[COLUMN]}, {flag} | 17, 0, 0, 0, 0)\n"
        "if pid == 0: os._exit(0)\nif pid > 0: got()"
        for name, flag in {
            "mount": 0x20000, "control group": 0x02000000, "host name": 0x04000000, "IPC": 0x08000000,
            "user": 0x10000000, "process": 0x20000000, "network": 0x40000000,
        }.items()
    },
    "calls clone3": "if call(435)[1] != errno.ENOSYS: got()",
    "calls by x32": "if call(0x40000000 | 39)[0] > 0: got()",
    "calls by 32 bits": "code = mmap.mmap(-1, 4096, prot=7)\ncode.write(bytes.fromhex('b814000000cd80c3'))\n"
    "address = ctypes.addressof(ctypes.c_char.from_buffer(code))\nctypes.CFUNCTYPE(ctypes.c_int)(address)()\ngot()",
    "types into a terminal": "import pty\n_, slave = pty.openpty()\ndoes(fcntl.ioctl, slave, 0x5412, b'x')",
    "pastes into a terminal": "import pty\n_, slave = pty.openpty()\ndoes(fcntl.ioctl, slave, 0x541c, b'\\x03')",
    "limits the agent": "does(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))",
    "limits the agent's memory": "does(resource.prlimit, 1, resource.RLIMIT_AS, (1, 1))",
    "looks at the agent's limits": "does(resource.prlimit, 1, resource.RLIMIT_AS)",
}  # fmt: skip
RIGHTS = {
    "becomes root": "does(os.setuid, 0)",
    "becomes root's group": "does(os.setgid, 0)",
    "joins groups": "does(os.setgroups, [0])",
    "becomes another user": "does(os.setuid, 1)",
    "gives a file away": "open('f', 'w').close()\ndoes(os.chown, 'f', 0, 0)",
    "makes a device": "does(os.mknod, 'd', 0o20666, os.makedev(1, 1))",
    "changes its root": "does(os.chroot, '/work')",
    "raises its processes": "does(resource.setrlimit, resource.RLIMIT_NPROC, (9999, 9999))",
    "raises its memory": "does(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))",
    "raises its files": "does(resource.setrlimit, resource.RLIMIT_NOFILE, (9999, 9999))",
    "raises its CPU time": "does(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))",
    "raises its priority": "does(os.setpriority, os.PRIO_PROCESS, 0, -20)",
    "runs in real time": "does(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
    "is spared when memory is short": "does(lambda: open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000'))",
    "joins the agent's network": "does(os.open, '/proc/1/ns/net', 0)",
    "changes the host's name": "does(socket.sethostname, 'evil')",
    "locks memory": "if libc.mlockall(3) == 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] > 1 << 20: got()",
    "keeps capabilities": "if libc.prctl(23, 21) == 1 or libc.prctl(47, 2, 21, 0, 0) == 0: got()",
    "drops no-new-privileges": "if libc.prctl(38, 0, 0, 0, 0) == 0 or libc.prctl(39, 0, 0, 0, 0) != 1: got()",
    "leaves the filter": "if libc.prctl(22, 0, 0) == 0: got()",
    "maps its users anew": "does(lambda: open('/proc/self/uid_map', 'wb', 0).write(b'0 0 1'))",
}
RIGHTS_BY_COMMANDS = {
    "asks sudo": "sudo -n id && echo GOT",
    "asks su": "echo | su -c id && echo GOT",
    "asks setpriv": "setpriv --reuid 0 id && echo GOT",
    "makes a program of root": "cp /usr/bin/id i; chown root i && chmod u+s i && ./i | grep -q uid=0 && echo GOT",
    "runs programs of root": "for f in $(find /usr/bin -perm -4000); do :; done; passwd -S root && echo GOT",
    "unshares users": "unshare -U true && echo GOT",
    "unshares everything": "unshare -Urmpf true && echo GOT",
    "enters the agent's namespaces": "nsenter -t 1 -a true && echo GOT",
    "mounts a proc": "mkdir p; mount -t proc proc p && echo GOT",
    "mounts memory": "mkdir t; mount -t tmpfs t t && echo GOT",
    "mounts an overlay": "mkdir o; mount -t overlay o -o lowerdir=/usr,upperdir=/work,workdir=/tmp o && echo GOT",
    "mounts the root for writing": "mount -o remount,rw / && echo GOT",
    "removes a mount": "umount /proc/sys && echo GOT",
    "starts another bwrap": "bwrap --bind / / true && echo GOT",
    "keeps a capability of a file": "cp /usr/bin/env e; setcap cap_sys_admin+ep e && echo GOT",
    "loads a module": "modprobe loop && echo GOT",
    "sets the clock": "date -s 2000-01-01 && echo GOT",
}
AGENT = {
    "kills the agent": "kill -9 1; sleep 0.1; kill -0 1 || echo GOT",
    "interrupts the agent": "kill -INT 1; kill -TERM 1; kill -HUP 1; kill -ALRM 1; kill -SEGV 1; kill -0 1 || echo GOT",
    "stops the agent": "kill -STOP 1; grep -q '^State:.T' /proc/1/status && echo GOT",
    "traces the agent": "gdb -batch -p 1 2>/dev/null | grep -q process && echo GOT",
    "writes to the agent's stream": "echo x > /proc/1/fd/3 && echo GOT",
    "reads the agent's stream": "timeout 1 cat /proc/1/fd/3 && echo GOT",
    "hides a module of the agent": "echo 'print(\"GOT\")' > json.py; cp json.py tarfile.py; echo then",
    "leaves a start-up file": "echo 'print(\"GOT\")' > sitecustomize.py; echo 'echo GOT' > .bashrc",
    "leaves a start-up file of bash": "echo 'echo GOT' > rc; export BASH_ENV=$PWD/rc ENV=$PWD/rc",
    "links the command": "rm /run/shell/command; ln -s /etc/passwd /run/shell/command",
    "links the command to a pipe": "rm /run/shell/command; mkfifo /run/shell/command",
    "links the state": "trap - EXIT; rm -f /run/shell/new; mkfifo /run/shell/new",
    "links the state to an endless file": "trap - EXIT; rm -f /run/shell/new; ln -s /dev/zero /run/shell/new",
    "closes its output": "exec 0>&- 1>&- 2>&-; sleep 0.1",
    "keeps the output open": "(sleep 5; echo GOT) & true",
    "prints a frame": 'printf \'{"code": 0, "is_late": false, "total": 0, "bytes": 0}\\n\' > /dev/stdout',
}
EXCEEDS = {
    "processes by a bomb": "n=0\nfor _ in range(200):\n    try: pid = os.fork()\n    except OSError: break\n"
    "    if pid == 0: time.sleep(30); os._exit(0)\n    n += 1\nif n > 32: got()",
    "threads": "import threading\nn = 0\ntry:\n    for _ in range(200): threading.Thread(target=time.sleep, args=(5,), "
    "daemon=True).start(); n += 1\nexcept RuntimeError: pass\nif n > 32: got()\nos._exit(0)",
    "memory of one process": "x = bytearray(300 << 20)\ngot()",
    "memory of many processes": "for _ in range(8):\n    if os.fork() == 0: x = bytearray(os.urandom(1 << 20)) * 90; "
    "time.sleep(9); os._exit(0)\ntime.sleep(5)\ngot()",
    "memory that is shared": "m = [mmap.mmap(-1, 90 << 20) for _ in range(2)]\n"
    "for one in m: one.write(b'x' * (90 << 20))\n"
    "for _ in range(3):\n    if os.fork() == 0:\n        y = mmap.mmap(-1, 90 << 20); y.write(b'x' * (90 << 20)); "
    "time.sleep(9); os._exit(0)\ntime.sleep(5)\ngot()",
    "shared memory in files": "n = 0\ntry:\n    with open('/dev/shm/x', 'wb') as file:\n        for _ in range(64): "
    "n += file.write(b'x' * (1 << 20))\nexcept OSError: pass\nif n > 16 << 20: got()",
    "disk": "n = 0\ntry:\n    for number in range(64):\n        with open(f'{number}', 'wb') as file: "
    "n += file.write(b'x' * (1 << 20))\nexcept OSError: pass\nif n > 16 << 20: got()",
    "disk by several folders": "n = 0\nfor folder in ('/work', '/tmp', '/dev/shm', '/run/shell'):\n    try:\n"
    "        with open(folder + '/x', 'wb', 0) as file:\n            for _ in range(64): n += "
    "file.write(b'x' * (1 << 20))\n    except OSError: pass\nif n > 20 << 20: got()",
    "disk by deleted files": "n, kept = 0, []\ntry:\n    for _ in range(64):\n        kept.append(open('x', 'wb', 0)); "
    "os.unlink('x'); n += kept[-1].write(b'x' * (1 << 20))\nexcept OSError: pass\nif n > 16 << 20: got()",
    "disk by reservation": "does(lambda: os.posix_fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 0, 15 << 20) or "
    "os.posix_fallocate(os.open('y', os.O_RDWR | os.O_CREAT), 0, 15 << 20))",
    "a long file": "does(lambda: os.truncate(os.open('x', os.O_RDWR | os.O_CREAT), 1 << 40))",
    "files": "n = 0\ntry:\n    for n in range(5000): open(f'f{n}', 'w').close()\n"
    "except OSError: pass\nif n > 500: got()",
    "links": "open('x', 'w').close(); n = 0\ntry:\n    for n in range(5000): os.symlink('x', f's{n}')\n"
    "except OSError: pass\nif n > 500: got()",
    "folders in folders": "n = 0\ntry:\n    for n in range(5000): os.mkdir('d'); os.chdir('d')\nexcept OSError: pass\n"
    "if n > 500: got()",
    "descriptors": "n = []\ntry:\n    while len(n) < 5000: n.append(os.open('/dev/null', 0))\nexcept OSError: pass\n"
    "if len(n) > 256: got()",
    "CPU time of many processes": "for _ in range(8):\n    if os.fork() == 0:\n        while True: pass\n"
    "time.sleep(25)\ngot()",
    "CPU time without a parent": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(4):\n"
    "    if os.fork() == 0:\n        os.setsid()\n        while True: pass\ntime.sleep(25)\ngot()",
    "seconds": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ntime.sleep(40)\ngot()",
    "seconds by stopping": "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(40)\ngot()",
    "queues of messages": "does(lambda: int('no') if libc.mq_open(b'/q', 0o102, 0o600, None) < 0 else None)",
}
IN_SHELL = {**WRITES, **READS, **RIGHTS_BY_COMMANDS, **AGENT}
IN_PYTHON = {**NETWORK, **CALLS, **RIGHTS}
ABUSES = {**IN_SHELL, **IN_PYTHON, **EXCEEDS}
