from __future__ import annotations

import dataclasses
import os
import platform
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError
from llamarl.parts.episodes.sandbox import seccomp
from llamarl.parts.episodes.sandbox.judge import JudgeJob, ProgramJudge, ProgramVerdict
from llamarl.parts.episodes.sandbox.judge_children import _is_same
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.sandbox.pool_server import FailureKind
from tests.nightly import NIGHTLY, also, nightly
from tests.sandbox import honest
from tests.sandbox.abuse import ABUSES
from tests.sandbox.test_pool import alive, children, until

pytestmark = pytest.mark.skipif(bool(seccomp.missing()), reason=seccomp.missing())

HONEST = JudgeJob(code="def f(x): return x + 1", tests="assert f(1) == 2")


@pytest.fixture(scope="module")
def judge() -> Iterator[ProgramJudge]:
    made = ProgramJudge(workers=2, cpu_s=1, wall_s=60.0, memory_bytes=1 << 28)
    yield made
    made.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[ProgramJudge]:
    """On a busy machine a second of CPU time computes less."""
    made = ProgramJudge(workers=1, cpu_s=20, wall_s=120.0, memory_bytes=1 << 28)
    yield made
    made.close()


def family(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in family(child))]


def one(judge: ProgramJudge, **job: object) -> tuple[bool | None, str]:
    (verdict,) = judge.judge([JudgeJob(**job)], 60.0)
    assert isinstance(verdict, ProgramVerdict), verdict
    return verdict.is_right, verdict.reason


def test_none_of_the_abuses_gains_or_leaves_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARL_SECRET", "7919")
    secret = tmp_path / "secret"
    secret.write_text("7919")
    chosen = list(ABUSES.items())[:: 1 if NIGHTLY else 4]
    programs = {name: f"FOLDER, SECRET = {str(tmp_path)!r}, {str(secret)!r}\n{text}" for name, text in chosen}
    assert len(ABUSES) >= 60
    own = ProgramJudge(
        workers=2, cpu_s=1, wall_s=6.0, memory_bytes=1 << 28
    )  # starts with the secret in its environment
    try:
        assert [verdict.is_right for verdict in own.judge([HONEST] * 9, 60.0)] == [True] * 9
        before = sorted(family(own._pool._server.pid))
        jobs = [JudgeJob(code=code, tests="assert f(3) == 7919") for code in programs.values()]
        verdicts = own.judge([job for abuse in jobs for job in (abuse, HONEST)], 300.0)
        gained = {
            name: verdict
            for name, verdict in zip(programs, verdicts[::2], strict=True)
            if not isinstance(verdict, ProgramVerdict) or verdict.is_right is not False
        }
        assert not gained
        assert [verdict.is_right for verdict in verdicts[1::2]] == [True] * len(jobs)
        assert sorted(family(own._pool._server.pid)) == before  # nobody was killed, nobody is new
    finally:
        own.close()
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert secret.read_text() == "7919"
    until(lambda: not any(map(alive, before)), "all processes end")


def test_pages_count_the_abuses() -> None:
    for page in ("episodes.md", "security.md"):
        text = (Path(__file__).parents[4] / "docs" / page).read_text(encoding="utf-8")
        assert f"{len(ABUSES)} abuses" in text, page


def test_a_program_has_no_rights(judge: ProgramJudge) -> None:
    """Neither those of root nor any capability: whatever the list of calls may one day forget."""
    found = dict[int, str]()
    endless = threading.Thread(target=one, args=(judge,), kwargs={"code": "while True: pass", "tests": "f()"})
    endless.start()
    while endless.is_alive() and not found:
        for worker in children(judge._pool._server.pid) if judge._pool._server else []:
            for pid in family(worker)[2:]:
                with suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    if "Seccomp:\t2" in status:
                        found[pid] = status
    endless.join()
    assert found
    for status in found.values():
        rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert {int(rights[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
        assert set(rights["Uid"].split()) == {str(os.getuid() or 65534)}


def test_a_root_that_may_be_nobody_else_keeps_no_capability() -> None:
    """As in a container, where there is no other account to change to."""
    code = """
import os, pathlib
from llamarl.parts.episodes.sandbox import seccomp
def refuse(*_): raise PermissionError
os.setgroups = os.setresgid = os.setresuid = refuse
seccomp._drop_rights(seccomp._libc())
print(pathlib.Path("/proc/self/status").read_text())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rights = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert {int(rights[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}


def test_memory_is_asked_for_and_given_back_and_no_more() -> None:
    """Advice that only says how memory is used; another could reach what the file behind it or the machine has."""
    code = """
import ctypes, mmap, os
from llamarl.parts.episodes.sandbox import seccomp
libc, page = seccomp._libc(), mmap.mmap(-1, 4096)
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
seccomp.only_compute(parent=os.getppid(), cpu_s=5, memory_bytes=1 << 31)
os.write(1, repr([libc.madvise(place, ctypes.c_size_t(4096), advice) for advice in (4, 9, 10, 12, 16)]).encode())
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0, -1, -1, -1, -1]"


def attempts_of(judge: ProgramJudge, monkeypatch: pytest.MonkeyPatch, exceeds: dict[str, str]) -> list[list[Any]]:
    """The jobs and limits of each attempt are added to this list; a job exceeds the limit that `exceeds` has for its
    code, and is right if it has none."""
    asked = list[list[Any]]()

    def answers(items: list[Any], batch_s: float) -> list[list[Any]]:
        assert batch_s <= 120.0
        limits = [{"cpu_s": item["limits"]["cpu_s"], "wall_s": item["wall_s"]} for item in items]
        codes = [item["job"]["code"] for item in items]
        asked.append([(code, *of.values()) for code, of in zip(codes, limits, strict=True)])
        over = [{name: of[name]} if (name := exceeds.get(code)) else {} for code, of in zip(codes, limits, strict=True)]
        return [[not one, "", one] for one in over]

    monkeypatch.setattr(judge._pool, "map", answers)
    return asked


def test_those_that_need_long_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = JudgeJob(code="while True: pass", tests="f()")
    judge = ProgramJudge(workers=1, cpu_s=7, wall_s=60.0, memory_bytes=1 << 28)
    asked = attempts_of(judge, monkeypatch, {slow.code: "cpu_s"})
    verdicts = judge.judge([slow, HONEST, slow, HONEST], 120.0)
    assert [verdict.is_right for verdict in verdicts] == [False, True, False, True]
    assert asked == [[(job.code, 1, 10.0) for job in (slow, HONEST, slow, HONEST)], [(slow.code, 7, 60.0)] * 2]


@pytest.mark.parametrize(("limit", "times"), [("cpu_s", 1), ("wall_s", 2)])
def test_nothing_is_tried_again_within_the_limit_that_it_exceeded(
    monkeypatch: pytest.MonkeyPatch, limit: str, times: int
) -> None:
    slow = JudgeJob(code="while True: pass", tests="f()")
    judge = ProgramJudge(workers=1, cpu_s=1, wall_s=60.0, memory_bytes=1 << 28)
    asked = attempts_of(judge, monkeypatch, {slow.code: limit})
    assert [verdict.is_right for verdict in judge.judge([slow, HONEST], 120.0)] == [False, True]
    assert [sum(code == slow.code for code, *_ in attempt) for attempt in asked] == [1] * times


def test_over_its_seconds() -> None:
    judge = ProgramJudge(workers=1, cpu_s=5, wall_s=0.2, memory_bytes=1 << 28)
    try:
        assert one(judge, code="while True: pass", tests="f()") == (False, "over 0.2 s")
    finally:
        judge.close()


def test_values_cross_as_exact_builtins(judge: ProgramJudge) -> None:
    values = (
        "[None, True, -1, 1 << 80, 1e300, float('inf'), 2j, 'é\\ud800', b'a', bytearray(b'b'), (1, (2,)), {1, 2}, [[]],"
        " frozenset('a'), {(1,): {'k': [0]}}, range(1, 9, 2), int, Decimal('1.10'), Fraction(1, 3), deque([1, 2])]"
    )
    imports = "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\n"
    code = f"{imports}values = {values}\ndef f(x=None): return x\ndef same(): return f(values)\n"
    tests = (
        f"values = {values}\nfor x in values:\n    y = f(x=x)\n    assert x == y and type(x) is type(y)\n"
        "assert same() == values\nassert list(f(iter([1, 2]))) == [1, 2]\nassert f({1: 2}.keys()) == {1}"
    )
    assert one(judge, code=code, setup=imports, tests=tests) == (True, "")


@pytest.mark.parametrize(
    "said",
    [
        "b'[' + b'1,' * 2_000_000 + b'1]'",  # more values than one may hand over
        "b'[' + b','.join([b'[' + b'1e15,' * 99_000 + b'1]'] * 20) + b']'",  # longer when it is written again
        "b'\"' + 'é'.encode() * 4_000_000 + b'\"'",
        "b'[' * 900 + b']' * 900",
    ],
)
def test_what_cannot_be_handed_back_is_the_programs_fault(judge: ProgramJudge, said: str) -> None:
    """A test that hands a value back is common; a program must not make it one that cannot be run."""
    code = f"import os\ndef f(x):\n    data = b'{{\"value\": ' + {said} + b', \"after\": []}}\\n'\n    "
    code += "while data: data = data[os.write(3, data):]"
    assert one(judge, code=code, tests="assert f(f(3)) == 3")[0] is False


@nightly("values that fill memory; by day what cannot be handed back is found in smaller ones")
@pytest.mark.parametrize(
    "tests", ["assert f(f(3)) == 3", "x = f(3)\nassert f([x] * 9) == 3", "f([0] * 2_000_000 * len(f(1)))"]
)
def test_values_that_grow_are_the_programs_fault(judge: ProgramJudge, tests: str) -> None:
    said = """b'[' + b','.join([b'{"Fraction": ["1e999"]}'] * 50000) + b']'"""
    code = f"import os\ndef f(x):\n    data = b'{{\"value\": ' + {said} + b', \"after\": []}}\\n'\n    "
    code += "while data: data = data[os.write(3, data):]"
    assert one(judge, code=code, tests=tests)[0] is False


def test_what_was_answered_once_may_grow_later(judge: ProgramJudge) -> None:
    """Also when nothing was answered in between."""
    assert one(judge, code="def f(x): return ['a' * 1_000_000]", tests="x = f(3)\nf.note = 1\nf(x * 40)")[0] is False


@pytest.mark.parametrize(
    ("code", "tests"),
    honest.HONEST,
)
def test_honest_programs_are_right(patient: ProgramJudge, code: str, tests: str) -> None:
    assert one(patient, code=code, tests=tests) == (True, "")


@pytest.mark.parametrize(
    "code",
    honest.LIARS,
)
def test_what_the_program_defines_does_not_say_what_is_right(judge: ProgramJudge, code: str) -> None:
    for tests in (
        "a = [3, 1]\nassert f(a) == sorted(a)",
        "assert abs(f([1]) - 7919) < 1e-6",
        "assert f([1]) > 5",
        "assert 7919 in f([1])",
        "assert f([1]) == 7919, f([1])",
    ):
        assert one(judge, code=code, tests=tests)[0] is False, tests


def test_chance_in_tests_is_not_foreseen_and_repeats(judge: ProgramJudge) -> None:
    foreseen = [random.Random(seed).random() for seed in (0, 1, None)]
    tests = f"assert f(1) == 2 and random.random() not in {foreseen}, random.random()"
    assert one(judge, code=HONEST.code, tests=tests) == (True, "")
    said = [one(judge, code=HONEST.code, tests=f"f(1)\nassert 0, random.random() # {n}") for n in (0, 0, 1)]
    assert said[0] == said[1] != said[2]


def test_what_cannot_be_confined_is_not_run() -> None:
    pool = WorkerPool("llamarl.parts.episodes.sandbox.judge:judge", Limits(num_workers=1, wall_s=60.0))
    limits = {"cpu_s": -1, "memory_bytes": 1 << 28}  # which the kernel refuses
    try:
        (failure,) = pool.map([{"limits": limits, "wall_s": 6.0, "job": dataclasses.asdict(HONEST)}], 60.0)
    finally:
        pool.close()
    assert isinstance(failure, Failure) and "could not be confined" in failure.reason


def test_objects_stay_and_are_used_from_afar(judge: ProgramJudge) -> None:
    code = (
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n    def total(self, k=1): "
        "return k * (self.v + (self.left.total() if self.left else 0))\ndef total(n): return n.total()"
    )
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(4)"
    tests = "assert total(root) == 7\nassert root.total(k=2) == 14\nassert root.left.v == 2\nassert root.left != 2"
    assert one(judge, code=code, setup=setup, tests=tests) == (True, "")


def test_errors_of_the_program_are_those_of_python(judge: ProgramJudge) -> None:
    tests = "try: f(1)\nexcept ValueError as e: assert str(e) == 'no' and type(e) is ValueError\nelse: assert False"
    assert one(judge, code="def f(x): raise ValueError('no')", tests=tests) == (True, "")
    assert one(judge, code="def f(x): raise KeyError('no')", tests=tests)[0] is False
    ends = "assert list(map(f, [1, 2])) == []"  # as it would be, if the error ended the test's loop
    assert one(judge, code="def f(x): raise StopIteration", tests=ends)[0] is False


def test_helpers_of_the_row_are_not_the_programs(judge: ProgramJudge) -> None:
    prelude = "def close(a, b): return abs(a - b) < 1e-6\ndef f(x):\n    '''The half.'''\n"
    job = {"prelude": prelude, "setup": prelude, "entry": "f", "names": ("f",)}
    tests = "def check(candidate):\n    assert close(candidate(3), 1.5)\n    assert close(f(1), 0.5)"
    assert one(judge, code="    return x / 2", tests=tests, **job) == (True, "")
    assert one(judge, code="from __future__ import annotations\ndef f(x): return x / 2", tests=tests, **job)[0]
    assert one(judge, code="def close(a, b): return True\ndef f(x): return 0", tests=tests, **job)[0] is False
    assert one(judge, code="def check(c): pass\ndef f(x): return 0", tests="", **job)[0] is None


def test_standard_input(judge: ProgramJudge) -> None:
    code = (
        "import sys\ndef main():\n    n = int(input())\n    print(sum(map(int, sys.stdin.read().split())) * n, ' ')\n"
        "    exit()\nif __name__ == '__main__': main()\nprint(0)"
    )
    code = code.replace("exit()", "sys.exit()")
    assert one(judge, code=code, cases=(("2\n1 2 3\n", "12\n"), ("1\n5", "5"))) == (True, "")
    right, reason = one(judge, code=code, cases=(("2\n1 2 3\n", "12\n"), ("1\n5", "6")))
    assert (right, reason) == (False, "case 1: the output differs")
    assert one(judge, code="raise SystemExit(1)", cases=(("", ""),))[0] is False
    assert one(judge, code="def", cases=(("", ""),))[0] is False


@pytest.mark.parametrize(
    "code",
    honest.SCRIPTS,
)
def test_scripts_read_and_end_as_they_like(judge: ProgramJudge, code: str) -> None:
    assert one(judge, code=code, cases=(("1 2", "3\n"), ("3 4\n", "7")))[0]
    assert one(judge, code=code, cases=(("1 2", "4\n"),))[0] is False


def test_the_end_of_a_slow_program_is_not_the_exception_that_tests_wait_for(judge: ProgramJudge) -> None:
    """However much of it the first, short attempt computes."""
    tests = "try:\n    f(1)\nexcept Exception:\n    good = True\nelse:\n    good = False\nassert good"
    for rounds in (10**3, 10**9):
        right, reason = one(judge, code=f"def f(x):\n    for _ in range({rounds}): pass\n    return 1", tests=tests)
        assert right is False, reason


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    honest.OUTPUTS,
)
def test_output_is_the_same(printed: str, expected: str, is_same: bool) -> None:
    assert _is_same(printed, expected) is is_same


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("assert f(", "no Python"),
        ("import no_such_module", "no_such_module"),
        ("assert f(lambda: 1) == 2", "function cannot be handed over"),
        ("assert 1 == 1", "ask nothing"),
        ("f('x' * (1 << 25))", "too long"),
    ],
)
def test_faults_of_the_tests_say_nothing_of_the_program(judge: ProgramJudge, tests: str, says: str) -> None:
    right, reason = one(judge, code="def f(x): return x", tests=tests)
    assert right is None
    assert says in reason


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True: pass", "the program used over 1 s of CPU time"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        *also(("import os\nwhile True: os.read(3, 1 << 16)", "waits for what never comes")),
        ("import os\nos._exit(0)", "the program ended"),
        ("def f(x): return 0", "a test failed: assert f(1) == 2"),
        ("def g(x): return 0", "does not define f"),
        ("def f(x", "SyntaxError"),
        ("def f(x): return [[]] * (1 << 20)", "more than 1,000,000 values"),
    ],
)
def test_reasons(judge: ProgramJudge, code: str, says: str) -> None:
    right, reason = one(judge, code=code, tests="assert f(1) == 2")
    assert right is False
    assert says in reason


def test_random_tests_repeat_and_cannot_be_foreseen(judge: ProgramJudge) -> None:
    job = JudgeJob(code="import random\ndef f(): return random.random()", tests="assert f() != random.random()")
    seen = JudgeJob(code="def f(x): assert False, x", tests="f(random.random())")
    first, second, alone = judge.judge([seen, seen, job], 60.0)
    assert first == second
    assert alone.is_right


def test_what_dies_is_replaced(judge: ProgramJudge) -> None:
    assert one(judge, **dataclasses.asdict(HONEST))[0]
    for worker in children(judge._pool._server.pid):
        for server in children(worker):
            os.kill(server, signal.SIGKILL)
    assert [verdict.is_right for verdict in judge.judge([HONEST] * 6, 60.0)] == [True] * 6
    late = judge.judge([JudgeJob(code="while True: pass", tests="f()")] * 3, 0.5)
    assert {failure.kind for failure in late if isinstance(failure, Failure)} == {FailureKind.BATCH}


@pytest.mark.parametrize("option", [{"workers": 0}, {"cpu_s": 0}, {"cpu_s": 0.5}, {"wall_s": 0}, {"memory_bytes": 1}])
def test_mistakes(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        ProgramJudge(**{"workers": 1, "cpu_s": 1, "wall_s": 1.0, "memory_bytes": 1 << 28, **option})


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        ProgramJudge(workers=1, cpu_s=1, wall_s=1.0, memory_bytes=1 << 28)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(seccomp, "_MODE_FILTER", 77)
    with pytest.raises(ConfigError, match="seccomp"):
        ProgramJudge(workers=1, cpu_s=1, wall_s=1.0, memory_bytes=1 << 28)
