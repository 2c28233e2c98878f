"""Programs that are right, in ways that a judge could miss, and what programs may not say of themselves."""

from __future__ import annotations

HONEST = [
    (
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: float = 2.0\n"
            "def f(x): return P.__annotations__['x'] is int and P(x) == P(1)"
        ),
        "assert f(1)",
    ),
    (
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\nimport typing\n@dataclass\n"
            "class P:\n    x: int\ndef f(x): return typing.get_type_hints(P)['x'](x)"
        ),
        "assert f(1) == 1",
    ),
    ("def f(x): x.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]\nb = {1}\nassert f([1]) is None"),
    (
        "def f(m):\n    for row in m: row.reverse()\ndef g(d, *, s): d['k'] = s.pop()",
        (
            "m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[2, 1], [4, 3]]\nd, s = {}, {7}\ng(d, s=s)\n"
            "assert (d, s) == ({'k': 7}, set())"
        ),
    ),
    (
        (
            "import datetime as d\ndef f(x): return [d.date(2024, 2, 28) + d.timedelta(x), d.datetime(2024, 1, 1,"
            " 9, tzinfo=d.timezone.utc), d.time(1, 2), d.timedelta(1, 2, 3)]"
        ),
        (
            "import datetime as d\nassert f(1) == [d.date(2024, 2, 29), d.datetime(2024, 1, 1, 9, tzinfo=d.UTC), "
            "d.time(1, 2), d.timedelta(1, 2, 3)]\nassert type(f(1)[0]) is d.date"
        ),
    ),
    (
        (
            "from collections import namedtuple, Counter\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, 2)\n"
            "def g(p): return p.y\ndef h(x): return Counter(x)"
        ),
        (
            "assert f(1) == (1, 2) and f(1).x == 1 and f(1)._fields == ('x', 'y') and g(f(1)) == 2\n"
            "assert P(1, 2) == f(1) and h('aab')['z'] == 0"
        ),
    ),
    (
        (
            "class S:\n    def __init__(self, *v): self.v = v\n    def __str__(self): return 'S'\n    def __len__"
            "(self): return len(self.v)\n    def __iter__(self): return iter(self.v)\n    def __getitem__(self, i):"
            " return self.v[i]\n    def __eq__(s, o): return s.v == o.v\n    def __hash__(s): return 5\n    def "
            "__lt__(self, o): return self.v < o.v\n    def __add__(self, o): return S(*self.v, *o.v)\n"
            "def f(*x): return S(*x)"
        ),
        (
            "s = f(1, 2)\nassert str(s) == 'S' and len(s) == 2 and list(s) == [1, 2] and s[1] == 2 and 2 in s\n"
            "assert s == S(1, 2) and s != S(2) and s < S(3) and not S() and isinstance(s, S)\n"
            "assert not isinstance(1, S)\nassert s + S(3) == S(1, 2, 3)\nassert len({s, S(1, 2)}) == 1\n"
            "assert sorted([S(2), S(1)])[0][0] == 1"
        ),
    ),
    (
        "class Low(ValueError): pass\nclass Lower(Low): pass\ndef f(x): raise Lower(f'no {x}')",
        (
            "for kind in (Lower, Low, ValueError):\n    try: f(1)\n    except kind as e: assert str(e) == 'no 1'\n"
            "    else: assert False"
        ),
    ),
    ("def f(x, key): return sorted(x, key=key)", "assert f(['bb', 'a'], key=len) == ['a', 'bb']"),
    ("def f(x): return list(range(x))", "assert f(300_000) == list(range(300_000)) and f(300_000)[-1] == 299_999"),
    (
        (
            "import pickle, time\nclass P: x = 1\nstart = time.time()\ntime.sleep(60)\n"
            "def f(x): return pickle.loads(pickle.dumps(P())).x"
        ),
        "assert f(1) == 1",
    ),
]
"""A program, and tests that it passes."""
LIARS = [
    "def f(x):\n    x.clear()\n    return []",  # in place, and as an answer
    (
        "class L:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0"
        "\n    def __lt__(self, other): return True\n    __gt__ = __lt__\n    def __contains__(self, x): return 1"
        "\ndef f(x): return L()"
    ),
    "def f(x):\n    class E(AssertionError):\n        def __str__(self): raise SystemExit\n    raise E",
    "class N:\n    def __str__(self): raise SystemExit\ndef f(x): return N()",
]
"""Programs whose objects would say that they are right."""
SCRIPTS = [
    "print(sum(map(int, open(0).read().split())))",
    "import os\nprint(sum(map(int, os.read(0, 99).split())))\nos._exit(0)",
    "import os\na, b = map(int, open(0, 'rb').read().split())\nos.write(1, b'%d' % (a + b))",
    (
        "import threading\ndef main():\n    print(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "print(sum(map(float, input().split())))",
    (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        "print(A(sum(map(int, input().split()))).x)\nexit()"
    ),
]
"""Each adds two numbers."""
OUTPUTS = [
    ("1  2 \n3\n\n", "1 2\n3", True),
    (" 1 2", "1 2", True),
    ("1.0 0.50 x", "1 0.5 x", True),
    ("a b", "ab", False),
    ("1.5", "1", False),
    ("101", "00101", False),
    ("+5", "5", False),
    ("-1.0", "-1", True),
    ("1_0", "10", False),
    ("* *", "*   *", False),
    ("*", "  *", False),
    ("  *\n ***", "  *\n ***", True),
    ("nan", "nan", True),
    ("1 2\n\n3", "1 2\n3", False),
]
"""What is printed, what is expected, and whether that is the same."""
