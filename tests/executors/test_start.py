"""An executor starts in the time that torch takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nightly import nightly

RUN = """
import sys
from tests.end_to_end.tiny import llamarl_here
done = llamarl_here("train", sys.argv[1], "--output", sys.argv[2], "--cluster.kind", "inline", "--steps", 2)
assert done.returncode == 0, done.stderr
print(*{"torch", "torch._dynamo", "torch.distributed.fsdp", "sympy"} & sys.modules.keys())
"""


@nightly("a run of processes; architecture/test_imports.py says by day what processes of a run import")
def test_a_run_imports_no_compiler(tmp_path: Path) -> None:
    """torch's, with what it stands on, takes longer to import than torch itself, and many calls of torch do."""
    from tests.end_to_end.tiny import ROOT, make_model, write_toml

    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    command = [sys.executable, "-c", RUN, str(toml), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout == "torch\n", done.stderr
