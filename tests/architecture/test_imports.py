"""What may import what, beyond the layers that import-linter checks, and who may catch everything."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.repository import PACKAGE, ROOT, imports, module_of, name_of, nodes, python_files
from tests.fork_server import PRELOADED

TORCH_FREE = (
    "types",
    "child",
    "config",
    "observability",
    "rewards",
    "sandbox",
    "sharding",
    "recipes",
    "cli",
    "parts.forecast",
    "parts.hub",
    "parts.page",
    "parts.episodes.environments",
    "parts.episodes.sandbox",
    "parts.episodes.rewards",
    *(f"parts.{name}.cli" for name in ("answers", "episodes", "hosts", "replay", "sft")),
)
"""A `--help`, a config error or a plan answers at once."""
MONARCH_FILE = "llamarl/cluster/monarch.py"
ONE_FILE_EACH = ("fsspec", "monarch", "vllm", "wandb", "tensorboard", "mlflow", "prometheus_client")
"""Optional packages: an adapter each."""
CATCHES_EVERYTHING = {
    "llamarl/checkpoint/folder.py": "what a thread's work raises is told by its future, and the thread stays",
    "llamarl/parts/copies/remote.py": "every file system that fsspec opens raises what it likes, and costs a copy only",
    "llamarl/cluster/rank.py": "whatever an executor raises becomes a reply",
    "llamarl/config/ref.py": "whatever a user's module raises as it is imported is a setting that cannot work",
    "llamarl/controller/supervision.py": "what a thread's run raises is raised where it is waited for",
    "llamarl/rewards/_function_worker.py": "what a user's function raises is an answer, with its line",
    "llamarl/parts/answers/fleet.py": "what a loop in another thread raises is raised where rollouts are waited for",
    "llamarl/run/python_inputs.py": "whatever an object raises as it is pickled is a reward that cannot be sent",
    "llamarl/run/preview.py": "whatever a user's reward raises on the rows' own answers is told with its line",
    "llamarl/data/tokenizer.py": "what a chat template raises, and the library of tokenizers, has no other kind",
    "llamarl/cluster/api.py": "what cannot be pickled becomes text",
    "llamarl/parts/episodes/environments/_functions.py": "what a tool raises is an answer to the policy",
    "llamarl/parts/episodes/environments/_async_worker.py": "whatever an environment raises is the end of its episode",
    "llamarl/parts/episodes/environments/_worker.py": "a state that cannot be closed keeps no other open",
    "llamarl/generation/engine.py": "whatever is wrong with a request ends that one, not those beside it",
    "llamarl/parts/episodes/programs/_verifiers.py": "whatever a taskset raises ends its episodes, or the start",
    "llamarl/parts/episodes/gateway/_worker.py": "whatever an agent raises is the end of its episode",
    "llamarl/parts/page/trackers/_base.py": "whatever a tracker of somebody else raises ends it, with a warning",
    "llamarl/parts/episodes/sandbox/judge_children.py": "whatever a program or its tests raise is an answer about them",
    "llamarl/sandbox/pool_server.py": "whatever a grader raises is an answer about that item",
}
"""Supervision and sandboxes."""

LEAN = {
    "llamarl.cluster.monarch": ("flask", "pyarrow", "pydantic", "numpy"),
    "llamarl.parts.episodes.sandbox.judge": ("pydantic", "numpy"),
    "llamarl.parts.hub.client": ("llamarl.config.schema", "numpy"),
    "llamarl.rewards._function_worker": ("llamarl.config.schema",),
}
"""Modules of processes, and what these do without."""

PROBE = """
import importlib, json, sys
heavy = {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    if "torch" in sys.modules:
        heavy[module] = "torch"
        break
print(json.dumps(heavy))
"""


def test_light_modules_import_no_torch() -> None:
    modules = [module_of(path) for path in python_files("llamarl") if _is_light(module_of(path))]
    assert "llamarl.config.load" in modules
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}, "first module after whose import torch is loaded"


@pytest.mark.parametrize("module", LEAN)
def test_what_processes_of_a_run_import_is_little(module: str) -> None:
    """Each executor, worker and client waits for what its own modules bring along."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not set(LEAN[module]) & set(done.stdout.split())


def _is_light(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"llamarl.{name}." for name in TORCH_FREE)) and "__main__" not in module


def test_what_the_tests_fork_server_loads_exists() -> None:
    """It passes over what it cannot import, so that each process would import it by itself."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []


def test_optional_packages_have_one_adapter_each() -> None:
    for package in ONE_FILE_EACH:
        users = [name_of(path) for path in python_files("llamarl") if package in imports(path)]
        assert len(users) <= 1, f"{package} is imported in {users}"
        if package == "monarch":
            assert set(users) <= {MONARCH_FILE}


def test_process_groups_are_set_up_in_one_place() -> None:
    """Elsewhere they are used: by FSDP2, and through `RankMesh` and `Pair`."""
    elsewhere = [path for path in python_files("llamarl") if "distributed" not in path.parts]
    lines = [line for path in elsewhere for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line for line in lines if "torch.distributed" in line}
    assert found and all(
        line.strip().startswith(("from torch.distributed.fsdp", "from torch.distributed.tensor")) for line in found
    )


def test_only_supervision_catches_everything() -> None:
    caught = {name_of(path) for path in python_files("llamarl") if _catches_everything(path)}
    assert not caught - set(CATCHES_EVERYTHING), "catch what you expect, and let the rest be seen"
    gone = {name for name in set(CATCHES_EVERYTHING) - caught if (ROOT / name).exists()}
    assert not gone, "these catch nothing of the kind any more: take them off the list"


def _catches_everything(path: Path) -> bool:
    for node in nodes(path):
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler) and not _raises_again(node):
            caught = list(node.type.elts) if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            caught = list(node.args)
        if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
            return True
    return False


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_tests_of_a_part_are_in_its_folder() -> None:
    """Each part has some."""
    home = ROOT / "tests" / "parts"
    parts = {path.parent.name for path in (PACKAGE / "parts").glob("*/__init__.py")}
    assert {path.relative_to(home).parts[0] for path in home.rglob("test_*.py")} == parts


def test_no_files_import_each_other() -> None:
    """Not even inside functions, and not for types alone."""
    files = {module_of(path): path for path in python_files("llamarl")}
    graph = {module: _imported(path) & files.keys() - {module} for module, path in files.items()}
    done, on_path = set[str](), list[str]()

    def visit(module: str) -> None:
        assert module not in on_path, " -> ".join([*on_path[on_path.index(module) :], module])
        if module in done:
            return
        on_path.append(module)
        for other in sorted(graph[module]):
            visit(other)
        done.add(on_path.pop())

    for module in graph:
        visit(module)


def _imported(path: Path) -> set[str]:
    """Modules that a file imports; from a package its submodules, not the package itself."""
    found = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
