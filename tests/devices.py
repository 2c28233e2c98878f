"""Whether there is a GPU, for those who may not import torch yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEVICES = Path("/dev")


def has_gpu() -> bool:
    """As torch says, in a process of its own, where a driver shows a device, whatever its number; else at once."""
    if not any(DEVICES.glob("nvidia*")):
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
