"""The controller: one asyncio process with all loops of a run. It touches no tensor. Begin with `controller.py`."""
