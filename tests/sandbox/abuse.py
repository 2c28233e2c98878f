"""Programs that want to be judged right without an answer, or to do what no program may.

Each is asked for `f(3)`. It answers 7919, which is right, only where what it tries has worked. A test says
`assert f(3)`, which the programs look for backwards, so as not to find themselves. SECRET is a file
that holds the number, in FOLDER. What would harm a machine that confines nothing is done with a harmless signal.
"""

from __future__ import annotations

_LIE = "class Lie({base}):\n    {method}\ndef f(x): return Lie({value})"
_ANY = "def {name}(self, *other): return True"

FAKES = {
    "exits at once": "import os; os._exit(0)",
    "exits by sys": "import sys; sys.exit(0)",
    "exits when asked": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises StopIteration": "def f(x): raise StopIteration",
    "raises GeneratorExit": "def f(x): raise GeneratorExit",
    "prints what a harness prints": "print('ok'); print('PASSED'); print('[true, \"\"]', flush=True)\ndef f(x): pass",
    "patches AssertionError": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef f(x): pass",
    "patches builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef f(x): pass",
    "patches json": "import json\njson.dumps = lambda *a, **k: '[true, \"\"]'\ndef f(x): return 1",
    "patches sys.modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef f(x): return 1",
    "patches the values module": "import sys\nm = sys.modules['llamarl.parts.episodes.sandbox.judge_values']\n"
    "m.pack = lambda *a: {'handle': [0]}\nm._BUILDERS['int'] = lambda parts: 7919\ndef f(x): return 1",
    "calls the tester's own code": "import sys\nm = sys.modules['llamarl.parts.episodes.sandbox.judge_children']\n"
    "m._verdict = lambda *a: (True, '')\ndef f(x): return 1",
    "walks frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        if ')3(f "
    "tressa' in str(list(frame.f_locals.values()))[::-1]: return 7919\n        frame = frame.f_back",
    "asks the collector": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) in (dict, list, "
    "tuple) and any(')3(f tressa' in v[::-1] for v in o if type(v) is str): return 7919",
    "a destructor": "import os\nclass D:\n    def __del__(self): os._exit(0)\ndef f(x): return D()",
    "an exception that equals all": "class E(Exception):\n    " + _ANY.format(name="__eq__") + "\ndef f(x): raise E",
    "an exception named as one of Python": "class AssertionError(BaseException): pass\ndef f(x): raise AssertionError",
    "int that equals all": _LIE.format(base="int", method=_ANY.format(name="__eq__"), value=1),
    "str that equals all": _LIE.format(base="str", method=_ANY.format(name="__eq__"), value=1),
    "float that equals all": _LIE.format(base="float", method=_ANY.format(name="__eq__"), value=1),
    "list that equals all": _LIE.format(base="list", method=_ANY.format(name="__eq__"), value="[1]"),
    "dict that equals all": _LIE.format(base="dict", method=_ANY.format(name="__eq__"), value="a=1"),
    "object that equals all": _LIE.format(base="object", method=_ANY.format(name="__eq__"), value=""),
    "class that equals all": "class M(type):\n    " + _ANY.format(name="__eq__") + "\n    __hash__ = type.__hash__\n"
    "class C(metaclass=M): pass\ndef f(x): return C",
    "int that differs from none": _LIE.format(base="int", method="def __ne__(self, other): return False", value=1),
    "int with a lying hex": "class I(int):\n    def __lt__(s, o): return False\n    __gt__ = __lt__\n"
    "    def __index__(s): return 7919\n    def __eq__(s, o): return True\ndef f(x): return I(1)",
    "pretends to be int": "class C:\n    __class__ = int\n    def __eq__(s, o): return True\n    def __int__(s): "
    "return 1\n    def __lt__(s, o): return True\n    __gt__ = __lt__\ndef f(x): return C()",
    "not a number": "def f(x): return float('nan')",
    "answers by itself": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'[true, \"\"]\\n' * 5)\n"
    "    except OSError: pass\ndef f(x): return 1",
    "answers with handles": "import os\nos.write(3, b'{\"value\": {\"handle\": [\"x\"]}, \"after\": []}\\n' * 9)\n"
    "def f(x): pass",
    "answers with types": "import os\nos.write(3, b'{\"value\": {\"type\": [\"eval\"]}, \"after\": []}\\n' * 9)\n"
    "def f(x): pass",
    "answers deep": "import os\nos.write(3, b'[' * 500000 + b'\\n')\ndef f(x): pass",
    "a type for the function": "f = int",
}  # fmt: skip
READS = {
    "a file": "def f(x): return open(SECRET).read()",
    "a file by os": "import os\ndef f(x): return os.read(os.open(SECRET, 0), 99).decode()",
    "a folder": "import os\ndef f(x): return '7919' if SECRET.rsplit('/')[-1] in os.listdir(FOLDER) else 0",
    "a file by io": "import _io\ndef f(x): return _io.FileIO(SECRET).read().decode()",
    "the environment": "import os\ndef f(x): return os.environ['LLAMARL_SECRET']",
    "the environment in memory": "import ctypes\ndef f(x):\n    p = ctypes.POINTER(ctypes.c_char_p).in_dll("
    "ctypes.CDLL(None), 'environ')\n    i = 0\n    while p[i]:\n        if b'_SECRET' in p[i]: return 7919\n"
    "        i += 1",
    "another's memory": "import os\ndef f(x):\n    for pid in range(os.getpid() - 9, os.getpid() + 9):\n        try: "
    "open(f'/proc/{pid}/mem', 'rb').read(1); return 7919\n        except OSError: pass",
    "another's memory by ptrace": "import ctypes, os\ndef f(x): return 7919 if ctypes.CDLL(None).ptrace(16, "
    "os.getpid() + 1, 0, 0) == 0 else 0",
    "a module that is not loaded": "import sqlite3\ndef f(x): return 7919",
}  # fmt: skip
WRITES = {
    "a file": "open(FOLDER + '/mark', 'w').write('x')\ndef f(x): return 7919",
    "a file by os": "import os\nos.close(os.open(FOLDER + '/mark', 65))\ndef f(x): return 7919",
    "removes": "import os\nos.unlink(SECRET)\ndef f(x): return 7919",
    "renames": "import os\nos.rename(SECRET, SECRET + '2')\ndef f(x): return 7919",
    "makes a folder": "import os\nos.mkdir(FOLDER + '/mark')\ndef f(x): return 7919",
    "links": "import os\nos.symlink('/', FOLDER + '/mark')\ndef f(x): return 7919",
    "memory with a name": "import os\nos.memfd_create('mark')\ndef f(x): return 7919",
}  # fmt: skip
PROCESSES = {
    "forks": "import os\nos.fork()\ndef f(x): return 7919",
    "a fork bomb": "import os\nfor _ in range(12): os.fork()\ndef f(x): return 7919",
    "a thread": "import _thread\n_thread.start_new_thread(print, ())\ndef f(x): return 7919",
    "a command": "import os\nassert os.system('true') == 0\ndef f(x): return 7919",
    "becomes another": "import os\nos.execv('/bin/true', ['true'])",
    "spawns": "import os\nos.posix_spawn('/bin/true', ['true'], {})\ndef f(x): return 7919",
    "kills its parent": "import os\nos.kill(os.getppid(), 18)\ndef f(x): return 7919",
    "kills its neighbours": "import os\nfor n in range(1, 9): os.kill(os.getpid() - n, 18)\ndef f(x): return 7919",
    "stops everybody": "import os\nos.kill(-1, 18)\ndef f(x): return 7919",
    "claims not to be confined": "import os\nos.kill(os.getpid(), 10)\ndef f(x): return 7919",
    "outlives its parent": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0) == 0\ndef f(x): return 7919",
    "more rights": "import os\nos.setuid(0)\ndef f(x): return 7919",
}  # fmt: skip
RESOURCES = {
    "CPU": "def f(x):\n    while True: pass",
    "CPU with signals ignored": "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "more CPU": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))\ndef f(x): return 7919",
    "sleep": "import time\ntime.sleep(600)",
    "a question that never comes": "import os\nwhile True: os.read(3, 1 << 16)",
    "memory": "x = bytearray(1 << 40)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "recursion in C": "x = []\nfor i in range(10**7): x = [x]\ndef f(_): return x",
    "output": "import sys\nwhile True: sys.stdout.write('x' * 100000)",
    "an answer without end": "def f(x): return 'x' * (1 << 27)",
    "an endless iterator": "import itertools\ndef f(x): return itertools.count()",
    "a flood": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "a huge number": "def f(x): return 9 ** (9 ** 9)",
    "a regular expression": "import re\ndef f(x): return re.match('(a+)+b', 'a' * 64)",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a crash": "import ctypes\nctypes.string_at(0)",
}  # fmt: skip
NETWORK = {
    "connects": "import _socket\n_socket.socket()\ndef f(x): return 7919",
    "a pair": "import _socket\n_socket.socketpair()\ndef f(x): return 7919",
}
_CALL = "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef f(x): return 7919 if libc.{call} >= 0 else 0"
_SAYS = "import os\nos.write(3, b'{said}\\n' * 9)\ndef f(x): return 1"
KERNEL = {
    name: _CALL.format(call=call)
    for name, call in {
        "shared memory": "shmget(7919, 4096, 0o1600)",
        "a queue of messages": "msgget(7919, 0o1600)",
        "semaphores": "semget(7919, 1, 0o1600)",
        "a queue with a name": "mq_open(b'/llamarl', 66, 0o600, None)",
        "a descriptor of events": "eventfd(0, 0)",
        "watches files": "inotify_init1(0)",
        "rooms of its own": "unshare(0x10000000)",
        "another personality": "personality(0x40000)",
        "reads its neighbour": "process_vm_readv(os.getpid() - 1, None, 0, None, 0, 0)",
        "holds its memory": "mlockall(3)",
        "the keyring": "syscall(248, b'user', b'llamarl', b'7919', 4, -3)",
        "a ring of calls": "syscall(425, 8, ctypes.create_string_buffer(256))",
        "a descriptor of a process": "syscall(434, os.getpid() - 1, 0)",
        "opens by the other table": "syscall(0x40000000 | 2, SECRET.encode(), 0)",
        "another filter": "prctl(22, 1)",
        "sleeps": "usleep(1)",
        "sleeps for events": "poll(None, 0, 1)",
        "advice on pages that it keeps from others": "madvise(None, 0, 12)",
    }.items()
} | {
    "calls of 32 bits": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
    "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
    "p = libc.mmap(None, 4096, 7, 34, -1, 0)\n"
    "ctypes.memmove(p, b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xb8\\xef\\x1e\\0\\0\\xc3', 13)\n"
    "def f(x): return ctypes.CFUNCTYPE(ctypes.c_int)(p)()",
    "an alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ndef f(x): return 7919",
    "aborts": "import os\ndef f(x): os.abort()",
}  # fmt: skip
TALK = {
    "profiles": "import sys\nseen = []\nsys.setprofile(lambda frame, *_: seen.append(str(frame.f_locals)))\ndef f(x): "
    "return 7919 if any(')3(f tressa' in one[::-1] for one in seen) else 0",
    "reads the questions": "import os\ndef f(x): return 7919 if b')3(f tressa' in os.read(3, 1 << 16)[::-1] else 0",
    "a line in a value": 'def f(x): return \'\\n[true, ""]\\n{"value": true}\\n\'',
    "an error that is none": _SAYS.format(said='{"error": [["bool"], "x"]}'),
    "an error of a group": _SAYS.format(said='{"error": [["ExceptionGroup", "Exception"], "x"]}'),
    "two values": _SAYS.format(
        said='{"value": 1, "error": [["StopIteration", "Exception"], ""], "value": true, "after": []}'
    ),
    "a list in place of an answer": _SAYS.format(said='[true, ""]'),
    "keys that cannot be": _SAYS.format(said='{"value": {"set": [[1]]}, "after": []}'),
    "a fraction of a huge power": _SAYS.format(said='{"value": {"Fraction": ["1e99999999", 1]}, "after": []}'),
    "bytes that are no text": _SAYS.format(said="\\xff\\xfe"),
    "at the end": "import atexit, os\natexit.register(os.write, 3, b'[true, \"\"]\\n')\ndef f(x): raise SystemExit(0)",
    "for the next": "import builtins, json\njson.loads = json.dumps = builtins.len = None\ndef f(x): return 1",
}
ABUSES = {
    f"{kind}: {name}": program
    for kind, programs in {
        "fakes": FAKES, "reads": READS, "writes": WRITES, "processes": PROCESSES, "resources": RESOURCES,
        "network": NETWORK, "kernel": KERNEL, "talk": TALK,
    }.items()
    for name, program in programs.items()
}  # fmt: skip
